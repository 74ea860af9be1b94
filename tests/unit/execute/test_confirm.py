"""The worker's device against the plan's: same card, enough memory, and a build of torch that can use it."""

from __future__ import annotations

import pytest
import torch

from batchgen.errors import PlanRefusedError
from batchgen.execute.confirm import compare, confirm_device, use_device
from batchgen.execute.engine import open_engine
from batchgen.execute.settings import ENGINE
from batchgen.inventory.records import DeviceFacts

GIB = 2**30
UUID = "1f0c9a1e-0000-1111-2222-333344445555"
PLANNED = DeviceFacts("NVIDIA H100 80GB HBM3", "cuda:0", 80 * GIB, 79 * GIB, uuid=f"GPU-{UUID}")
STATED = DeviceFacts("stated device", "cuda:0", 80 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("planned", "total_gib", "uuid"),
    [(PLANNED, 79, UUID), (PLANNED, 79, UUID.upper()), (PLANNED, 79, f"GPU-{UUID}"), (PLANNED, 79, None), (STATED, 79, UUID), (STATED, 72, None)],
    ids=["same card", "in capitals", "with the prefix", "torch tells no UUID", "nothing to compare but memory", "the driver's share is gone"],
)
def test_the_planned_card_is_confirmed(planned: DeviceFacts, total_gib: int, uuid: str | None) -> None:
    compare(planned, name=PLANNED.name, total_bytes=total_gib * GIB, uuid=uuid)


@pytest.mark.parametrize(
    ("planned", "total_gib", "uuid", "words"),
    [
        (PLANNED, 79, "ffffffff-0000-1111-2222-333344445555", ["cuda:0", "GPU-1f0c9a1e", "CUDA_DEVICE_ORDER"]),
        (STATED, 12, None, ["cuda:0", "12.00 GiB", "80.00 GiB"]),
        (PLANNED, 12, None, ["cuda:0", "12.00 GiB", "80.00 GiB"]),
    ],
    ids=["another card", "a smaller one", "a smaller one without a UUID"],
)
def test_another_card_is_refused_with_both_named(planned: DeviceFacts, total_gib: int, uuid: str | None, words: list[str]) -> None:
    with pytest.raises(PlanRefusedError) as caught:
        compare(planned, name="NVIDIA GeForce RTX 3060", total_bytes=total_gib * GIB, uuid=uuid)
    assert all(word in str(caught.value) for word in ["RTX 3060", *words]), str(caught.value)


def test_the_cpu_is_what_it_is() -> None:
    confirm_device((), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this build of torch can use a CUDA device")
def test_a_build_of_torch_without_cuda_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(PlanRefusedError) as caught:
        confirm_device((PLANNED,), "cuda:0")
    assert torch.__version__ in str(caught.value)
    assert "--device cpu" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_workers_card_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events, pinned pages and kernels that name no device must not go to the first card. Only the driver is stood in."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    use_device((), "cuda:1")
    assert current == [1]
    with pytest.raises(PlanRefusedError, match="torch sees 2"):
        use_device((), "cuda:2")
    use_device((), "cpu")
    assert current == [1]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
def test_mps_that_torch_cannot_use_is_refused() -> None:
    with pytest.raises(PlanRefusedError, match="mps"):
        confirm_device((), "mps")


def test_workers_open_their_engine_this_way() -> None:
    assert f"{open_engine.__module__}:{open_engine.__name__}" == ENGINE
