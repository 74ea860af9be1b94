"""What a rank tells its group, without one: fingerprints, differences, failures as others see them, and the link of a worker alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.errors import DiskError, ModelError, PlanRefusedError, RunStoppedError
from batchgen.execute.fingerprints import difference, fingerprint
from batchgen.execute.group import Alone, PeerError, _Fault
from batchgen.execute.recovery import is_out_of_memory
from batchgen.execute.stages import Item

TENSOR = torch.arange(6, dtype=torch.float32).reshape(2, 3)
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a value": (TENSOR, TENSOR + torch.tensor([0.0, 0.0, 1e-6])),
    "the dtype": (TENSOR, TENSOR.to(torch.bfloat16)),
    "the shape": (TENSOR, TENSOR.reshape(3, 2)),
    "the order": ([1, 2], [2, 1]),
    "where a list ends": ([[1], [2, 3]], [[1, 2], [3]]),
    "a name": ({"latents": TENSOR}, {"embeds": TENSOR}),
    "a row's element": (Item(TENSOR), Item(TENSOR * 2)),
    "none": (None, 0),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_has_another_fingerprint(what: str) -> None:
    one, other = DIFFERENT[what]
    assert fingerprint(one) != fingerprint(other)


def test_equal_values_have_one_fingerprint_wherever_they_lie() -> None:
    strided = torch.arange(12, dtype=torch.float32).reshape(2, 6)[:, ::2] / 2
    assert fingerprint({"b": strided, "a": 1}) == fingerprint({"a": 1, "b": strided.clone()})
    assert 0 <= fingerprint(torch.zeros(0)) < 2**63
    assert fingerprint(torch.tensor(True)) != fingerprint(torch.tensor(False))


@pytest.mark.parametrize(
    ("mine", "theirs", "apart"),
    [
        (TENSOR, TENSOR, 0.0),
        ({"a": [TENSOR]}, {"a": [TENSOR + 0.5]}, 0.5 / 5.5),
        (Item(TENSOR), Item(TENSOR), 0.0),
        (TENSOR, TENSOR.reshape(3, 2), float("inf")),
        (torch.tensor([1]), torch.tensor([2]), float("inf")),
        ({"a": 1}, {"b": 1}, float("inf")),
        ([1], [1, 2], float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), 0.0),
    ],
    ids=["equal", "within", "item", "shape", "whole numbers", "names", "length", "a failed row"],
)
def test_difference_is_relative_to_the_largest_value(mine: Any, theirs: Any, apart: float) -> None:
    assert difference(mine, theirs) == pytest.approx(apart)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (ValueError("no\nsecond line"), PeerError, "rank 1 (cuda:1): ValueError: no"),
        (AssertionError(), PeerError, "rank 1 (cuda:1): AssertionError"),
        (torch.OutOfMemoryError("tried to allocate"), torch.OutOfMemoryError, "rank 1 (cuda:1): OutOfMemoryError: tried to allocate"),
        (MemoryError(), torch.OutOfMemoryError, "rank 1 (cuda:1): MemoryError"),
        (RuntimeError("CUDA out of memory. Tried"), torch.OutOfMemoryError, "rank 1 (cuda:1): RuntimeError: CUDA out of memory. Tried"),
        (ModelError("no weights", hint="load them"), ModelError, "rank 1 (cuda:1): no weights\nload them"),
        (DiskError("full"), DiskError, "rank 1 (cuda:1): full"),
        (PlanRefusedError("too small", hint="less"), PlanRefusedError, "rank 1 (cuda:1): too small\nless"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_another_ranks_failure_is_the_same_kind_here(raised: Exception, kind: type[Exception], text: str) -> None:
    made = _Fault.of(raised).error("rank 1 (cuda:1)")
    assert type(made) is kind
    assert str(made) == text
    assert is_out_of_memory(made) == is_out_of_memory(raised)
    assert isinstance(made, RunStoppedError) == isinstance(raised, RunStoppedError)


def test_a_worker_alone_agrees_with_itself() -> None:
    link, error = Alone(), ValueError("mine")
    assert link.agree(error) is error
    assert link.agree(None) is None
    assert (link.told(True), link.everywhere(False), link.least(3), link.gather("a")) == (True, False, 3, ["a"])
    assert link.settled("latents", TENSOR) is TENSOR
    link.vote("anything")
    link.check_same("anything", 1)
