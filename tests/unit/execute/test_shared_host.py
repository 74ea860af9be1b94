"""Weights that workers of one machine look at together: the same bits, aligned, over one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from batchgen.execute.memory import HostBudget
from batchgen.execute.residency import Residency
from batchgen.execute.shared_host import SUFFIX, share_weights


class Net(nn.Module):
    """Two megabytes, with a tied weight, a buffer and another dtype."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(512, 512)
        self.second = nn.Linear(512, 512)
        self.tied = self.first
        self.narrow = nn.Parameter(torch.randn(7, 3).to(torch.float16))
        self.register_buffer("means", torch.randn(5))


def ranges_of(suffix: str) -> list[tuple[int, int]]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.rstrip().endswith(suffix)]
    return [(int(start, 16), int(end, 16)) for start, end in (line[0].split("-") for line in lines)]


def test_two_copies_of_a_model_lie_over_one_file_with_the_same_bits(tmp_path: Path) -> None:
    expected = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    nets = [Net(), Net()]
    assert [share_weights("net", net.eval().requires_grad_(False), tmp_path) > 0 for net in nets] == [True, True]
    (file,) = tmp_path.iterdir()
    assert file.name.endswith(SUFFIX), "no temporary file is left"
    for net in nets:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
        assert net.tied is net.first
        assert all(tensor.data_ptr() % 64 == 0 for tensor in net.state_dict().values())
        residency = Residency({"net": "resident"}, torch.device("cpu"), host_budget=HostBudget(2**30), emit=lambda event: None)
        before = [tensor.data_ptr() for tensor in net.state_dict().values()]
        residency.add("net", net)
        assert [tensor.data_ptr() for tensor in net.state_dict().values()] == before, "taken as they lie, not copied"
    if Path("/proc/self/maps").exists():
        mapped = ranges_of(SUFFIX)
        assert all(any(start <= tensor.data_ptr() < end for start, end in mapped) for net in nets for tensor in net.state_dict().values())


def test_who_writes_to_a_weight_gets_a_page_of_their_own(tmp_path: Path) -> None:
    one, other = Net(), Net()
    for net in (one, other):
        share_weights("net", net.requires_grad_(False), tmp_path)
    one.first.weight.add_(1)
    assert torch.equal(other.first.weight, Net().first.weight)
    third = Net().requires_grad_(False)
    share_weights("net", third, tmp_path)
    assert torch.equal(third.first.weight, Net().first.weight)


@pytest.mark.parametrize("change", ["weights", "dtype"])
def test_another_models_file_is_not_taken_for_this_ones(tmp_path: Path, change: str) -> None:
    share_weights("net", Net().requires_grad_(False), tmp_path)
    other = Net(seed=1) if change == "weights" else Net().to(torch.bfloat16)
    expected = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    share_weights("net", other.requires_grad_(False), tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
    assert len(list(tmp_path.iterdir())) == 2


def test_where_it_cannot_be_every_worker_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_bytes(b"")
    net = Net().requires_grad_(False)
    pointers = [tensor.data_ptr() for tensor in net.state_dict().values()]
    assert share_weights("net", net, tmp_path / "a-file" / "below") == 0
    assert [tensor.data_ptr() for tensor in net.state_dict().values()] == pointers
    assert share_weights("small", nn.Linear(4, 4), tmp_path) == 0
    torn = Net().requires_grad_(False)
    share_weights("net", Net().requires_grad_(False), tmp_path)
    (file,) = tmp_path.glob(f"*{SUFFIX}")
    file.write_bytes(file.read_bytes()[:-1])
    assert share_weights("net", torn, tmp_path) == 0
    assert torch.equal(torn.first.weight, Net().first.weight)
