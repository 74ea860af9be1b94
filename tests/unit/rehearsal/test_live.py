"""Bytes followed over tensors: what is made counts once, what only looks at what is there counts nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from batchgen.rehearsal import hollow
from batchgen.rehearsal.calls import Scene
from batchgen.rehearsal.live import REAL_FLOATS, LiveBytes

LARGE = (1, 3, REAL_FLOATS // 1024, 1024)  # a picture of more values than are made for real inside a hollow module
LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "slice": lambda x: x[:, :, :, :1000],
    "unsqueeze": lambda x: x.unsqueeze(2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "split": lambda x: x.split(1, dim=1),
    "expand": lambda x: x.expand(8, -1, -1, -1),
    "reshape": lambda x: x.reshape(1, -1),
}


class Looking(nn.Module):
    def __init__(self, look: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.look = look
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.looked = self.look(x)
        return torch.ones(1) * self.weight


@pytest.mark.parametrize("look", LOOKS)
def test_a_view_of_a_large_real_input_counts_nothing_in_a_hollow_module(look: str) -> None:
    scene = Scene()
    with scene.fake:
        module = Looking(LOOKS[look])
    hollow.enter(module, "looking", scene)
    picture = torch.zeros(LARGE)
    tracker = LiveBytes(module.parameters(), [picture], fake=scene.fake)
    with scene.following(tracker):
        module(picture)
    assert tracker.largest == picture.nbytes
    assert tracker.peak <= picture.nbytes + 64


def test_what_is_computed_from_a_large_real_input_counts_whole() -> None:
    scene = Scene()
    with scene.fake:
        module = Looking(lambda x: x[:, :1] * 2)
    hollow.enter(module, "looking", scene)
    picture = torch.zeros(LARGE)
    tracker = LiveBytes(module.parameters(), [picture], fake=scene.fake)
    with scene.following(tracker):
        module(picture)
    assert picture.nbytes * 4 // 3 <= tracker.peak <= picture.nbytes * 4 // 3 + 64
