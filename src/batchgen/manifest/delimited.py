"""CSV and TSV, every cell as the text it is.

The csv module reads what is well formed, at its own speed. Its strict mode stops where a quote is out of place; there a record is
split by our own rule: a field is unquoted only if it is one quoted string from edge to edge.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchgen.errors import Fault
from batchgen.manifest.blocks import RECORD_LIMIT, Block, nul_fault
from batchgen.manifest.columns import known_count
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.rows import Cells, Chunk, FileFaultError

DELIMITERS = (",", ";", "\t", "|")
_SEP_LINE = re.compile(r'"?sep=([^"])"?', re.IGNORECASE)


class _NeedsMoreError(Exception):
    """The record goes on in the next block."""


class _UnclosedError(Exception):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index  # of the line where the quote opened


@dataclass(frozen=True, slots=True)
class Record:
    cells: list[str]
    next_line: int  # index of the line after it
    quotes_kept: bool


def split_record(lines: Sequence[str], start: int, delimiter: str, *, final: bool) -> Record:
    """One record from `lines[start]` on, which keep their line ends. `final`: no more lines will come."""
    cells: list[str] = []
    kept = False
    index, body, place = start, _body(lines[start]), 0
    while True:
        quoted = None
        if body.startswith('"', place):
            quoted = _quoted(lines, index, place, delimiter, final)
            kept = kept or quoted is None
        if quoted is not None:
            cell, index, place = quoted
            body = _body(lines[index])
        else:
            end = body.find(delimiter, place)
            end = len(body) if end < 0 else end
            cell, place = body[place:end], end
        cells.append(cell)
        if place >= len(body):
            return Record(cells, index + 1, kept)
        place += 1


def _quoted(lines: Sequence[str], index: int, place: int, delimiter: str, final: bool) -> tuple[str, int, int] | None:
    """(text, line index, place after it) of a field quoted from edge to edge; None for one that is not."""
    opened, parts, size = index, [], 0
    line, body = lines[index], _body(lines[index])
    place += 1
    while True:
        end = line.find('"', place)
        if end >= 0:
            parts.append(line[place:end])
            if line.startswith('"', end + 1):
                parts.append('"')
                place = end + 2
                continue
            if end + 1 == len(body) or line.startswith(delimiter, end + 1):
                return "".join(parts), index, end + 1
            if index == opened:
                return None
            raise _UnclosedError(opened)
        parts.append(line[place:])
        size += len(line) - place
        index, place = index + 1, 0
        if size > RECORD_LIMIT:
            raise _UnclosedError(opened)
        if index >= len(lines):
            if final:
                raise _UnclosedError(opened)
            raise _NeedsMoreError
        line, body = lines[index], _body(lines[index])


def _body(line: str) -> str:
    return line[:-2] if line.endswith("\r\n") else line[:-1] if line.endswith(("\n", "\r")) else line


class DelimitedReader:
    """Chunks of a CSV or TSV file. `delimiter` and `header` stand once the first chunk was asked for."""

    def __init__(
        self, blocks: Iterator[Block], *, name: str, tsv: bool, delimiter: str | None, prompt_column: str | None, notices: NoticeLog,
    ) -> None:
        self.delimiter = delimiter
        self.header: tuple[str, ...] = ()
        self.header_line = 1
        self._blocks, self._name, self._tsv, self._prompt_column, self._notices = blocks, name, tsv, prompt_column, notices

    def __iter__(self) -> Iterator[Chunk]:
        lines: list[str] = []
        nuls: dict[int, int] = {}
        first, begun, size, wanted = 1, False, 0, 0
        for block in self._blocks:
            if not lines:
                first, nuls = block.first_line, {}
            nuls.update(block.nuls)
            at = 0
            if begun and not lines and not nuls and (chunk := self._plain(block)) is not None:
                if chunk.rows:
                    yield chunk
                continue
            lines += _lines(block.text)
            size += len(block.text)
            if size < wanted and not block.last:
                continue
            try:
                if not begun:
                    at = self._begin(lines, nuls, final=block.last)
                    begun = True
                chunk, at = self._careful(lines, at, first, nuls, final=block.last)
            except _NeedsMoreError:
                wanted = 2 * size
                continue
            if chunk.rows:
                yield chunk
            lines, first = lines[at:], first + at
            # a record that goes on is read again with twice the text, so that a long one costs little
            size = sum(map(len, lines))
            wanted = 2 * size

    def _plain(self, block: Block) -> Chunk | None:
        """A block of one-line records, in one go; None where a record is not a line or the csv module objects."""
        reader = csv.reader(io.StringIO(block.text, newline=""), delimiter=self.delimiter or ",", strict=True)
        try:
            rows: list[Cells | Fault] = list(reader)
        except csv.Error:  # a quote out of place, or a field beyond the module's own limit
            return None
        if reader.line_num != len(rows):
            return None
        return Chunk(self.header, self.header_line, range(block.first_line, block.first_line + len(rows)), rows)

    def _careful(self, lines: list[str], at: int, first: int, nuls: dict[int, int], *, final: bool) -> tuple[Chunk, int]:
        """The records of `lines` from index `at` on, and where they end: before the end if the last one goes on."""
        delimiter = self.delimiter or ","
        rows: list[Cells | Fault] = []
        starts: list[int] = []
        reader = csv.reader(iter(lines[at:]), delimiter=delimiter, strict=True)
        base, damaged = at, False
        while at < len(lines):
            begin = at
            row: Cells | Fault
            try:
                row = next(reader)
                at = base + reader.line_num
            except csv.Error:
                try:
                    record = split_record(lines, begin, delimiter, final=final)
                except _NeedsMoreError:
                    break
                except _UnclosedError as unclosed:
                    row, at = self._unclosed(first + unclosed.index, lines[unclosed.index]), unclosed.index + 1
                else:
                    row, at = record.cells, record.next_line
                    if record.quotes_kept:
                        self._notices.add("quotes-kept", first + begin, _body(lines[begin])[:80])
                if at != base + reader.line_num:
                    reader, base = csv.reader(iter(lines[at:]), delimiter=delimiter, strict=True), at
            if nuls:
                nul = next((line for line in range(first + begin, first + at) if line in nuls), None)
                row = row if nul is None else nul_fault(self._name, nul, nuls[nul])
            damaged = damaged or isinstance(row, Fault)
            rows.append(row)
            starts.append(first + begin)
        return Chunk(self.header, self.header_line, starts, rows, damaged), at

    def _unclosed(self, line: int, text: str) -> Fault:
        value = _body(text)
        value = value if len(value) <= 80 else value[:77] + "..."
        fix = 'close it, or write a quote inside a field as ""'
        return Fault(self._name, line, None, value, "a quote opens here and never closes", fix, "unclosed-quote")

    def _begin(self, lines: list[str], nuls: dict[int, int], *, final: bool) -> int:
        """Reads a `sep=` line and the header; returns the index of the first line of data."""
        at = 0
        if lines and (sep := _SEP_LINE.fullmatch(_body(lines[0]))):
            self.delimiter = self.delimiter or sep.group(1)
            at = 1
        while at < len(lines) and not lines[at].strip():
            at += 1
        if at >= len(lines):
            if not final:
                raise _NeedsMoreError
            fix = "write a header line with a prompt column, then one row a picture"
            raise FileFaultError(Fault(self._name, None, None, None, "the file is empty", fix, "no-jobs"))
        if at + 1 in nuls:
            raise FileFaultError(nul_fault(self._name, at + 1, nuls[at + 1]))
        if self.delimiter is None:
            self.delimiter = self._choose(lines[at])
        try:
            record = split_record(lines, at, self.delimiter, final=final)
        except _UnclosedError as unclosed:
            raise FileFaultError(self._unclosed(unclosed.index + 1, lines[unclosed.index])) from None
        self.header, self.header_line = tuple(record.cells), at + 1
        return record.next_line

    def _choose(self, line: str) -> str:
        """The delimiter that gives the most known columns; the file kind's own, then the comma, wins a tie."""
        usual = ("\t", ",", ";", "|") if self._tsv else DELIMITERS
        counts = {}
        for delimiter in usual:
            try:
                counts[delimiter] = known_count(split_record([line], 0, delimiter, final=True).cells, self._prompt_column)
            except _UnclosedError:
                counts[delimiter] = 0
        return max(usual, key=lambda delimiter: counts[delimiter])


def _lines(text: str) -> list[str]:
    return list(io.StringIO(text, newline=""))
