"""Joins the folders of a run's shards into one whole run folder: journal, outputs, what their runs measured.

Order of truth as in a run: an output stands under its name before the journal's row says so. So a merge may be killed and
begun again, and may be repeated when a shard has gone on meanwhile. Shards are only read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from batchgen.errors import RefusedError
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.outputs.delivery import remote_name
from batchgen.outputs.files import atomic_write, disk_errors, make_folders, measure, place, size_of, sync_folder, temp_path
from batchgen.outputs.names import name_key, unique
from batchgen.outputs.store import Store
from batchgen.runfolder import RunFolder, pixel_diff
from batchgen.runlock import live_holder
from batchgen.shards import Shard
from batchgen.units import counted

_CHUNK = 500
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)
# Options that say which jobs a list gives and what they are called, beside those that alter pixels: as run.json names them.
JOB_OPTIONS = (
    "format", "encoding", "delimiter", "prompt-column", "carry", "name", "num-images", "limit", "skip-invalid", "snap", "dedupe",
    "allow-empty-prompt", "on-truncate", "video-format",
)
# Tables whose rows belong to one of a folder's runs, and the column that says which.
_OF_RUNS = ("memory", "work")


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's folder, looked at."""

    folder: RunFolder
    record: Mapping[str, Any]  # its run.json
    shard: Shard

    @property
    def identity(self) -> dict[str, object]:
        """All that must be the same in every shard of one run."""
        manifest = self.record.get("manifest") or {}
        settings = self.record.get("settings") or {}
        said = {f"--{name}": (settings.get(name) or {}).get("value") for name in JOB_OPTIONS}
        said["--format"] = self.record.get("manifest_kind") or said["--format"]  # where no option names it, the file's suffix does
        if isinstance(said["--carry"], list):  # given at once or one by one
            said["--carry"] = ",".join(map(str, said["--carry"])) or None
        pixels = self.record.get("pixel_settings") or {}
        return {**pixels, **said, "manifest": manifest.get("sha256") or manifest.get("path"), "shards": self.shard.count}


@dataclass(slots=True)
class Merged:
    """What a merge found. Paths are below outputs/."""

    linked: int = 0
    copied: int = 0
    kept: int = 0  # were there from an earlier merge
    renamed: list[tuple[str, str]] = field(default_factory=list)
    redone: list[str] = field(default_factory=list)  # done in the shard, their file missing or changed: to be rendered again

    @property
    def lines(self) -> list[str]:
        said = [f"{counted(self.linked, 'output')} linked, {self.copied} copied, {self.kept} already there"]
        if self.renamed:
            old, new = self.renamed[0]
            said.append(f"{counted(len(self.renamed), 'output')} renamed, as another shard has the name: {old} -> {new}")
        if self.redone:
            names = ", ".join(self.redone[:3])
            said.append(f"{counted(len(self.redone), 'output')} missing or changed in their shard, to be rendered again: {names}")
        return said


def read_parts(paths: Sequence[Path], *, partial: bool = False) -> list[Part]:
    """The shards, by number. Raises RefusedError for folders that are none, differ, are at work, come twice or are not all there."""
    parts = sorted((_part(path) for path in paths), key=lambda part: part.shard.number)
    first = parts[0]
    for part in parts[1:]:
        if differences := pixel_diff(first.identity, part.identity):
            raise RefusedError(
                f"{part.folder.path} is not of the same run as {first.folder.path}:\n" + "\n".join(f"  {line}" for line in differences),
                hint="Name the shards of one run: the same manifest, model and settings.",
            )
    numbers = [part.shard.number for part in parts]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise RefusedError(f"shard {twice[0]}/{first.shard.count} is named twice", hint="Name each shard's folder once.")
    missing = [str(number) for number in range(1, first.shard.count + 1) if number not in numbers]
    if missing and not partial:
        raise RefusedError(
            f"of {first.shard.count} shards {', '.join(missing[:10])} {'is' if len(missing) == 1 else 'are'} missing",
            hint="Name their folders too, or merge what there is with --partial and the rest later.",
        )
    return parts


def _part(path: Path) -> Part:
    folder = RunFolder.open(path)
    record = folder.read_run()
    if record is None or not isinstance(record.get("shard"), str):
        raise RefusedError(f"{path} is no shard: it was not begun with --shard", hint="Only shards of one run can be joined.")
    holder = live_holder(folder.lock_path)
    if holder is not None:
        raise RefusedError(f"{path} is at work: {holder.text}", hint="Wait until the run has ended or stop it; it resumes.")
    return Part(folder, record, Shard.parse(record["shard"]))


