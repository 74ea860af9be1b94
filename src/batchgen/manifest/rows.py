"""What readers hand on: rows as cells with line numbers, and the collector of faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
