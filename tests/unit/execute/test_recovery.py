"""The ladder: its order, its memory, and what is freed before the next try."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from batchgen.execute.recovery import Ladder, Situation, free_after_oom, is_out_of_memory


def climb(ladder: Ladder, *, batch: int, can_tile: bool, leaner: int, stage: str = "decode", shape: str = "64x64") -> list[tuple[str, int]]:
    """Every step until the job fails, memory never being enough."""
    steps, tiled = [], ladder.tiles(stage, shape)
    batch = ladder.batch_size(stage, shape, batch)
    while not steps or steps[-1][0] != "fail":
        step = ladder.next_step(Situation(stage, shape, batch, can_tile, tiled, leaner > 0))
        steps.append((step.action, step.batch))
        batch, tiled = step.batch, tiled or step.action == "tile"
        leaner -= step.action == "leaner"
    return steps


ORDERS = {
    "halved to one, tiled, leaner twice, failed": (
        {"batch": 8, "can_tile": True, "leaner": 2},
        [("halve", 4), ("halve", 2), ("halve", 1), ("tile", 1), ("leaner", 1), ("leaner", 1), ("fail", 1)],
    ),
    "an odd batch": ({"batch": 5, "can_tile": False, "leaner": 0}, [("halve", 2), ("halve", 1), ("fail", 1)]),
    "a denoiser has no tiles": ({"batch": 1, "can_tile": False, "leaner": 1}, [("leaner", 1), ("fail", 1)]),
    "nothing left": ({"batch": 1, "can_tile": False, "leaner": 0}, [("fail", 1)]),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_rungs_in_order(case: str) -> None:
    asked, want = ORDERS[case]
    assert climb(Ladder(), **asked) == want


def test_limits_are_remembered_per_stage_and_shape() -> None:
    ladder = Ladder()
    ladder.next_step(Situation("denoise", "big", 8))
    assert ladder.batch_size("denoise", "big", 8) == 4
    assert ladder.batch_size("denoise", "small", 8) == 8
    assert ladder.batch_size("decode", "big", 8) == 8
    ladder.next_step(Situation("denoise", "big", 2))
    assert ladder.batch_size("denoise", "big", 8) == 1
    assert ladder.batch_size("denoise", "big", 1) == 1


def test_tiling_is_remembered_and_taken_once() -> None:
    ladder = Ladder()
    assert climb(ladder, batch=1, can_tile=True, leaner=0) == [("tile", 1), ("fail", 1)]
    assert ladder.tiles("decode", "64x64")
    assert not ladder.tiles("decode", "32x32")
    assert climb(ladder, batch=8, can_tile=True, leaner=0) == [("fail", 1)]


def test_a_shape_that_failed_twice_is_not_tried_again_until_something_changes() -> None:
    ladder = Ladder()
    climb(ladder, batch=1, can_tile=False, leaner=0)
    assert not ladder.hopeless("decode", "64x64")
    climb(ladder, batch=1, can_tile=False, leaner=0)
    assert ladder.hopeless("decode", "64x64")
    assert not ladder.hopeless("decode", "32x32")
    ladder.forget_failures()
    assert not ladder.hopeless("decode", "64x64")


def test_every_step_is_a_decision_with_its_numbers() -> None:
    situation = Situation("denoise", "64x64", 8)
    decision = Ladder().next_step(situation).decision(situation)
    assert (decision.rule, decision.subject, decision.decision) == ("out-of-memory", "denoise 64x64", "halve")
    assert dict(decision.numbers) == {"batch": 8, "next_batch": 4, "tiled": False}
    assert "batch of 8: 4" in decision.text


ERRORS = {
    "torch's own": (torch.OutOfMemoryError("CUDA out of memory"), True),
    "the host's": (MemoryError(), True),
    "the CPU allocator's": (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 12 bytes"), True),
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    "another error": (RuntimeError("shapes do not match"), False),
    "a value that talks of memory": (ValueError("out of memory"), False),
}


@pytest.mark.parametrize("case", ERRORS)
def test_out_of_memory_is_told_from_other_errors(case: str) -> None:
    error, want = ERRORS[case]
    assert is_out_of_memory(error) is want


def test_nothing_of_the_failed_call_stays_alive() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def deep() -> None:
        big = torch.zeros(1000)
        alive.append(weakref.ref(big))
        raise torch.OutOfMemoryError("no room")

    def wrapped() -> None:
        outer = torch.zeros(1000)
        alive.append(weakref.ref(outer))
        try:
            deep()
        except torch.OutOfMemoryError as error:
            raise RuntimeError("out of memory in a block") from error

    try:
        wrapped()
    except RuntimeError as error:
        kept = error
    gc.collect()
    assert all(ref() is not None for ref in alive), "the traceback holds them"
    free_after_oom(kept)
    assert all(ref() is None for ref in alive)
    free_after_oom(None)
