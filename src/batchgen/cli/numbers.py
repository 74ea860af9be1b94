"""Numbers on the command line: NaN, which no limit stops, and the infinities are refused."""

from __future__ import annotations

import math
from typing import Any

import click
from click.types import FloatParamType


class FiniteFloat(FloatParamType):
    """A number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return _finite(super().convert(value, param, ctx), value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return _finite(super().convert(value, param, ctx), value, param, ctx)


def _finite(number: float, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
    if not math.isfinite(number):
        raise click.BadParameter(f"{value!r} is not a finite number.", ctx, param)
    return number
