"""Whole chunks at once: a few questions about a column answer for thousands of rows that none of them needs looking at.

Only a fast road to what `RowStream.entries` finds: a chunk it cannot vouch for is refused untouched, and read row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from batchgen.errors import Fault
from batchgen.jobs import SEED_LIMIT, ShapeKey
from batchgen.manifest import values
from batchgen.manifest.columns import Layout
from batchgen.manifest.options import INPUTS
from batchgen.manifest.rows import Chunk
from batchgen.manifest.schema import Row, shape_of
from batchgen.manifest.stream import Ids, RowStream, short

SHAPE_FIELDS = ("width", "height", "size", "steps", "guidance", "true_cfg_scale", "num_images", "num_frames", "fps")
_SCALARS = {str, int, float, values.WrittenFloat, type(None)}
_LAST_SEED = str(SEED_LIMIT - 1)
_MEMO = 100_000

Column = Sequence[Any]


class _RefusedError(Exception):
    """This chunk has to be read row by row."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A row that stands for all with the same settings. `lines` are theirs, where something has to be said of them."""

    row: Row
    shape: ShapeKey
    count: int
    lines: Sequence[int]


@dataclass(frozen=True, slots=True)
class Taken:
    """A chunk without a fault."""

    prompts: Sequence[str]
    samples: tuple[Sample, ...]
    drawn: Sequence[int]  # lines of rows that ask for a drawn seed
    negatives: Sequence[int]  # lines of rows with a negative prompt of their own


