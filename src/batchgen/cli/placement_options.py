"""The options that say where components live, shared by `run` and `plan`. They reach a command as one Overrides record."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import click

from batchgen.cli.numbers import WholeRange
from batchgen.plan.records import Overrides

_MODES = "resident, component-offload, layerwise-offload"


def _keep_resident(context: click.Context, parameter: click.Parameter, value: str | None) -> float | Literal["never"] | None:
    if value is None:
        return None
    if value.strip().lower() == "never":
        return "never"
    try:
        size = float(value)
    except ValueError:
        size = math.nan
    if not math.isfinite(size):
        raise click.BadParameter(f"{value!r} is neither a number of GiB nor 'never'", context, parameter)
    return size


def _batch_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None or value.strip().lower() == "auto":
        return None
    if not value.strip().isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a whole number from 1 nor 'auto'", context, parameter)
    return int(value)


def _joined(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    # A repeated option is one longer list; an environment variable comes split at its spaces.
    return ",".join(values) if values else None


def _list(flag: str, metavar: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(flag, metavar=metavar, multiple=True, callback=_joined, help=text)


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--performance-mode", metavar="MODE", default="auto", show_default=True,
        help="auto: by what fits; speed: all on the device; memory: as little as possible; manual: only what you say.",
    ),
    _list("--component-residency", "NAME=MODE,...", f"Where single components or groups live: {_MODES}. Repeatable."),
    _list("--cpu-offload-components", "LIST", "Components or groups to hold in host memory between their stages; all; none. Repeatable."),
    _list(
        "--layerwise-offload-components", "LIST",
        "Components or groups to stream block by block; all; default (text_encoder, image_encoder, vae); none. Repeatable.",
    ),
    click.option("--dit-cpu-offload/--no-dit-cpu-offload", default=None, help="Hold the denoiser in host memory between its stages."),
    click.option("--text-encoder-cpu-offload/--no-text-encoder-cpu-offload", default=None, help="The same for text encoders."),
    click.option("--image-encoder-cpu-offload/--no-image-encoder-cpu-offload", default=None, help="The same for image encoders."),
    click.option("--vae-cpu-offload/--no-vae-cpu-offload", default=None, help="The same for VAEs."),
    click.option("--dit-layerwise-offload/--no-dit-layerwise-offload", default=None, help="Stream the denoiser block by block."),
    click.option("--fsdp/--no-fsdp", default=None, help="Shard the denoiser over the devices, or never do so."),
    click.option(
        "--fsdp-group-size", "group_size", type=WholeRange(min=2), metavar="N",
        help="Devices that share one sharded denoiser; default: as few as hold it. Several groups render side by side.",
    ),
    click.option(
        "--cfg-parallel/--no-cfg-parallel", default=None,
        help="Guidance's two branches at once, each on half of a sharded group's devices; default: off.",
    ),
    click.option(
        "--keep-resident-min-available-gb", metavar="GB|never", callback=_keep_resident,
        help="Free device memory (GiB) from which components stay on the device.",
    ),
    click.option("--batch-size", metavar="N|auto", callback=_batch_size, help="Jobs in one batch; auto (default): what fits."),
    click.option("--profile", metavar="NAME", help="Deployment profile, instead of the one found for the model."),
    click.option("--profile-file", metavar="FILE", help="Your own deployment profile (TOML); see docs/residency.md."),
    click.option("--force", is_flag=True, help="Go on with a plan that does not fit."),
)  # fmt: skip
_FIELDS = tuple(Overrides.__dataclass_fields__)


def placement_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `overrides: Overrides` in their place."""

    @wraps(command)
    def gathered(*args: Any, **rest: Any) -> Any:
        own = {name: rest.pop(name) for name in _FIELDS}
        return command(*args, overrides=Overrides(**own), **rest)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered
