"""Plays a model's stages through for one job and batch: the same stage objects, guiders and arguments as in a run.

What comes out is one StageProfile a stage: its peak, its output, its FLOPs and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from batchgen.execute.arguments import block_names, call_arguments, cast_latents, ordinary_guidance
from batchgen.execute.hollow_model import CPU, Rehearsal
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE, Stage, Stages, call_stage, join_rows, split_rows
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.records import StageProfile
from batchgen.rehearsal.live import LiveBytes, held_tensors, tensors_in


def job_of(shape: ShapeKey, prompt: str) -> Job:
    """A job of that shape, with a negative prompt: the second branch costs memory where there is one."""
    pictures = {name: name for name in shape.inputs}
    return Job(
        key="0" * 32, index=0, row=1, k=0, id="rehearsal", prompt=prompt, negative_prompt=" ", seed=0, seed_source="row", output="none",
        width=shape.width, height=shape.height, steps=shape.steps, guidance=shape.guidance, true_cfg_scale=shape.true_cfg_scale,
        num_frames=shape.num_frames, fps=shape.fps, strength=shape.strength, lora=shape.lora,
        image=pictures.get("image"), last_image=pictures.get("last_image"), mask=pictures.get("mask"),
    )


def play(rehearsal: Rehearsal, job: Job, batch: int, *, only: Sequence[str] | None = None) -> tuple[StageProfile, ...]:
    """All stages at the job's shape with `batch` rows: what each needs at its peak, makes and computes.

    Steps, size and frames are the job's or the ordinary call's defaults. `only`: stages after the last of these are not played.
    """
    stages, rules = rehearsal.stages, rehearsal.rules
    jobs = [job] * batch
    guidance = [rules.of(one) for one in jobs]
    arguments = call_arguments(stages.call, job, batch)
    if stages.family is None:
        return (_play_ordinary(rehearsal, job, batch, arguments),)
    profiles: list[StageProfile] = []
    carried: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    pictures = _pictures(stages, job)
    for stage in stages.stages:
        rows = 1 if stage.per_row else batch
        given = arguments | {"batch_size": rows} | pictures
        guiders: dict[str, Any] = {}
        if stage.encodes_text:
            given["prompt"] = [job.prompt] * rows
            if guidance[0].on and job.negative_prompt is not None and "negative_prompt" in stage.inputs:
                given["negative_prompt"] = [job.negative_prompt] * rows
            guiders = {name: rules.text_guider(getattr(stage.pipe, name), negatives=True) for name in stage.guiders}
        elif stage.name == DENOISE:
            stages.fresh_scheduler(stage)
            guiders = rules.guiders_for(guidance)
            given["generator"] = _generators(batch)
            if rules.embeds_scale and guidance[0].scale is not None:
                given["guidance_scale"] = guidance[0].scale
        elif stage.name == DECODE:
            given |= {"output_type": "np", "generator": _generators(batch)}
            vae = rehearsal.components.get("vae")
            cast_latents(carried, None if vae is None else next(vae.parameters()).dtype)
        try:
            outputs, profile = _follow(rehearsal, stage, given | carried, guiders, fields, job, rows)
        except Exception:
            if rows == 1 or stage.name == DENOISE:
                raise
            # some parts take one row at a time (a VAE's mask without a head axis): the engine then runs row by row as well
            rows = 1
            single = {name: _first_row(value, batch) for name, value in (given | carried).items()} | {"batch_size": 1}
            outputs, profile = _follow(rehearsal, stage, single, guiders, fields, job, rows)
        profiles.append(profile)
        wanted = _wanted_after(stages, stage)
        if stage.name == DENOISE:  # what only the denoiser read leaves the device
            carried = {name: value for name, value in carried.items() if name in wanted}
        kept = {name: value for name, value in outputs.items() if value is not None and name in wanted}
        if rows != batch:
            kept = {name: join_rows(split_rows(value, 1) * batch, CPU) for name, value in kept.items()}
        carried |= {name: value for name, value in kept.items() if name != "batch_size"}
        fields |= {name: value for name, value in kept.items() if name in stage.denoiser_fields}
        del outputs, given
        if only is not None and stage.name == only[-1]:
            break
    return tuple(profiles)


def _first_row(value: Any, rows: int) -> Any:
    return join_rows(split_rows(value, rows)[:1], CPU) if isinstance(value, torch.Tensor | list) else value


def _pictures(stages: Stages, job: Job) -> dict[str, Any]:
    """Blank pictures for the inputs that the job brings, or that the model cannot do without."""
    from PIL import Image

    size = (int(job.width or stages.call.get("width") or 1024), int(job.height or stages.call.get("height") or 1024))
    required = {name.removeprefix("resized_") for stage in stages.stages for name in stage.required}
    needed = required & {"image", "last_image", "mask_image"}
    given = set(block_names(job.shape.inputs))
    # a mask is white where something is to be painted
    made = {name: Image.new("L", size, 255) if name == "mask_image" else Image.new("RGB", size) for name in given | needed}
    # some families' stages take pictures at the job's size under a name of their own
    return made | {f"resized_{name}": picture for name, picture in made.items()}


def _wanted_after(stages: Stages, stage: Stage) -> frozenset[str]:
    later = stages.stages[stages.stages.index(stage) + 1 :]
    return frozenset().union(*(other.inputs for other in later), stage.denoiser_fields)


def _generators(batch: int) -> list[torch.Generator]:
    return [torch.Generator("cpu").manual_seed(0) for _ in range(batch)]


def _play_ordinary(rehearsal: Rehearsal, job: Job, batch: int, arguments: dict[str, Any]) -> StageProfile:
    stages = rehearsal.stages
    stage = stages.named(PIPELINE)
    stages.fresh_scheduler(stage)
    rows = 1 if job.shape.inputs else batch  # pipelines that take a picture take one
    arguments = arguments | _pictures(stages, job) | {
        "prompt": [job.prompt] * rows, "generator": _generators(rows), "negative_prompt": [job.negative_prompt] * rows, "batch_size": rows,
    }  # fmt: skip
    arguments |= ordinary_guidance(stages, stage, job)
    _, profile = _follow(rehearsal, stage, arguments, {}, {}, job, rows)
    return profile


def _follow(
    rehearsal: Rehearsal, stage: Stage, arguments: Mapping[str, Any], guiders: Mapping[str, Any], fields: Mapping[str, Any],
    job: Job, batch: int,
) -> tuple[dict[str, Any], StageProfile]:
    scene = rehearsal.scene
    if rehearsal.told is not None:
        rehearsal.told(f"{stage.name} at {job.shape.text}, batch {batch}")
    modules = [rehearsal.components[name] for name in stage.components]
    known = [tensor for module in modules for tensor in held_tensors(module)]
    scene.forget_calls()
    inputs = [*tensors_in(dict(arguments)), *tensors_in(dict(fields))]
    tracker = LiveBytes(known, inputs, fake=None if rehearsal.real else scene.fake)
    with scene.following(tracker):
        outputs = call_stage(stage, arguments, guiders, fields)
    brought = tuple(name for name in stage.components if name not in rehearsal.idle)
    calls = tuple((name, sum(scene.components[name].counts.values())) for name in brought if scene.components[name].counts)
    output_bytes = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(_arrays(outputs))}.values())
    return outputs, StageProfile(
        stage=stage.name, shape=job.shape.text, batch=batch, components=brought,
        weights_bytes=sum(rehearsal.weights[name] for name in brought), activation_bytes=tracker.peak,
        output_bytes=output_bytes, flops=tracker.flops, calls=calls, order=tuple(scene.order),
    )


def _arrays(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if hasattr(value, "__array__") and not isinstance(value, torch.Tensor) else value
            for name, value in outputs.items()}
