"""Follows the bytes of every tensor made while it is active, and counts floating-point operations.

Works the same over real tensors and hollow ones (fake tensors: shapes without storage), so that one can be held against the
other. Knows nothing of models or stages.

Real until it meets a weight: an operation whose tensors are all real runs for real, so that masks, positions and branches that
hang on them come out as in a real run; whatever touches a hollow weight is hollow from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# What is made inside a hollow module from nothing, or from real tensors, stays real up to these sizes: masks and positions
# are small; a large constant has no values that anything hangs on.
REAL_FLOATS = 2**20
REAL_OTHERS = 2**26
_BROADCASTS = 2**13  # a real input of this many elements might broadcast into something too large to make

Tensors = Iterable[torch.Tensor]


def _fused_cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU's fused attention, which torch's table lacks. Shapes [batch, heads, tokens, head]."""
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


_ATEN = torch.ops.aten
_WRITES = frozenset({_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default, _ATEN.copy_.default})
_FLOPS: dict[Any, Callable[..., int]] = dict(flop_registry)
_FLOPS[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu] = _fused_cpu_attention_flops


@dataclass(slots=True)
class Cost:
    """Of a part of what a tracker follows."""

    peak_bytes: int = 0  # above what was live when it began
    flops: int = 0
    left_bytes: int = 0  # live at its end beyond what was live when it began


class LiveBytes(TorchDispatchMode):
    """`live` bytes now and `peak` bytes at most of all storages made under it; `flops` so far.

    `known`: tensors that are there already (weights): they count nothing. `inputs` count from the start.
    """

    def __init__(self, known: Tensors = (), inputs: Tensors = (), *, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.largest = 0
        self._fake = fake
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self.ignore(tensor)
        for tensor in inputs:
            self.see(tensor)

    # -- storages ---------------------------------------------------------------------------------------------------

    def ignore(self, tensor: torch.Tensor) -> None:
        """The tensor's storage counts nothing from now on."""
        storage = tensor.untyped_storage()
        self.live -= self._sizes.get(storage._cdata, 0)
        self._watch(storage, 0)

    def ignore_weight(self, tensor: torch.Tensor) -> None:
        """As `ignore`, for what a module holds: what it made itself in an earlier call (a cache) has been counted and stays so."""
        if tensor.untyped_storage()._cdata not in self._sizes:
            self.ignore(tensor)

    def size_of(self, storage: Any) -> int:
        """Bytes the storage counts now."""
        return self._sizes.get(storage._cdata, 0)

    def see(self, tensor: torch.Tensor) -> None:
        """The tensor's storage counts from now on, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size = storage.nbytes()
            self._watch(storage, size)
            self.live += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self.live)

    def _watch(self, storage: Any, size: int) -> None:
        key = storage._cdata
        self._sizes[key] = size
        if key not in self._watches:
            self._watches[key] = weakref.ref(storage, lambda _, key=key: self._drop(key))  # type: ignore[misc]

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._watches.pop(key, None)

    def stand_in(self, hollow: Any, base: torch.Tensor) -> None:
        """`base` takes over the bytes of the hollow storage, as if it were the same memory."""
        size = self._sizes.get(hollow._cdata, 0)
        if hollow._cdata in self._sizes:
            self._sizes[hollow._cdata] = 0
        storage = base.untyped_storage()
        self.live -= self._sizes.get(storage._cdata, 0)
        self._watch(storage, size)

    def spike(self, relative_bytes: int, flops: int) -> None:
        """A call that is not played again: its peak above what is live now, and its FLOPs."""
        self.peak = max(self.peak, self.live + relative_bytes)
        self.flops += flops

    @contextmanager
    def measured(self) -> Iterator[Cost]:
        """What is done within, measured by itself; complete at the end."""
        cost = Cost()
        live, flops, peak = self.live, self.flops, self.peak
        self.peak = live
        yield cost
        cost.peak_bytes, cost.flops, cost.left_bytes = self.peak - live, self.flops - flops, self.live - live
        self.peak = max(peak, self.peak)

    # -- operations -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs) if self._fake is None else self._run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self.see(out)
        elif out is not None:
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self._fake is not None
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if func in _WRITES and isinstance(args[0], FakeTensor):
            return args[0]  # writing values into what has none makes nothing; masks are filled row by row, tens of thousands of times
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is torch.ops.aten.index.Tensor:  # hollow values at the places that a real mask names
                args = (args[0], _places(args[1]))
            return func(*args, **kwargs)
        if not tensors or (self.hollow_depth and any(tensor.numel() >= _BROADCASTS for tensor in tensors)):
            return self._maybe_large(func, args, kwargs)
        return func(*args, **kwargs)

    hollow_depth = 0  # calls of hollow modules that are open

    def _maybe_large(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run for real unless the result would be large; then hollow.

        What writes in place, or gives views, stays real: it makes nothing, and a hollow view of a real tensor would count as new.
        """
        if not self.hollow_depth or func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        assert self._fake is not None
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # shapes that hang on values: only a real run can tell
            return func(*args, **kwargs)
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0:
                limit = REAL_FLOATS if leaf.dtype.is_floating_point else REAL_OTHERS
                if leaf.untyped_storage().nbytes() // leaf.element_size() >= limit:
                    return out
        return func(*args, **kwargs)


def _places(indices: Any) -> list[Any]:
    places: list[Any] = []
    for index in indices:
        real = isinstance(index, torch.Tensor) and not isinstance(index, FakeTensor)
        places += list(index.nonzero().unbind(1)) if real and index.dtype == torch.bool else [index]
    return places


def held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor a module holds: parameters, buffers, and those in plain attributes (rope tables, caches)."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in {"_parameters", "_buffers", "_modules"}:
                yield from tensors_in(value, depth=2)


def tensors_in(value: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)

