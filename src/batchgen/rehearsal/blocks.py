"""Repeated blocks of a hollow component: of equal ones called with equal inputs one is played for all.

Sixty of a transformer's blocks cost what one costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from batchgen.rehearsal.calls import Call, Scene, replay, signature
from batchgen.rehearsal.forms import Forms
from batchgen.rehearsal.live import Cost, LiveBytes, tensors_in


def share_blocks(module: nn.Module, scene: Scene) -> None:
    """Lets one block of each list in the module stand for all that are alike and called alike."""
    inside: set[int] = set()
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) > 2 and id(part) not in inside:
            for nested in part.modules():
                inside.add(id(nested))
            records: dict[Any, Call | None] = {}
            for block in part:
                block.forward = _shared(block.forward, _block_key(block), records, scene)


def _block_key(block: nn.Module) -> Any:
    """What makes two blocks behave alike: class, plain attributes, and the shapes and dtypes of the weights."""
    plain = tuple(sorted((key, repr(value)) for key, value in vars(block).items() if isinstance(value, str | int | float | bool)))
    weights = tuple((key, tuple(value.shape), value.dtype) for key, value in block.named_parameters())
    return type(block), plain, weights


def _shared(inner: Callable[..., Any], block: Any, records: dict[Any, Call | None], scene: Scene) -> Callable[..., Any]:
    @functools.wraps(inner)
    def shared(*args: Any, **kwargs: Any) -> Any:
        tracker = scene.tracker
        if tracker is None:
            return inner(*args, **kwargs)
        key = (block, signature((args, kwargs)))
        call = records.get(key)
        if call is not None:
            return replay(call, tracker, list(tensors_in((args, kwargs))), scene.fake)
        with tracker.measured() as cost:
            result = inner(*args, **kwargs)
        if key not in records and (block, signature((args, kwargs))) != key:
            records[key] = None  # it wrote into its arguments (a cache of frames), which a record would not
        elif key not in records:
            records[key] = _recorded(result, (args, kwargs), cost, tracker)
        return result

    return shared


def _recorded(result: Any, inputs: Any, cost: Cost, tracker: LiveBytes) -> Call | None:
    """The record of a block's call; None where another call could differ: it left a cache, or gave views of its inputs."""
    given = list(tensors_in(inputs))
    places = {id(tensor): place for place, tensor in enumerate(given)}
    forms = Forms(places)
    form = forms.of(result)
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    if any(storage._cdata in storages for storage in forms.storages) or forms.reals:
        return None
    if cost.left_bytes != sum(tracker.size_of(storage) for storage in forms.storages):
        return None
    return Call(cost.peak_bytes, cost.flops, 0, form)
