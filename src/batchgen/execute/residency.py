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
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from batchgen.errors import UsageError
from batchgen.events import ComponentMoved, DecisionMade, Emit
from batchgen.execute.memory import DeviceMemory, HostBudget, HostBuffer, trim_allocator
from batchgen.execute.moving import Weights
from batchgen.plan.records import Mode

_EXPERT_NAMES = ("transformer", "unet", "prior", "video_dit", "unconditional_transformer")


@dataclass(slots=True, eq=False)
class Held:
    """One component under its placement. Mutable: it is what is running."""

    name: str
    module: nn.Module
    weights: Weights
    mode: Mode
    used_by: int = 0  # stages open now that use it
    waiting: list[RemovableHandle] = field(default_factory=list)  # hooks that bring it in at its first use
    buffer: HostBuffer | None = None

    @property
    def is_in(self) -> bool:
        return self.weights.is_in


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one placement is carried out. Each function takes the residency and the component."""

    apply: Callable[[Residency, Held], None]
    enter: Callable[[Residency, Held], None]
    leave: Callable[[Residency, Held], None]
    release: Callable[[Residency, Held], None]  # back to plain host weights, ready for another placement


class Residency:
    """Where every component's weights are now, and the moves between.

    `modes`: the plan's placements. `fixed`: components the user placed, which no recovery step may place elsewhere.
    """

    def __init__(
        self, modes: Mapping[str, Mode], device: torch.device, *, host_budget: HostBudget, emit: Emit, worker: int = 0, prefetch: int = 2,
        fixed: Iterable[str] = (),
    ) -> None:
        self.device = torch.device(device)
        self.prefetch = max(2, prefetch)
        self.host_budget = host_budget
        self.memory = DeviceMemory(self.device)
        self.planned = dict(modes)
        self.fixed = frozenset(fixed)
        self._emit = emit
        self._worker = worker
        self._held: dict[str, Held] = {}
        self._released_bytes: dict[str, int] = {}

    # -- components -------------------------------------------------------------------------------------------------

    def add(self, name: str, module: nn.Module) -> None:
        """Take a freshly loaded component and apply its placement. Once per component (ValueError otherwise).

        Raises UsageError for a placement that this process cannot carry out.
        """
        if name in self._held:
            raise ValueError(f"{name} has a placement already: remove it first")
        self._apply(name, module, self.planned.get(name, "resident"))

    def remove(self, name: str) -> nn.Module:
        """Take the placement off: plain weights in host memory, every hook gone. Returns the module."""
        held = self._held.pop(name)
        self._forget_waiting(held)
        STRATEGIES[held.mode].release(self, held)
        self._released_bytes[name] = self._released_bytes.get(name, 0) + held.weights.bytes_in
        return held.module

    def _apply(self, name: str, module: nn.Module, mode: Mode) -> None:
        held = Held(name, module, Weights.of(name, module, self.device), mode)
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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    @property
    def bytes_in(self) -> dict[str, int]:
        """Bytes copied onto the device so far, per component."""
        counts = dict(self._released_bytes)
        for name, held in self._held.items():
            counts[name] = counts.get(name, 0) + held.weights.bytes_in
        return counts

    # -- stages -----------------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, names: Iterable[str], *, one_at_a_time: bool = False) -> Iterator[None]:
        """The components of a stage are in while it runs; afterwards each stays or leaves, as its placement says.

        Offloaded experts of one kind (`transformer`, `transformer_2`) are never in together: each comes in at its first use
        and the other leaves. `one_at_a_time` does the same for all offloaded components, for a whole pipeline run as one stage.
        Names that were never added (a stage's weightless parts) are ignored. Nested and overlapping stages are counted.
        """
        members = [self._held[name] for name in dict.fromkeys(names) if name in self._held]
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
        held.weights.out()
        held.waiting = [part.register_forward_pre_hook(first_use) for part in held.module.modules()]

    def _forget_waiting(self, held: Held) -> None:
        for handle in held.waiting:
            handle.remove()
        held.waiting = []

    def prefetch_next(self, names: Iterable[str]) -> None:
        """Begin bringing in what the next stage needs, beside this stage's last work.

        Only where a copy can run beside the device's work (CUDA), only offloaded components, and only into memory that is free.
        """

    # -- the ladder -------------------------------------------------------------------------------------------------

    def next_leaner(self, name: str) -> Mode | None:
        """The next leaner placement this component may take; None where there is none or the user placed it."""
        held = self._held.get(name)
        if held is None or name in self.fixed:
            return None
        return {"resident": "component-offload"}.get(held.mode)  # type: ignore[return-value]

    def leaner(self, name: str) -> Mode | None:
        """Go to that placement. Only between stages that use the component. Returns it, or None where there is none."""
        mode = self.next_leaner(name)
        if mode is None:
            return None
        self._change(name, mode)
        return mode

    def restore_planned(self) -> tuple[str, ...]:
        """Undo what the ladder changed. Returns the components placed anew."""
        changed = tuple(name for name, held in self._held.items() if held.mode != self.planned.get(name, "resident"))
        for name in changed:
            self._change(name, self.planned.get(name, "resident"))
        return changed

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

    def bring_in(self, held: Held) -> None:
        if held.weights.is_in:
            return
        start = time.perf_counter()
        copied = held.weights.into()
        self._emit(ComponentMoved(self._worker, held.name, "in", copied, time.perf_counter() - start))

    def take_out(self, held: Held) -> None:
        if not held.weights.is_in:
            return
        start = time.perf_counter()
        held.weights.out()
        if self.device.type == "cpu":
            trim_allocator()
        self._emit(ComponentMoved(self._worker, held.name, "out", 0, time.perf_counter() - start))


def _same_experts(one: str, other: str) -> bool:
    bases = {re.sub(r"_\d+$", "", name) for name in (one, other)}
    return len(bases) == 1 and bases <= set(_EXPERT_NAMES)


# -- strategies -----------------------------------------------------------------------------------------------------


def _nothing(residency: Residency, held: Held) -> None:
    """Where a placement has nothing to do."""


def _settle_resident(residency: Residency, held: Held) -> None:
    start = time.perf_counter()
    copied = held.weights.keep_in()
    residency._emit(ComponentMoved(residency._worker, held.name, "in", copied, time.perf_counter() - start))


def _resident_to_host(residency: Residency, held: Held) -> None:
    held.weights.to_host()


def _hold_offloaded(residency: Residency, held: Held) -> None:
    """One host copy: the loaded tensors themselves (mapped files cost nothing), or pinned, where that speeds the copies up."""
    weights = held.weights
    if residency.device.type == "cuda" and torch.cuda.is_available() and weights.flat_bytes:
        buffer = HostBuffer.of(weights.flat_bytes, pinned=True, budget=residency.host_budget)
        if buffer is not None:
            weights.hold(buffer.bytes, pinned=buffer.pinned, keep=buffer)
            held.buffer = buffer
        residency.decide(
            held.name, "pinned" if buffer is not None and buffer.pinned else "not pinned",
            f"host copy of {held.name}: {'pinned' if buffer is not None and buffer.pinned else 'as loaded'}",
            bytes=weights.flat_bytes, host_left_bytes=residency.host_budget.left_bytes,
        )
    weights.settle()
    weights.out()


def _release_offloaded(residency: Residency, held: Held) -> None:
    held.weights.restore()
    if held.buffer is not None:
        held.weights.to_host()
        held.buffer.free()
        held.buffer = None


def _refuse_sharding(residency: Residency, held: Held) -> None:
    raise UsageError(
        f"{held.name} is planned as fsdp, but this worker runs alone on {residency.device}: sharding needs a group of workers, "
        "one for each device",
        option="--fsdp", hint="Use --no-fsdp, or place the component with --component-residency.",
    )


STRATEGIES: Mapping[Mode, Strategy] = {
    "resident": Strategy(_settle_resident, _nothing, _nothing, _resident_to_host),
    "component-offload": Strategy(_hold_offloaded, Residency.bring_in, Residency.take_out, _release_offloaded),
    "fsdp": Strategy(_refuse_sharding, _nothing, _nothing, _nothing),
}
