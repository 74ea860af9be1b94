"""Bare prompts: a text file with one a line, or a folder with one a file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

from batchgen.errors import Fault
from batchgen.manifest.blocks import Block, blocks, nul_fault
from batchgen.manifest.notices import NoticeLog
from batchgen.manifest.rows import Cells, Chunk, FileFaultError

ROWS_A_CHUNK = 8192


def read_lines(source: Iterator[Block], *, name: str, notices: NoticeLog) -> Iterator[Chunk]:
    """One prompt a line, as it stands. Blank lines are skipped; a line whose first character is # is a comment."""
    for block in source:
        rows: list[Cells | Fault] = []
        starts: list[int] = []
        blank = comments = 0
        for number, line in enumerate(io.StringIO(block.text, newline=""), start=block.first_line):
            text = line.rstrip("\r\n")
            if not text or text.isspace():
                blank += 1
            elif text.lstrip().startswith("#"):
                comments += 1
            else:
                rows.append(nul_fault(name, number, block.nuls[number]) if number in block.nuls else (text,))
                starts.append(number)
        if blank:
            notices.add("blank-rows", count=blank)
        if comments:
            notices.add("comments", count=comments)
        if rows:
            yield Chunk(("prompt",), 1, starts, rows, bool(block.nuls))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: 2.txt before 10.txt."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), part) if place % 2 else (1, 0, part) for place, part in enumerate(parts)]


def read_folder(folder: str, *, name: str, encoding: str | None, limit: int | None) -> Iterator[Chunk]:
    """The folder's *.txt files in natural order, one prompt a file (its last line end is none of it), id = stem.

    A row's number is the file's place in that order, from 1.
    """
    names = sorted((entry for entry in os.listdir(folder) if entry.lower().endswith(".txt") and not entry.startswith(".")), key=natural)
    names = [entry for entry in names if os.path.isfile(os.path.join(folder, entry))]
    if not names:
        fix = "put one prompt in each .txt file, or name a file"
        raise FileFaultError(Fault(name, None, None, None, "the folder holds no .txt file", fix, "no-jobs"))
    if limit is not None:
        names = names[:limit]
    for start in range(0, len(names), ROWS_A_CHUNK):
        part = names[start : start + ROWS_A_CHUNK]
        rows = [_file(folder, entry, f"{name.rstrip('/')}/{entry}", encoding) for entry in part]
        numbers = range(start + 1, start + 1 + len(part))
        yield Chunk(("id", "prompt"), 1, numbers, rows, any(isinstance(row, Fault) for row in rows))


def _file(folder: str, entry: str, shown: str, encoding: str | None) -> Cells | Fault:
    try:
        with open(os.path.join(folder, entry), "rb") as file:
            parts = list(blocks(file, name=shown, encoding=encoding))
    except FileFaultError as error:
        return error.faults[0]
    except OSError as error:
        return Fault(shown, None, None, None, f"cannot be read: {error.strerror or error}", "check its permissions", "unreadable")
    for part in parts:
        for line, byte in part.nuls.items():
            return nul_fault(shown, line, byte)
    text = "".join(part.text for part in parts)
    text = text[:-2] if text.endswith("\r\n") else text[:-1] if text.endswith(("\n", "\r")) else text
    return entry[: -len(".txt")], text
