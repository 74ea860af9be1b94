"""Numbers and switches on the command line, refused in plain words: NaN, which no limit stops, and the infinities among them."""

from __future__ import annotations

import math
import re
from typing import Any

import click
from click.types import BoolParamType

_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")  # Python itself reads no more digits than some 4,300


class WholeRange(click.IntRange):
    """A whole number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not _WHOLE.fullmatch(text):
            self.fail(f"{value!r} is not a whole number; write digits only", param, ctx)
        number = int(text)
        if not _within(number, self):
            self.fail(f"{text} is {_outside(self)}; write a whole number {_asked(self)}", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number; write it like 7.5", param, ctx)
        if not _within(number, self):
            self.fail(f"{value} is {_outside(self)}; write a number {_asked(self)}", param, ctx)
        return number


class Switch(BoolParamType):
    """On or off, as a variable of the environment says it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        found = value if isinstance(value, bool) else self.str_to_bool(str(value))
        if found is None:
            self.fail(f"{value!r} is neither true nor false; write one of them", param, ctx)
        return found


Limits = WholeRange | FiniteRange


def _within(number: float, limits: Limits) -> bool:
    low, high = limits.min, limits.max
    above = low is None or number > low or (number == low and not limits.min_open)
    return above and (high is None or number < high or (number == high and not limits.max_open))


def _outside(limits: Limits) -> str:
    if limits.max is None:
        return f"not above {limits.min}" if limits.min_open else f"below {limits.min}"
    return f"outside {limits.min} ... {limits.max}"


def _asked(limits: Limits) -> str:
    if limits.max is None:
        return f"above {limits.min}" if limits.min_open else f"of at least {limits.min}"
    return f"from {limits.min} to {limits.max}"