def not_there(target: RunFolder, parts: Sequence[Part]) -> list[Shard]:
    """Shards that no merge has brought yet, and whose jobs no run of the joined folder has taken up."""
    count = parts[0].shard.count
    there = {part.shard.number for part in parts}
    if len(there) < count:
        with Journal.read(target.journal) as journal:
            there.update(Shard.of_key(row["key"], count).number for row in journal.raw_rows())
    return [Shard(number, count) for number in range(1, count + 1) if number not in there]


def check_target(target: RunFolder, parts: Sequence[Part]) -> None:
    """Raises RefusedError unless the folder is empty, or a merge of this very run, begun before."""
    if target.path.exists() and not target.path.is_dir():
        raise RefusedError(f"{target.path} is a file, not a folder", hint="Name an empty or a new folder with -o.")
    record = target.read_run()
    if any(part.folder.path == target.path for part in parts):
        raise RefusedError(f"{target.path} is one of the shards", hint="Name a new folder with -o.")
    if record is None:
        taken = not target.path.is_dir() or any(not entry.name.startswith(("run.lock", ".")) for entry in target.path.iterdir())
        if target.path.exists() and taken:
            raise RefusedError(f"{target.path} is not empty and holds no merge", hint="Name an empty or a new folder with -o.")
        return
    begun = record.get("merged")
    if not isinstance(begun, dict):
        raise RefusedError(f"{target.path} holds a run of its own", hint="Name an empty or a new folder with -o.")
    if differences := pixel_diff(begun.get("identity") or {}, parts[0].identity):
        raise RefusedError(
            f"{target.path} holds a merge of another run:\n" + "\n".join(f"  {line}" for line in differences),
            hint="Name an empty or a new folder with -o.",
        )


def merge(
    target: RunFolder, parts: Sequence[Part], *, copy: bool = False, say: Callable[[str], None] = print,
    store_of: Callable[[RunFolder], Store | None] = lambda folder: None,
) -> Merged:
    """Carries the merge out, with the target's lock held. Raises RefusedError where a foreign file stands in the way, DiskError.

    `store_of`: where a shard's outputs are, if not in its folder; from there they are fetched. Raises StoreError too, then.
    """
    found = Merged()
    target.prepare()
    _write_record(target, parts)
    with _MergeJournal.open(target.journal) as journal:
        assert isinstance(journal, _MergeJournal)
        journal.begin_merge()
        for part in parts:
            say(f"shard {part.shard}: {part.folder.path}")
            bring = _Bringer(part.folder.outputs, found, store_of(part.folder), copy=copy)
            with Journal.read(part.folder.journal) as source:
                for rows in _row_chunks(source):
                    journal.absorb(rows, bring, target, found)
        journal.absorb_runs(parts)
    return found


def _write_record(target: RunFolder, parts: Sequence[Part]) -> None:
    """run.json of a whole run: the shards' own, without what made each of them a shard."""
    first = parts[0]
    record = dict(first.record)
    manifest = dict(record.get("manifest") or {})
    kept = manifest.get("path")
    if kept and Path(kept).parent == first.folder.path and Path(kept).is_file():  # came on standard input
        copy = target.path / Path(kept).name
        atomic_write(copy, Path(kept).read_bytes(), overwrite=True)
        manifest["path"] = str(copy)
    settings = {name: value for name, value in (record.get("settings") or {}).items() if name not in ("shard", "output")}
    folders = [str(part.folder.path) for part in parts]
    merged = {"shards": [str(part.shard) for part in parts], "folders": folders, "identity": first.identity}
    target.write_run({**record, "manifest": manifest, "settings": settings, "shard": None, "remote": None, "merged": merged})


