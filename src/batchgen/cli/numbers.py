"""Numbers on the command line: NaN, which no limit stops, and the infinities are refused."""

from __future__ import annotations

import math
from typing import Any

import click
from click.types import FloatParamType


class _Finite(click.ParamType):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class FiniteFloat(_Finite, FloatParamType):
    """A number."""


class FiniteRange(_Finite, click.FloatRange):
    """A number within limits."""
