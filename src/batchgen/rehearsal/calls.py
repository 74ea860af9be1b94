"""Calls of hollow components on record: how they are told apart, what each cost, and how one is taken from the record.

`Scene` is where all of a rehearsal's calls report. What a call does inside is not known here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from batchgen.rehearsal.forms import remade
from batchgen.rehearsal.live import LiveBytes

_HASHED_ELEMENTS = 2**20  # integer and bool inputs up to this size are told apart by their values


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a hollow component as it was played."""

    peak_bytes: int  # above what was live when it began
    flops: int
    retained_bytes: int  # left live besides what it returned: caches
    result: Any  # the result's form


@dataclass(slots=True)
class Rehearsed:
    """All calls of one component: how often each entry was called, and the calls on record by their inputs."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    records: dict[Any, list[Call]] = field(default_factory=dict)
    played: int = 0


class Scene:
    """Where hollow calls report: one fake mode for all components, and the tracker at work."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker: LiveBytes | None = None
        self.components: dict[str, Rehearsed] = {}
        self.order: list[str] = []  # components as they were called; calls in a row once

    @contextmanager
    def following(self, tracker: LiveBytes) -> Iterator[LiveBytes]:
        """Calls within are followed by the tracker.

        Garbage in cycles (outputs that know their caches) goes at the start of every component's call, never at a time that
        hangs on what else the process did.
        """
        before, self.tracker = self.tracker, tracker
        with small_collections():
            gc.disable()
            try:
                with torch.no_grad(), tracker:
                    yield tracker
            finally:
                gc.enable()
                self.tracker = before

    def called(self, name: str, entry: str) -> None:
        """Counts a call from outside."""
        counts = self.components[name].counts
        counts[entry] = counts.get(entry, 0) + 1
        if self.order[-1:] != [name]:
            self.order.append(name)

    def forget_calls(self) -> None:
        """Counts begin anew; what was played stays on record."""
        self.order.clear()
        for rehearsed in self.components.values():
            rehearsed.counts.clear()


@contextmanager
def small_collections() -> Iterator[None]:
    """What is there already is not looked through by collections inside, so that one before every call costs little.

    May be nested: then only the outermost gives back what it froze, for giving back and freezing again looks through everything.
    """
    nested = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not nested:
            gc.unfreeze()


def signature(value: Any) -> Any:
    """What decides a call's shapes: shapes, dtypes and strides of tensors, values of small whole-number ones, plain arguments."""
    if isinstance(value, torch.Tensor):
        values: Any = None
        if not value.dtype.is_floating_point and not isinstance(value, FakeTensor) and value.numel() <= _HASHED_ELEMENTS:
            with _disable_current_modes():
                values = hash(value.contiguous().numpy().tobytes())
        return "tensor", tuple(value.shape), value.stride(), value.dtype, isinstance(value, FakeTensor), values
    if isinstance(value, dict):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(signature, value))
    if value is None or isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        return value
    return type(value).__name__


def replay(call: Call, tracker: LiveBytes, inputs: Sequence[torch.Tensor] = (), fake: FakeTensorMode | None = None) -> Any:
    """A call that is not played again: its cost is added, its result made anew (see `remade`) and counted."""
    tracker.spike(call.peak_bytes, call.flops)
    made, storages = remade(call.result, inputs=inputs, fake=fake)
    for tensor in storages:
        tracker.see(tensor)
    return made
