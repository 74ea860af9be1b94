"""Carries placements out: a strategy table over the moving primitive.

`Residency` holds the model's components. A component is added once, right after it is loaded; from then on the stages say
what they need and the strategies bring it in and take it out. A placement is removed before another is applied, and nothing
is cached by module. Emits what it moves; knows nothing of jobs, batches or files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from batchgen.errors import UsageError
from batchgen.events import ComponentMoved, DecisionMade, Emit
from batchgen.execute import sharding
from batchgen.execute.group import Alone
from batchgen.execute.memory import DeviceMemory, HostBudget, HostBuffer, trim_allocator
from batchgen.execute.moving import Weights
from batchgen.execute.streaming import BlockStream, StreamApi, find_blocks, streams_for
from batchgen.plan.records import Mode
from batchgen.units import MIB, size_text

PREFETCH_MARGIN_BYTES = 256 * MIB
_LEANER: Mapping[Mode, Mode] = {"resident": "component-offload"}
_EXPERT_NAMES = ("transformer", "unet", "prior", "video_dit", "unconditional_transformer")


@dataclass(slots=True, eq=False)
class Held:
    """One component under its placement. Mutable: it is what is running."""

    name: str
    module: nn.Module
    mode: Mode
    weights: Weights | None = None  # None while it streams
    stream: BlockStream | None = None
    used_by: int = 0  # stages open now that use it
    arriving: Any = None  # the copy's event, while it is being prefetched
    prefetched: bool = False  # in for a stage that has not begun
    waiting: list[RemovableHandle] = field(default_factory=list)  # hooks that bring it in at its first use
    buffer: HostBuffer | None = None

    @property
    def is_in(self) -> bool:
        if self.mode == "fsdp":
            return True
        return self.weights.is_in if self.weights is not None else self.stream is not None and self.stream.is_open

    @property
    def bytes_in(self) -> int:
        return (self.weights.bytes_in if self.weights else 0) + (self.stream.bytes_in if self.stream else 0)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one placement is carried out. Each function takes the residency and the component."""

    apply: Callable[[Residency, Held], None]
    enter: Callable[[Residency, Held], None]
    leave: Callable[[Residency, Held], None]
    release: Callable[[Residency, Held], None]  # back to plain host weights, ready for another placement


