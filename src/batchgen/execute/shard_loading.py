"""Loads a component in parts: each rank reads its own rows of what is cut, and what stays whole, and nothing else of the weight files.

The component is built without weights, cut over the group, and then filled, so that no rank ever holds all of it. What the libraries'
loaders do besides (dtypes, parts kept in fp32, stored buffers, tied weights) is done here in their way, and a test holds it to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.execute.group import RankGroup
from batchgen.execute.load import ModelFolder, default_dtype, looks_plausible
from batchgen.execute.sharding import NotSharded, is_cut, shard
from batchgen.inventory.weights import choose


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
    module._apply(lambda tensor: torch.empty_like(tensor, device=group.device) if is_cut(tensor) else tensor)
    shards = _Filling(module, stored, group, dtype).fill()
    sizes = [sum(weight.nbytes for weight in weights) for _, _, weights in cut.blocks]
    return module, Shards(
        name, group.rank, len(cut.blocks), sum(sizes), shards.own_bytes, shards.whole_bytes, max(sizes), stored.read_bytes,
        stored.file_bytes,
    )


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
    with folder.naming(name), default_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
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
                if is_cut(weight):
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