def _row_chunks(source: Journal) -> Iterator[list[sqlite3.Row]]:
    chunk: list[sqlite3.Row] = []
    for row in source.raw_rows():
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _MergeJournal(Journal):
    """The target's journal, which takes rows over as they are."""

    def begin_merge(self) -> None:
        """The next run looks at the manifest, whatever an earlier one had marked."""
        with self._writing() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('mark', '')")

    def absorb(self, rows: Sequence[sqlite3.Row], bring: _Bringer, target: RunFolder, found: Merged) -> None:
        """Some of a shard's jobs, in one transaction, after their outputs stand in the target."""
        columns = [name for name in self._columns("jobs") if name in rows[0].keys()]  # noqa: SIM118 rows of SQLite are no mappings
        marks = ",".join("?" * len(columns))
        with disk_errors(target.outputs), self._writing() as db:
            there = {row["key"]: row["state"] for row in self._known_states([row["key"] for row in rows])}
            for row in rows:
                if there.get(row["key"]) == "done":
                    found.kept += 1
                    continue
                values = self._taken_over(dict(row), bring, target, found)
                sql = f"INSERT OR REPLACE INTO jobs ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 our own names
                db.execute(sql, [values[name] for name in columns])
            bring.sync()

    def _columns(self, table: str) -> list[str]:
        return [row["name"] for row in self._all(f"PRAGMA table_info({table})")]

    def _known_states(self, keys: Sequence[str]) -> list[sqlite3.Row]:
        marks = ",".join("?" * len(keys))
        return self._all(f"SELECT key, state FROM jobs WHERE key IN ({marks})", keys)  # noqa: S608 only question marks

    def _taken_over(self, row: dict[str, Any], bring: _Bringer, target: RunFolder, found: Merged) -> dict[str, Any]:
        output = str(row["output"])
        name = unique(output, lambda candidate: self._others(candidate, row["key"]))
        if name != output:
            found.renamed.append((output, name))
            row |= {"output": name, "name_key": name_key(name), "job": replace(Job.from_json(row["job"]), output=name).as_json()}
        row["spool"] = None
        if row["state"] == "running":
            row["state"] = "pending"
        if row["state"] == "done" and not bring(output, target.outputs / name, row):
            found.redone.append(name)
            row |= {"state": "pending", "attempts": 0, "size_bytes": None, "sha256": None, "written_at": None}
        return row

    def _others(self, candidate: str, key: str) -> bool:
        return bool(self._all("SELECT 1 FROM jobs WHERE name_key = ? AND key != ? LIMIT 1", (name_key(candidate), key)))

    def absorb_runs(self, parts: Sequence[Part]) -> None:
        """The shards' runs with what was measured in them, and the rows of the manifest that became no job.

        Those that an earlier merge brought from the same shards are replaced, so that merging again doubles nothing. Others' and the
        target's own stay, and all get numbers in the order of their beginnings: the last one is what `status` tells of.
        """
        runs: list[tuple[dict[str, Any], Part | None]] = []
        skipped: dict[tuple[object, ...], None] = {}
        for part in parts:
            with Journal.read(part.folder.journal) as source:
                runs += [(run, part) for run in source.runs()]
                skipped.update(dict.fromkeys(source.skipped()))
        with self._writing() as db:
            known = db.execute("SELECT value FROM meta WHERE name = 'merged runs'").fetchone()
            given: dict[str, list[int]] = json.loads(known[0]) if known else {}
            for part in parts:
                for old in given.pop(str(part.shard), []):
                    db.execute("DELETE FROM runs WHERE id = ?", (old,))
                    for table in _OF_RUNS:
                        db.execute(f"DELETE FROM {table} WHERE run = ?", (old,))  # noqa: S608 our own names
            brought = {old: shard for shard, numbers in given.items() for old in numbers}
            given = {}
            runs += [(run, None) for run in self.runs()]
            for run, origin in sorted(runs, key=lambda item: float(item[0]["started"])):
                number = self._renumbered(db, run) if origin is None else self._absorb_run(db, run, origin)
                shard = brought.get(run["id"]) if origin is None else str(origin.shard)
                if shard is not None:
                    given.setdefault(shard, []).append(number)
            db.execute("INSERT OR REPLACE INTO meta VALUES ('merged runs', ?)", (json.dumps(given),))
            db.execute("DELETE FROM skipped")
            db.executemany("INSERT INTO skipped VALUES (?, ?, ?)", list(skipped))

    def _insert_run(self, db: sqlite3.Connection, run: Mapping[str, Any]) -> int:
        names = [name for name in self._columns("runs") if name in run and name != "id"]
        marks = ",".join("?" * len(names))
        made = db.execute(f"INSERT INTO runs ({', '.join(names)}) VALUES ({marks})", [run[name] for name in names])  # noqa: S608 our own names
        return int(made.lastrowid or 0)

    def _renumbered(self, db: sqlite3.Connection, run: Mapping[str, Any]) -> int:
        new = self._insert_run(db, run)
        for table in _OF_RUNS:
            db.execute(f"UPDATE {table} SET run = ? WHERE run = ?", (new, run["id"]))  # noqa: S608 our own names
        db.execute("DELETE FROM runs WHERE id = ?", (run["id"],))
        return new

    def _absorb_run(self, db: sqlite3.Connection, run: dict[str, Any], part: Part) -> int:
        old, new = run["id"], self._insert_run(db, run)
        with Journal.read(part.folder.journal) as source:
            for table in _OF_RUNS:
                columns = self._columns(table)
                rows = source.rows_of_run(table, old)
                marks = ",".join("?" * len(columns))
                db.executemany(
                    f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})",  # noqa: S608 our own names
                    ([new if name == "run" else row.get(name) for name in columns] for row in rows),
                )
        return new


