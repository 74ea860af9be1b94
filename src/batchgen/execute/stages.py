"""The stages of a model: what each needs, what it gives, and how to call it with a batch of rows.

A stage is a small pipeline over one of the modular blocks, pruned to what the run's inputs trigger. It owns the components that it
calls; of the others that it only asks about (scale factors, channel counts, dtypes) it gets weightless copies. Stages can be
built around any components, hollow ones too. Knows nothing of jobs, placements or files.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.execute.families import Family, find_family
from batchgen.execute.guidance import is_guider_name
from batchgen.execute.load import ModelFolder, signature_defaults
from batchgen.execute.memory import to_host as host_copy
from batchgen.execute.ordinary import OrdinaryCall

DENOISE, DECODE, PIPELINE = "denoise", "decode", "pipeline"
# Arguments of the ordinary call that say how its result is handed over, not what it is.
_PICTURES = frozenset({"image", "last_image", "mask_image", "prompt_image", "resized_image", "resized_last_image"})
RESIZED = "resized_"  # begins the name of a picture that a step made to size
_HANDOVER = frozenset({"output_type", "return_dict", "callback_on_step_end_tensor_inputs", "callback_steps", "prompt"})


@dataclass(frozen=True, slots=True)
class Item:
    """One row's element of an output that is a list with one element a row."""

    value: Any


@dataclass(slots=True)
class Stage:
    """One stage: `pipe` is callable with the names in `inputs`; `components` carry weights and are called in it."""

    name: str
    pipe: Any
    inputs: frozenset[str]
    required: frozenset[str]
    outputs: tuple[str, ...]
    denoiser_fields: frozenset[str]  # outputs that go to the denoiser's own inputs as well
    components: tuple[str, ...]
    consulted: tuple[str, ...]  # models it only asks about: weightless copies
    guiders: tuple[str, ...] = ()
    takes_fields: bool = False

    @property
    def encodes_text(self) -> bool:
        return "prompt" in self.inputs

    @property
    def per_row(self) -> bool:
        """Whether rows must be run one by one: encoders of pictures take one picture."""
        return bool(self.inputs & _PICTURES)


@dataclass(slots=True)
class Stages:
    """All stages of a model, in order. `call`: parameter -> default of the model's ordinary pipeline call."""

    folder: ModelFolder
    family: Family | None
    stages: tuple[Stage, ...]
    call: dict[str, Any]
    device: torch.device
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)  # scheduler, tokenizers, processors
    copies: dict[str, nn.Module] = field(default_factory=dict)  # weightless ones, made at first use

    @property
    def encoders(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.name not in (DENOISE, DECODE, PIPELINE))

    def named(self, name: str) -> Stage:
        """The stage of that name. Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    @property
    def road(self) -> str:
        return "stages" if self.family is not None else "pipeline"

    def weightless(self, name: str) -> nn.Module:
        """The component without weights, for a stage that only asks what it is."""
        if name not in self.copies:
            self.copies[name] = self.folder.weightless(name, self.dtypes.get(name, torch.float32), self.device)
        return self.copies[name]

    def give(self, name: str, module: nn.Module) -> None:
        """Hands a loaded component to every stage that calls it."""
        for stage in self.stages:
            if name in stage.components:
                _set_component(stage.pipe, name, module)

    def fresh_scheduler(self, stage: Stage) -> None:
        """A scheduler without the last batch's state."""
        scheduler = self.plain.get("scheduler")
        if scheduler is not None and hasattr(stage.pipe, "scheduler"):
            _set_component(stage.pipe, "scheduler", type(scheduler).from_config(scheduler.config))


def build_stages(
    folder: ModelFolder, device: torch.device, dtypes: Mapping[str, torch.dtype], *,
    components: Mapping[str, Any] | None = None, inputs: Iterable[str] = (), whole: bool = False,
) -> Stages:
    """The stages of a model folder; loads tokenizers and the like, but no weights.

    `dtypes`: component -> dtype as planned, for the weightless copies. `components`: objects to use instead of loading (models
    too). `inputs`: what jobs bring besides prompts ("image", "last_image", "mask_image"): stages that need another are left out.
    `whole`: the ordinary call as one stage, even where blocks could split it.
    """
    inputs = tuple(inputs)
    family = None if whole else find_family(folder.pipeline_class, folder.settings)
    if family is not None and not (family.whole_inputs.isdisjoint(inputs) and _takes(family, inputs)):
        family = None
    pipeline = _pipeline_for(folder.pipeline_class, inputs)
    call = {key: value for key, value in signature_defaults(pipeline.__call__).items() if key not in _HANDOVER}
    given = dict(components or {})
    plain = {name: given[name] if name in given else folder.load_plain(name) for name in folder.entries if name not in folder.models}
    stages = Stages(folder, family, (), call, device, dict(dtypes), plain)
    if family is None:
        stages.stages = (_whole_pipeline(stages, pipeline),)
        lacking = sorted(set(inputs) - stages.stages[0].inputs)
        if lacking:
            raise ModelError(f"{folder.pipeline_class} takes no {', '.join(lacking)}")
    else:
        stages.stages = _split(stages, family, inputs)
    for name in folder.models:
        if name in given:
            stages.give(name, given[name])
    return stages


