"""Are the outputs still what the journal says? Looks and reports; changes nothing.

A resume repairs what it finds (see reconcile); this is for the morning after, for archives, and for folders that were copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchgen.journal import Journal
from batchgen.outputs.files import is_temp, measure, size_of
from batchgen.outputs.names import name_key
from batchgen.runfolder import RunFolder
from batchgen.runlock import live_holder

Wrong = Literal["missing", "changed", "unreadable", "stranger"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One output that is not as it should be. `path` below outputs/, POSIX separators."""

    wrong: Wrong
    path: str
    text: str


@dataclass(slots=True)
class Tally:
    """What was looked at, filled while `verify` is run through."""

    checked: int = 0
    size_bytes: int = 0
    vanished: int = 0  # files of rows that the manifest no longer has: kept, and not compared
    unlisted: int = 0  # files of rows beyond the last run's limit, or of none: a journal begun anew has not seen the whole manifest
    going_on: str | None = None  # the run that writes into the folder meanwhile
    others: int = 0  # objects at a shard's address that are not its own, as other shards put theirs there
    in_hand: int = 0  # its files that the journal did not tell of when the comparing began


def verify(folder: RunFolder, journal: Journal, tally: Tally | None = None) -> Iterator[Finding]:
    """Every done job's file by size and hash, then the files that no job owns. Streams; memory grows with names alone.

    Files of rows that went from the manifest or that a limit left out are no findings, nor is what a run that goes on is writing: `tally`
    counts them. A clip kept as a folder of frames counts as one output.
    """
    tally = tally if tally is not None else Tally()
    tally.going_on = going_on(folder)
    owned: set[str] = set()
    for row in journal.finished():
        tally.checked += 1
        owned.add(name_key(row.output))
        path = folder.outputs / row.output
        found = _compare(path, row.output, row.size_bytes, row.sha256)
        if found is not None:
            yield found
        else:
            tally.size_bytes += row.size_bytes or 0
    aside = Aside.of(journal, owned)
    tally.going_on = tally.going_on or going_on(folder)  # it may have begun since
    yield from _strangers(folder.outputs, owned, aside, journal, tally)


@dataclass(frozen=True, slots=True)
class Aside:
    """Names of outputs that belong to the run and are not compared."""

    vanished: frozenset[str]
    unlisted: frozenset[str]

    @classmethod
    def of(cls, journal: Journal, owned: set[str]) -> Aside:
        vanished, unlisted = (frozenset(map(name_key, names)) - owned for names in (journal.left_behind(), journal.unlisted()))
        return cls(vanished, unlisted - vanished)

    def counts(self, key: str, tally: Tally) -> bool:
        """Whether the name is one of them; then it is counted."""
        tally.vanished += key in self.vanished
        tally.unlisted += key in self.unlisted
        return key in self.vanished or key in self.unlisted


def going_on(folder: RunFolder) -> str | None:
    """The process of the run that goes on in the folder, in words; None where none does."""
    holder = live_holder(folder.lock_path)
    return holder.text if holder is not None else None


def unowned(path: str, journal: Journal, tally: Tally) -> Finding | None:
    """The finding for what no done job owned when the comparing began. None, and counted, where it is the work of a run that goes on:
    such a run writes under a temporary name first, then under the job's, and tells the journal last.
    """
    temporary = is_temp(path.rpartition("/")[2])
    if tally.going_on is not None and (temporary or journal.state_under(path) in ("pending", "running", "done")):
        tally.in_hand += 1
        return None
    return Finding("stranger", path, "left behind by a run that was killed" if temporary else "no done job of this run owns it")


def _compare(path: Path, output: str, size_bytes: int | None, sha256: str | None) -> Finding | None:
    size = size_of(path)
    if size is None:
        return Finding("missing", output, "the journal says done, and there is no such file")
    if size != size_bytes:
        return Finding("changed", output, f"{size} bytes, the journal says {size_bytes}")
    try:
        digest = measure(path)[1]
    except OSError as error:
        return Finding("unreadable", output, error.strerror or str(error))
    if digest != sha256:
        return Finding("changed", output, f"the bytes are others: sha256 {digest[:12]}…, the journal says {str(sha256)[:12]}…")
    return None


def _strangers(outputs: Path, owned: set[str], aside: Aside, journal: Journal, tally: Tally) -> Iterator[Finding]:
    for root, folders, names in os.walk(outputs):
        inside = Path(root).relative_to(outputs)
        paths = {name: (inside / name).as_posix() for name in (*folders, *names)}
        known = {name for name, path in paths.items() if aside.counts(name_key(path), tally) or name_key(path) in owned}
        # A folder that is itself an output, or becomes one, holds a clip's frames.
        clips = {name for name in folders if name in known or is_temp(name) or journal.state_under(paths[name]) is not None}
        folders[:] = sorted(set(folders) - clips)
        for name in sorted(clips.union(names) - known):
            finding = unowned(paths[name], journal, tally)
            if finding is not None:
                yield finding
