"""JSON Lines and JSON arrays of objects. Numbers keep their digits; a duplicate key, NaN or a non-object is that row's fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from batchgen.errors import Fault
from batchgen.manifest.blocks import RECORD_LIMIT, Block, count_lines, nul_fault
from batchgen.manifest.rows import Cells, Chunk, FileFaultError
from batchgen.manifest.values import WrittenFloat, shown

ROWS_A_CHUNK = 8192
_SPACE = re.compile(r"[ \t\r\n]*")


class _BadObjectError(ValueError):
    """Well-formed JSON that is no row."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _BadObjectError(f"the key {twice!r} stands twice in one object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise _BadObjectError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=WrittenFloat, parse_constant=_no_constant)


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (character {error.colno} of the line)"
    if isinstance(error, RecursionError):
        return "not a row: nested too deeply"
    return str(error) if isinstance(error, _BadObjectError) else "not JSON: a number with too many digits"


class _Chunks:
    """Gathers rows until their keys change."""

    def __init__(self, header_line: int = 1) -> None:
        self.lines: list[int] = []
        self.rows: list[Cells | Fault] = []
        self.header: tuple[str, ...] = ()
        self.damaged = self.escapes = False
        self.block_escapes = False  # of the text being read

    def begin_block(self, text: str) -> None:
        self.block_escapes = "\\u" in text
        self.escapes = self.escapes or self.block_escapes

    def add(self, line: int, row: dict[str, object] | Fault) -> Chunk | None:
        """Takes a row; gives the finished chunk before it, if one is finished."""
        done = None
        header = self.header if isinstance(row, Fault) else tuple(row)
        if header != self.header or len(self.rows) >= ROWS_A_CHUNK:
            done = self.flush()
            self.header = header
        self.lines.append(line)
        if isinstance(row, Fault):
            self.rows.append(row)
            self.damaged = True
        else:
            self.rows.append(tuple(row.values()))
        return done

    def flush(self) -> Chunk | None:
        if not self.rows:
            return None
        chunk = Chunk(self.header, self.lines[0], self.lines, self.rows, self.damaged, self.escapes)
        self.lines, self.rows, self.damaged, self.escapes = [], [], False, self.block_escapes
        return chunk


def read_json_lines(blocks: Iterator[Block], *, name: str) -> Iterator[Chunk]:
    """One object a line, lines ending at LF alone. Blank lines are skipped."""
    gathered = _Chunks()
    for block in blocks:
        gathered.begin_block(block.text)
        line = block.first_line - 1
        for text in block.text.split("\n"):
            line += 1
            if not text or text.isspace():
                continue
            if (chunk := gathered.add(line, _row(text, name, line, block.nuls))) is not None:
                yield chunk
    if (chunk := gathered.flush()) is not None:
        yield chunk


def _row(text: str, name: str, line: int, nuls: dict[int, int]) -> dict[str, object] | Fault:
    if line in nuls:
        return nul_fault(name, line, nuls[line])
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return Fault(name, line, None, shown(text.strip()), _why(error), "write one JSON object a line", "json")
    if not isinstance(value, dict):
        return Fault(name, line, None, shown(text.strip()), "not an object", 'write one JSON object a line, {"prompt": ...}', "json")
    return value