def _takes(family: Family, inputs: Iterable[str]) -> bool:
    """Whether some stage of the family asks for each of these picture inputs."""
    blocks = _library_class(family.blocks)()
    return {name for block in blocks.sub_blocks.values() for name in block.input_names}.issuperset(inputs)


def _library_class(name: str) -> type:
    found = getattr(importlib.import_module("diffusers"), name, None)
    if not isinstance(found, type):
        raise ModelError(f"the installed diffusers has no {name}", hint="upgrade diffusers, or use another model")
    return found


def _pipeline_for(pipeline_class: str, inputs: Sequence[str]) -> type:
    """The pipeline a user would call for these picture inputs: the folder's own, or the library's sister of it that takes them."""
    own = _library_class(pipeline_class)
    if not inputs or set(inputs) <= set(inspect.signature(own.__call__).parameters):
        return own
    kinds = ("Inpaint",) if "mask_image" in inputs else ("Img2Img", "ImageToVideo")
    library = importlib.import_module("diffusers")
    sisters = (getattr(library, pipeline_class.replace("Pipeline", f"{kind}Pipeline"), None) for kind in kinds)
    return next((sister for sister in sisters if isinstance(sister, type)), own)


def _whole_pipeline(stages: Stages, pipeline: type) -> Stage:
    """The ordinary call as one stage."""
    folder = stages.folder
    accepted = frozenset(inspect.signature(pipeline.__call__).parameters)
    pipe = OrdinaryCall(pipeline, folder.settings, tuple(folder.entries), folder.absent, stages.device)
    for name, part in stages.plain.items():
        _set_component(pipe, name, part)
    outputs = ("images", "videos", "audio", "nsfw")
    return Stage(PIPELINE, pipe, accepted - _HANDOVER | {"prompt"}, frozenset(), outputs, frozenset(), folder.models, ())


def _split(stages: Stages, family: Family, inputs: tuple[str, ...]) -> tuple[Stage, ...]:
    blocks = _library_class(family.blocks)()
    triggers: dict[str, Any] = dict.fromkeys(("prompt", "negative_prompt", *inputs), True)
    made = []
    for name, block in blocks.sub_blocks.items():
        pruned = _pruned(block, triggers)
        if pruned is not None:
            _as_ordinary(pruned, stages.folder.pipeline_class, unresized=family.unresized)
        if pruned is None or _without_its_parts(pruned, stages.folder):
            continue
        triggers.update(dict.fromkeys(pruned.intermediate_output_names, True))
        made.append(_stage(name, pruned, stages))
    return tuple(made)


def _pruned(block: Any, triggers: Mapping[str, Any]) -> Any:
    """The block as it runs for these inputs; None where nothing of it does."""
    loop = "LoopSequentialPipelineBlocks"
    if not block.sub_blocks or any(base.__name__ == loop for base in type(block).__mro__):
        return block
    pruned = block.get_execution_blocks(**triggers)
    if pruned is None or (type(pruned).__name__ == "SequentialPipelineBlocks" and not pruned.sub_blocks):
        return None
    return pruned


def _as_ordinary(block: Any, pipeline_class: str, *, unresized: bool) -> None:
    """Takes out what a block does otherwise than the pipeline's own call.

    `unresized`: steps whose only outputs are resized pictures go; what follows takes the pictures themselves, under those names.
    Steps with a system message for the text encoder take the pipeline's, which may be broken into lines elsewhere.
    """
    message = getattr(sys.modules[_library_class(pipeline_class).__module__], "SYSTEM_MESSAGE", None)
    for step in (block, *block.sub_blocks.values()):
        if message is not None and hasattr(step, "DEFAULT_SYSTEM_MESSAGE"):
            step.DEFAULT_SYSTEM_MESSAGE = message
    for name, step in list(block.sub_blocks.items()):
        made = step.intermediate_output_names
        if unresized and made and all(output.startswith(RESIZED) for output in made):
            del block.sub_blocks[name]


def _without_its_parts(block: Any, folder: ModelFolder) -> bool:
    """Whether the block needs models and the folder has none of them: an optional stage of a bigger family."""
    wanted = [spec.name for spec in block.expected_components if spec.default_creation_method == "from_pretrained"]
    models = [name for name in wanted if name not in folder.entries or name in folder.models]
    models = [name for name in models if not name.startswith(("tokenizer", "scheduler", "processor"))]
    return bool(models) and not any(name in folder.entries for name in models)


