"""Counts and times what each component does: calls and seconds per batch, by device events where the device runs on its own.

Knows nothing of stages or placements. A VAE is entered by `encode` and `decode`, all else by `forward`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Meter:
    """`watch` each component once; `take` gives what happened since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda" and torch.cuda.is_available()
        self._calls: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, Any, Any]] = []
        self._depth: dict[str, int] = {}

    def watch(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self._enter(name))
        module.register_forward_hook(lambda *_: self._leave(name), always_call=True)
        for entry in ("encode", "decode"):
            if callable(getattr(module, entry, None)):
                setattr(module, entry, self._timed(name, getattr(module, entry)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave(name)

        return timed

    def _enter(self, name: str) -> None:
        depth = self._depth.get(name, 0)
        self._depth[name] = depth + 1
        if depth == 0:
            self._calls[name] = self._calls.get(name, 0) + 1
            self._pending.append((name, self._now(), None))

    def _leave(self, name: str) -> None:
        self._depth[name] = max(0, self._depth.get(name, 1) - 1)
        if self._depth[name]:
            return
        for index in range(len(self._pending) - 1, -1, -1):
            if self._pending[index][0] == name and self._pending[index][2] is None:
                self._pending[index] = (name, self._pending[index][1], self._now())
                return

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> tuple[tuple[str, int, float], ...]:
        """Component, calls, seconds, since the last call. Waits for the device where events measure."""
        if self._events and self._pending:
            torch.cuda.synchronize()
        for name, start, end in self._pending:
            if end is not None:
                seconds = start.elapsed_time(end) / 1000 if self._events else end - start
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        taken = tuple((name, calls, self._seconds.get(name, 0.0)) for name, calls in self._calls.items())
        self._calls, self._seconds, self._pending, self._depth = {}, {}, [], {}
        return taken
