"""The options that name a model and say how it loads, shared by every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from batchgen.errors import UsageError
from batchgen.inventory.options import DTYPES, ModelOptions


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `model: str | None` and `model_options: ModelOptions` in their place."""

    @wraps(command)
    def gathered(
        *args: Any, variant: str | None, revision: str | None, dtype: tuple[str, ...], trust_remote_code: bool, allow_pickle: bool,
        cache_dir: str | None, **rest: Any,
    ) -> Any:
        one, by_component = parse_dtypes(dtype)
        options = ModelOptions(
            variant=variant, revision=revision, dtype=one, component_dtypes=by_component, trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle, cache_dir=cache_dir,
        )
        return command(*args, model_options=options, **rest)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("--model", metavar="ID_OR_FOLDER", help="Hub id, a folder in diffusers' layout, or `builtin`."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub model."),
    click.option("--variant", metavar="NAME", help="Weight files to prefer, e.g. fp16."),
    click.option(
        "--dtype", metavar="DTYPE|NAME=DTYPE", multiple=True,
        help="bf16, fp16, fp32 or auto, for all components or one (vae=fp32); repeatable.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run code that the model brings along."),
    click.option("--allow-pickle", is_flag=True, help="Load pickle weights (.bin), which can run code."),
    click.option("--cache-dir", metavar="DIR", type=click.Path(file_okay=False), help="Where hub models are kept."),
)


def parse_dtypes(values: tuple[str, ...]) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """(dtype for all or None, dtypes of single components); the last word on a component counts. Raises UsageError."""
    one: str | None = None
    named: dict[str, str] = {}
    for value in (part.strip() for text in values for part in text.split(",")):
        name, equals, dtype = value.rpartition("=")
        dtype = dtype.strip().lower()
        if dtype != "auto" and dtype not in DTYPES:
            raise UsageError(f"--dtype {value!r}: {dtype!r} is no dtype; use auto, bf16, fp16 or fp32", option="--dtype")
        if not equals:
            one = None if dtype == "auto" else dtype
        elif not name.strip():
            raise UsageError(f"--dtype {value!r} names no component", option="--dtype")
        else:
            named[name.strip()] = dtype
    return one, tuple(named.items())