class Residency:
    """Where every component's weights are now, and the moves between.

    modes: the plan's placements. fixed: components the user placed, which no recovery step may place elsewhere.
    keep_bytes: device memory that the leading blocks of a streamed component may take for good. prefetch: device buffers of a
    streamed component. Raises UsageError, from `add`, for a placement that this process cannot carry out.
    """

    def __init__(
        self, modes: Mapping[str, Mode], device: torch.device, *, host_budget: HostBudget, emit: Emit, worker: int = 0, prefetch: int = 2,
        fixed: Iterable[str] = (), keep_bytes: Mapping[str, int] | None = None, streams: StreamApi | None = None,
        group: Alone | None = None,
    ) -> None:
        self.device = torch.device(device)
        if str(self.device) == "cuda":  # tensors tell their card's number
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.prefetch = max(2, prefetch)
        self.host_budget = host_budget
        self.memory = DeviceMemory(self.device)
        self.planned = dict(modes)
        self.fixed = frozenset(fixed)
        self.keep_bytes = dict(keep_bytes or {})
        self._planned_keep = dict(self.keep_bytes)
        self.streams = streams if streams is not None else streams_for(self.device)
        self.group = group if group is not None else Alone()
        self._emit = emit
        self._worker = worker
        self._held: dict[str, Held] = {}
        self._released_bytes: dict[str, int] = {}
        self._released_streamed = self._told_streamed = 0

    # -- components -------------------------------------------------------------------------------------------------

    def add(self, name: str, module: nn.Module) -> None:
        """Take a freshly loaded component and apply its placement. Once per component (ValueError otherwise).

        Raises UsageError for a placement that this process cannot carry out.
        """
        if name in self._held:
            raise ValueError(f"{name} has a placement already: remove it first")
        mode = self.planned.get(name, "resident")
        try:
            self._apply(name, module, mode)
        except torch.OutOfMemoryError:
            leaner = _LEANER.get(mode)
            if leaner is None or name in self.fixed:
                raise
            self.memory.release_cached()
            self.decide(name, leaner, f"{name} does not fit on {self.device} as {mode}: {leaner}")
            self._apply(name, module, leaner)

    def remove(self, name: str) -> nn.Module:
        """Take the placement off: plain weights in host memory, every hook gone. Returns the module."""
        held = self._held.pop(name)
        self._forget_waiting(held)
        STRATEGIES[held.mode].release(self, held)
        self._released_bytes[name] = self._released_bytes.get(name, 0) + held.bytes_in
        self._released_streamed += held.stream.block_bytes_in if held.stream is not None else 0
        return held.module

    def _apply(self, name: str, module: nn.Module, mode: Mode) -> None:
        if mode == "layerwise-offload" and not find_blocks(module):
            mode = "component-offload"
            self.decide(name, mode, f"{name} ({type(module).__name__}) has no repeated blocks to stream: {mode}")
        held = Held(name, module, mode)
        self._held[name] = held
        try:
            STRATEGIES[mode].apply(self, held)
        except BaseException:
            del self._held[name]
            raise

    def mode(self, name: str) -> Mode:
        """The placement carried out now (the ladder may have changed the plan's)."""
        return self._held[name].mode if name in self._held else self.planned.get(name, "resident")

    def is_in(self, name: str) -> bool:
        return self._held[name].is_in

    def replan(self, name: str, mode: Mode) -> None:
        """Another placement than the plan's, for a component that is not added yet or is in no stage now."""
        self.planned[name] = mode
        if name in self._held and self._held[name].mode != mode:
            self._change(name, mode)

    def rest(self) -> None:
        """Between two batches, also after one that broke off: no sharded component keeps anything gathered."""
        for held in self._held.values():
            if held.mode == "fsdp":
                sharding.rest(held.module)

    @property
    def pins(self) -> bool:
        """Whether pinned host memory exists and speeds copies up."""
        return self.device.type == "cuda" and torch.cuda.is_available()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    @property
    def bytes_in(self) -> dict[str, int]:
        """Bytes copied onto the device so far, per component."""
        counts = dict(self._released_bytes)
        for name, held in self._held.items():
            counts[name] = counts.get(name, 0) + held.bytes_in
        return counts

    def take_streamed_bytes(self) -> int:
        """Bytes copied for streamed blocks since the last call (they come in block by block, without an event each)."""
        total = self._released_streamed + sum(held.stream.block_bytes_in for held in self._held.values() if held.stream is not None)
        taken, self._told_streamed = total - self._told_streamed, total
        return taken

    # -- stages -----------------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, names: Iterable[str], *, one_at_a_time: bool = False) -> Iterator[None]:
        """The components of a stage are in while it runs; afterwards each stays or leaves, as its placement says.

        Offloaded experts of one kind (`transformer`, `transformer_2`) are never in together: each comes in at its first use
        and the other leaves. `one_at_a_time` does the same for all offloaded components, for a whole pipeline run as one stage.
        Names that were never added (a stage's weightless parts) are ignored. Nested and overlapping stages are counted.
        """
        members = [self._held[name] for name in dict.fromkeys(names) if name in self._held]
        self._drop_prefetched(members)
        with ExitStack() as leaving:
            for held in members:
                held.used_by += 1
                leaving.callback(self._leave, held)
            for held in members:
                rivals = self._rivals(held, members, one_at_a_time)
                if rivals and not held.is_in:
                    self._await_first_use(held, rivals)
                else:
                    STRATEGIES[held.mode].enter(self, held)
            yield

    def _leave(self, held: Held) -> None:
        held.used_by -= 1
        if held.used_by == 0 and self._held.get(held.name) is held:
            self._forget_waiting(held)
            STRATEGIES[held.mode].leave(self, held)

    def _rivals(self, held: Held, members: list[Held], one_at_a_time: bool) -> list[Held]:
        """The members that must not be in together with this one."""
        if held.mode != "component-offload":
            return []
        return [
            other for other in members
            if other is not held and other.mode == "component-offload" and (one_at_a_time or _same_experts(held.name, other.name))
        ]

    def _await_first_use(self, held: Held, rivals: list[Held]) -> None:
        """Bring the component in when any of its submodules is called: some are entered by `decode` or `encode`, not `forward`."""

        def first_use(module: nn.Module, args: Any) -> None:
            self._forget_waiting(held)
            for rival in rivals:
                if rival.is_in and self._held.get(rival.name) is rival:
                    STRATEGIES[rival.mode].leave(self, rival)
                    self._await_first_use(rival, [other for other in (*rivals, held) if other is not rival])
            STRATEGIES[held.mode].enter(self, held)

        self._forget_waiting(held)
        held.waiting = [part.register_forward_pre_hook(first_use) for part in held.module.modules()]

    def _forget_waiting(self, held: Held) -> None:
        for handle in held.waiting:
            handle.remove()
        held.waiting = []

    def prefetch_next(self, names: Iterable[str]) -> None:
        """Begin bringing in what the next stage needs, beside this stage's last work.

        Only where a copy can run beside the device's work, only components that are offloaded whole, and only into memory that
        was free at this stage's peak. A component whose stage then does not come is taken out again.
        """
        members = [self._held[name] for name in dict.fromkeys(names) if name in self._held]
        if not self.streams.overlaps:
            return
        begun: list[Held] = []
        for held in members:
            if held.mode != "component-offload" or held.is_in or any(_same_experts(held.name, other.name) for other in begun):
                continue
            assert held.weights is not None
            if self.pins and not (held.buffer is not None and held.buffer.pinned):
                continue  # such a copy would hold up the host, which has the device's work to issue
            room = self._room_at_peak()
            if room is None or held.weights.moving_bytes > room:
                continue
            ready = self.streams.record_compute()
            start = time.perf_counter()
            try:
                copied = held.weights.into(partial(self._copying_after, ready))
            except torch.OutOfMemoryError:  # free, but in pieces: it comes in when its stage does
                self.memory.release_cached()
                continue
            held.arriving, held.prefetched = self.streams.record_copy(), True
            begun.append(held)
            self.moved(held, "in", copied, start)

    @contextmanager
    def _copying_after(self, event: Any) -> Iterator[None]:
        self.streams.copy_waits(event)
        with self.streams.copying():
            yield

    def _room_at_peak(self) -> int | None:
        """Bytes that stayed free when this stage needed most."""
        free = self.memory.free()
        return None if free is None else free - (self.memory.peak() - self.memory.allocated()) - PREFETCH_MARGIN_BYTES

    def drop_prefetched(self) -> bool:
        """Take out what came in before its stage. Returns whether there was anything."""
        return self._drop_prefetched([])

    def _drop_prefetched(self, wanted: list[Held]) -> bool:
        early = [held for held in self._held.values() if held.prefetched and held not in wanted and not held.used_by]
        for held in early:
            self.take_out(held)
        return bool(early)

    # -- the ladder -------------------------------------------------------------------------------------------------

    def fix(self, name: str) -> None:
        """No recovery step may place this component elsewhere: what is compiled must stay where it is."""
        self.fixed |= {name}

    def next_leaner(self, name: str, *, in_stage: bool) -> Mode | None:
        """The next leaner placement of this component; None where there is none or the user placed it.

        in_stage: the stage that lacks memory uses the component. Then being offloaded whole would not help it.
        """
        held = self._held.get(name)
        if held is None or name in self.fixed:
            return None
        if held.mode == "resident":
            if self.pins and _weight_bytes(held.module) > self.host_budget.left_bytes:
                return None  # its only copy is on the device, and the host has no room for one
            return "layerwise-offload" if in_stage and find_blocks(held.module) else None if in_stage else "component-offload"
        if held.mode == "component-offload":
            return "layerwise-offload" if in_stage and find_blocks(held.module) else None
        if held.stream is not None and held.stream.kept_blocks:
            return "layerwise-offload"  # with fewer blocks kept
        return None

    def leaner(self, stage_names: Iterable[str]) -> tuple[str, Mode] | None:
        """Make room for a stage: one component goes to its next leaner placement. Call between stages.

        First what the stage does not use, largest first; then its own components, largest first. Returns the component and
        its new placement, or None where nothing is left that the user did not fix.
        """
        stage = set(stage_names)
        choices = [
            (in_stage, -_weight_bytes(held.module), held, mode)
            for held in self._held.values()
            for in_stage in (held.name in stage,)
            if not held.used_by and (mode := self.next_leaner(held.name, in_stage=in_stage)) is not None
        ]
        if not choices:
            return None
        _, _, held, mode = min(choices, key=lambda choice: choice[:2])
        if held.stream is not None:
            self.keep_bytes[held.name] = 0
        self._change(held.name, mode)
        return held.name, mode

    def restore_planned(self) -> tuple[str, ...]:
        """Undo what the ladder changed, between stages. Returns the components placed anew."""
        changed = tuple(
            name for name, held in self._held.items() if not held.used_by and (
                self._short_of_plan(name, held) or self.keep_bytes.get(name) != self._planned_keep.get(name)
            )
        )
        self.keep_bytes = dict(self._planned_keep)
        for name in changed:
            self._change(name, self.planned.get(name, "resident"))
        return changed

    def _short_of_plan(self, name: str, held: Held) -> bool:
        planned = self.planned.get(name, "resident")
        if planned == "layerwise-offload" and held.mode == "component-offload":
            return bool(find_blocks(held.module))
        return held.mode != planned

    def _change(self, name: str, mode: Mode) -> None:
        if self._held[name].used_by:
            raise RuntimeError(f"{name} is in use: its placement can only change between stages")
        module = self.remove(name)
        self._apply(name, module, mode)

    def release(self) -> None:
        """Take every placement off."""
        for name in tuple(self._held):
            self.remove(name)

    # -- what strategies call ---------------------------------------------------------------------------------------

    def decide(self, subject: str, decision: str, text: str, **numbers: Any) -> None:
        self._emit(DecisionMade(self._worker, "residency", subject, decision, text, tuple(numbers.items())))

    def moved(self, held: Held, direction: Literal["in", "out"], copied: int, since: float) -> None:
        self._emit(ComponentMoved(self._worker, held.name, direction, copied, time.perf_counter() - since))

    def bring_in(self, held: Held) -> None:
        assert held.weights is not None
        if held.arriving is not None:
            self.streams.compute_waits(held.arriving)
        held.arriving, held.prefetched = None, False
        if held.weights.is_in:
            return
        start = time.perf_counter()
        self.moved(held, "in", held.weights.into(), start)

    def take_out(self, held: Held) -> None:
        assert held.weights is not None
        if not held.weights.is_in:
            return
        start = time.perf_counter()
        if held.arriving is not None:  # the memory goes back to the compute stream's allocator
            self.streams.compute_waits(held.arriving)
        held.arriving, held.prefetched = None, False
        held.weights.out()
        if self.device.type == "cpu":
            trim_allocator()
        self.moved(held, "out", 0, start)


