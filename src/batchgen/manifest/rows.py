"""What readers hand on: rows as cells with line numbers, and the collectors of faults and notices."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from batchgen.errors import Fault

Cells = Sequence[object]


class FileFaultError(Exception):
    """A fault after which the rest of the file cannot be read."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(str(faults[0]))
        self.faults = faults


@dataclass(slots=True)
class Chunk:
    """Consecutive rows under one header. A row that could not be read is its Fault. Blank rows are left out."""

    header: tuple[str, ...]
    header_line: int
    lines: Sequence[int]
    rows: list[Cells | Fault]
    damaged: bool = False  # some row is a Fault
    escapes: bool = False  # cells were written with escapes, which can stand for what no text file holds


class FaultLog:
    """Faults in file order. The first KEPT stay in memory, all are counted, and all go to `sink` where one is given."""

    KEPT = 10_000

    def __init__(self, sink: TextIO | None = None) -> None:
        self.total = 0
        self.counts: dict[str, int] = {}
        self._kept: list[Fault] = []
        self._sink = sink

    def add(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self.total += 1
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            if len(self._kept) < self.KEPT:
                self._kept.append(fault)
            if self._sink is not None:
                self._sink.write(one_line(fault) + "\n")

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._kept)


def one_line(fault: Fault) -> str:
    """A fault on one line, whatever its texts hold."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(fault))


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about a kind of thing, with the rows it was seen in (the first few) and how many there were."""

    kind: str
    message: str
    rows: tuple[int, ...] = ()
    count: int = 0
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return self.message
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        return f"{self.message}: row{'s' if self.count > 1 else ''} {', '.join(map(str, self.rows))}{more}"


@dataclass(slots=True)
class _Seen:
    message: str
    rows: list[int] = field(default_factory=list)
    count: int = 0
    examples: list[str] = field(default_factory=list)


class NoticeLog:
    """Notices by kind: each is told once, with its first rows."""

    ROWS = 10
    EXAMPLES = 3

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, kind: str, message: str, row: int | None = None, example: str | None = None, count: int = 1) -> None:
        seen = self._seen.setdefault(kind, _Seen(message))
        seen.count += count
        if row is not None:
            # the lowest row numbers, in whatever order they come
            if len(seen.rows) < self.ROWS:
                seen.rows.append(row)
            elif row < max(seen.rows):
                seen.rows = heapq.nsmallest(self.ROWS, [*seen.rows, row])
        if example is not None and len(seen.examples) < self.EXAMPLES:
            seen.examples.append(example)

    def count(self, kind: str) -> int:
        return self._seen[kind].count if kind in self._seen else 0

    @property
    def notices(self) -> tuple[Notice, ...]:
        return tuple(
            Notice(kind, seen.message, tuple(sorted(seen.rows)), seen.count, tuple(seen.examples)) for kind, seen in self._seen.items()
        )
