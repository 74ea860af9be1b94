"""The columns batchgen knows, their other names, and how a header is matched against them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from batchgen.errors import Fault


@dataclass(frozen=True, slots=True)
class Column:
    """A known column. `kind` is how its cells are read: see `values`."""

    name: str
    aliases: tuple[str, ...]
    kind: str  # "prompt", "text", "id", "seed", "integer", "number", "rate", "size", "unit"
    about: str


COLUMNS = (
    Column("prompt", ("text", "caption"), "prompt", "what to paint, word for word"),
    Column("negative_prompt", ("negative",), "text", "what to keep out; blank takes the run's default"),
    Column("id", ("name", "key"), "id", "unique; blank gives a short hash of the row"),
    Column("seed", (), "seed", "0 ... 2^64-1; blank comes from the row, -1 or random is drawn once"),
    Column("width", (), "integer", "pixels"),
    Column("height", (), "integer", "pixels"),
    Column("size", (), "size", "WIDTHxHEIGHT, in place of the two columns"),
    Column("steps", ("num_inference_steps",), "integer", "denoising steps"),
    Column("guidance", ("guidance_scale", "cfg"), "number", "0 or more: the CFG scale, or the embedded value of a distilled model"),
    Column("true_cfg_scale", (), "number", "0 or more, where a model has both kinds"),
    Column("num_images", ("n", "count"), "integer", "pictures of this row, with seeds counting up from its seed"),
    Column("num_frames", ("frames",), "integer", "video: frames of the clip"),
    Column("fps", (), "rate", "video: frames a second, 0.1 ... 1000"),
    Column("image", ("init_image",), "path", "picture to start from, relative to the manifest"),
    Column("last_image", (), "path", "video: the last frame"),
    Column("mask", (), "path", "where to paint"),
    Column("strength", (), "unit", "0 ... 1, how far to leave the picture"),
    Column("lora", (), "text", "NAME or NAME:WEIGHT of a LoRA given to the run"),
)
BY_NAME = {name: column for column in COLUMNS for name in (column.name, *column.aliases)}
_FUZZY = tuple(name for name in BY_NAME if len(name) >= 4)  # `id` and `n` are one edit from half the alphabet
_BLANKS = " \t\r\n\v\f\u00a0\u2007\u202f\ufeff"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each field stands in a row."""

    header: tuple[str, ...]  # as written
    fields: tuple[tuple[str, int], ...]  # known field, position
    extra: tuple[tuple[str, int], ...]  # other column as written, position

    def heading(self, name: str) -> str:
        """The column's name as the file writes it."""
        for known, position in self.fields:
            if known == name:
                return self.header[position].strip(_BLANKS)
        return name


def normal(heading: str) -> str:
    """A heading as it is matched: trimmed, casefolded, spaces and hyphens as underscores."""
    return re.sub(r"[\s-]", "_", heading.strip(_BLANKS).casefold())


def one_edit_apart(left: str, right: str) -> bool:
    """One letter more, less, changed, or two neighbours swapped."""
    if left == right or abs(len(left) - len(right)) > 1:
        return False
    short, long = sorted((left, right), key=len)
    start = 0
    while start < len(short) and short[start] == long[start]:
        start += 1
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    if short[start + 1 :] == long[start + 1 :]:
        return True
    return short[start : start + 2] == long[start : start + 2][::-1] and short[start + 2 :] == long[start + 2 :]


@lru_cache(maxsize=4096)
def nearly_known(heading: str) -> str | None:
    """The known name that a heading is one edit away from, or None. One that holds that name as a whole word is its own.

    So is one that differs in the first letter alone: slips seldom fall there, and `weight`, `task` and `game` are words.
    """
    return next((name for name in _FUZZY if one_edit_apart(heading, name) and not _of_its_own(heading, name)), None)


def _of_its_own(heading: str, name: str) -> bool:
    return heading[1:] == name[1:] or f"_{name}_" in f"_{heading}_"


def known_count(header: Sequence[str], prompt_column: str | None) -> int:
    """How many known columns a header holds: what its delimiter is chosen by."""
    wanted = {normal(prompt_column)} if prompt_column else set()
    return len({normal(heading) for heading in header} & (BY_NAME.keys() | wanted))


def match_header(
    header: Sequence[str], *, file: str, line: int | None, prompt_column: str | None = None, carry: Collection[str] = ()
) -> tuple[Layout, list[Fault]]:
    """The layout of a header and everything wrong with it. A header without a prompt column is a fault."""
    faults: list[Fault] = []
    fields: dict[str, int] = {}
    extra: dict[str, int] = {}
    own_prompt = normal(prompt_column) if prompt_column else None
    carried = {normal(name) for name in carry}

    def fault(heading: str, message: str, fix: str, kind: str) -> None:
        faults.append(Fault(file, line, heading.strip(_BLANKS) or None, None, message, fix, kind))

    for position, heading in enumerate(header):
        name = normal(heading)
        known = BY_NAME.get(name)
        field = "prompt" if name == own_prompt else known.name if known and name not in carried else None
        if field == "prompt" and own_prompt is not None and name != own_prompt:
            field = None  # --prompt-column says which one it is
        if field is None:
            if known is None and name not in carried and (near := nearly_known(name)) is not None:
                fault(heading, f"looks like {near!r}, one letter off", f"rename it, or keep it as it is with --carry {name}", "near-miss")
            extra[_own_name(heading, position, extra)] = position
        elif field in fields:
            other = header[fields[field]].strip(_BLANKS)
            fault(heading, f"a second column for {field} (the first is {other!r})", "keep one of them", "two-columns")
        else:
            fields[field] = position
    if "size" in fields and ("width" in fields or "height" in fields):
        fault(header[fields["size"]], "size stands beside width or height", "keep one way of saying the size", "two-columns")
    if "prompt" not in fields and not any(fault.kind == "near-miss" for fault in faults):
        faults.append(_no_prompt(header, fields, file, line, prompt_column))
    return Layout(tuple(header), tuple(fields.items()), tuple(extra.items())), faults


def _own_name(heading: str, position: int, taken: Collection[str]) -> str:
    name = heading.strip(_BLANKS) or f"column {position + 1}"
    if name not in taken:
        return name
    number = 2
    while f"{name} ({number})" in taken:
        number += 1
    return f"{name} ({number})"


def _no_prompt(header: Sequence[str], fields: Collection[str], file: str, line: int | None, prompt_column: str | None) -> Fault:
    found = ", ".join(repr(heading.strip(_BLANKS)[:40]) for heading in header[:20]) or "nothing"
    more = f" and {len(header) - 20} more" if len(header) > 20 else ""
    what = f"no column {prompt_column!r}" if prompt_column else "no prompt column" if fields else "no known column"
    fix = "name the prompt column with --prompt-column, or use .txt for a list of bare prompts"
    return Fault(file, line, None, None, f"{what} in the header; found {found}{more}", fix, "no-prompt-column")
