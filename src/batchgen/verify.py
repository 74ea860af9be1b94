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


def verify(folder: RunFolder, journal: Journal, tally: Tally | None = None) -> Iterator[Finding]:
    """Every done job's file by size and hash, then the files that no job owns. Streams; memory grows with names alone.

    Files of rows that went from the manifest are no findings: `tally` counts them.
    A clip kept as a folder of frames counts as one output.
    """
    tally = tally if tally is not None else Tally()
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
    gone = {name_key(output) for output in journal.left_behind()} - owned
    yield from _strangers(folder.outputs, owned, gone, tally)


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


def _strangers(outputs: Path, owned: set[str], gone: set[str], tally: Tally) -> Iterator[Finding]:
    for root, folders, names in os.walk(outputs):
        inside = Path(root).relative_to(outputs)
        keys = {name: name_key((inside / name).as_posix()) for name in (*folders, *names)}
        tally.vanished += sum(key in gone for key in keys.values())
        # a folder that is itself an output holds a clip's frames
        folders[:] = sorted(name for name in folders if keys[name] not in owned and keys[name] not in gone)
        for name in sorted(names):
            path = (inside / name).as_posix()
            if keys[name] not in owned and keys[name] not in gone:
                text = "left behind by a run that was killed" if is_temp(name) else "no done job of this run owns it"
                yield Finding("stranger", path, text)
