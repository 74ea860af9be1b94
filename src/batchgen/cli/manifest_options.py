"""The options that say how a manifest is read and what its rows become, shared by every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import click

from batchgen.cli.numbers import WholeRange
from batchgen.errors import UsageError
from batchgen.inventory.loras import parse_loras
from batchgen.jobs import SEED_LIMIT
from batchgen.manifest import values
from batchgen.manifest.options import DEFAULT_NAME, KINDS, JobDefaults, ManifestOptions
from batchgen.outputs.names import parse_template

_NAMED_DELIMITERS = {"comma": ",", "tab": "\t", "\\t": "\t", "semicolon": ";", "pipe": "|", "space": " "}


def manifest_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `manifest_options: ManifestOptions` in their place."""

    @wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        own = {name: given.pop(name) for name in _NAMES}
        return command(*args, manifest_options=options_from(**own), **given)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


def options_from(
    *, size: tuple[int, int] | None = None, carry: tuple[str, ...] = (), lora: tuple[str, ...] = (), **given: Any
) -> ManifestOptions:
    """The record of the options as parsed. Raises UsageError for those that contradict each other."""
    if size is not None:
        if given["width"] is not None or given["height"] is not None:
            raise UsageError("--size stands beside --width or --height; say the size one way", option="--size")
        given["width"], given["height"] = size
    loras = parse_loras(lora)
    # one LoRA is meant for every row that says nothing; of several each row chooses
    given["lora"] = loras[0].name if len(loras) == 1 else None
    defaults = JobDefaults(**{name: given.pop(name) for name in JobDefaults.__dataclass_fields__})
    parse_template(given["name_template"])
    carried = tuple(name.strip() for text in carry for name in text.split(","))
    return ManifestOptions(defaults=defaults, carry=carried, loras=loras, one_size=size is not None, **given)


def _seed(context: click.Context, parameter: click.Parameter, value: str | None) -> int | Literal["random"] | None:
    if value is None:
        return None
    try:
        return values.seed(value)
    except values.Problem as problem:
        raise click.BadParameter(f"{value!r} {problem.message}; {problem.fix}", context, parameter) from None


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    try:
        return values.size(value)
    except values.Problem as problem:
        raise click.BadParameter(f"{value!r} {problem.message}; {problem.fix}", context, parameter) from None


def _delimiter(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    value = _NAMED_DELIMITERS.get(value.casefold(), value)
    if len(value) != 1 or value in '"\r\n':
        raise click.BadParameter(f"{value!r} is not one character; tab, comma, semicolon and pipe may be named", context, parameter)
    return value


def _number(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A plain decimal, by the rules of the manifest's cells: click's own float takes `nan`, too."""
    if value is None:
        return None
    try:
        if parameter.name == "fps":
            number = values.rate(value)
        else:
            number = values.number(value, high=1.0 if parameter.name == "strength" else values.NUMBER_LIMIT)
    except values.Problem as problem:
        raise click.BadParameter(f"{value!r} {problem.message}; {problem.fix}", context, parameter) from None
    if number is None:
        raise click.BadParameter("it is blank; write a number like 7.5", context, parameter)
    return number


_COUNT = WholeRange(min=1, max=values.INT_LIMIT)

_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--format", type=click.Choice([*KINDS, "ndjson"], case_sensitive=False), help="Kind of the manifest; default: by its name.",
    ),
    click.option("--encoding", metavar="NAME", help="Its text encoding, e.g. cp1252; default: UTF-8, or what its byte-order mark says."),
    click.option("--delimiter", metavar="CHAR", callback=_delimiter, help="What stands between columns; default: by the header."),
    click.option("--prompt-column", metavar="NAME", help="The column that holds the prompts."),
    click.option("--carry", metavar="NAMES", multiple=True, help="Columns to carry as they are, though named like a known one."),
    click.option("--name", "name_template", metavar="TEMPLATE", default=DEFAULT_NAME, show_default=True, help="What outputs are called."),
    click.option("--negative-prompt", metavar="TEXT", help="For rows without one."),
    click.option("--size", metavar="WxH", callback=_size, help="Size of rows that name none."),
    click.option("--width", type=_COUNT, metavar="PIXELS", help="Width of rows that name none."),
    click.option("--height", type=_COUNT, metavar="PIXELS", help="Height of rows that name none."),
    click.option("--steps", type=_COUNT, metavar="N", help="Denoising steps of rows that name none."),
    click.option("--guidance", callback=_number, metavar="X", help="Guidance of rows that name none."),
    click.option("--true-cfg-scale", callback=_number, metavar="X", help="True CFG scale of rows that name none."),
    click.option("--num-images", type=_COUNT, metavar="N", default=1, show_default=True, help="Pictures of rows that name no number."),
    click.option("--num-frames", type=_COUNT, metavar="N", help="Frames of rows that name none."),
    click.option("--fps", callback=_number, metavar="X", help="Frames a second, 0.1 to 1000, of rows that name none."),
    click.option("--strength", callback=_number, metavar="X", help="Strength, 0 to 1, of rows that name none."),
    click.option(
        "--lora", metavar="NAME=FILE[:WEIGHT]", multiple=True,
        help="A LoRA (.safetensors) that rows name in their lora column; a single one is for all rows that name none. Repeatable.",
    ),
    click.option("--seed", metavar="N|random", callback=_seed, help=f"Seed of rows that name none (0 to {SEED_LIMIT - 1})."),
    click.option("--skip-invalid", is_flag=True, help="Leave rows with faults out, and report them as failed."),
    click.option("--snap", is_flag=True, help="Take the nearest size or frame count that the model can make."),
    click.option("--dedupe", is_flag=True, help="Of rows with one id, or one text and seed, keep the first."),
    click.option("--allow-empty-prompt", is_flag=True, help="Render rows without a prompt."),
    click.option(
        "--on-truncate", type=click.Choice(["warn", "error"]), default="warn", show_default=True,
        help="A prompt longer than every text encoder reads.",
    ),
    click.option("--faults-file", metavar="FILE", help="Write every fault of the manifest, one a line."),
)
_NAMES = (
    "format", "encoding", "delimiter", "prompt_column", "carry", "name_template", "size", *JobDefaults.__dataclass_fields__,
    "skip_invalid", "snap", "dedupe", "allow_empty_prompt", "on_truncate", "faults_file",
)
