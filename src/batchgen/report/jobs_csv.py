"""tables/jobs.csv: every job with what became of it, in the manifest's order, read from the journal's rows as a stream.

Text is always quoted, so that a prompt with a carriage return or a leading quote comes back exactly as it went in.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

# What people look at first comes first; the rest follows in the order in which the rows bring it.
FIRST = (
    "index", "k", "id", "state", "output", "prompt", "negative_prompt", "seed", "width", "height", "num_frames", "fps", "steps", "guidance",
    "true_cfg_scale", "reason", "kind", "stage", "attempts", "batch", "flags", "seconds",
)

_EMPTY: tuple[object, ...] = (None, "", (), [], {})
Rows = Callable[[], Iterable[Mapping[str, Any]]]  # each call streams the rows from the start


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All columns that any row has, in the file's order. Columns that are empty throughout are left out, the first ones excepted."""
    seen: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            seen[name] = seen.get(name, False) or value not in _EMPTY
    first = [name for name in FIRST if name in seen]
    return first + [name for name, filled in seen.items() if filled and name not in FIRST]


def write_jobs_csv(rows: Rows, handle: BinaryIO) -> int:
    """Writes the table as UTF-8 with `\\n` line ends and gives the number of rows. Reads the rows twice, holding one at a time."""
    names = columns(rows())
    text = io.TextIOWrapper(handle, encoding="utf-8", errors="surrogatepass", newline="", write_through=False)
    try:
        writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerow(names)
        return sum(1 for _ in _written(writer, names, rows()))
    finally:
        text.flush()
        text.detach()  # the handle is the caller's to close


def _cell(value: Any) -> Any:
    """Numbers and text as they are, nothing as an empty text, everything else as JSON."""
    if value in _EMPTY:
        return ""
    return value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False, default=str)


def _written(writer: Any, names: list[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
        yield
