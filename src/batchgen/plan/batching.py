"""Memory and traffic of a stage under given placements, and the batch size to run it with. Pure numbers; bytes and seconds.

A stage's peak = weights on the device in that stage + streaming buffers + activations + reserve. Activations follow a curve through
the rehearsed batch sizes; where it is extended, by its steepest slope, so that it never promises too little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchgen.plan.records import Mode, Rehearsed, RehearsedComponent, StageProfile
from batchgen.plan.selectors import base_name, is_dit
from batchgen.plan.traffic import kept_blocks, streamed_bytes, turns
from batchgen.units import MIB

# What a device needs besides tensors: its context and the libraries' workspaces, and what the allocator cannot use between blocks.
CONTEXT_BYTES = 768 * MIB
FRAGMENTATION = 0.04  # of activations
# Rows a batch beyond which a stage gains nothing on the cards of the catalogue; fewer are lost when one fails.
LARGEST_BATCH = {"denoise": 16, "decode": 8, "pipeline": 8}
LARGEST_ENCODE = 32
# Work of one call that keeps any card of the catalogue busy for a tenth of a second: launches and idle units no longer count.
FILLING_FLOPS = 10**14


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity over batch sizes: `points` as rehearsed, sorted by batch."""

    points: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.points or list(self.points) != sorted(dict(self.points).items()):
            raise ValueError("a curve needs points, one a batch size, in order")

    def at(self, batch: int) -> int:
        """The value at a batch size: rehearsed, between two rehearsed ones, or beyond by the steepest slope."""
        known = dict(self.points)
        if batch in known:
            return known[batch]
        below = [point for point in self.points if point[0] < batch]
        above = [point for point in self.points if point[0] > batch]
        if below and above:
            (left, low), (right, high) = below[-1], above[0]
            return max(low, -(-(low * (right - batch) + high * (batch - left)) // (right - left)))
        size, value = self.points[-1] if below else self.points[0]
        if not below:  # smaller than any rehearsed: never less than its share
            return -(-value * batch // size)
        return value + self._steepest * (batch - size)

    @property
    def _steepest(self) -> int:
        pairs = list(zip(self.points, self.points[1:], strict=False))
        if not pairs:
            size, value = self.points[0]
            return -(-value // size)
        return max(0, *(-(-(high - low) // (right - left)) for (left, low), (right, high) in pairs))


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage at one shape, over batch sizes."""

    name: str
    shape: str
    components: tuple[str, ...]
    activations: Curve
    outputs: Curve
    flops: Curve
    calls: Mapping[str, int]  # component -> forwards a batch, the same at every batch size
    per_row: bool = False  # only ever run one row at a time
    tiled: bool = False
    order: tuple[str, ...] = ()  # components as one batch calls them

    @property
    def largest(self) -> int:
        return 1 if self.per_row else LARGEST_BATCH.get(self.name, LARGEST_ENCODE)

    @property
    def enough(self) -> int:
        """Rows from which on a call fills any card of the catalogue; more would only come later and lose more when one fails."""
        forwards = max(1, max(self.calls.values(), default=1))
        per_row = max(1, self.flops.at(1) // forwards)
        return min(self.largest, -(-FILLING_FLOPS // per_row))


def stage_models(profiles: Sequence[StageProfile]) -> tuple[StageModel, ...]:
    """Profiles gathered by shape and stage, in their order."""
    groups: dict[tuple[str, str, bool], list[StageProfile]] = {}
    for profile in profiles:
        groups.setdefault((profile.shape, profile.stage, profile.tiled), []).append(profile)
    found = []
    for (shape, name, tiled), group in groups.items():
        rows = sorted({profile.batch: profile for profile in group}.values(), key=lambda profile: profile.batch)

        def curve(field: str, rows: Sequence[StageProfile] = rows) -> Curve:
            return Curve(tuple((row.batch, int(getattr(row, field))) for row in rows))

        several = len({profile.batch for profile in profiles if profile.shape == shape}) > 1
        found.append(StageModel(
            name, shape, rows[0].components, curve("activation_bytes"), curve("output_bytes"), curve("flops"), dict(rows[0].calls),
            per_row=several and len(rows) == 1 and rows[0].batch == 1, tiled=tiled, order=rows[0].order or rows[0].components,
        ))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements with what a stream keeps in for good."""

    modes: Mapping[str, Mode]
    rehearsed: Rehearsed
    depth: int = 2
    keep: Mapping[str, int] | None = None  # component -> bytes that its leading blocks may take
    shards: int = 1  # devices that share a component placed fsdp
    branches: int = 1  # 2: guidance's branches are computed side by side, each by half of the devices

    def part(self, name: str) -> RehearsedComponent:
        return self.rehearsed.component(name)

    def mode(self, name: str) -> Mode:
        """As carried out: what has no blocks to stream is offloaded as a whole."""
        mode = self.modes[name]
        return "component-offload" if mode == "layerwise-offload" and not self.part(name).block_bytes else mode

    def kept(self, name: str) -> int:
        return kept_blocks(self.part(name).block_bytes, (self.keep or {}).get(name, 0))

    def held_bytes(self, name: str) -> int:
        """On the device in every stage."""
        part, mode = self.part(name), self.mode(name)
        if mode == "resident":
            return part.weights_bytes
        if mode == "layerwise-offload":
            return part.outside_bytes + sum(part.block_bytes[: self.kept(name)])
        if mode == "fsdp":  # what is outside the blocks is whole on every device
            blocks = sum(part.block_bytes)
            return part.weights_bytes - blocks + -(-blocks // self.shards)
        return part.staying_bytes

    def entering_bytes(self, name: str) -> int:
        """On the device while a stage that calls it is open, besides what is held."""
        part, mode = self.part(name), self.mode(name)
        if mode == "component-offload":
            return part.weights_bytes - part.staying_bytes
        if mode == "layerwise-offload":
            streamed = part.block_bytes[self.kept(name) :]
            return self.depth * max(streamed, default=0)
        if mode == "fsdp":  # two blocks gathered at once
            return 2 * max(part.block_bytes, default=0)
        return 0

    def stage_weights(self, stage: StageModel) -> int:
        """All weights and buffers on the device while the stage runs. Experts of one kind are never in together."""
        held = sum(self.held_bytes(part.name) for part in self.rehearsed.components)
        entering: dict[str, list[int]] = {}
        for name in stage.components:
            expert = is_dit(name) and self.mode(name) == "component-offload"
            alone = stage.name == "pipeline" and self.mode(name) == "component-offload"
            key = "one at a time" if alone else base_name(name) if expert else name
            entering.setdefault(key, []).append(self.entering_bytes(name))
        return held + sum(max(sizes) for sizes in entering.values())

    def peak(self, stage: StageModel, batch: int, reserve: int) -> int:
        """Bytes on the device at the stage's worst moment, reserve included."""
        activations = stage.activations.at(batch)
        return self.stage_weights(stage) + activations + int(activations * FRAGMENTATION) + reserve

    def streamed(self, stage: StageModel, batches: int) -> int:
        """Bytes copied by streams while the stage is open once and runs so many batches."""
        return sum(
            streamed_bytes(self.part(name).block_bytes, self.kept(name), self.depth, stage.calls.get(name, 0) * batches)
            for name in stage.components if self.mode(name) == "layerwise-offload"
        )  # fmt: skip

    def gathered(self, stage: StageModel, batches: int) -> int:
        """Bytes that each device of a group receives from the others: every forward needs every block whole."""
        total = 0
        for name in stage.components:
            if self.mode(name) == "fsdp":
                forwards = -(-stage.calls.get(name, 0) * batches // self.branches)
                total += sum(self.part(name).block_bytes) * (self.shards - 1) // self.shards * forwards
        return total

    def moved_per_opening(self, stage: StageModel, batches: int = 1) -> int:
        """Bytes copied while the stage is open once and runs so many batches: components that are offloaded as a whole.

        Experts of one kind, and all components of a whole pipeline run as one stage, are never in together: they take turns.
        """
        offloaded = [name for name in stage.components if self.mode(name) == "component-offload"]
        total = 0
        for name in offloaded:
            rivals = [other for other in offloaded if other != name and (stage.name == "pipeline" or _same_experts(name, other))]
            times = turns(stage.order, name, rivals, batches) if rivals else 1
            total += self.entering_bytes(name) * times
        return total

    def moved_once(self, names: Iterable[str]) -> int:
        """What stays in of these components, copied once."""
        return sum(self.held_bytes(name) for name in set(names))


def _same_experts(one: str, other: str) -> bool:
    return is_dit(one) and base_name(one) == base_name(other)


def largest_batch(layout: Layout, stage: StageModel, budget: int, reserve: int, *, limit: int | None = None) -> int:
    """The largest batch that fits up to `limit` (the stage's own by default); 0 where not even one does."""
    top = 1 if stage.per_row else limit if limit is not None else stage.largest
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        if layout.peak(stage, middle, reserve) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
