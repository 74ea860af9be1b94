"""The standard streams of the command: closed, full or without a reader, they are no reason for a traceback or a lost night.

What cannot be said on stderr is dropped. What cannot be written to stdout raises: BrokenPipeError where its reader has gone,
StdoutLostError where it is full or not open for writing. A closed stream is nowhere.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class StdoutLostError(OSError):
    """Standard output takes nothing more, and nobody closed its other end."""


class _Out(io.FileIO):
    """Standard output: its errors can be told from those of a file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutLostError(error.errno, error.strerror) from error


class _Err(io.FileIO):
    """Standard error: a message that nobody can read must not end the run that it is about."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def mend() -> None:
    """Takes stdout and stderr over, as UTF-8. Closed descriptors 0 to 2 get a place to go, lest a file be opened as one of them."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open as long as the program
    sys.stdout = _text(_Out(1, "w", closefd=False), lines=os.isatty(1))
    sys.stderr = _text(_Err(2, "w", closefd=False), lines=True)


def _text(raw: io.FileIO, *, lines: bool) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=lines)


def _to_nowhere(number: int, flags: int) -> None:
    null = os.open(os.devnull, flags)
    if null != number:
        os.dup2(null, number)
        os.close(null)


@contextmanager
def kept_besides(stream: TextIO, what: str, where: object) -> Iterator[None]:
    """For `what` is written inside and stands `where` it was made, too: a stream that is full is no error then, but a line on stderr.

    Raises BrokenPipeError where the reader has gone: by then all is done.
    """
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(stream)
        print(f"{what} cannot be printed: {error.strerror or error}; {where}", file=sys.stderr)


def silence(stream: TextIO) -> None:
    """What is left to be written, now and at the program's end, goes nowhere."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # no descriptor of its own
        return
    _to_nowhere(number, os.O_WRONLY)
