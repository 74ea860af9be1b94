"""A manifest's rows in order, each typed or with its faults: what both passes (check, and the making of jobs) walk along.

Holds for every row seen no more than a few bytes: ids and the hashes of rows.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchgen.errors import Fault
from batchgen.jobs import row_hash
from batchgen.manifest.columns import Layout
from batchgen.manifest.lengths import LengthCheck
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.options import ManifestOptions
from batchgen.manifest.readers import Reader
from batchgen.manifest.rows import Cells, Chunk, FileFaultError
from batchgen.manifest.schema import Row, RowReader


@dataclass(frozen=True, slots=True)
class Entry:
    """A row that is not blank. Without a `row` it has faults, or --dedupe dropped it."""

    index: int
    line: int
    row: Row | None
    faults: tuple[Fault, ...] = ()


class Ids:
    """Ids seen so far. Long ones are kept as 16 bytes."""

    def __init__(self) -> None:
        self.seen: dict[str | bytes, str | None] = {}

    def add(self, name: str) -> str:
        """`new`, `same` as an earlier one, or `case`: the same but for case or composition."""
        key = self.key(name)
        if key not in self.seen:
            self.seen[key] = None if key == name else short(name)
            return "new"
        return "same" if self.seen[key] == (None if key == name else short(name)) else "case"

    @staticmethod
    def key(name: str) -> str | bytes:
        folded = name.casefold() if name.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        return folded if len(folded) <= 40 else _digest(folded)


def short(name: str) -> str:
    """An id as `Ids` compares it: itself, or the hash of a long one."""
    return name if len(name) <= 40 else _digest(name).hex()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def known_hash(layout: Layout, cells: Cells) -> int:
    """A hash of the row's known cells as they are written."""
    return hash(tuple(cells[place] if place < len(cells) else "" for _, place in layout.fields))


def identity(said: Mapping[str, object]) -> str:
    """`row_hash` of what a row says. How many pictures is left out: asking for more must not render the first ones again."""
    return row_hash({name: value for name, value in said.items() if name != "num_images"})


class RowStream:
    """Walks a manifest once. Raises FileFaultError where the rest cannot be read."""

    def __init__(self, path: str, options: ManifestOptions, notices: NoticeLog) -> None:
        self.options, self.notices = options, notices
        self.reader = Reader(path, options, notices)
        self.kind = self.reader.kind
        base = path if self.kind == "folder" else os.path.dirname(path) if options.shown_as is None else ""
        self.rows = RowReader(
            options, name=self.reader.name, folder=os.path.abspath(base or os.curdir), decimal_comma=lambda: self.reader.delimiter == ";"
        )
        self.lengths = LengthCheck(options.tokenizers) if options.tokenizers else None
        self.ids = Ids()
        self.pictures: set[int | str] = set()  # rows with their own seed
        self.extra: dict[str, None] = {}  # other columns, in the order they were met
        self.index = 0
        self.blank = 0

    @property
    def has_header(self) -> bool:
        return self.kind in ("csv", "tsv", "parquet")

    def chunks(self) -> Iterator[tuple[Layout, Chunk, tuple[Fault, ...]]]:
        """Chunks with their layout and its faults. A header without a prompt column ends the reading."""
        for chunk in self.reader:
            layout, faults = self.rows.layout(chunk.header, chunk.header_line if self.has_header and chunk.header_line else None)
            if self.has_header and faults and "prompt" not in dict(layout.fields):
                raise FileFaultError(*faults)
            self.extra.update((heading, None) for heading, _ in layout.extra)
            yield layout, chunk, faults
            if self.options.limit is not None and self.index >= self.options.limit:
                return
        if self.reader.header is not None:  # no chunk may have come: the header alone can be wrong
            layout, faults = self.rows.layout(*self.reader.header)
            if faults and "prompt" not in dict(layout.fields):
                raise FileFaultError(*faults)

    def entries(self, layout: Layout, chunk: Chunk, faults: Sequence[Fault]) -> Iterator[Entry]:
        """The chunk's rows one by one, blank ones left out."""
        for entry in self._entries(layout, chunk, faults):
            if entry.faults and self.kind == "json":
                yield replace(entry, faults=tuple(replace(fault, item=entry.index + 1) for fault in entry.faults))
            else:
                yield entry

    def _entries(self, layout: Layout, chunk: Chunk, faults: Sequence[Fault]) -> Iterator[Entry]:
        by_row = () if self.has_header else faults  # keys of JSON objects are each row's own
        for line, cells in zip(chunk.lines, chunk.rows, strict=True):
            if self.options.limit is not None and self.index >= self.options.limit:
                return
            if not isinstance(cells, Fault) and self._is_blank(cells):
                self.blank += 1
                self.notices.add("blank-rows")
                continue
            index, self.index = self.index, self.index + 1
            if isinstance(cells, Fault):
                yield Entry(index, line, None, (cells,))
                continue
            row, found = self.rows.read(layout, line, cells)
            if by_row:
                own = [replace(fault, row=line) for fault in by_row]
                row, found = None, own + [fault for fault in found if fault.kind != "empty-prompt" or "prompt" in dict(layout.fields)]
            if self.kind == "folder" and found:
                found = [replace(fault, file=f"{fault.file.rstrip('/')}/{cells[0]}.txt", row=None) for fault in found]
            if row is None:
                yield Entry(index, line, None, tuple(found))
            else:
                yield self._compared(index, row, layout, cells)

    def _is_blank(self, cells: Cells) -> bool:
        return self.kind in ("csv", "tsv") and not any(isinstance(cell, str) and cell.strip() for cell in cells)

    def _compared(self, index: int, row: Row, layout: Layout, cells: Cells) -> Entry:
        """The row against those before it, and its prompt against the encoders where that decides."""
        name = row.said.get("id")
        if isinstance(name, str):
            verdict = self.ids.add(name)
            if verdict == "same" and self.options.dedupe:
                return self._dropped(index, row)
            if verdict == "same":
                fix = "give each row its own, leave ids blank, or keep the first with --dedupe"
                fault = self._fault(row, layout, "id", name, "this id stands in an earlier row", fix, "duplicate-id")
                return Entry(index, row.line, None, (fault,))
            if verdict == "case":
                self.notices.add("id-case", row.line, name[:80])
        elif isinstance(row.said.get("seed"), int):
            # for a mere warning, equal texts are enough
            picture = identity(row.said) if self.options.dedupe else known_hash(layout, cells)
            if picture in self.pictures and self.options.dedupe:
                return self._dropped(index, row)
            if picture in self.pictures:
                self.notices.add("same-picture", row.line)
            self.pictures.add(picture)
        if self.lengths is not None and self.options.on_truncate == "error":
            prompt = str(row.said["prompt"])
            if (lost := self.lengths.lost(prompt)) is not None and lost.by_all:
                message, fix = f"{lost.text}; lost: {lost.tail[:60]!r}", "shorten it, or take --on-truncate warn"
                return Entry(index, row.line, None, (self._fault(row, layout, "prompt", prompt[:80], message, fix, "truncated"),))
        return Entry(index, row.line, row)

    def _dropped(self, index: int, row: Row) -> Entry:
        self.notices.add("dropped", row.line)
        return Entry(index, row.line, None)

    def _fault(self, row: Row, layout: Layout, field: str, value: str, message: str, fix: str, kind: str) -> Fault:
        return Fault(self.reader.name, row.line, layout.heading(field), value[:80], message, fix, kind)
