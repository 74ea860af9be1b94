"""Options whose text is read by a function from elsewhere, which says itself what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

_Value = TypeVar("_Value")


def parsed(parse: Callable[[str], _Value]) -> Callable[[click.Context, click.Parameter, str | None], _Value | None]:
    """The option's callback: what `parse` makes of the text, None where nothing was said. Its ValueError is refused as usage."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> _Value | None:
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return callback
