"""Loads each component once, just before the first stage that calls it, and hands it to its placement, its meter and its stages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from batchgen.errors import ModelError
from batchgen.events import ComponentLoaded, Emit
from batchgen.execute.attention import set_attention
from batchgen.execute.compiling import compile_blocks
from batchgen.execute.load import ModelFolder, torch_dtype
from batchgen.execute.loras import Loras
from batchgen.execute.memory import host_memory
from batchgen.execute.meter import Meter
from batchgen.execute.recovery import free_after_oom
from batchgen.execute.residency import Residency
from batchgen.execute.settings import EngineSettings
from batchgen.execute.stages import Stages


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

    def _load(self, name: str) -> None:
        start = time.perf_counter()
        if name not in dict(self.settings.dtypes):
            raise ModelError(f"{name}: the plan names no dtype for it")
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
        set_attention(name, module, self.settings.attention_backend)
        if self.settings.compile_blocks and compile_blocks(name, module, self.residency.mode(name)):
            self.residency.fix(name)
        size = sum({id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}.values())
        self.meter.watch(name, module)
        self.modules[name] = module
        self.residency.add(name, module)
        for stages in self.roads:
            stages.give(name, module)
        files = tuple(sorted(f"{name}/{file.name}" for file in (self.folder.path / name).glob("*.safetensors")))
        self.emit(ComponentLoaded(self.worker, name, self.residency.mode(name), size, time.perf_counter() - start, files))