def _same_experts(one: str, other: str) -> bool:
    bases = {re.sub(r"_\d+$", "", name) for name in (one, other)}
    return len(bases) == 1 and bases <= set(_EXPERT_NAMES)


def _weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


# -- strategies -----------------------------------------------------------------------------------------------------


def _nothing(residency: Residency, held: Held) -> None:
    """Where a placement has nothing to do."""


def _weights(residency: Residency, held: Held) -> Weights:
    held.weights = Weights.of(held.name, held.module, residency.device)
    return held.weights


def _settle_resident(residency: Residency, held: Held) -> None:
    start = time.perf_counter()
    copied = _weights(residency, held).keep_in()
    if copied:
        residency.moved(held, "in", copied, start)


def _resident_to_host(residency: Residency, held: Held) -> None:
    assert held.weights is not None
    held.weights.to_host()


def _hold_offloaded(residency: Residency, held: Held) -> None:
    """One host copy: the loaded tensors themselves (mapped files cost nothing), or pinned, where that speeds the copies up."""
    weights = _weights(residency, held)
    if residency.pins and weights.flat_bytes:
        held.buffer = HostBuffer.of(weights.flat_bytes, pinned=True, budget=residency.host_budget)
        if held.buffer is not None:
            weights.hold(held.buffer.bytes, pinned=held.buffer.pinned, keep=held.buffer)
        how = "pinned" if held.buffer is not None and held.buffer.pinned else "not pinned"
        residency.decide(
            held.name, how, f"host copy of {held.name}, {size_text(weights.flat_bytes)}: {how}",
            bytes=weights.flat_bytes, host_left_bytes=residency.host_budget.left_bytes,
        )
    weights.settle()
    weights.out()


