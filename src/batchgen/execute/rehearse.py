"""Plays a model's stages through on hollow components: the road rehearsed is the road run.

The same stage objects, guiders and arguments as in a run; only the components have no weights. The result is one StageProfile for
each stage, shape and batch. Over loaded components the same function measures a real run, which is how the rehearsal is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.execute.experts import idle_experts
from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.load import ModelFolder, first_line, quiet_libraries, torch_dtype
from batchgen.execute.moving import chunks_of, pieces_of, stays
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE, Stage, Stages, build_stages, call_stage, join_rows, split_rows
from batchgen.execute.streaming import split_chunks
from batchgen.inventory.prompt_limits import call_arguments
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.records import Rehearsed, RehearsedComponent, StageProfile
from batchgen.rehearsal import hollow
from batchgen.rehearsal.calls import Scene, small_collections
from batchgen.rehearsal.live import LiveBytes, held_tensors, tensors_in
from batchgen.rehearsal.standins import stand_in_tokenizer
from batchgen.rehearsal.tiles import share_tiles

CPU = torch.device("cpu")
# About as many tokens as a careful prompt has; a manifest's own longest prompt takes its place.
PROMPT = (
    "A wide photograph of a small wooden boat on a calm mountain lake at sunrise, mist over the water, tall pine trees along the shore, "
    "snow on the far peaks, soft golden light, a red blanket folded on the seat, fine detail, natural colours, quiet mood"
)


@dataclass(frozen=True, slots=True)
class HollowFolder(ModelFolder):
    """A model folder whose components are hollow. Files it lacks (tokenizers of a model known by its configs) get stand-ins."""

    hollows: dict[str, nn.Module] = field(default_factory=dict)
    stood_in: list[str] = field(default_factory=list)
    tokens: int = 60

    def weightless(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The hollow component itself: it has all that a weightless copy has."""
        return self.hollows[name]

    def load_plain(self, name: str) -> Any:
        if any((self.path / name).glob("*")):
            return ModelFolder.load_plain(self, name)
        self.stood_in.append(name)
        return stand_in_tokenizer(self.entries[name][1], self.tokens)


@dataclass(slots=True)
class Rehearsal:
    """A model with hollow components, ready to be played at any shape and batch."""

    stages: Stages
    rules: GuidanceRules
    scene: Scene
    components: dict[str, nn.Module]
    weights: dict[str, int]  # bytes as loaded, each storage once
    parameters: dict[str, int]
    blocks: dict[str, tuple[int, ...]]  # bytes of each block that can stream, in registration order
    stood_in: tuple[str, ...]
    real: bool = False
    told: Callable[[str], None] | None = None  # hears what is played
    idle: frozenset[str] = frozenset()  # components that a run of the list never loads


def hollow_rehearsal(
    path: str, dtypes: Mapping[str, str], *, tokens: int = 60, trust_remote_code: bool = False, inputs: Sequence[str] = (),
) -> Rehearsal:
    """Builds the hollow components of a model folder from their configs. `dtypes`: component -> torch's name, as it would load.

    Raises ModelError where a class cannot be built from its config.
    """
    quiet_libraries()
    read = ModelFolder.read(path, trust_remote_code=trust_remote_code)
    folder = HollowFolder(
        read.path, read.pipeline_class, read.entries, read.settings, read.absent, read.trust_remote_code, read.allow_pickle, tokens=tokens)
    scene = Scene()
    wanted = {name: torch_dtype(dtypes.get(name, "float32")) for name in folder.models}
    weights, parameters, blocks = {}, {}, {}
    for name, dtype in wanted.items():
        module = _build(folder, name, dtype, scene)
        folder.hollows[name] = module
        weights[name], parameters[name] = hollow.weight_bytes(module), hollow.parameter_count(module)
        blocks[name] = block_bytes(name, module)
        # language models keep caches and VAEs hand a cache of frames from block to block: each of their blocks is played
        hollow.enter(module, name, scene, repeats=folder.entries[name][0] == "diffusers" and not folder.is_autoencoder(name))
    stages = build_stages(folder, CPU, wanted, components=folder.hollows, inputs=inputs)
    return Rehearsal(
        stages, guidance_rules(stages), scene, dict(folder.hollows), weights, parameters, blocks, tuple(dict.fromkeys(folder.stood_in)))


