"""What a resume does before anything is rendered: hold the journal against the disk.

Done is a row whose file has its size and hash. Files the journal does not know are adopted where their own settings name the
job, and never written over. Nothing is deleted: what stands in the way and is no work of this job's is moved to `aside/`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.errors import BatchgenError, RefusedError
from batchgen.events import OutputDone
from batchgen.journal import Journal, Known
from batchgen.journalfile import JournalMode
from batchgen.outputs.files import disk_errors, is_temp, make_folders, measure, size_of, sweep
from batchgen.outputs.metadata import read_settings
from batchgen.outputs.space import SpaceForecast, forecast
from batchgen.outputs.whole import condition, judge
from batchgen.runfolder import RunFolder
from batchgen.units import counted

RECENT_SECONDS = 60.0  # of the time before a crash: what a power cut may have torn
_SHOWN = 10
_FRAME = re.compile(r"\d{5}\.png")


@dataclass(slots=True)
class Reconciled:
    """What was found. Paths are below outputs/."""

    checked: int = 0
    hashed: int = 0
    adopted: list[str] = field(default_factory=list)
    redone: list[str] = field(default_factory=list)  # done before, file missing, changed or damaged
    moved_aside: list[str] = field(default_factory=list)
    swept: int = 0  # temp files of a killed run
    recovered: int = 0  # outputs read for a new journal

    @property
    def lines(self) -> list[str]:
        """For people: only what is worth saying."""
        said = []
        if self.recovered:
            said.append(f"journal begun anew: {self.recovered} finished outputs found by their own metadata")
        if self.adopted:
            said.append(f"{counted(len(self.adopted), 'output')} adopted that the journal did not know as done")
        if self.redone:
            said.append(f"{counted(len(self.redone), 'output')} missing, changed or damaged, to be rendered again: {_some(self.redone)}")
        if self.moved_aside:
            said.append(f"{counted(len(self.moved_aside), 'file')} moved to aside/: {_some(self.moved_aside)}")
        return said


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def open_journal(folder: RunFolder, *, mode: JournalMode | None = None) -> tuple[Journal, int]:
    """The folder's journal, to write, with the lock held; and how many outputs were found on disk for one that is new.

    A damaged journal is set aside (`Journal.damaged`), and its done jobs are found again by the outputs' own metadata as soon as
    the manifest is ingested. So are they where the journal was deleted. Raises RefusedError for a newer schema, DiskError.
    """
    make_folders(folder.path)
    journal = Journal.open(folder.journal, mode=mode)
    return journal, recover(folder, journal)


def recover(folder: RunFolder, journal: Journal) -> int:
    """Fills an empty journal with the outputs found on disk, before `ingest`. Returns how many; 0 if the journal is not new."""
    if any(journal.counts().values()) or not folder.outputs.is_dir():
        return 0
    found = list(_own_outputs(folder.outputs))
    if found:
        journal.set_found(found)
    return len(found)


def nothing_rendered(folder: RunFolder) -> bool:
    """Whether what was begun here has made no output: no job done, no file below outputs/. Latents of other settings are of no use.

    Only looks; False where the journal cannot be read. Of runs whose outputs lie in the folder itself.
    """
    if any(path.is_file() and not is_temp(path.name) for path in folder.outputs.rglob("*")):
        return False
    if not folder.journal.exists():
        return True
    try:
        with Journal.read(folder.journal) as journal:
            return journal.counts()["done"] == 0
    except BatchgenError:
        return False


def begin_anew(folder: RunFolder) -> None:
    """Forgets what was begun where `nothing_rendered`, with the lock held: its jobs would count as vanished. Raises DiskError."""
    with disk_errors(folder.journal):
        for ending in ("-wal", "-shm", "-journal", ""):
            folder.journal.with_name(folder.journal.name + ending).unlink(missing_ok=True)


def _own_outputs(outputs: Path) -> Iterator[tuple[str, str, str | None]]:
    for root, folders, names in os.walk(outputs):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            settings = None if is_temp(name) else read_settings(path)
            if settings is None or condition(path) != "whole":
                continue
            clip = bool(settings.get("num_frames")) and _FRAME.fullmatch(name) is not None  # kept as a folder of frames
            path = path.parent if clip else path
            seed = settings.get("seed")
            yield str(settings["key"]), path.relative_to(outputs).as_posix(), None if seed is None else str(seed)
            if clip:
                break


def space(folder: RunFolder, journal: Journal, *, image_format: str = "png", video_format: str = "mp4") -> SpaceForecast:
    """Room for the outputs still to come: from this run's own outputs where it has some, else from the jobs' sizes."""
    jobs = (journal.job(row.key) for row in journal.known("pending"))
    mean = journal.mean_output_bytes()
    return forecast(jobs, journal.pending(), folder.outputs, image_format=image_format, video_format=video_format, mean_bytes=mean)


def reconcile(folder: RunFolder, journal: Journal, *, after_crash: bool, verify: bool = False, overwrite: bool = False) -> Reconciled:
    """Checks done outputs and the places of pending ones. With the lock held, after `ingest`, before the first window.

    Every done output is looked at (one stat); hashed are those of the last minute before a crash, or all with `verify`. Raises
    RefusedError where foreign files stand under planned names (unless `overwrite`), DiskError.
    """
    found = Reconciled()
    with disk_errors(folder.outputs):
        journal.release()
        if after_crash:
            found.swept = sweep(folder.path)
        check_done(
            journal, found, after_crash=after_crash, verify=verify,
            size_there=lambda output: size_of(folder.outputs / output), hash_there=lambda output: measure(folder.outputs / output)[1],
        )
        _check_pending(folder, journal, found, overwrite)
    return found


def check_done(
    journal: Journal, found: Reconciled, *, size_there: Callable[[str], int | None], hash_there: Callable[[str], str | None],
    after_crash: bool, verify: bool,
) -> None:
    """Holds done rows against what is there under their names; those that are not as they were are to be done again."""
    last = journal.last_written()
    recent = last - RECENT_SECONDS if after_crash and last is not None else float("inf")
    broken: list[Known] = []
    for row in journal.known("done"):
        found.checked += 1
        if size_there(row.output) != row.size_bytes:
            broken.append(row)
        elif verify or (row.written_at or 0.0) >= recent:
            found.hashed += 1
            if hash_there(row.output) != row.sha256:
                broken.append(row)
    if broken:
        found.redone = [row.output for row in broken]
        journal.redo(row.key for row in broken)


def _check_pending(folder: RunFolder, journal: Journal, found: Reconciled, overwrite: bool) -> None:
    """A file under a pending job's name is adopted, cleared away, or a reason to stop before anything is rendered."""
    known_before = set(found.redone)
    foreign: list[str] = []
    adopted: list[OutputDone] = []
    for row in list(_present(folder, journal)):
        path = folder.outputs / row.output
        verdict, settings = judge(path, row.key)
        if verdict == "ours" and settings is not None:
            adopted.append(adoption(path, row.key, row.output, settings))
        elif verdict == "damaged" or row.output in known_before:
            clear(folder, path, row.output, found)
        elif verdict == "foreign" and not overwrite:
            foreign.append(row.output)
    if foreign:
        shown = "\n".join(f"  {folder.outputs / name}" for name in foreign[:_SHOWN])
        more = f"\n  ... and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        stand = counted(len(foreign), "file stands", "files stand")
        raise RefusedError(
            f"{stand} where pictures of this run would go, made by no job of it:\n{shown}{more}",
            hint="Move them away, use --overwrite to replace them, or --new to start beside this folder.",
        )
    journal.record(adopted)
    names = {event.path for event in adopted}
    found.adopted = sorted(names)
    found.redone = [name for name in found.redone if name not in names]


