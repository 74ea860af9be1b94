"""The options that say what is to be rendered, for plans: a size and a number of jobs, or what a manifest says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.numbers import FiniteRange, WholeRange
from batchgen.cli.parsed import parsed
from batchgen.errors import UsageError
from batchgen.inventory.loras import LoraFile, parse_loras
from batchgen.jobs import ShapeKey
from batchgen.units import parse_size

if TYPE_CHECKING:
    from batchgen.cli.fitting import Shapes
    from batchgen.inventory.records import ModelFacts, Profile, SizeRules

MAX_SIDE = 16384


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """As given on the command line; None is unset."""

    size: tuple[int, int] | None = None  # width, height
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    jobs: int | None = None
    reserve_bytes: int | None = None
    host_bytes: int | None = None
    loras: tuple[LoraFile, ...] = ()

    @property
    def said(self) -> bool:
        return any(value is not None for value in (self.size, self.frames, self.steps, self.guidance, self.jobs))


def _dimensions(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,5})\s*[x×*]\s*(\d{1,5})\s*", value, re.IGNORECASE)
    if match is None or not all(0 < int(side) <= MAX_SIDE for side in match.groups()):
        raise click.BadParameter(f"{value!r} is no size; write WIDTHxHEIGHT, e.g. 1024x1024", context, parameter)
    return int(match[1]), int(match[2])


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets them as `workload: WorkloadOptions`."""

    @wraps(command)
    def gathered(
        *args: Any, size: tuple[int, int] | None, frames: int | None, steps: int | None, guidance: float | None, jobs: int | None,
        reserve_vram: int | None, host_memory: int | None, lora: tuple[str, ...], **rest: Any,
    ) -> Any:
        options = WorkloadOptions(size, frames, steps, guidance, jobs, reserve_vram, host_memory, parse_loras(lora))
        return command(*args, workload=options, **rest)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("--size", metavar="WxH", callback=_dimensions, help="Size to plan for, e.g. 1024x1024; default: the model's own."),
    click.option("--frames", metavar="N", type=WholeRange(1, 2**31 - 1), help="Frames of a clip."),
    click.option("--steps", metavar="N", type=WholeRange(1, 2**31 - 1), help="Denoising steps."),
    click.option("--guidance", metavar="G", type=FiniteRange(min=0), help="Guidance scale."),
    click.option("--jobs", metavar="N", type=WholeRange(1), help="How many pictures or clips; default: the manifest's, else 100."),
    click.option("--reserve-vram", metavar="GB", callback=parsed(parse_size), help="Device memory to keep back (GiB)."),
    click.option("--host-memory", metavar="GB", callback=parsed(parse_size), help="Host memory to use at most (GiB)."),
    click.option(
        "--lora", metavar="NAME=FILE[:WEIGHT]", multiple=True, help="A LoRA (.safetensors): its weights need memory, too. Repeatable.",
    ),
)


def shapes_to_plan(manifest: str | None, model: ModelFacts, profile: Profile, options: WorkloadOptions) -> Shapes:
    """The manifest's shapes, or one shape from the options and the profile's defaults. Raises ManifestError, UsageError."""
    from batchgen.cli.fitting import ASSUMED_JOBS, Shapes

    given = one_shape(profile, options)
    rules = _checked_rules(model, options)
    if manifest is None:
        return Shapes(((given, options.jobs or ASSUMED_JOBS),), assumed=options.jobs is None)
    from batchgen import manifest as manifests
    from batchgen.cli.request import with_profile
    from batchgen.manifest.options import JobDefaults, ManifestOptions

    if manifest == "-":
        raise UsageError("plan reads no manifest from standard input", hint="Name a file, or state --size and --jobs.")
    defaults = JobDefaults(
        width=given.width, height=given.height, num_frames=given.num_frames, steps=given.steps, guidance=given.guidance,
        lora=options.loras[0].name if len(options.loras) == 1 else None)
    asked = ManifestOptions(defaults=with_profile(defaults, profile), rules=rules, loras=options.loras)
    checked = manifests.check(manifest, asked)
    counts = tuple((count.shape, count.jobs) for count in checked.shapes)
    if options.jobs is not None:
        scale = options.jobs / max(1, checked.jobs)
        counts = tuple((shape, max(1, round(jobs * scale))) for shape, jobs in counts)
    return Shapes(counts, prompt=checked.longest_prompt)


def _checked_rules(model: ModelFacts, options: WorkloadOptions) -> SizeRules:
    """The model's rules for sizes; known models have them without their files. Raises UsageError for options that break them."""
    from batchgen.inventory.rules import size_rules
    from batchgen.manifest.sizes import misfits, option_refusal

    rules = size_rules(model)
    width, height = options.size or (None, None)
    if found := misfits({"width": width, "height": height, "num_frames": options.frames}, rules):
        raise option_refusal(found, options.size, frames_option="--frames", snap=False)
    return rules


def one_shape(profile: Profile, options: WorkloadOptions) -> ShapeKey:
    """What the options say, then the profile's defaults, then the pipeline's own."""
    defaults: dict[str, Any] = dict(profile.defaults)
    width, height = options.size or (_whole(defaults.get("width")), _whole(defaults.get("height")))
    shape = ShapeKey(
        width, height, _whole(defaults.get("num_frames")), defaults.get("fps"), _whole(defaults.get("steps")), defaults.get("guidance"),
        None, None, None, ())  # fmt: skip
    said = {"num_frames": options.frames, "steps": options.steps, "guidance": options.guidance}
    return replace(shape, **{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