def _stage(name: str, block: Any, stages: Stages) -> Stage:
    folder = stages.folder
    pipe = block.init_pipeline(str(folder.path))
    pipe.__class__ = _on_device(type(pipe), stages.device)
    pipe.set_progress_bar_config(disable=True)
    specs = {spec.name: spec for spec in block.expected_components}
    listed = [part for part in folder.models if part in specs]
    consulted = [part for part in listed if name == DENOISE and folder.is_autoencoder(part) and len(listed) > 1]
    owned = tuple(part for part in listed if part not in consulted)
    for part in specs:
        if part in stages.plain:
            _set_component(pipe, part, stages.plain[part])
    lacking = [part for part in folder.models if part not in owned and folder.entries[part][0] == "diffusers"]
    return Stage(
        name, pipe,
        inputs=frozenset(item.name for item in block.inputs if item.name),
        required=frozenset(item.name for item in block.inputs if item.name and item.required),
        outputs=tuple(item.name for item in block.intermediate_outputs),
        denoiser_fields=frozenset(item.name for item in block.intermediate_outputs if item.kwargs_type == "denoiser_input_fields"),
        components=owned,
        consulted=_give_copies(pipe, lacking, stages),
        guiders=tuple(part for part in specs if is_guider_name(part)),
        takes_fields=any(item.kwargs_type == "denoiser_input_fields" for item in block.inputs),
    )


def _give_copies(pipe: Any, names: Iterable[str], stages: Stages) -> tuple[str, ...]:
    given = tuple(names)
    for name in given:
        setattr(pipe, name, stages.weightless(name))
    return given


def _on_device(cls: type, device: torch.device) -> type:
    """The pipeline class with its device said outright: a stage would take it from its first weight, which may be a copy's."""
    return type(cls.__name__, (cls,), {"device": property(lambda _: device), "_execution_device": property(lambda _: device)})


def _set_component(pipe: Any, name: str, component: Any) -> None:
    """As `update_components`, without its rewriting of the pipeline's config, which costs more than a small model's step."""
    setattr(pipe, name, component)


def call_stage(
    stage: Stage, arguments: Mapping[str, Any], guiders: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Runs the stage once. `arguments`: those named in its inputs are passed on; the rest are not its business.

    Returns its outputs by name, whole batches, on the execution device. Raises what the model raises.
    """
    for name, guider in guiders.items():
        if name in stage.guiders:
            _set_component(stage.pipe, name, guider)
    passed = {name: value for name, value in arguments.items() if name in stage.inputs and value is not None}
    if stage.takes_fields and fields:
        passed["denoiser_input_fields"] = dict(fields)
    lacking = stage.required - set(passed) - set(fields or ())
    if lacking:
        raise ModelError(f"stage {stage.name} needs {', '.join(sorted(lacking))}, which nothing before it makes")
    # a stage that resizes a picture input changes the size itself, which is no output of it
    changed = [name for name in ("height", "width") if name in stage.inputs and stage.per_row]
    found: dict[str, Any] = stage.pipe(output=[*stage.outputs, *changed], **passed)
    return found


def split_rows(value: Any, rows: int) -> list[Any]:
    """A batch's output as one value a row: tensors [rows, ...] as [1, ...], lists as Items, all else shared by the rows."""
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows:
        return [value] if rows == 1 else [value[index : index + 1].clone() for index in range(rows)]
    if isinstance(value, list) and len(value) == rows:
        return [Item(element) for element in value]
    return [value] * rows


def join_rows(values: Sequence[Any], device: torch.device) -> Any:
    """Rows from different calls as one batch on the device: tensors padded with zeros to the longest in dimension 1."""
    first = values[0]
    if isinstance(first, Item):
        return [to_device(item.value, device) for item in values]
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return to_device(first, device)
    if len(values) == 1:
        return first.to(device)
    longest = max(value.shape[1] for value in values) if first.dim() > 1 else 0
    padded = [_pad(value, longest) if value.dim() > 1 and value.shape[1] < longest else value for value in values]
    return torch.cat(padded).to(device)


def _pad(value: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([value, value.new_zeros(value.shape[0], length - value.shape[1], *value.shape[2:])], dim=1)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and those in lists, tuples, dicts and Items, on the device; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Item):
        return Item(to_device(value.value, device))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(element, device) for element in value)
    if isinstance(value, dict):
        return {key: to_device(element, device) for key, element in value.items()}
    return value


def to_host(value: Any) -> Any:
    """Like `to_device`, into host memory of its own: nothing that is carried holds a batch's memory on the device, a CPU included."""
    if isinstance(value, torch.Tensor):
        return host_copy(value)
    if isinstance(value, Item):
        return Item(to_host(value.value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(element) for element in value)
    if isinstance(value, dict):
        return {key: to_host(element) for key, element in value.items()}
    return value


def value_bytes(value: Any) -> int:
    """Bytes of all tensors in a carried value."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes() if value.storage_offset() == 0 else value.nbytes
    if isinstance(value, Item):
        return value_bytes(value.value)
    if isinstance(value, (list, tuple)):
        return sum(map(value_bytes, value))
    if isinstance(value, dict):
        return sum(map(value_bytes, value.values()))
    return 0
