"""What a plan is made from and what it is. Frozen; a record checks itself when built. Sizes in bytes unless named otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchgen.inventory.records import DeviceFacts, ModelFacts, Platform, Profile
from batchgen.plan.trail import Trail

Mode = Literal["resident", "component-offload", "layerwise-offload", "fsdp"]
PerformanceMode = Literal["auto", "manual", "speed", "memory"]
DecidedBy = Literal["user", "model", "task", "global", "default", "size", "rehearsal"]
ThresholdSource = Literal["user", "model", "task", "global"]

MODES: tuple[Mode, ...] = ("resident", "component-offload", "layerwise-offload", "fsdp")
PERFORMANCE_MODES: tuple[PerformanceMode, ...] = ("auto", "manual", "speed", "memory")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user set about placement; None is unset. Text fields hold the options as given, unparsed and joined by commas."""

    performance_mode: str = "auto"
    component_residency: str | None = None
    cpu_offload_components: str | None = None
    layerwise_offload_components: str | None = None
    dit_cpu_offload: bool | None = None
    text_encoder_cpu_offload: bool | None = None
    image_encoder_cpu_offload: bool | None = None
    vae_cpu_offload: bool | None = None
    dit_layerwise_offload: bool | None = None
    fsdp: bool | None = None
    group_size: int | None = None  # devices that share one sharded model; None: the plan chooses
    cfg_parallel: bool | None = None  # both guidance branches at once, on half of a group's devices each; only when asked for
    keep_resident_min_available_gb: float | Literal["never"] | None = None
    batch_size: int | None = None  # None: auto
    force: bool = False  # run a plan that does not fit
    profile: str | None = None  # a shipped profile's name, instead of the one found for the model
    profile_file: str | None = None  # the user's own profile


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Everything the rules may look at."""

    model: ModelFacts
    profile: Profile
    platform: Platform
    devices: tuple[DeviceFacts, ...]
    overrides: Overrides
    largest_group: int | None = None  # devices of one machine; None: all are on one
    adapted: tuple[str, ...] = ()  # components whose blocks adapters (--lora) change: such a dit cannot be cut over devices

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a plan needs at least one device")

    @property
    def available_gb(self) -> float:
        return min(device.available_gb for device in self.devices)

    @property
    def total_gb(self) -> float:
        return min(device.total_gb for device in self.devices)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one component lives, who decided and why."""

    component: str
    mode: Mode
    group: str | None
    by: DecidedBy
    reason: str
    bytes: int | None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown placement {self.mode!r}")
        if not self.reason:
            raise ValueError(f"placement of {self.component} has no reason")


@dataclass(frozen=True, slots=True)
class StageProfile:
    """What one stage needs for one shape and batch size, as rehearsed. Bytes on the execution device."""

    stage: str  # "text_encoder", "denoise", "decode", ... or "pipeline" for a model without blocks
    shape: str  # ShapeKey.text
    batch: int
    components: tuple[str, ...]  # that carry weights and are brought in for this stage, called or not
    weights_bytes: int
    activation_bytes: int  # peak of everything made during the stage, weights left out
    output_bytes: int  # carried to later stages
    flops: int
    calls: tuple[tuple[str, int], ...] = ()  # component -> forwards per batch
    tiled: bool = False  # the VAE decodes in tiles, which alters pixels a little
    order: tuple[str, ...] = ()  # components as one batch calls them, calls in a row once; empty: as `components`