def _release_offloaded(residency: Residency, held: Held) -> None:
    assert held.weights is not None
    held.weights.restore()
    if held.buffer is not None:
        held.weights.to_host()
        held.buffer.free()
        held.buffer = None


def _start_stream(residency: Residency, held: Held) -> None:
    start = time.perf_counter()
    held.stream = BlockStream(
        held.name, held.module, residency.device, depth=residency.prefetch, streams=residency.streams,
        keep_bytes=residency.keep_bytes.get(held.name, 0),
        hold=lambda size_bytes: HostBuffer.of(size_bytes, pinned=residency.pins, budget=residency.host_budget),
    )
    residency.moved(held, "in", held.stream.outside.bytes_in, start)


def _open_stream(residency: Residency, held: Held) -> None:
    assert held.stream is not None
    held.stream.open()


def _close_stream(residency: Residency, held: Held) -> None:
    assert held.stream is not None
    held.stream.close()


def _end_stream(residency: Residency, held: Held) -> None:
    assert held.stream is not None
    held.stream.release()


def _take_shards(residency: Residency, held: Held) -> None:
    """The loader has cut it already, onto the device."""
    if residency.group.size > 1 and sharding.is_sharded(held.module):
        return
    raise UsageError(
        f"{held.name} is planned as fsdp, but this worker runs alone on {residency.device}: sharding needs a group of workers, "
        "one for each device",
        option="--fsdp", hint="use --no-fsdp, or place the component with --component-residency",
    )


def _rest_shards(residency: Residency, held: Held) -> None:
    sharding.rest(held.module)


STRATEGIES: Mapping[Mode, Strategy] = {
    "resident": Strategy(_settle_resident, _nothing, _nothing, _resident_to_host),
    "component-offload": Strategy(_hold_offloaded, Residency.bring_in, Residency.take_out, _release_offloaded),
    "layerwise-offload": Strategy(_start_stream, _open_stream, _close_stream, _end_stream),
    "fsdp": Strategy(_take_shards, _nothing, _nothing, _rest_shards),
}