class _Bringer:
    """Brings outputs of one shard under their names in the target: linked, copied where links are impossible or not wanted, or fetched."""

    def __init__(self, origin: Path, found: Merged, store: Store | None, *, copy: bool) -> None:
        self._origin, self._found, self._store, self._copy = origin, found, store, copy
        self._folders: set[Path] = set()

    def __call__(self, output: str, goal: Path, row: Mapping[str, Any]) -> bool:
        """False if the output is not there or not whole."""
        origin = self._origin / output
        if self._store is None and not _whole(origin, row):
            if goal.is_file() and origin.is_file() and os.path.samefile(origin, goal):  # linked by a merge that was killed, damaged since
                goal.unlink()
            return False
        if os.path.lexists(goal):
            if not _same(origin, goal, row):
                raise RefusedError(f"{goal} stands where an output of a shard would go", hint="Move it away, or name a new folder with -o.")
            self._found.kept += 1
            return True
        make_folders(goal.parent)
        self._folders.add(goal.parent)
        if self._store is not None:
            copied, whole = True, _fetch(self._store, output, goal, row)
        elif origin.is_dir():
            copied, whole = _bring_folder(origin, goal, copy=self._copy), True
        else:
            copied = _bring_file(origin, goal, copy=self._copy)
            whole = not copied or _whole(goal, row)  # a copy may go wrong by itself
            if not whole:
                goal.unlink()
        self._found.copied += whole and copied
        self._found.linked += whole and not copied
        return whole

    def sync(self) -> None:
        """What was brought survives a power cut from here on."""
        for folder in self._folders:
            sync_folder(folder)
        self._folders.clear()


def _fetch(store: Store, output: str, goal: Path, row: Mapping[str, Any]) -> bool:
    temp = temp_path(goal.parent)
    try:
        if not store.get(remote_name(output), temp) or measure(temp) != (row["size_bytes"], row["sha256"]):
            return False
        place(temp, goal)
    finally:
        temp.unlink(missing_ok=True)
    return True


def _whole(path: Path, row: Mapping[str, Any]) -> bool:
    """Whether the output has the bytes that its journal told of. Damage that leaves the size alone is found by reading only."""
    return bool(size_of(path) == row["size_bytes"] and measure(path)[1] == row["sha256"])


def _same(origin: Path, goal: Path, row: Mapping[str, Any]) -> bool:
    """What an earlier merge brought before it was killed: the same file, or an equal copy."""
    if origin.is_file() and goal.is_file() and os.path.samefile(origin, goal):
        return True
    return _whole(goal, row)


def _bring_folder(origin: Path, goal: Path, *, copy: bool) -> bool:
    """A clip kept as frames: appears whole under its name."""
    temp = temp_path(goal.parent)
    temp.mkdir()
    try:
        copied = [_bring_file(frame, temp / frame.name, copy=copy) for frame in sorted(origin.iterdir())]
        sync_folder(temp)
        place(temp, goal)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return any(copied)


def _bring_file(origin: Path, goal: Path, *, copy: bool) -> bool:
    """True if it was copied, False if linked."""
    if not copy:
        try:
            os.link(origin, goal)
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise

    def content(handle: BinaryIO) -> None:
        with origin.open("rb") as source:
            shutil.copyfileobj(source, handle, 1 << 20)

    atomic_write(goal, content)
    return True
