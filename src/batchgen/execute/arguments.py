"""What a model's stages are called with for a job: the ordinary call's defaults, the job's own settings, its guidance.

The engine and the rehearsal both ask here, so that the road rehearsed is the road run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.pictures import INPUTS
from batchgen.execute.stages import DENOISE, PIPELINE, Stage, Stages
from batchgen.jobs import Job


def call_arguments(call: dict[str, Any], job: Job | None, rows: int) -> dict[str, Any]:
    """What stages are called with besides carried values: the ordinary call's defaults, then the job's own settings.

    Guidance is not among them: it is the guiders' business.
    """
    arguments = {name: value for name, value in call.items() if value is not None and name != "guidance_scale"}
    if job is not None:
        own = {
            "height": job.height, "width": job.width, "num_inference_steps": job.steps, "num_frames": job.num_frames,
            "frame_rate": job.fps, "strength": job.strength,
        }
        arguments |= {name: value for name, value in own.items() if value is not None}
        if "max_area" in arguments and job.width is not None and job.height is not None:
            arguments["max_area"] = job.width * job.height  # where a call brings every size to an area of its own
    return arguments | {"batch_size": rows}


def guidance_rules(stages: Stages) -> GuidanceRules:
    """What guidance means for these stages."""
    main = stages.named(DENOISE if stages.family is not None else PIPELINE)
    guiders = {name: getattr(main.pipe, name) for name in main.guiders}
    extra = dict(stages.family.guider) if stages.family is not None else {}
    return GuidanceRules(stages.call, guiders, "guidance_scale" in main.inputs, extra)


def ordinary_guidance(stages: Stages, stage: Stage, job: Job) -> dict[str, float]:
    """The job's guidance as the ordinary call takes it: some have a `guidance_scale` that does nothing beside their `true_cfg_scale`."""
    given: dict[str, float] = {}
    if job.guidance is not None:
        plain = "guidance_scale" in stage.inputs and stages.call.get("guidance_scale") is not None
        given["guidance_scale" if plain or "true_cfg_scale" not in stage.inputs else "true_cfg_scale"] = job.guidance
    if job.true_cfg_scale is not None:
        given["true_cfg_scale"] = job.true_cfg_scale
    return given


def cast_latents(carried: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Latents in the decoder's dtype, where it has one: not every family's stage sees to that."""
    latents = carried.get("latents")
    if dtype is not None and isinstance(latents, torch.Tensor) and latents.is_floating_point():
        carried["latents"] = latents.to(dtype)


def block_names(inputs: Sequence[str]) -> tuple[str, ...]:
    """A job's picture inputs as blocks and calls name them."""
    names = dict(INPUTS)
    return tuple(names[name] for name in inputs)