def _present(folder: RunFolder, journal: Journal) -> Iterator[Known]:
    for row in journal.known("pending"):
        if os.path.lexists(os.path.join(folder.outputs, row.output)):
            yield row


def adoption(path: Path, key: str, output: str, settings: dict[str, object], worker: int = -1) -> OutputDone:
    """The event of an output that is there already, made for this very job."""
    size, digest = measure(path)
    batch = settings.get("batch")
    flags = settings.get("flags")
    kept = tuple(str(flag) for flag in flags if flag != "adopted") if isinstance(flags, list) else ()

    return OutputDone(
        worker, key, output, size, digest, batch if isinstance(batch, int) else 0, 0.0, json.dumps(settings, ensure_ascii=False),
        (*kept, "adopted"),
    )


def clear(folder: RunFolder, path: Path, output: str, found: Reconciled) -> None:
    """Makes room under a planned name: an empty file goes, anything else is moved to aside/."""
    if path.is_file() and not path.is_symlink() and path.stat().st_size == 0:
        path.unlink()
        return
    target = folder.aside / output
    number = 1
    while os.path.lexists(target):
        number += 1
        target = (folder.aside / output).with_name(f"{number}-{path.name}")
    make_folders(target.parent)
    path.rename(target)
    found.moved_aside.append(output)