def real_rehearsal(path: str, dtypes: Mapping[str, str], *, inputs: Sequence[str] = ()) -> Rehearsal:
    """The same over loaded components, for measuring a real run with the same tracker."""
    quiet_libraries()
    folder = ModelFolder.read(path)
    scene = Scene()
    wanted = {name: torch_dtype(dtypes[name]) for name in folder.models}
    modules = {name: folder.load_model(name, dtype) for name, dtype in wanted.items()}
    for name, module in modules.items():
        hollow.count_calls(module, name, scene)
    stages = build_stages(folder, CPU, wanted, components=modules, inputs=inputs)
    weights = {name: hollow.weight_bytes(module) for name, module in modules.items()}
    return Rehearsal(stages, guidance_rules(stages), scene, modules, weights, {}, {}, (), real=True)


def _build(folder: HollowFolder, name: str, dtype: torch.dtype, scene: Scene) -> nn.Module:
    library, class_name = folder.entries[name]
    cls: Any = folder.component_class(name)
    try:
        if library == "transformers":
            config = cls.config_class.from_pretrained(str(folder.path), subfolder=name, local_files_only=True)
        else:
            config = cls.load_config(str(folder.path), subfolder=name, local_files_only=True)
        return hollow.build(cls, config, dtype, scene, library=library)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{folder.path}: {name} ({class_name}) cannot be built from its config: {first_line(error)}") from error


def guidance_rules(stages: Stages) -> GuidanceRules:
    """What guidance means for these stages, as the engine asks it."""
    main = stages.named(DENOISE if stages.family is not None else PIPELINE)
    guiders = {name: getattr(main.pipe, name) for name in main.guiders}
    extra = dict(stages.family.guider) if stages.family is not None else {}
    return GuidanceRules(stages.call, guiders, "guidance_scale" in main.inputs, extra)


def block_bytes(name: str, module: nn.Module) -> tuple[int, ...]:
    """Bytes that stream with each repeated block, in registration order, as the executor splits the module."""
    _, blocks = split_chunks(name, module)
    return tuple(sum(chunk.size_bytes for chunk in chunks) for _, _, chunks in blocks)


def staying_bytes(name: str, module: nn.Module) -> int:
    """Bytes of the small buffers that the executor never takes off the device."""
    return sum(chunk.size_bytes for chunk in chunks_of(pieces_of(name, module)) if stays(chunk))


def rehearse(
    path: str, dtypes: Mapping[str, str], shapes: Sequence[ShapeKey], batches: Sequence[int], *, prompt: str | None = None,
    tokens: int = 60, tiled: bool = False, trust_remote_code: bool = False, told: Callable[[str], None] | None = None,
    other_steps: Sequence[int | None] = (),
) -> Rehearsed:
    """Profiles of every stage at every shape, at as many of the batch sizes as tell the others. `tiled`: decodes in tiles as well.

    `other_steps`: step counts of the list's shapes that are not played. `told` hears of every stage before it is
    played: its name, shape and batch in one line.
    """
    with small_collections():
        rehearsal = hollow_rehearsal(path, dtypes, tokens=tokens, trust_remote_code=trust_remote_code, inputs=block_names(shapes[0].inputs))
        rehearsal.told = told
        stages = rehearsal.stages
        drawing = stages.named(PIPELINE if stages.family is None else DENOISE)
        rehearsal.idle = idle_experts(stages, drawing, (*(shape.steps for shape in shapes), *other_steps))
        roads = _Roads(rehearsal, dtypes, prompt or PROMPT, {shapes[0].inputs: rehearsal})
        profiles: dict[StageProfile, None] = {}
        for shape in shapes:
            for played in roads.play(shape, batches):
                profiles.update(dict.fromkeys(played))
        if tiled and tile(rehearsal):
            for shape in shapes:
                (played,) = roads.play(shape, [1])
                profiles.update({replace(profile, tiled=True): None for profile in played if profile.stage in (DECODE, PIPELINE)})
    components = tuple(
        RehearsedComponent(
            name, rehearsal.weights[name], rehearsal.weights[name] - sum(rehearsal.blocks[name]), rehearsal.blocks[name],
            rehearsal.parameters[name], staying_bytes(name, rehearsal.components[name]))
        for name in rehearsal.weights
    )
    notes = [f"{name}: a stand-in of {tokens} tokens, for its files are not here" for name in rehearsal.stood_in]
    notes += [f"{shape.text}: with a blank picture of that size, for the model does nothing without one" for shape in roads.pictured]
    return Rehearsed(components, tuple(profiles), tuple(notes))


