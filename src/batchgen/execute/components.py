"""Loads each component once, just before the first stage that calls it, and hands it to its placement, its meter and its stages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.events import ComponentLoaded, Emit
from batchgen.execute.attention import set_attention
from batchgen.execute.compiling import compile_blocks
from batchgen.execute.group import Alone, RankGroup
from batchgen.execute.load import ModelFolder, torch_dtype
from batchgen.execute.loras import Loras
from batchgen.execute.memory import host_memory
from batchgen.execute.meter import Meter
from batchgen.execute.recovery import free_after_oom
from batchgen.execute.residency import Residency
from batchgen.execute.settings import EngineSettings
from batchgen.execute.shard_loading import Shards, load_sharded
from batchgen.execute.sharding import NotSharded
from batchgen.execute.shared_host import share_weights
from batchgen.execute.stages import Stages
from batchgen.plan.records import MODES
from batchgen.units import size_text


@dataclass(slots=True)
class Components:
    """The model's weights in this process. `ensure` loads what is not there yet."""

    settings: EngineSettings
    folder: ModelFolder
    residency: Residency
    meter: Meter
    emit: Emit
    worker: int
    loras: Loras = field(default_factory=Loras)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    roads: list[Stages] = field(default_factory=list)
    shards: dict[str, Shards] = field(default_factory=dict)  # of cut components, this rank's
    _settled: set[str] = field(default_factory=set)  # components whose placement the ranks of a group have agreed on

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: torch_dtype(dtype) for name, dtype in self.settings.dtypes}

    def add_road(self, stages: Stages) -> None:
        """Stages built later share what is loaded already."""
        self.roads.append(stages)
        for name, module in self.modules.items():
            stages.give(name, module)

    def ensure(self, names: Iterable[str]) -> None:
        """Raises ModelError for weights that do not load; torch.OutOfMemoryError where the device is too small for them."""
        for name in names:
            if name not in self.modules:
                self._load(name)

    @property
    def group(self) -> Alone:
        return self.residency.group

    def settle(self, names: Iterable[str]) -> None:
        """After every rank has loaded them: one placement for each on all ranks, the leanest that one of them came to."""
        fresh = [name for name in names if name in self.modules and name not in self._settled]
        if not fresh or self.group.size == 1:
            return
        told = self.group.gather(({name: self.residency.mode(name) for name in fresh}, [self.shards.get(name) for name in fresh]))
        for index, name in enumerate(fresh):
            modes = [rank[0][name] for rank in told]
            if len(set(modes)) > 1:
                self.residency.replan(name, max(modes, key=MODES.index))
            shards = [part for rank in told if (part := rank[1][index]) is not None]
            if shards:
                self._tell(shards)
            self._settled.add(name)

    def _tell(self, ranks: list[Shards]) -> None:
        first = ranks[0]
        text = (
            f"{first.component}: {first.blocks} blocks, {size_text(first.sharded_bytes)}, sharded over {len(ranks)} ranks; "
            f"{size_text(first.whole_bytes)} whole on each. Ranks read {', '.join(size_text(part.read_bytes) for part in ranks)} and hold "
            f"{', '.join(size_text(part.held_bytes) for part in ranks)}."
        )
        numbers: dict[str, int] = {
            "ranks": len(ranks), "blocks": first.blocks, "sharded_bytes": first.sharded_bytes, "whole_bytes": first.whole_bytes,
            "block_bytes": first.largest_block_bytes, "file_bytes": first.file_bytes,
        }
        for part in ranks:
            numbers |= {f"held_bytes_{part.rank}": part.held_bytes, f"read_bytes_{part.rank}": part.read_bytes}
        self.residency.decide(first.component, "fsdp", text, **numbers)

    def _cut(self, name: str) -> nn.Module | None:
        """The component in parts; None where it stays whole on every rank, which the trail then says."""
        assert isinstance(self.group, RankGroup)
        if self.loras.touching([name]):
            raise ModelError(f"{name} takes a LoRA, and it is sharded", hint="leave --lora out, or use --no-fsdp")
        try:
            module, shards = load_sharded(
                self.folder, name, self.dtypes[name], self.group, variant=dict(self.settings.variants).get(name),
            )
        except NotSharded as reason:
            self.residency.replan(name, "resident")
            self.residency.decide(name, "resident", f"{name} is whole on every rank: {reason}")
            return None
        self.shards[name] = shards
        return module

    def _load(self, name: str) -> None:
        start = time.perf_counter()
        if name not in dict(self.settings.dtypes):
            raise ModelError(f"{name}: the plan names no dtype for it")
        cut = self._cut(name) if self.residency.mode(name) == "fsdp" and self.group.size > 1 else None
        module = cut if cut is not None else self._whole(name)
        set_attention(name, module, self.settings.attention_backend)
        if self.settings.compile_blocks and compile_blocks(name, module, self.residency.mode(name)):
            self.residency.fix(name)
        tensors = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
        size = self.shards[name].held_bytes if cut is not None else sum(tensors.values())
        self.meter.watch(name, module)
        self.modules[name] = module
        if self.settings.share_weights and cut is None and self.residency.device.type == "cpu" and self.residency.mode(name) == "resident":
            share_weights(name, module, Path(self.settings.run_folder) / "spool")
        self.residency.add(name, module)
        for stages in self.roads:
            stages.give(name, module)
        files = tuple(sorted(f"{name}/{file.name}" for file in (self.folder.path / name).glob("*.safetensors")))
        self.emit(ComponentLoaded(self.worker, name, self.residency.mode(name), size, time.perf_counter() - start, files))

    def _whole(self, name: str) -> nn.Module:
        """The component as its loader makes it, with its adapters."""
        device = self.residency.device
        straight = device if self.residency.mode(name) == "resident" else None
        variant = dict(self.settings.variants).get(name)
        try:
            with host_memory() if device.type == "cpu" else nullcontext():  # the placement makes the device's copy
                module = self.folder.load_model(name, self.dtypes[name], variant=variant, device=straight)
        except torch.OutOfMemoryError as error:
            # onto the host instead: the placement then finds the leaner way, or says that there is none
            free_after_oom(error)
            module = self.folder.load_model(name, self.dtypes[name], variant=variant)
        with host_memory() if device.type == "cpu" else nullcontext():
            self.loras.attach(name, module)
        return module
