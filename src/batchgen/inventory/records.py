"""Records of what a model is made of and what a machine has. Sizes in bytes unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchgen.units import gib

Platform = Literal["cuda", "mps", "cpu"]
Task = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One weight file of a component. `path` is relative to the model's folder, POSIX separators."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ComponentFacts:
    """An entry of model_index.json that carries weights."""

    name: str
    library: str  # "diffusers", "transformers", or a module name that needs consent
    class_name: str
    bytes_as_loaded: int | None  # in the dtype it will load in, tied tensors once; None: unknown
    parameters: int | None  # elements of all tensors in the files
    stored_dtypes: tuple[tuple[str, int], ...] = ()  # ("BF16", elements), largest first
    dtype: str | None = None  # what it loads as: "bfloat16", "float16", "float32"; None: unknown
    variant: str | None = None  # the variant its files really have ("fp16"), or None
    files: tuple[WeightFile, ...] = ()
    pickle: bool = False  # files are pickles, allowed by flag


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as found: where it is, which commit, and its weight-carrying components in index order."""

    source: str  # what the user named: a hub id, a folder, or "builtin"
    kind: Literal["hub", "folder", "builtin", "facts"]  # "facts": known by numbers only, no files
    folder: str | None  # absolute folder with the files; None for "facts"
    revision: str  # hub commit, or a hash of configs, safetensors headers and sizes
    pipeline_class: str | None
    components: tuple[ComponentFacts, ...]
    other: tuple[str, ...] = ()  # scheduler, tokenizers, processors: entries without weights
    absent: tuple[str, ...] = ()  # null entries: optional parts that are not there
    notes: tuple[str, ...] = ()  # what a user should know: a variant fallback, a part left out
    index: tuple[tuple[str, str], ...] = ()  # plain settings of model_index.json as JSON text, e.g. ("boundary_ratio", "0.875")

    def component(self, name: str) -> ComponentFacts:
        """The component of that name. Raises KeyError."""
        for part in self.components:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def component_bytes(self) -> Mapping[str, int | None]:
        return {part.name: part.bytes_as_loaded for part in self.components}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One selected device. `name` as a user reads it; `torch_name` is "cuda:0", "mps" or "cpu"."""

    name: str
    torch_name: str
    total_bytes: int
    available_bytes: int
    uuid: str | None = None

    @property
    def total_gb(self) -> float:
        return gib(self.total_bytes)

    @property
    def available_gb(self) -> float:
        return gib(self.available_bytes)


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Speeds of a device from the catalogue."""

    dense_bf16_flops: float  # per second
    memory_bytes: float  # per second
    host_link_bytes: float  # per second, one direction
    device_link_bytes: float | None = None  # to other devices of the machine, per second, one direction; None: over the host's link


@dataclass(frozen=True, slots=True)
class Profile:
    """Deployment facts of a model family; sizes in GiB where a name ends in _gb. See configs/models/."""

    name: str
    task: Task
    components: tuple[str, ...] = ()  # usual weight-carrying entries, for plans without the model's files
    models: tuple[str, ...] = ()  # hub ids
    pipeline_classes: tuple[str, ...] = ()
    uses_cfg: bool = False
    dit_layerwise_offload_modes: tuple[str, ...] = ()
    keep_resident_min_available_gb: float | Literal["never"] | None = None
    keep_resident_components: tuple[str, ...] = ("vae",)  # groups
    fsdp_auto_min_available_memory_gb: float | None = None
    fsdp_auto_requires_cfg: bool = True
    auto_enable_cfg_parallel: bool = True
    supports_cfg_parallel: bool = True
    dit_offload_prefetch_size: int | None = None
    defaults: tuple[tuple[str, float], ...] = ()  # width, height, steps, guidance, num_frames, fps: what a run takes where nothing is said
    source: str = ""  # where the numbers come from
    matched: str = ""  # how it was found for the model at hand: by id, by pipeline class, by an option


@dataclass(frozen=True, slots=True)
class SizeRules:
    """Which sizes and frame counts a model can make, from its own configs. None: unknown, anything goes."""

    width_multiple: int | None = None
    height_multiple: int | None = None
    frames_step: int | None = None  # frames = frames_step * n + frames_offset
    frames_offset: int = 1
    is_video: bool = False
    source: str = ""  # e.g. "vae scale 8 x patch 2"