@dataclass(frozen=True, slots=True)
class RehearsedComponent:
    """What a component weighs as loaded. Blocks stream; what is outside them stays in."""

    name: str
    weights_bytes: int
    outside_bytes: int  # weights of no repeated block
    block_bytes: tuple[int, ...] = ()  # in registration order; empty: nothing to stream
    parameters: int | None = None
    staying_bytes: int = 0  # small buffers that stay on the device even when the rest is out


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A model as rehearsed: its components, and stage profiles for a few shapes and batch sizes."""

    components: tuple[RehearsedComponent, ...]
    profiles: tuple[StageProfile, ...]
    notes: tuple[str, ...] = ()  # what stood in for files that are not here

    def component(self, name: str) -> RehearsedComponent:
        """The component of that name. Raises KeyError."""
        for part in self.components:
            if part.name == name:
                return part
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Workload:
    """The list as the fit sees it: how many jobs of each shape."""

    shapes: tuple[tuple[str, int], ...]  # ShapeKey.text -> jobs
    assumed: bool = False  # no manifest was given

    @property
    def jobs(self) -> int:
        return sum(count for _, count in self.shapes)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage as planned for one shape."""

    name: str
    shape: str
    components: tuple[str, ...]
    batch: int
    weights_bytes: int
    activation_bytes: int
    peak_bytes: int
    flops: int
    transfer_bytes: int  # per batch
    tiled: bool = False
    seconds: float | None = None  # predicted, for all jobs of the shape; None: no rates known for the device


@dataclass(frozen=True, slots=True)
class Predicted:
    """Totals for the whole list; None where nothing was rehearsed."""

    peak_device_bytes: int | None = None
    host_bytes: int | None = None
    seconds: float | None = None
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """What the same list takes on some of the devices. Loading is left out."""

    devices: int
    replicas: int
    seconds: float
    jobs_per_hour: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision: placements, threshold, batch size and the trail that explains them."""

    performance_mode: PerformanceMode
    platform: Platform
    devices: tuple[DeviceFacts, ...]
    fsdp: bool
    cfg_parallel: bool  # each group's first half of ranks runs the conditional branch, the second half the other
    replicas: int  # workers, or groups of ranks, that render side by side
    threshold_gb: float | None  # None: never
    threshold_source: ThresholdSource
    placements: tuple[Placement, ...]  # in the model's order
    batch_size: int | None  # None: auto
    trail: Trail
    stages: tuple[StagePlan, ...] = ()
    predicted: Predicted = field(default_factory=Predicted)
    window: int | None = None  # jobs a window; None: the executor's default
    prefetch: int = 2  # device buffers of a streamed component
    keep_bytes: tuple[tuple[str, int], ...] = ()  # streamed component -> device memory that its leading blocks may take for good
    vae_tiling: bool = False  # no decode of one fits otherwise
    model: str = ""
    profile: str = ""
    group_size: int = 1  # devices (ranks) of one replica; more than 1 exactly when the dit is sharded
    scaling: tuple[ScalingPoint, ...] = ()  # predicted, fewest devices first; empty where no rates are known

    def __post_init__(self) -> None:
        names = [placement.component for placement in self.placements]
        if len(set(names)) != len(names):
            raise ValueError("a component is placed twice")
        if self.fsdp != any(placement.mode == "fsdp" for placement in self.placements):
            raise ValueError("fsdp is on exactly when a component is sharded")
        if self.group_size < 1 or self.replicas * self.group_size > max(len(self.devices), self.replicas):
            raise ValueError(f"{self.replicas} groups of {self.group_size} do not fit {len(self.devices)} devices")
        if self.cfg_parallel and (not self.fsdp or self.group_size % 2):
            raise ValueError("guidance branches need a sharded group of even size")

    def placement(self, component: str) -> Placement:
        """Raises KeyError for a component the plan does not know."""
        for placement in self.placements:
            if placement.component == component:
                return placement
        raise KeyError(component)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Torch names of each replica's devices, in rank order; devices left over belong to none."""
        names = [device.torch_name for device in self.devices]
        size = self.group_size
        return tuple(tuple(names[first : first + size]) for first in range(0, len(names) - size + 1, size))[: self.replicas]

    @property
    def modes(self) -> Mapping[str, Mode]:
        return {placement.component: placement.mode for placement in self.placements}
