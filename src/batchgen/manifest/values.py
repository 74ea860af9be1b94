"""Cells to typed values, exactly: no float ever stands between a seed and its digits.

A cell is text (CSV, TSV) or what JSON and Parquet hold. Every reader returns None for a blank cell and raises `Problem`.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from batchgen.jobs import FPS_HIGH, FPS_LOW, SEED_LIMIT

INT_LIMIT = 2**31 - 1  # what a tensor dimension can hold
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")
_EXPONENT = re.compile(_NUMBER.pattern + r"e[+-]?[0-9]+", re.IGNORECASE)
NUMBER_LIMIT = 3.4028234663852886e38  # what float32, in which models compute, can hold
_COMMA_NUMBER = re.compile(r"[+-]?[0-9]+,[0-9]+")
_SIZE = re.compile(r"\s*([0-9]{1,10})\s*[xX\u00d7]\s*([0-9]{1,10})\s*")


class Problem(Exception):
    """Why a cell cannot be read: what is wrong, what to do, and a stable word for counting."""

    def __init__(self, message: str, fix: str, kind: str) -> None:
        super().__init__(message)
        self.message, self.fix, self.kind = message, fix, kind


class WrittenFloat(float):
    """A JSON number with a point or exponent that remembers how it was written."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.written = text
        return number


def written(cell: object) -> str | None:
    """A scalar as its text, for parsing; None for a blank or missing one. Raises Problem for what is no scalar."""
    if cell is None:
        return None
    if type(cell) is str:
        return cell.strip() or None
    if isinstance(cell, WrittenFloat):
        return cell.written
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return repr(cell)
    raise Problem(f"is {_kind_of(cell)}, not a number", "write a number", "type")


def text(cell: object) -> str | None:
    """Text, untouched. Blank (white space only) is None."""
    if cell is None:
        return None
    if not isinstance(cell, str):
        raise _not_text(cell)
    check_text(cell)
    return cell if cell.strip() else None


def path(cell: object) -> str | None:
    """A path as written, trimmed at the ends."""
    value = text(cell)
    return None if value is None else value.strip()


def identifier(cell: object) -> str | None:
    """An id: text as it stands, trimmed at the ends, or a JSON number as written."""
    if isinstance(cell, str):
        check_text(cell)
        return cell.strip() or None
    if isinstance(cell, bool) or not isinstance(cell, (int, float, type(None))):
        raise _not_text(cell)
    return written(cell)


def _not_text(cell: object) -> Problem:
    plain = isinstance(cell, bool | int | float)
    return Problem(f"is {_kind_of(cell)}, not text", "put it in quotes" if plain else "write it as one text", "type")


def check_text(value: str) -> None:
    """Raises Problem for what no file and no tokenizer can take: a NUL, or half of a surrogate pair."""
    if "\0" in value:
        raise Problem("holds a NUL character", "remove it", "nul")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            fix = "write the whole pair, or remove it"
            raise Problem("holds half of a surrogate pair, which is no character", fix, "unicode") from None


def integer(cell: object, *, low: int = 1) -> int | None:
    """A whole number from `low` to 2^31-1; `42.0` is 42."""
    digits = written(cell)
    if digits is None:
        return None
    if not _INTEGER.fullmatch(digits):
        raise Problem("is not a whole number", "write digits only", "number")
    digits = digits.partition(".")[0]
    if len(digits.lstrip("+-0")) > 10 or not low <= int(digits) <= INT_LIMIT:
        raise Problem(f"is outside {low} ... {INT_LIMIT}", f"write a whole number of at least {low}", "range")
    return int(digits)


def number(cell: object, *, low: float = 0.0, high: float = NUMBER_LIMIT, decimal_comma: bool = False) -> float | None:
    """A plain decimal number. `7,5` is 7.5 only where the file's delimiter is a semicolon."""
    digits = written(cell)
    if digits is None:
        return None
    if _COMMA_NUMBER.fullmatch(digits):
        if not decimal_comma:
            raise Problem("is not a number here: a decimal comma counts only in files with ; between columns", "write a point", "number")
        digits = digits.replace(",", ".")
    if _EXPONENT.fullmatch(digits) and not isinstance(cell, float):
        raise Problem("is written with an exponent", "write it out, like 7.5", "number")
    if not _NUMBER.fullmatch(digits) and not (isinstance(cell, float) and math.isfinite(cell)):
        raise Problem("is not a number", "write it like 7.5", "number")
    value = float(digits)
    if not low <= value <= high or not math.isfinite(value):
        if value > high == NUMBER_LIMIT:
            raise Problem("is larger than any number a model computes with", f"write a number of {low:g} or more, like 7.5", "range")
        span = f"{low:g} or more" if high == NUMBER_LIMIT else f"{low:g} ... {high:g}"
        raise Problem(f"is outside {span}", f"write a number of {span}", "range")
    return value + 0.0  # -0.0 is 0.0: both must be one identity


def rate(cell: object, *, decimal_comma: bool = False) -> float | None:
    """Frames a second that every kind of clip can hold."""
    return number(cell, low=FPS_LOW, high=FPS_HIGH, decimal_comma=decimal_comma)


def seed(cell: object) -> int | Literal["random"] | None:
    """A seed, exactly, from 0 to 2^64-1; -1 and `random` ask for a drawn one; blank is None."""
    digits = written(cell)
    if digits is None:
        return None
    if digits.casefold() == "random" or digits == "-1":
        return "random"
    if not _INTEGER.fullmatch(digits):
        raise Problem("is not a whole number", "write digits only, or leave it blank", "number")
    digits = digits.partition(".")[0]
    magnitude = digits.lstrip("+-0") or "0"
    if (digits.startswith("-") and magnitude != "0") or len(magnitude) > 20 or int(magnitude) >= SEED_LIMIT:
        raise Problem("is outside 0 ... 2^64-1", "write a seed in that range, or -1 to have one drawn", "range")
    if isinstance(cell, float) and not isinstance(cell, WrittenFloat) and cell >= 2**53:
        raise Problem("is a float too large to be exact", "store seeds as integers or text", "number")
    return int(magnitude)


def size(cell: object) -> tuple[int, int] | None:
    """`WIDTHxHEIGHT`, both at least 1."""
    value = text(cell)
    if value is None:
        return None
    match = _SIZE.fullmatch(value)
    if match is None:
        raise Problem("is not a size", "write it like 1024x768", "number")
    width, height = int(match.group(1)), int(match.group(2))
    if not (1 <= width <= INT_LIMIT and 1 <= height <= INT_LIMIT):
        raise Problem(f"is outside 1 ... {INT_LIMIT}", "write it like 1024x768", "range")
    return width, height


def shown(cell: object) -> str | None:
    """A cell as a fault shows it."""
    if cell is None or isinstance(cell, str):
        value = cell
    else:
        value = cell.written if isinstance(cell, WrittenFloat) else str(cell)
    return value if value is None or len(value) <= 80 else value[:77] + "..."


def _kind_of(cell: object) -> str:
    if isinstance(cell, bool):
        return "true or false"
    if isinstance(cell, (int, float)):
        return "a number"
    return "a list" if isinstance(cell, (list, tuple)) else "an object" if isinstance(cell, dict) else type(cell).__name__