@dataclass(slots=True)
class _Roads:
    """The roads that a list's shapes take, over the same hollow components."""

    rehearsal: Rehearsal
    dtypes: Mapping[str, str]
    prompt: str
    made: dict[tuple[str, ...], Rehearsal]
    pictured: list[ShapeKey] = field(default_factory=list)  # shapes without pictures that were played with one

    def play(self, shape: ShapeKey, batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
        """Profiles at these batch sizes. Editors of pictures do nothing without one: they get a blank one."""
        if shape in self.pictured:
            return self._played(shape, _PICTURE, batches)
        try:
            return self._played(shape, shape.inputs, batches)
        except Exception:
            found = self._with_picture(shape, batches) if not shape.inputs and _takes_a_picture(self.rehearsal) else None
            if found is None:  # that was not what it lacked: the first error is told
                raise
            self.pictured.append(shape)
            return found

    def _with_picture(self, shape: ShapeKey, batches: Sequence[int]) -> list[tuple[StageProfile, ...]] | None:
        try:
            return self._played(shape, _PICTURE, batches)
        except Exception:  # noqa: BLE001
            return None

    def _played(self, shape: ShapeKey, inputs: tuple[str, ...], batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
        if inputs not in self.made:
            self.made[inputs] = on_road(self.rehearsal, self.dtypes, inputs)
        found = play_batches(self.made[inputs], job_of(replace(shape, inputs=inputs), self.prompt), batches)
        return [tuple(replace(profile, shape=shape.text) for profile in played) for played in found]


def _takes_a_picture(rehearsal: Rehearsal) -> bool:
    """Whether the model's own pipeline takes one. One that makes pictures of words alone never lacked it, whatever failed."""
    arguments = call_arguments(rehearsal.stages.folder.pipeline_class)
    return not arguments or "image" in arguments


def on_road(rehearsal: Rehearsal, dtypes: Mapping[str, str], inputs: Sequence[str]) -> Rehearsal:
    """The same hollow components on the road that jobs with these picture inputs take."""
    wanted = {name: torch_dtype(dtypes.get(name, "float32")) for name in rehearsal.components}
    stages = build_stages(rehearsal.stages.folder, CPU, wanted, components=rehearsal.components, inputs=block_names(inputs))
    return replace(rehearsal, stages=stages, rules=guidance_rules(stages))


def block_names(inputs: Sequence[str]) -> tuple[str, ...]:
    """A job's picture inputs as blocks and calls name them."""
    return tuple(_BLOCK_NAMES.get(name, name) for name in inputs)


_BLOCK_NAMES = {"mask": "mask_image"}
_PICTURE = ("image",)
# Peaks at two batch sizes this near to one line through nothing at no rows tell those of all others.
_ON_A_LINE = 0.02


def play_batches(rehearsal: Rehearsal, job: Job, batches: Sequence[int]) -> list[tuple[StageProfile, ...]]:
    """The job at these batch sizes, the smallest first; no more of them once two have shown that every peak grows with its rows."""
    found: list[tuple[StageProfile, ...]] = []
    for batch in sorted(batches):
        if len(found) > 1 and _on_a_line(*found[-2:]):
            break
        found.append(play(rehearsal, job, batch))
    return found


def _on_a_line(fewer: Sequence[StageProfile], more: Sequence[StageProfile]) -> bool:
    """Whether each stage needs as much more as it has more rows. A stage that takes one row at a time has nothing to show."""
    pairs = [(one, other) for one, other in zip(fewer, more, strict=True) if one.batch != other.batch]
    return all(
        abs(other.activation_bytes * one.batch - one.activation_bytes * other.batch) <= _ON_A_LINE * one.activation_bytes * other.batch
        for one, other in pairs
    )


def job_of(shape: ShapeKey, prompt: str) -> Job:
    """A job of that shape, with a negative prompt: the second branch costs memory where there is one."""
    pictures = {name: name for name in shape.inputs}
    return Job(
        key="0" * 32, index=0, row=1, k=0, id="rehearsal", prompt=prompt, negative_prompt=" ", seed=0, seed_source="row", output="none",
        width=shape.width, height=shape.height, steps=shape.steps, guidance=shape.guidance, true_cfg_scale=shape.true_cfg_scale,
        num_frames=shape.num_frames, fps=shape.fps, strength=shape.strength, lora=shape.lora,
        image=pictures.get("image"), last_image=pictures.get("last_image"), mask=pictures.get("mask"),
    )


def tile(rehearsal: Rehearsal) -> bool:
    """Lets the VAE decode in tiles; what was played without them counts no more. False where it cannot."""
    vae: Any = rehearsal.components.get("vae")
    if vae is None or not hasattr(vae, "enable_tiling"):
        return False
    vae.enable_tiling()
    share_tiles(vae, rehearsal.scene)
    rehearsal.scene.components["vae"].records.clear()
    return True


# -- playing ------------------------------------------------------------------------------------------------------------


def play(rehearsal: Rehearsal, job: Job, batch: int, *, only: Sequence[str] | None = None) -> tuple[StageProfile, ...]:
    """All stages at the job's shape with `batch` rows: what each needs at its peak, makes and computes.

    Steps, size and frames are the job's or the ordinary call's defaults. `only`: stages after the last of these are not played.
    """
    stages, rules = rehearsal.stages, rehearsal.rules
    jobs = [job] * batch
    guidance = [rules.of(one) for one in jobs]
    arguments = _arguments(stages, job) | {"batch_size": batch}
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
            _cast_latents(rehearsal, carried)
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


def _arguments(stages: Stages, job: Job) -> dict[str, Any]:
    """As the engine's: the ordinary call's defaults, then the job's own."""
    own = {
        "height": job.height, "width": job.width, "num_inference_steps": job.steps, "num_frames": job.num_frames,
        "frame_rate": job.fps, "strength": job.strength,
    }
    defaults = {name: value for name, value in stages.call.items() if value is not None and name != "guidance_scale"}
    return defaults | {name: value for name, value in own.items() if value is not None}


def _generators(batch: int) -> list[torch.Generator]:
    return [torch.Generator("cpu").manual_seed(0) for _ in range(batch)]


def _cast_latents(rehearsal: Rehearsal, carried: dict[str, Any]) -> None:
    vae = rehearsal.components.get("vae")
    latents = carried.get("latents")
    if vae is not None and isinstance(latents, torch.Tensor) and latents.is_floating_point():
        carried["latents"] = latents.to(next(vae.parameters()).dtype)


def _play_ordinary(rehearsal: Rehearsal, job: Job, batch: int, arguments: dict[str, Any]) -> StageProfile:
    stages = rehearsal.stages
    stage = stages.named(PIPELINE)
    stages.fresh_scheduler(stage)
    rows = 1 if job.shape.inputs else batch  # pipelines that take a picture take one
    arguments = arguments | _pictures(stages, job) | {
        "prompt": [job.prompt] * rows, "generator": _generators(rows), "negative_prompt": [job.negative_prompt] * rows, "batch_size": rows,
    }  # fmt: skip
    if job.guidance is not None:
        plain = "guidance_scale" in stage.inputs and stages.call.get("guidance_scale") is not None
        arguments["guidance_scale" if plain or "true_cfg_scale" not in stage.inputs else "true_cfg_scale"] = job.guidance
    if job.true_cfg_scale is not None:
        arguments["true_cfg_scale"] = job.true_cfg_scale
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
