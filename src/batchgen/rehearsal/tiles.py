"""Tiles of a hollow autoencoder: of equal ones one is played for all. A large picture has hundreds, and seams are blended line by line.

Video autoencoders hand a cache of frames from call to call, as lists among the arguments. What a call leaves in them belongs to its
record: equal caches before give equal caches after.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchgen.rehearsal.calls import Call, Scene, signature
from batchgen.rehearsal.forms import Forms, remade
from batchgen.rehearsal.live import Cost, LiveBytes, tensors_in

# What autoencoders do to each tile, by the names that diffusers' classes share.
_PARTS = ("encoder", "decoder", "quant_conv", "post_quant_conv")
_METHODS = ("blend_v", "blend_h", "blend_t")


def share_tiles(vae: nn.Module, scene: Scene) -> None:
    """Lets one tile stand for all that are called alike: same shapes, same caches."""
    for name in _PARTS:
        part = getattr(vae, name, None)
        if isinstance(part, nn.Module):
            part.forward = shared(part.forward, scene)
    for name in _METHODS:
        method = getattr(vae, name, None)
        if callable(method):
            setattr(vae, name, shared(method, scene))


def shared(inner: Callable[..., Any], scene: Scene) -> Callable[..., Any]:
    """The call, played once for all calls with equal arguments; lists among them are left as the played call left its own."""
    records: dict[Any, Call | None] = {}

    @functools.wraps(inner)
    def once(*args: Any, **kwargs: Any) -> Any:
        tracker = scene.tracker
        if tracker is None:
            return inner(*args, **kwargs)
        key = signature((args, kwargs))
        call = records.get(key)
        if call is not None:
            return _replay(call, args, kwargs, tracker, scene)
        given = [weakref.ref(tensor) for tensor in tensors_in((args, kwargs))]
        sizes = {tensor.untyped_storage()._cdata: tracker.size_of(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        with tracker.measured() as cost:
            result = inner(*args, **kwargs)
        if key not in records:
            records[key] = _recorded(result, _lists(args, kwargs), given, sizes, cost, tracker)
        return result

    return once


def _lists(args: Any, kwargs: Any) -> list[list[Any]]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, list)]


def _recorded(
    result: Any, lists: list[list[Any]], given: list[weakref.ref[torch.Tensor]], sizes: dict[int, int], cost: Cost,
    tracker: LiveBytes,
) -> Call | None:
    """The record; None where another call could differ: something else was left behind, or views of what was given came out.

    `given`: the tensors among the arguments; `sizes`: bytes of their storages.
    """
    there = [(place, tensor) for place, ref in enumerate(given) if (tensor := ref()) is not None]
    forms = Forms({id(tensor): place for place, tensor in there})
    form = forms.of((result, [list(values) for values in lists]))
    kept = {tensor.untyped_storage()._cdata for _, tensor in there}
    if forms.reals or any(storage._cdata in kept for storage in forms.storages):
        return None
    freed = sum(size for storage, size in sizes.items() if storage not in kept)
    if cost.left_bytes != sum(tracker.size_of(storage) for storage in forms.storages) - freed:
        return None
    return Call(cost.peak_bytes, cost.flops, 0, form)


def _replay(call: Call, args: Any, kwargs: Any, tracker: LiveBytes, scene: Scene) -> Any:
    tracker.spike(call.peak_bytes, call.flops)
    (result, contents), storages = remade(call.result, inputs=list(tensors_in((args, kwargs))), fake=scene.fake)
    for values, left in zip(_lists(args, kwargs), contents, strict=True):
        values[:] = left  # what a cache held before goes first
    for tensor in storages:
        tracker.see(tensor)
    return result