class _Scanner:
    """Text of a JSON file as far as it is needed, with its line numbers."""

    def __init__(self, blocks: Iterator[Block], name: str) -> None:
        self.text, self.place, self.line, self.last = "", 0, 1, False
        self.name = name
        self._blocks = blocks

    def more(self) -> bool:
        """Drops what was read and fetches at least as much again; False at the end."""
        parts = [self.text[self.place :]]
        wanted = 2 * len(parts[0])
        while not self.last and (len(parts) == 1 or sum(map(len, parts)) < wanted):
            block = next(self._blocks, None)
            if block is None:
                self.last = True
            elif block.nuls:
                line = min(block.nuls)
                raise FileFaultError(nul_fault(self.name, line, block.nuls[line]))
            else:
                parts.append(block.text)
        self.text, self.place = "".join(parts), 0
        return len(parts) > 1

    def skip(self, count: int) -> None:
        self.line += count_lines(self.text[self.place : self.place + count])
        self.place += count

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.place)
            self.skip(match.end() - self.place if match else 0)
            if self.place < len(self.text):
                return self.text[self.place]
            if not self.more():
                return ""

    def value(self) -> tuple[int, object]:
        """The next value and the line it starts on. Raises _BadObjectError (the value is skipped) or FileFaultError."""
        while True:
            bad: Exception | None = None
            try:
                value, end = _DECODER.raw_decode(self.text, self.place)
            except (ValueError, RecursionError) as error:
                bad = error
            if bad is not None:
                bad_end = self._end_of_bad() if isinstance(bad, _BadObjectError) else None
                if bad_end is not None:
                    self.skip(bad_end - self.place)
                    raise bad
                if len(self.text) - self.place < RECORD_LIMIT and self.more():
                    continue
                line = self.line
                if isinstance(bad, json.JSONDecodeError):
                    line += count_lines(self.text[self.place : bad.pos])
                raise FileFaultError(Fault(self.name, line, None, None, _why(bad), "mend it; what follows cannot be read", "json"))
            if end == len(self.text) and self.more():  # a number may go on in the next block
                continue
            line = self.line
            self.skip(end - self.place)
            return line, value

    def _end_of_bad(self) -> int | None:
        """Where a well-formed value ends that is no row; None where it is cut off."""
        try:
            return json.JSONDecoder().raw_decode(self.text, self.place)[1]
        except (ValueError, RecursionError):
            return None


def read_json_array(blocks: Iterator[Block], *, name: str) -> Iterator[Chunk]:
    """An array of objects, element by element. Broken JSON ends the reading: nothing after it can be trusted."""
    scanner = _Scanner(blocks, name)
    first = scanner.peek()
    fix = 'write an array of objects, [{"prompt": ...}, ...]'
    if first != "[":
        what = "the file is empty" if not first else "not a JSON array"
        fix += ", or use .jsonl for one object a line" if first == "{" else ""
        raise FileFaultError(Fault(name, scanner.line, None, None, what, fix, "json"))
    scanner.skip(1)
    gathered = _Chunks()
    gathered.escapes = gathered.block_escapes = True  # nothing is known of blocks to come
    ended = scanner.peek() == "]"
    while not ended:
        line = scanner.line
        row: dict[str, object] | Fault
        try:
            line, value = scanner.value()
            row = value if isinstance(value, dict) else Fault(name, line, None, shown(value), "not an object", fix, "json")
        except _BadObjectError as error:
            row = Fault(name, line, None, None, str(error), "mend this object", "json")
        except FileFaultError:
            if (chunk := gathered.flush()) is not None:
                yield chunk
            raise
        if (chunk := gathered.add(line, row)) is not None:
            yield chunk
        mark = scanner.peek()
        if mark not in (",", "]"):
            if (chunk := gathered.flush()) is not None:
                yield chunk
            what = "the array does not end" if not mark else f"expected a comma or ], found {mark!r}"
            raise FileFaultError(Fault(name, scanner.line, None, None, f"not JSON: {what}", "mend it; what follows cannot be read", "json"))
        scanner.skip(1)
        scanner.peek()
        ended = mark == "]"
    if (chunk := gathered.flush()) is not None:
        yield chunk
    if scanner.peek():
        raise FileFaultError(Fault(name, scanner.line, None, None, "text after the array's end", "remove it", "json"))


def as_json(cell: object) -> str:
    """A cell that is no text, as it is carried into the results: a missing one empty, a number as written, the rest as JSON."""
    if cell is None:
        return ""
    if isinstance(cell, WrittenFloat):
        return cell.written
    return json.dumps(cell, ensure_ascii=False, default=str)
