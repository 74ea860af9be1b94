"""Small modules of shapes that are hard to shard, run in parts and whole. `differences` is called by every rank of a group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from batchgen.execute.sharding import NotSharded, rest, shard

WIDTH = 16


def groups_of(module: Any) -> list[Any]:
    """What torch gathers together for this module; older versions have one group at most."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups if groups is not None else filter(None, (state._fsdp_param_group,)))


class Block(nn.Module):
    """bf16 linears with an fp32 norm between them, as Wan and T5 keep theirs, and a table of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24, dtype=torch.bfloat16), nn.Linear(24, WIDTH, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(24, dtype=torch.float32)
        self.table = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.up(x + self.table).float()).to(torch.bfloat16)
        return x + self.down(inner)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Picture(Stack):
    """Entered by other methods than `forward`, which some inputs alone do."""

    def get_image_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 2


class Tied(Stack):
    """A weight that two blocks share, and one that a block shares with what is outside."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.blocks
        blocks[1].up.weight = blocks[0].up.weight
        self.last = nn.Linear(24, WIDTH, dtype=torch.bfloat16)
        self.last.weight = blocks[2].down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.last(torch.cat([x, x[..., :8]], dim=-1))


class Plain(nn.Module):
    """Nothing repeated: as a VAE or a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def broken_off(link: Any, x: torch.Tensor) -> dict[str, float]:
    """A forward that raises in its second block, and a whole one after it: with torch's own call for that, and without (older torch)."""
    whole, found = made(Stack), {}
    for how in ("own", "older torch"):
        module: Any = copy.deepcopy(whole).to(link.device)
        shard(module, link)
        kept = getattr(FSDPModule, "reset_iter_state", None)
        handle = module.blocks[1].up.register_forward_hook(_raise)
        if how == "older torch" and kept is not None:
            del FSDPModule.reset_iter_state  # type: ignore[misc]
        try:
            with torch.no_grad():
                with contextlib.suppress(ZeroDivisionError):
                    module(x.to(link.device))
                handle.remove()
                rest(module)
                found[how] = float((whole(x) - module(x.to(link.device)).cpu()).abs().max())
                rest(module)
            assert not any(group.is_unsharded for block in module.blocks for group in groups_of(block))
        finally:
            if kept is not None:
                FSDPModule.reset_iter_state = kept  # type: ignore[method-assign]
    return found


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def differences(link: Any) -> dict[str, Any]:
    """By module and entry: the largest difference between the whole module's output and the sharded one's, and what stayed whole."""
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found: dict[str, Any] = {}
    for name, build, entry in (
        ("mixed dtypes", Stack, "forward"), ("another entry", Picture, "get_image_features"), ("tied", Tied, "forward"),
    ):
        whole = made(build)
        module = copy.deepcopy(whole).to(link.device)
        cut = shard(module, link)
        for _ in range(2):
            with torch.no_grad():
                call = module if entry == "forward" else getattr(module, entry)
                apart = (getattr(whole, entry)(x) - call(x.to(link.device)).cpu()).abs().max()
            rest(module)
        names = {id(weight): key for key, weight in reversed(list(whole.named_parameters()))}
        there = dict(module.named_parameters(remove_duplicate=False))
        found[name] = {
            "apart": float(apart), "whole": sorted(key for key in names.values() if not hasattr(there[key], "to_local")),
            "cut_blocks": len(cut.blocks),
        }
    found["broken off"] = broken_off(link, x)
    try:
        shard(made(Plain), link)
    except NotSharded as reason:
        found["nothing repeated"] = str(reason)
    return found
