"""Cuts a component over the ranks of a group: every repeated block's weights are held in parts and gathered while it runs.

Carried out by `torch.distributed.fsdp.fully_shard`. Whole on every rank stay: weights outside the blocks, weights of another dtype than
their block's (fully_shard gathers one dtype), weights that several places share or that have no row for some rank, and components that
are not worth it. Knows nothing of files, jobs or stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from batchgen.execute.group import RankGroup
from batchgen.execute.streaming import find_blocks

WORTH_IT = 0.05  # of a component's bytes that must lie in blocks
# How pipelines enter a component besides `forward`.
ENTRIES = ("encode", "decode", "get_image_features", "get_text_features")


class NotSharded(Exception):
    """The component stays whole on every rank; the text says why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Which of a module's parameters are cut, by block. `whole` are those that stay."""

    blocks: tuple[tuple[str, nn.Module, tuple[nn.Parameter, ...]], ...]
    whole: tuple[nn.Parameter, ...]

    @property
    def sharded_bytes(self) -> int:
        return sum(weight.nbytes for _, _, weights in self.blocks for weight in weights)


def find_cut(module: nn.Module, ranks: int) -> Cut:
    """Per repeated block its weights of the block's main dtype that nothing else holds and that have a row for every rank."""
    blocks = find_blocks(module)
    places: dict[int, int] = {}
    for owner in module.modules():
        for weight in owner._parameters.values():
            if weight is not None:
                places[id(weight)] = places.get(id(weight), 0) + 1
    chosen, taken = [], set()
    for path, block in blocks:
        weights = list(block.parameters())
        dtype = _main_dtype(weights)
        own = tuple(
            weight for weight in weights
            if weight.dtype == dtype and places[id(weight)] == 1 and type(weight) is nn.Parameter
            and weight.dim() and weight.shape[0] >= ranks
        )
        if own:
            chosen.append((path, block, own))
            taken |= {id(weight) for weight in own}
    return Cut(tuple(chosen), tuple(weight for weight in module.parameters() if id(weight) not in taken))


def _main_dtype(weights: Iterable[nn.Parameter]) -> torch.dtype | None:
    """The floating dtype with most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for weight in weights:
        if weight.is_floating_point():
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def shard(module: nn.Module, group: RankGroup) -> Cut:
    """Cuts the module over the group's ranks, in place. Meta weights stay meta, in parts. Raises NotSharded where nothing is worth it."""
    cut = find_cut(module, group.size)
    total = sum(weight.nbytes for weight in module.parameters())
    if not cut.blocks:
        raise NotSharded(f"{type(module).__name__} has no repeated blocks to shard")
    if cut.sharded_bytes < WORTH_IT * total:
        raise NotSharded(f"its blocks hold {100 * cut.sharded_bytes // total} % of its weights: not worth sharding")
    mesh, gather, whole = group.mesh, VotedGather(group), set(cut.whole)
    for _, block, weights in cut.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=set(block.parameters()) - set(weights))
        _sharded(block).set_custom_all_gather(gather)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    _gather_ahead([(path, _sharded(block)) for path, block, _ in cut.blocks])
    for entry in ENTRIES:
        if callable(getattr(module, entry, None)):
            register_fsdp_forward_method(module, entry)
    return cut


def _sharded(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module


def _gather_ahead(blocks: Sequence[tuple[str, Any]]) -> None:
    """The next block of the same list is gathered beside a block's work: two are whole at once."""
    for (path, block), (following, other) in itertools.pairwise(blocks):
        if path.rpartition(".")[0] == following.rpartition(".")[0]:
            block.set_modules_to_forward_prefetch([other])


class VotedGather:
    """The gather of a block's parts (torch's AllGather), after a vote: a rank that failed before it is not waited for."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        return self._group.gather_into(output_tensor, input_tensor, group, async_op=async_op)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it (torch's DTensor)."""
    return hasattr(tensor, "to_local")


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def rest(module: nn.Module) -> None:
    """Between two batches: nothing gathered, no trace of a forward that broke off, and no record kept for a backward that never comes.

    (Without it torch notes every block's every call until a backward, which over a night is gigabytes.)
    """
    own: Any = module
    state = own._get_fsdp_state()
    if state._is_root is None:  # never run
        return
    if hasattr(own, "reset_iter_state"):
        own.reset_iter_state()
        return
    for part in state._state_ctx.all_states:  # torch before it had a call for this
        part._training_state = type(part._training_state).IDLE
        groups = getattr(part, "_fsdp_param_groups", None)
        for weights in groups if groups is not None else filter(None, (part._fsdp_param_group,)):
            _end_forward(weights)
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = None
    state._state_ctx.iter_forward_root = None


def _end_forward(weights: Any) -> None:
    pending = weights._all_gather_result
    if pending is not None and pending.all_gather_event is not None:
        weights.device_handle.current_stream().wait_event(pending.all_gather_event)
    weights._all_gather_result = None
    weights._post_forward_indices.clear()
    weights._training_state = type(weights._training_state).IDLE
    weights._to_sharded()
