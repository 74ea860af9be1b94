"""Batches of a stage under a memory limit, over real placements and real modules; the work is a tensor of a stated size."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchgen.events import DecisionMade
from batchgen.execute import residency as residency_module
from batchgen.execute.memory import HostBudget, LiveLimit
from batchgen.execute.meter import Meter
from batchgen.execute.residency import Residency
from batchgen.execute.runner import Runner, Task
from batchgen.execute.stages import Stage
from batchgen.execute.streaming import NoStreams
from batchgen.units import MIB

CPU = torch.device("cpu")


class Overlapping(NoStreams):
    overlaps = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(residency_module, "PREFETCH_MARGIN_BYTES", 0)  # so that megabytes tell
    return []


def runner_of(events: list[Any]) -> Runner:
    """A denoiser without weights is at work, and a VAE of 40 MiB comes next."""
    residency = Residency({"vae": "component-offload"}, CPU, host_budget=HostBudget(2**30), emit=events.append, streams=Overlapping())
    residency.add("vae", nn.Linear(10 * MIB, 1, bias=False))
    parts: Any = SimpleNamespace(residency=residency, meter=Meter(CPU), ensure=lambda names: None, settle=lambda names: None, modules={})
    return Runner(0, events.append, parts)


def stage() -> Stage:
    made: Any = SimpleNamespace(name="denoise", components=())
    return made


def run(runner: Runner, sizes_mib: Sequence[int], limit_mib: int) -> tuple[list[tuple[int, ...]], list[str]]:
    """Batches of two that came through, and what failed."""
    came: list[tuple[int, ...]] = []
    failed: list[str] = []

    def work(batch: Sequence[Any]) -> None:
        room = torch.empty(sum(batch) * MIB, dtype=torch.uint8)
        came.append(tuple(batch))
        del room

    task = Task(None, sizes_mib, 2, work, lambda item, kind, reason: failed.append(reason), keys=lambda batch: tuple(map(str, batch)))
    with LiveLimit(CPU, limit_mib * MIB):
        runner.run(stage(), [task], ["vae"])
    return came, failed


def batch_decisions(events: list[Any]) -> list[str]:
    return [event.decision for event in events if isinstance(event, DecisionMade) and event.rule == "out-of-memory"]


def test_a_last_batch_that_fits_alone_gets_the_room_of_what_came_in_early(events: list[Any]) -> None:
    runner = runner_of(events)
    # at the first batch's peak 60 MiB were free, and the VAE took 40 of them; the last batch needs 80 of 100
    assert run(runner, [20, 20, 40, 40], 100) == ([(20, 20), (40, 40)], [])
    assert batch_decisions(events) == []  # no smaller batch for the rest of the night
    assert not runner.residency.is_in("vae")


def test_what_comes_in_early_stays_where_the_last_batch_fits_beside_it(events: list[Any]) -> None:
    runner = runner_of(events)
    assert run(runner, [20, 20, 20, 20], 100) == ([(20, 20), (20, 20)], [])
    assert runner.residency.is_in("vae")


def test_a_batch_too_large_by_itself_is_halved_once_the_room_is_back(events: list[Any]) -> None:
    runner = runner_of(events)
    assert run(runner, [20, 20, 60, 60], 100) == ([(20, 20), (60,), (60,)], [])
    assert batch_decisions(events) == ["halve"]


def test_room_that_is_free_in_pieces_only_keeps_no_batch_from_running(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(events)
    monkeypatch.setattr(runner.residency.memory, "free", lambda: 2**40)  # what a fragmented allocator says
    assert run(runner, [10, 10, 10, 10], 30) == ([(10, 10), (10, 10)], [])
    assert not runner.residency.is_in("vae")
