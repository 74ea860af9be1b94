"""Where tables are printed: the width, and what a stream that is no terminal should not get."""

from __future__ import annotations

import os
import re
from typing import Any, TextIO, cast

from rich.console import Console

_BLANKS = re.compile(r"[ \t]+(?=\n)")
_MOST_COLUMNS = 10_000


def columns() -> int | None:
    """The width that COLUMNS asks for; None where it is unset or no positive number."""
    text = os.environ.get("COLUMNS", "").strip()
    if not (text.isascii() and text.isdigit()):
        return None
    return min(int(text[:9]), _MOST_COLUMNS) or None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # called while it is handled: rich itself would end the program with a code of its own


class _Trimmed:
    """A text stream without the blanks that pad the last column of a table."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_BLANKS.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stream: TextIO, *, elsewhere: int | None = None, soft_wrap: bool = False) -> Console:
    """Prints in the terminal's width and colours; where there is none, `elsewhere` columns wide, without trailing blanks.

    COLUMNS, where it is a number, says the width of both. No markup: names, reasons and prompts are data.
    """
    terminal = stream.isatty()
    width = columns()
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}  # what rich takes for numbers
    return _Console(
        file=stream if terminal else cast(TextIO, _Trimmed(stream)), width=width or (None if terminal else elsewhere), soft_wrap=soft_wrap,
        markup=False, highlight=False, emoji=False, _environ=environ,
    )