class Bulk:
    """Takes chunks of one stream."""

    def __init__(self, stream: RowStream) -> None:
        self._stream = stream
        self._text = stream.kind in ("csv", "tsv", "txt")  # cells are text without NULs, and whole
        self._rows: dict[tuple[object, ...], tuple[Row, ShapeKey]] = {}

    def take(self, layout: Layout, chunk: Chunk, faults: Sequence[Fault]) -> Taken | None:
        """The chunk's rows, now counted as read; None, and nothing changed, where one has to be looked at."""
        stream, options = self._stream, self._stream.options
        if chunk.damaged or not chunk.rows or options.dedupe or stream.kind == "folder" or (faults and not stream.has_header):
            return None
        if options.limit is not None and stream.index + len(chunk.rows) > options.limit:
            return None
        if stream.lengths is not None and options.on_truncate == "error":
            return None
        rows: list[Any] = chunk.rows
        if set(map(len, rows)) != {len(layout.header)}:
            return None
        columns: list[Column] = list(zip(*rows, strict=True))
        places = dict(layout.fields)
        fields = {field: columns[place] for field, place in layout.fields}
        try:
            self._check_texts(fields, columns, chunk)
            ids, blank_ids = self._ids(fields.get("id"))
            drawn = self._drawn(fields.get("seed"), chunk.lines)
            pictures = self._pictures(fields, blank_ids)
            samples = self._samples(layout, places, chunk, columns)
        except (_RefusedError, TypeError):  # TypeError: a list or object where a scalar belongs
            return None
        stream.ids.seen.update(ids)
        stream.pictures.update(pictures)
        stream.index += len(rows)
        negatives = [line for line, cell in zip(chunk.lines, fields.get("negative_prompt", ()), strict=False) if cell and cell.strip()] \
            if options.takes_negative_prompt is False else []
        return Taken(fields["prompt"], samples, drawn, negatives)

    def _check_texts(self, fields: dict[str, Column], columns: Sequence[Column], chunk: Chunk) -> None:
        if "prompt" not in fields or any(field in fields and any(fields[field]) for field in INPUTS):
            raise _RefusedError
        if not self._text:
            for field in ("prompt", "negative_prompt"):
                if not set(map(type, fields.get(field, ()))) <= ({str} if field == "prompt" else {str, type(None)}):
                    raise _RefusedError
            if chunk.escapes:
                for column in columns:
                    self._check_characters(column)
        if not all(map(str.strip, fields["prompt"])):
            raise _RefusedError

    @staticmethod
    def _check_characters(column: Column) -> None:
        """NULs and halves of surrogate pairs, which only an escape can bring in."""
        if not set(map(type, column)) <= {*_SCALARS, bool}:
            raise _RefusedError
        joined = "".join(cell for cell in column if isinstance(cell, str))
        if "\0" in joined or (not joined.isascii() and joined.encode(errors="replace").decode() != joined):
            raise _RefusedError

    def _ids(self, column: Column | None) -> tuple[dict[str | bytes, str | None], Sequence[bool] | None]:
        """(what `Ids` has to remember, which rows have none of their own; None for all)."""
        if column is None:
            return {}, None
        if not self._text and not set(map(type, column)) <= {str, int, type(None)}:
            raise _RefusedError
        names = [cell.strip() for cell in column] if self._text else ["" if cell is None else str(cell).strip() for cell in column]
        blank = [not name for name in names] if not all(names) else [False] * len(names)
        names = [name for name in names if name]
        keys: list[Any] = list(map(str.casefold, names)) if "".join(names).isascii() else [Ids.key(name) for name in names]
        if max(map(len, keys), default=0) > 40:
            keys = [Ids.key(name) for name in names]
        new: dict[str | bytes, str | None]
        new = dict.fromkeys(keys) if keys == names else {
            key: None if key == name else short(name) for key, name in zip(keys, names, strict=True)
        }
        if len(new) != len(names) or not self._stream.ids.seen.keys().isdisjoint(new):
            raise _RefusedError
        return new, blank

    def _drawn(self, column: Column | None, lines: Sequence[int]) -> Sequence[int]:
        """Lines of rows whose seed is to be drawn, once every seed is known to be one."""
        if column is None or (self._plain_seeds(column) if self._text else self._whole_seeds(column)):
            return []
        drawn = []
        for line, cell in zip(lines, column, strict=True):
            try:
                if values.seed(cell) == "random":
                    drawn.append(line)
            except values.Problem:
                raise _RefusedError from None
        return drawn

    @staticmethod
    def _plain_seeds(column: Column) -> bool:
        joined = "".join(column)
        if not joined or not joined.isascii() or not joined.isdigit() or max(map(len, column)) > len(_LAST_SEED):
            return not joined
        return max([cell for cell in column if len(cell) == len(_LAST_SEED)], default="") <= _LAST_SEED

    @staticmethod
    def _whole_seeds(column: Column) -> bool:
        return set(map(type, column)) == {int} and min(column) >= 0 and max(column) < SEED_LIMIT

    def _pictures(self, fields: dict[str, Column], blank_ids: Sequence[bool] | None) -> set[int]:
        """Hashes of rows with their own seed and no id, none of which stood before."""
        if "seed" not in fields or (blank_ids is not None and not any(blank_ids)):
            return set()
        keep = [cell not in (None, "") for cell in fields["seed"]]
        if blank_ids is not None:
            keep = [seeded and blank for seeded, blank in zip(keep, blank_ids, strict=True)]
        chosen = list(compress(zip(*fields.values(), strict=True), keep))
        hashes = set(map(hash, chosen))
        if len(hashes) != len(chosen) or not self._stream.pictures.isdisjoint(hashes):
            raise _RefusedError
        return hashes

    def _samples(self, layout: Layout, places: dict[str, int], chunk: Chunk, columns: Sequence[Column]) -> tuple[Sample, ...]:
        """One row read in full for every different settings."""
        shaping = [columns[places[field]] for field in SHAPE_FIELDS if field in places]
        if not self._text and any(not set(map(type, column)) <= _SCALARS for column in shaping):
            raise _RefusedError
        if not shaping:
            return (self._sample(layout, chunk, 0, (), len(chunk.rows), None),)
        settings = list(zip(*shaping, strict=True))
        counts = Counter(settings)
        if len(counts) == 1:
            return (self._sample(layout, chunk, 0, settings[0], len(settings), None),)
        places_of: dict[tuple[object, ...], int] = {}
        if any((layout.header, *key) not in self._rows for key in counts):
            places_of = dict(zip(settings, range(len(settings)), strict=True))
        return tuple(self._sample(layout, chunk, places_of.get(key, 0), key, count, settings) for key, count in counts.items())

    def _sample(
        self, layout: Layout, chunk: Chunk, place: int, key: tuple[object, ...], count: int, settings: Sequence[tuple[object, ...]] | None
    ) -> Sample:
        row, shape = self._read(layout, chunk, place, key)
        lines: Sequence[int] = ()
        if row.snapped or "num_frames" in row.said or "fps" in row.said:
            lines = chunk.lines if settings is None else [line for line, own in zip(chunk.lines, settings, strict=True) if own == key]
        return Sample(row, shape, count, lines)

    def _read(self, layout: Layout, chunk: Chunk, place: int, key: tuple[object, ...]) -> tuple[Row, ShapeKey]:
        known = self._rows.get((layout.header, *key))
        if known is not None:
            return known
        cells: Any = chunk.rows[place]
        row, faults = self._stream.rows.read(layout, chunk.lines[place], cells)
        if row is None or faults:
            raise _RefusedError
        if len(self._rows) >= _MEMO:
            self._rows.clear()
        self._rows[layout.header, *key] = row, shape_of(row)
        return self._rows[layout.header, *key]
