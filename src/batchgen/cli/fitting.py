"""From a plan by the rules to the plan that fits: the rehearsal (from the cache, or in a process of its own) and the fit step.

Shared by `plan` and `run`. Imports no torch: a rehearsal that is not in the cache runs in a child process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.cli.playing import played_apart
from batchgen.errors import PlanRefusedError
from batchgen.inventory import catalogue
from batchgen.inventory.loras import LoraFile
from batchgen.inventory.model import component_config
from batchgen.inventory.records import ModelFacts
from batchgen.inventory.safetensors import TORCH_BYTES, read_header
from batchgen.jobs import ShapeKey
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.records import Plan, PlanFacts, Rehearsed, RehearsedComponent, Workload
from batchgen.plan.selectors import base_name, is_dit
from batchgen.plan.trail import Decision
from batchgen.rehearsal import cache, learned

# Shapes that are rehearsed one by one; jobs of the others are planned as the largest of these.
MOST_SHAPES = 4
ASSUMED_JOBS = 100
BATCHES = (1, 2, 4)
BATCHES_OF_LARGE = (1, 2)
LARGE_PIXELS = 4 * 2**20  # of all frames of a job
REHEARSAL_SECONDS = 3600
USUAL_TOKENS = 60  # of a careful prompt; what the rehearsal takes where none is longer
TEMPLATE_TOKENS = 34  # that a chat template adds to a prompt
BYTES_PER_TOKEN = 3.0  # English has more, scripts that tokenizers know less have about as many
TOKEN_STEP = 64  # longer prompts are rehearsed in steps of so many tokens, so that the next list finds them in the cache

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is to be rendered: jobs by shape. `assumed`: nobody said how many."""

    counts: tuple[tuple[ShapeKey, int], ...]
    assumed: bool = False
    prompt: str | None = None  # the longest one, where a manifest was read

    @property
    def tokens(self) -> int:
        """Tokens to rehearse prompts with."""
        needed = math.ceil(len((self.prompt or "").encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)
        return USUAL_TOKENS if needed <= USUAL_TOKENS * 4 / BYTES_PER_TOKEN else -(-needed // TOKEN_STEP) * TOKEN_STEP


def rehearse_and_fit(
    plan: Plan, facts: PlanFacts, shapes: Shapes, options: FitOptions, *, note: Note, trust_remote_code: bool = False,
    loras: Sequence[LoraFile] = (),
) -> Plan:
    """The plan that is carried out. A model that cannot be rehearsed keeps the plan by the rules, and the trail says so.

    Raises PlanRefusedError where nothing fits.
    """
    if facts.model.folder is None:
        return _unrehearsed(plan, "the model is known by its sizes only, without configs")
    played, workload = _to_play(shapes)
    others = [shape.steps for shape, _ in shapes.counts if shape not in played]
    request = rehearsal_request(facts.model, played, shapes.tokens, trust_remote_code=trust_remote_code, other_steps=others)
    options = replace(_with_rates(options, facts), whole=_why_whole(facts))

    def play(asked: dict[str, Any]) -> Rehearsed:
        found = _sized_as_stored(rehearsal(Path(facts.model.folder or ""), asked, note=note), facts.model)
        return with_loras(found, facts.model, loras)

    try:
        rehearsed = play(request)
    except RehearsalFailedError as error:
        return _unrehearsed(plan, str(error))
    plan = _with_notes(plan, rehearsed, played, shapes.tokens, loras)
    try:
        return fit_plan(plan, facts, rehearsed, workload, options)
    except PlanRefusedError as refusal:
        if refusal.stage not in ("decode", "pipeline"):
            raise
    # what a decode in tiles needs is only asked where a whole one does not fit
    try:
        rehearsed = play(request | {"tiled": True})
    except RehearsalFailedError as error:
        return _unrehearsed(plan, str(error))
    return fit_plan(plan, facts, rehearsed, workload, options)


def rehearsal_request(
    model: ModelFacts, shapes: Sequence[ShapeKey], tokens: int = USUAL_TOKENS, *, trust_remote_code: bool = False,
    other_steps: Iterable[int | None] = (),
) -> dict[str, Any]:
    """What a rehearsal is asked, in plain values: all that its numbers depend on, besides the model's configs.

    `tokens`: of the prompt. None of the list's own goes into the cache, only how long it is. `other_steps`: see `rehearse`.
    """
    more = {*other_steps} - {shape.steps for shape in shapes}
    prompt = None if tokens == USUAL_TOKENS else " ".join(["word"] * tokens)
    return {
        "dtypes": {part.name: part.dtype or "bfloat16" for part in model.components},
        "shapes": [asdict(shape) for shape in shapes], "batches": _batches(shapes), "prompt": prompt, "tokens": tokens + TEMPLATE_TOKENS,
        "trust_remote_code": trust_remote_code, "tiled": False,
    } | ({"other_steps": sorted(more, key=lambda count: count or 0)} if more else {})


class RehearsalFailedError(Exception):
    """The model could not be rehearsed; the text says why."""


def rehearsal(folder: Path, request: dict[str, Any], *, note: Note) -> Rehearsed:
    """From the cache, else played now. Raises RehearsalFailedError."""
    place = cache.cache_dir(os.environ)
    entry = cache.key(folder, request)
    found = cache.load(place, entry)
    if found is not None:
        return found
    sizes = ", ".join(ShapeKey(**{**shape, "inputs": tuple(shape["inputs"])}).text for shape in request["shapes"])
    note(f"rehearsing {sizes} without weights (kept for the next plan)")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        answer = played_apart(
            [sys.executable, "-m", "batchgen.execute.rehearsing"], request | {"path": str(folder)}, environment,
            note=note, seconds=REHEARSAL_SECONDS)
        if "error" in answer:
            raise RehearsalFailedError(answer["error"])
        found = cache.from_json(answer["rehearsed"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        raise RehearsalFailedError(f"the rehearsal gave no answer ({type(error).__name__})") from error
    cache.store(place, entry, found)
    return found


def _to_play(shapes: Shapes) -> tuple[list[ShapeKey], Workload]:
    """The largest shape and the most frequent ones; the jobs of all others are counted to the largest."""
    counts = dict(shapes.counts)
    ordered = sorted(counts, key=lambda shape: -_pixels(shape))
    often = sorted(ordered[1:], key=lambda shape: -counts[shape])[: MOST_SHAPES - 1]
    played = [ordered[0], *often]
    rest = sum(count for shape, count in counts.items() if shape not in played)
    jobs = [(shape.text, counts[shape] + (rest if shape is ordered[0] else 0)) for shape in played]
    return played, Workload(tuple(jobs), shapes.assumed)


def _pixels(shape: ShapeKey) -> int:
    return (shape.width or 1024) * (shape.height or 1024) * (shape.num_frames or 1)


def _batches(shapes: Sequence[ShapeKey]) -> list[int]:
    return list(BATCHES_OF_LARGE if max(map(_pixels, shapes)) > LARGE_PIXELS else BATCHES)


def _with_rates(options: FitOptions, facts: PlanFacts) -> FitOptions:
    if options.rates is not None or facts.platform != "cuda":
        return options
    rates = [catalogue.rates_of(device.name) for device in facts.devices]
    if any(rate is None for rate in rates):
        return options
    slowest = min((rate for rate in rates if rate is not None), key=lambda rate: rate.dense_bf16_flops)
    name = next(device.name for device in facts.devices if catalogue.rates_of(device.name) == slowest)
    shown = learned.efficiencies(cache.cache_dir(os.environ), name, facts.model.pipeline_class or "")
    return replace(options, rates=slowest, learned=tuple(shown.items()))


def adapted(loras: Sequence[LoraFile], model: ModelFacts) -> tuple[str, ...]:
    """The components that LoRAs add weights to."""
    names = tuple(part.name for part in model.components)
    found = [elements_by_component(lora, names) for lora in loras]
    return tuple(name for name in names if any(elements[name] for elements in found))


def _why_whole(facts: PlanFacts) -> str:
    """What keeps the denoiser from being cut over devices: each rank reads rows of its files, and nothing may change its blocks."""
    for part in filter(lambda part: is_dit(part.name), facts.model.components):
        if part.name in facts.adapted:
            return "adapters (--lora) change its blocks"
        if part.pickle:
            return f"the weights of {part.name} are pickles"
        if "quantization_config" in component_config(Path(facts.model.folder or ""), part.name):
            return f"the weights of {part.name} are quantised"
    return ""


def _sized_as_stored(rehearsed: Rehearsed, model: ModelFacts) -> Rehearsed:
    """Quantised components weigh what their files hold, not what their class would weigh without."""
    parts = []
    for part in rehearsed.components:
        found = next((item for item in model.components if item.name == part.name), None)
        config = component_config(Path(model.folder or ""), part.name)
        if found is None or found.bytes_as_loaded is None or "quantization_config" not in config:
            parts.append(part)
            continue
        ratio = found.bytes_as_loaded / max(1, part.weights_bytes)
        blocks = tuple(int(size * ratio) for size in part.block_bytes)
        parts.append(RehearsedComponent(part.name, found.bytes_as_loaded, found.bytes_as_loaded - sum(blocks), blocks, part.parameters))
    return replace(rehearsed, components=tuple(parts))


def with_loras(rehearsed: Rehearsed, model: ModelFacts, loras: Sequence[LoraFile]) -> Rehearsed:
    """Adapters become weights of the components that they touch, in those components' dtype: as many bytes more in each block."""
    if not loras:
        return rehearsed
    sizes = {part.name: TORCH_BYTES.get(part.dtype or "bfloat16", 2) for part in model.components}
    more = dict.fromkeys(sizes, 0)
    for lora in loras:
        for name, elements in elements_by_component(lora, tuple(sizes)).items():
            more[name] += int(elements * sizes[name])
    parts = []
    for part in rehearsed.components:
        extra = more.get(part.name, 0)
        share = -(-extra // len(part.block_bytes)) if part.block_bytes else 0
        parts.append(replace(
            part, weights_bytes=part.weights_bytes + max(extra, share * len(part.block_bytes)),
            outside_bytes=part.outside_bytes + (0 if part.block_bytes else extra),
            block_bytes=tuple(size + share for size in part.block_bytes),
        ))
    return replace(rehearsed, components=tuple(parts))


def elements_by_component(lora: LoraFile, components: Sequence[str]) -> dict[str, int]:
    """How many numbers of the file go into each component. Files name a component first; those of other trainers mean the denoiser.

    A file for one of two experts is for both.
    """
    found = dict.fromkeys(components, 0)
    dits = [name for name in components if is_dit(name)]
    for tensor in read_header(Path(lora.path)).tensors:
        if tensor.name.endswith("alpha"):
            continue
        first = tensor.name.partition(".")[0]
        named = [name for name in components if first in (name, f"lora_{name}") or first.startswith(f"lora_{name}_")]
        named += [name for name in dits if name not in named and any(base_name(name) == other for other in (first, *named))]
        for name in named or dits:
            found[name] += tensor.elements
    return found


def _with_notes(plan: Plan, rehearsed: Rehearsed, played: Sequence[ShapeKey], tokens: int, loras: Sequence[LoraFile]) -> Plan:
    text = f"Rehearsed on hollow components: {', '.join(shape.text for shape in played)}; prompts of {tokens} tokens."
    notes = [Decision.of("rehearsal", "stand-in", "used", note) for note in rehearsed.notes]
    notes += [
        Decision.of("rehearsal", "lora", lora.name, f"LoRA {lora.name} counts as weights of the components that it touches.")
        for lora in loras
    ]  # fmt: skip
    return replace(plan, trail=plan.trail.add([Decision.of("rehearsal", "plan", "played", text, {"prompt_tokens": tokens}), *notes]))


def _unrehearsed(plan: Plan, why: str) -> Plan:
    decision = Decision.of("rehearsal", "plan", "no", f"Not rehearsed: {why}. The rules' placements stand, and nothing is predicted.")
    return replace(plan, trail=plan.trail.add([decision]))
