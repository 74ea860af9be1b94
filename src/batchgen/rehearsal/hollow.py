"""Hollow components: the real class built from its real config, with shapes and dtypes but no storage.

A hollow component is called like a real one. Inside, its own forward runs over fake tensors; what it returns are real zeros of
the right shapes, strides and shared storages, so that any pipeline code around it goes on as usual. A call that was played before
with the same inputs is not played again: its peak and FLOPs are added from the record.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from batchgen.rehearsal.blocks import share_blocks
from batchgen.rehearsal.calls import Call, Rehearsed, Scene, replay, signature
from batchgen.rehearsal.forms import Forms, remade
from batchgen.rehearsal.live import LiveBytes, held_tensors

# How pipelines enter a component. VAEs are entered by encode and decode, the others by forward.
ENTRIES = ("forward", "encode", "decode", "get_image_features", "get_text_features")


def build(
    cls: Any, config: Mapping[str, Any] | Any, dtype: torch.dtype, scene: Scene, *, library: str,
) -> nn.Module:
    """A hollow module of the class, as its loader would leave it: weights in `dtype`, fp32 where the class keeps it, tables tied."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with scene.fake, no_init_weights():
            module: nn.Module = cls.from_config(config) if library != "transformers" else cls(config)
    finally:
        torch.set_default_dtype(before)
    module.eval().requires_grad_(False)
    _cast_as_loaded(module, dtype, scene.fake)
    tie: Any = getattr(module, "tie_weights", None)
    if library == "transformers" and tie is not None:
        with scene.fake:
            tie()
    return module


def _cast_as_loaded(module: nn.Module, dtype: torch.dtype, fake: FakeTensorMode) -> None:
    """Loaders cast every floating weight of the file to the dtype asked for, but for the modules a class keeps in fp32."""
    plan = getattr(module, "_get_dtype_plan", None)
    if plan is not None:  # transformers: names or patterns -> dtype
        kept = tuple(plan(dtype))
    else:
        kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    persistent = set(module.state_dict())

    def as_loaded(name: str) -> torch.dtype | None:
        if name not in persistent:
            return None
        return torch.float32 if any(word in name.split(".") for word in kept) else dtype

    _recast(module, as_loaded, fake)


def _recast(module: nn.Module, wanted: Callable[[str], torch.dtype | None], fake: FakeTensorMode) -> None:
    """Floating weights in the dtype that is wanted for their name; None leaves one as it is. Shared ones stay shared."""
    done: dict[int, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for leaf, tensor in table.items():
                if tensor is None or not tensor.dtype.is_floating_point:
                    continue
                dtype = wanted(f"{prefix}.{leaf}" if prefix else leaf)
                if dtype is not None and dtype != tensor.dtype:
                    if id(tensor) not in done:
                        done[id(tensor)] = _empty_as(tensor, dtype, fake)
                    table[leaf] = done[id(tensor)]


def _empty_as(tensor: torch.Tensor, dtype: torch.dtype, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())


def parameter_count(module: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def enter(module: nn.Module, name: str, scene: Scene, *, repeats: bool = False) -> nn.Module:
    """Wraps the ways into a hollow component. Signatures are kept: stages drop arguments that they do not see in them.

    `repeats`: of equal blocks called with equal inputs one is played for all (sixty of a transformer's cost what one costs).
    """
    if repeats:
        share_blocks(module, scene)
    rehearsed = scene.components.setdefault(name, Rehearsed(name))
    for entry in ENTRIES:
        inner = getattr(module, entry, None)
        if callable(inner):
            setattr(module, entry, _wrapped(inner, entry, module, rehearsed, scene))
    setattr(module, "to", _moved_to(module, scene))  # noqa: B010  torch's own cannot swap hollow weights
    return module


def _moved_to(module: nn.Module, scene: Scene) -> Callable[..., nn.Module]:
    """`module.to`, which some pipelines call for another dtype (a VAE in float32). Devices are not its business here."""

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None:
            _recast(module, lambda name: dtype, scene.fake)
        return module

    return to


def count_calls(module: nn.Module, name: str, scene: Scene) -> nn.Module:
    """The same count of calls over a real component, for holding one run against the other."""
    rehearsed = scene.components.setdefault(name, Rehearsed(name))
    for entry in ENTRIES:
        inner = getattr(module, entry, None)
        if callable(inner):
            setattr(module, entry, _counted(inner, entry, rehearsed.name, scene))
    return module


def _counted(inner: Callable[..., Any], entry: str, name: str, scene: Scene) -> Callable[..., Any]:
    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        scene.called(name, entry)
        return inner(*args, **kwargs)

    return counted


def _wrapped(inner: Callable[..., Any], entry: str, module: nn.Module, rehearsed: Rehearsed, scene: Scene) -> Callable[..., Any]:
    @functools.wraps(inner)
    def hollow_call(*args: Any, **kwargs: Any) -> Any:
        tracker = scene.tracker
        if tracker is None or tracker.hollow_depth:  # called from within: part of the outer call
            return inner(*args, **kwargs)
        gc.collect()
        scene.called(rehearsed.name, entry)
        key = (entry, signature((args, kwargs)))
        records = rehearsed.records.setdefault(key, [])
        # A first call may fill caches that later ones find (rope tables): only a call that left nothing behind stands for the next.
        if records and (records[-1].retained_bytes == 0 or len(records) > 1):
            return replay(records[-1], tracker)
        call, result = _play(inner, args, kwargs, module, tracker, scene)
        rehearsed.played += 1
        records.append(call)
        return result

    return hollow_call


def _play(
    inner: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module, tracker: LiveBytes, scene: Scene,
) -> tuple[Call, Any]:
    for tensor in held_tensors(module):
        tracker.ignore_weight(tensor)
    tracker.hollow_depth += 1
    try:
        with tracker.measured() as cost, _WritesOfNumbers():
            result = inner(*args, **kwargs)
    finally:
        tracker.hollow_depth -= 1
    forms = Forms()
    form = forms.of(result)
    returned = sum(tracker.size_of(storage) for storage in forms.storages)
    call = Call(cost.peak_bytes, cost.flops, cost.left_bytes - returned, form)
    made, bases = remade(form, reals=forms.reals)
    for storage, base in zip(forms.storages, bases, strict=True):
        tracker.stand_in(storage, base)
    return call, made


class _WritesOfNumbers(TorchFunctionMode):
    """`hollow[places] = number` makes nothing and is left out.

    Masks are written row by row, tens of thousands of times for a clip (HunyuanVideo 1.5's VAE), and every such write would be a
    view and a fill of a hollow tensor. Writes to real tensors, of tensors, or to places that tensors name, are carried out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = func is torch.Tensor.__setitem__ and isinstance(args[0], FakeTensor) and isinstance(args[2], int | float)
        if writes and _named_plainly(args[1]):
            return None
        return func(*args, **(kwargs or {}))


def _named_plainly(places: Any) -> bool:
    if isinstance(places, tuple):
        return all(map(_named_plainly, places))
    if isinstance(places, slice):
        return all(end is None or isinstance(end, int) for end in (places.start, places.stop, places.step))
    return places is None or places is Ellipsis or isinstance(places, int)
