"""The ladder that a stage climbs down when memory runs out: pure policy, and the clean-up before the next try.

Halve the batch, decode in tiles, take the next leaner placement, and last let that job fail, alone. What was found is
remembered for the stage and shape, so that no later batch runs into the same wall. Knows nothing of engines or modules.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass, field
from typing import Literal

import torch

from batchgen.execute.memory import trim_allocator
from batchgen.plan.trail import Decision

Action = Literal["halve", "tile", "leaner", "fail"]
HOPELESS_AFTER = 2  # jobs of one shape that failed with nothing left to try: the next ones are not tried again

_OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory", "not enough memory")


@dataclass(frozen=True, slots=True)
class Situation:
    """Where memory ran out, and what is left to try there."""

    stage: str
    shape: str
    batch: int
    can_tile: bool = False  # the stage decodes, and its VAE tiles
    tiled: bool = False
    can_be_leaner: bool = False  # some component may still go to a leaner placement

    @property
    def name(self) -> str:
        return f"{self.stage} at {self.shape}" if self.shape else self.stage


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next. `batch` is the size to try from now on."""

    action: Action
    batch: int
    text: str

    def decision(self, situation: Situation) -> Decision:
        numbers = {"batch": situation.batch, "next_batch": self.batch, "tiled": situation.tiled or self.action == "tile"}
        return Decision.of("out-of-memory", f"{situation.stage} {situation.shape}".strip(), self.action, self.text, numbers)


@dataclass(slots=True)
class Ladder:
    """Decides the next step and remembers what it found, per stage and shape."""

    _limits: dict[tuple[str, str], int] = field(default_factory=dict)
    _tiled: set[tuple[str, str]] = field(default_factory=set)
    _failed: dict[tuple[str, str], int] = field(default_factory=dict)

    def next_step(self, situation: Situation) -> Step:
        """The next rung. Every rung is taken once at most, so a stage that keeps failing reaches the end."""
        where = (situation.stage, situation.shape)
        name = situation.name
        if situation.batch > 1:
            smaller = situation.batch // 2
            self._limits[where] = min(smaller, self._limits.get(where, smaller))
            return Step("halve", smaller, f"out of memory in {name} with a batch of {situation.batch}: {smaller} from now on")
        self._limits[where] = 1
        if situation.can_tile and not situation.tiled:
            self._tiled.add(where)
            return Step("tile", 1, f"out of memory in {name} with a batch of 1: decoded in tiles from now on")
        if situation.can_be_leaner:
            return Step("leaner", 1, f"out of memory in {name} with a batch of 1: the next leaner placement")
        self._failed[where] = self._failed.get(where, 0) + 1
        return Step("fail", 1, f"out of memory in {name} with a batch of 1, and nothing is left to try")

    def batch_size(self, stage: str, shape: str, planned: int) -> int:
        """The planned size, or the smaller one that memory taught."""
        return max(1, min(planned, self._limits.get((stage, shape), planned)))

    def tiles(self, stage: str, shape: str) -> bool:
        """Whether this shape is decoded in tiles from the start."""
        return (stage, shape) in self._tiled

    def hopeless(self, stage: str, shape: str) -> bool:
        """Whether enough jobs of this shape failed with nothing left to try, so that the next is not tried."""
        return self._failed.get((stage, shape), 0) >= HOPELESS_AFTER

    def forget_failures(self) -> None:
        """After something changed for the better: a placement given back, another model part unloaded."""
        self._failed.clear()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the allocator's own error, or a library's that says so in words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def free_after_oom(error: BaseException | None) -> None:
    """Let go of everything the failed call left: the tensors in the frames of the error's traceback, of its causes too, and what
    the allocators cache. Without it they stay, and every later, smaller job fails as well.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        if current.__traceback__ is not None:
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None
        current.__cause__ = current.__context__ = None
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    trim_allocator()
