"""The file that `--faults-file` asks for: every fault, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from batchgen.errors import UsageError


@contextmanager
def fault_file(path: str | None) -> Iterator[TextIO | None]:
    """The open file, or None where none is asked for. Raises UsageError where it cannot be written."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - only the opening may be the user's mistake
    except OSError as error:
        raise UsageError(f"{path!r} cannot be written: {error.strerror}", option="--faults-file") from None
    with file:
        yield file
