"""Cuts a component over the ranks of a group: every repeated block's weights are held in parts and gathered while it runs.

Carried out by `torch.distributed.fsdp.fully_shard`. Each rank reads its own parts of the weight files and nothing else of what is
cut. Whole on every rank stay: weights outside the blocks, weights of another dtype than their block's (fully_shard gathers one
dtype), weights that several places share, and components that are not worth it. Knows nothing of jobs or stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from batchgen.errors import ModelError
from batchgen.execute.group import RankGroup
from batchgen.execute.load import ModelFolder, default_dtype, looks_plausible
from batchgen.execute.streaming import find_blocks
from batchgen.inventory.weights import choose

WORTH_IT = 0.05  # of a component's bytes that must lie in blocks
# How pipelines enter a component besides `forward`.
ENTRIES = ("encode", "decode", "get_image_features", "get_text_features")


@dataclass(frozen=True, slots=True)
class Shards:
    """What one rank holds of a cut component. Bytes."""

    component: str
    rank: int
    blocks: int
    sharded_bytes: int  # of all that is cut, over all ranks
    own_bytes: int  # this rank's parts of it
    whole_bytes: int  # held by every rank
    largest_block_bytes: int  # what is cut of it
    read_bytes: int = 0  # from the weight files, by this rank
    file_bytes: int = 0  # of all weights in them

    @property
    def held_bytes(self) -> int:
        return self.own_bytes + self.whole_bytes


class NotSharded(Exception):
    """The component stays whole on every rank; the text says why."""


# -- what is cut ----------------------------------------------------------------------------------------------------


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


# -- loading --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoredWeights:
    """A component's safetensors files. `read_bytes` counts what was read of them."""

    name: str
    files: Mapping[str, Any]  # weight -> its open file
    read_bytes: int = 0

    @classmethod
    def open(cls, folder: ModelFolder, name: str, variant: str | None) -> StoredWeights:
        """Raises NotSharded for files in another form, ModelError for unreadable ones."""
        from safetensors import SafetensorError, safe_open

        part = folder.path / name
        listing = [f"{name}/{path.name}" for path in sorted(part.iterdir()) if path.is_file()]
        chosen = choose(name, folder.entries[name][0], listing, lambda path: _text(folder.path / path), variant=variant, allow_pickle=True)
        if chosen.fault:
            raise ModelError(chosen.fault)
        if chosen.pickle:
            raise NotSharded("its weights are pickles, which cannot be read in parts")
        files: dict[str, Any] = {}
        try:
            for path in chosen.files:
                opened = safe_open(folder.path / path, framework="pt")
                files.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{part}: {error}", hint="the download or conversion is damaged") from error
        return cls(name, files)

    @property
    def file_bytes(self) -> int:
        sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
        parts = ((file.get_slice(key), key) for key, file in self.files.items())
        return sum(torch.Size(part.get_shape()).numel() * sizes.get(part.get_dtype(), 1) for part, _ in parts)

    def read(self, key: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The weight, or `rows` (first, end) of it. Raises ModelError where its shape is not the module's."""
        part = self.files[key].get_slice(key)
        if list(part.get_shape()) != list(shape):
            raise ModelError(f"{self.name}: {key} is {list(part.get_shape())} in its file and {list(shape)} in its config")
        found: torch.Tensor = self.files[key].get_tensor(key) if rows is None or not shape else part[rows[0] : rows[1]]
        self.read_bytes += found.nbytes
        return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def load_sharded(
    folder: ModelFolder, name: str, dtype: torch.dtype, group: RankGroup, *, variant: str | None = None,
) -> tuple[nn.Module, Shards]:
    """The component in eval mode, cut over the group, its weights on the group's device.

    Raises NotSharded where it stays whole (to be loaded like any other), ModelError for missing or wrong weights.
    """
    module = _hollow(folder, name, dtype)
    stored = StoredWeights.open(folder, name, variant)
    wanted = set(module.state_dict())
    if not any(key in stored.files for key in wanted):
        raise NotSharded("its files name their weights otherwise than its class does")
    cut = shard(module, group)
    # a part of every cut weight on the device; the others are made as they are read
    module._apply(lambda tensor: torch.empty_like(tensor, device=group.device) if _is_cut(tensor) else tensor)
    shards = _Filling(module, stored, group, dtype).fill()
    sizes = [sum(weight.nbytes for weight in weights) for _, _, weights in cut.blocks]
    return module, Shards(
        name, group.rank, len(cut.blocks), sum(sizes), shards.own_bytes, shards.whole_bytes, max(sizes), stored.read_bytes,
        stored.file_bytes,
    )


def _is_cut(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _hollow(folder: ModelFolder, name: str, dtype: torch.dtype) -> nn.Module:
    """The component as its own loader would leave it, with meta weights in their final dtypes and real buffers."""
    from accelerate import init_empty_weights
    from diffusers import ModelMixin
    from diffusers.models.modeling_utils import no_init_weights

    cls: Any = folder.component_class(name)
    if not issubclass(cls, ModelMixin):
        raise NotSharded(f"{cls.__name__} is not one of diffusers' models")
    config = cls.load_config(str(folder.path), subfolder=name)
    if "quantization_config" in config:
        raise NotSharded("its weights are quantised")
    with default_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
        module: nn.Module = cls.from_config(config)
    module.eval().requires_grad_(False)
    done: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        for key, weight in part._parameters.items():
            if weight is None or not weight.is_floating_point():
                continue
            if id(weight) not in done:
                done[id(weight)] = nn.Parameter(weight.to(_final_dtype(module, f"{path}.{key}", dtype)), requires_grad=False)
            part._parameters[key] = done[id(weight)]
    return module


def _final_dtype(module: nn.Module, key: str, dtype: torch.dtype) -> torch.dtype:
    """What the loader gives a stored floating tensor: the dtype asked for, or fp32 in parts that the class keeps so."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in kept for part in key.split(".")) else dtype


@dataclass(slots=True)
class _Filling:
    """Gives every weight and stored buffer of a cut module its values."""

    module: nn.Module
    stored: StoredWeights
    group: RankGroup
    dtype: torch.dtype
    own_bytes: int = 0
    whole_bytes: int = 0
    _done: dict[int, nn.Parameter] = field(default_factory=dict)

    def fill(self) -> _Filling:
        keys = self._keys()
        persistent = set(self.module.state_dict())
        for path, part in self.module.named_modules():
            for key, weight in list(part._parameters.items()):
                if weight is None:
                    continue
                source = keys[id(weight)]
                if _is_cut(weight):
                    self._fill_part(source, weight)
                else:
                    part._parameters[key] = self._whole(source, weight)
            for key, buffer in list(part._buffers.items()):
                if buffer is not None:
                    name = f"{path}.{key}".removeprefix(".")
                    part._buffers[key] = self._buffer(name if name in persistent else None, buffer)
        return self

    def _keys(self) -> dict[int, str]:
        """Each weight's name in the files; tied ones lie there under one of theirs. Raises ModelError for what is in none."""
        names: dict[int, list[str]] = {}
        for key, weight in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(key)
        found = {weight: next((key for key in keys if key in self.stored.files), None) for weight, keys in names.items()}
        lost = [names[weight][0] for weight, key in found.items() if key is None]
        if lost:
            raise ModelError(
                f"{self.stored.name}: {len(lost)} weights are not in its files, {lost[0]} first",
                hint="the download or conversion is incomplete",
            )
        return {weight: key for weight, key in found.items() if key is not None}

    def _fill_part(self, key: str, weight: Any) -> None:
        """Rows as torch deals them out: equal runs of ceil(rows / ranks), the last ones shorter or empty."""
        rows, local = int(weight.shape[0]), weight.to_local()
        run = -(-rows // self.group.size)
        first, end = min(self.group.rank * run, rows), min((self.group.rank + 1) * run, rows)
        if local.shape != torch.Size((end - first, *weight.shape[1:])):
            raise ModelError(f"{self.stored.name}: {key}: torch cut {tuple(local.shape)} where rows {first} to {end} were expected")
        self.own_bytes += local.nbytes
        if first < end:
            local.copy_(self.stored.read(key, weight.shape, (first, end)))
            self._check(key, local)

    def _whole(self, key: str, weight: nn.Parameter) -> nn.Parameter:
        if id(weight) not in self._done:
            value = self.stored.read(key, weight.shape).to(self.group.device, weight.dtype, copy=True)
            self._check(key, value)
            self.whole_bytes += value.nbytes
            self._done[id(weight)] = nn.Parameter(value, requires_grad=False)
        return self._done[id(weight)]

    def _buffer(self, key: str | None, buffer: torch.Tensor) -> torch.Tensor:
        value = buffer
        if key is not None and key in self.stored.files:
            value = self.stored.read(key, buffer.shape)
            value = value.to(_final_dtype(self.module, key, self.dtype)) if value.is_floating_point() else value
        value = value.to(self.group.device)
        self.whole_bytes += value.nbytes
        return value

    def _check(self, key: str, value: torch.Tensor) -> None:
        if value.is_floating_point() and not looks_plausible(value):
            raise ModelError(f"{self.stored.name}: {key} holds values that are not numbers", hint="the weight file is damaged")
