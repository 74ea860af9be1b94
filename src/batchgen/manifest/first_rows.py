"""Where an id stood first. Looked up in a second reading, and only where an id came twice: to remember every id's row would cost every
list memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchgen.errors import Fault
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.options import ManifestOptions
from batchgen.manifest.rows import FileFaultError
from batchgen.manifest.stream import RowStream

KIND = "duplicate-id"


def with_first_rows(faults: Sequence[Fault], path: str, options: ManifestOptions) -> tuple[Fault, ...]:
    """The faults, those of a repeated id with the row of its first one."""
    wanted = {fault.value for fault in faults if fault.kind == KIND}
    if not wanted:
        return tuple(faults)
    first = _first_rows(wanted, path, options)
    return tuple(
        replace(fault, message=f"this id stands in row {first[fault.value]} already")
        if fault.kind == KIND and fault.value in first else fault
        for fault in faults
    )  # fmt: skip


def _first_rows(wanted: set[str | None], path: str, options: ManifestOptions) -> dict[str | None, int]:
    first: dict[str | None, int] = {}
    try:
        for layout, chunk, _ in RowStream(path, options, NoticeLog()).chunks():
            place = dict(layout.fields).get("id")
            if place is None:
                continue
            for line, cells in zip(chunk.lines, chunk.rows, strict=True):
                if isinstance(cells, Fault) or place >= len(cells):
                    continue
                name = str(cells[place]).strip()[:80]  # as a fault shows it
                if name in wanted:
                    first.setdefault(name, line)
            if len(first) == len(wanted):
                break
    except FileFaultError:
        pass  # told already, by the reading that came before
    return first
