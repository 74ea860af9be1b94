"""A `cuda:0` that is not there: what the pipeline computes on it is computed on the CPU, what meets a weight is hollow.

Tensors on it say that they are on `cuda:0`. Mixing them with tensors on the host is the error that a GPU makes of it. Inside
components everything is PyTorch's fake `cuda:0`; what comes out of them has values again, all ones, so that branches of the pipeline
that hang on values go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda:0")
_ATEN = torch.ops.aten
# What a GPU does between devices: copies, and picking by places that lie on the host.
_ACROSS = frozenset({_ATEN._to_copy, _ATEN.copy_, _ATEN.index, _ATEN.index_put_, _ATEN.index_put})


class OnDevice(torch.Tensor):
    """A tensor on the pretended device; `inner` holds its values on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=CUDA)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the pretended device")


class _Indexing(TorchFunctionMode):
    """What torch does for real devices alone, in plain operations: `tensor[places]` and `contiguous` ask for the device's guard, which
    a torch without CUDA lacks, and values are read from memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and args[0].device == CUDA:
            view, places = _viewed(args[0], args[1])
            return _ATEN.index.Tensor(view, places) if places else view
        if func is torch.Tensor.__setitem__ and args[0].device == CUDA:
            view, places = _viewed(args[0], args[1])
            value = args[2] if isinstance(args[2], torch.Tensor) else torch.full((), args[2], dtype=view.dtype, device=CUDA)
            if places:
                _ATEN.index_put_.default(view, places, value)
            else:
                _ATEN.copy_.default(view, value)
            return None
        if func is torch.Tensor.copy_ and args[0].device == CUDA:
            return _ATEN.copy_.default(*args, **(kwargs or {}))
        if func is torch.Tensor.contiguous and args[0].device == CUDA:
            form = (kwargs or {}).get("memory_format", torch.contiguous_format)
            return args[0] if args[0].is_contiguous(memory_format=form) else args[0].clone(memory_format=form)
        if func in (torch.Tensor.nonzero, torch.nonzero) and args[0].device == CUDA:
            return _ATEN.nonzero.default(args[0])
        if func in (torch.Tensor.tolist, torch.Tensor.item) and isinstance(args[0], OnDevice):
            return func(args[0].inner)
        return func(*args, **(kwargs or {}))


def _viewed(tensor: torch.Tensor, places: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that whole numbers, slices, None and ... name, and for each of its dimensions the tensor of places, if any has one."""
    places = list(places) if isinstance(places, tuple) else [places]
    taken = sum((place.dim() if place.dtype == torch.bool else 1) if isinstance(place, torch.Tensor) else place not in (None, ...)
                for place in places)  # fmt: skip
    at = next((number for number, place in enumerate(places) if place is ...), len(places))
    places[at : at + 1] = [slice(None)] * (tensor.dim() - taken)
    dim, found = 0, list[torch.Tensor | None]()  # a mask stands for all the dimensions that it has
    for place in places:
        if place is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
            found.append(None)
        elif isinstance(place, slice):
            start, end, step = place.indices(tensor.shape[dim])
            tensor, dim = _ATEN.slice.Tensor(tensor, dim, start, max(start, end), step), dim + 1
            found.append(None)
        elif isinstance(place, int):
            tensor = tensor.select(dim, place)
        else:
            place = torch.as_tensor(place) if not isinstance(place, torch.Tensor) else place
            found.append(place)
            dim += place.dim() if place.dtype == torch.bool else 1
    return tensor, found if any(place is not None for place in found) else []


class PretendedDevice(TorchDispatchMode):
    """While it is entered, `cuda:0` can be used. `component` marks what is called with hollow weights."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.depth = 0
        self._below = FakeTensorMode(allow_non_fake_inputs=True)  # nothing asks for a driver while one is active
        self._indexing = _Indexing()

    def __enter__(self) -> PretendedDevice:
        self._below.__enter__()
        self._indexing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._indexing.__exit__(*raised)
        self._below.__exit__(*raised)

    @property
    def _asked_for_hollow(self) -> bool:
        """Whether the code at work has entered the components' own fake mode."""
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is self.fake

    def component(self, module: nn.Module) -> nn.Module:
        """Calls of the module (forward, encode, decode) are hollow inside, and so is all that it holds."""
        for part in module.modules():
            for store in (part._parameters, part._buffers):
                for name, tensor in store.items():
                    if tensor is not None and not isinstance(tensor, FakeTensor):
                        store[name] = self.fake.from_tensor(tensor)
        for entry in ("forward", "encode", "decode"):
            inner = getattr(module, entry, None)
            if callable(inner):
                setattr(module, entry, self._inside(inner))
        return module

    def _inside(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self.depth -= 1

        return inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inside = self.depth or func.overloadpacket is _ATEN.detach  # a parameter is made by detaching
        if self._asked_for_hollow or (inside and any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            with self.fake:
                args, kwargs = tree_map(self._hollow, (args, kwargs))
                return func(*args, **kwargs)
        args, kwargs = tree_map(self._valued, (args, kwargs))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = _asked(kwargs) or (CUDA if any(isinstance(tensor, OnDevice) for tensor in tensors) else None)
        self._check(func, tensors)
        return self._carried_out(func, args, kwargs, device)

    def _hollow(self, value: Any) -> Any:
        if not isinstance(value, OnDevice):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    def _valued(self, value: Any) -> Any:
        """What a component gave, as ones (guidance divides by norms) on the device that it is on."""
        if not isinstance(value, FakeTensor):
            return value
        with _disable_current_modes():
            ones = torch.ones(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
            ones = ones.as_strided(value.shape, value.stride(), value.storage_offset())
        return OnDevice(ones) if value.device == CUDA else ones

    @staticmethod
    def _check(func: Any, tensors: list[torch.Tensor]) -> None:
        places = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, OnDevice)}
        if len(places) > 1 and func.overloadpacket not in _ACROSS:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")

    @staticmethod
    def _carried_out(func: Any, args: Any, kwargs: Any, device: torch.device | None) -> Any:
        where = {"device": torch.device("cpu")} if "device" in kwargs else {}
        plain_args, plain = tree_map(lambda value: value.inner if isinstance(value, OnDevice) else value, (args, kwargs))
        with _disable_current_modes():
            out = func(*plain_args, **(plain | where))
        if func._schema.is_mutable and isinstance(args[0] if args else None, torch.Tensor) and out is plain_args[0]:
            return args[0]
        if device != CUDA:
            return out
        return tree_map(lambda value: OnDevice(value) if isinstance(value, torch.Tensor) else value, out)


def _asked(kwargs: Any) -> torch.device | None:
    found = kwargs.get("device")
    return None if found is None else torch.device(found)
