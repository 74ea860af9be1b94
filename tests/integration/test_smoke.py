"""--smoke: the largest shape in a few steps before the first job, nothing written, and a night that cannot go on refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import enginekit
from batchgen.errors import PlanRefusedError
from batchgen.events import DecisionMade, StageBatchDone
from batchgen.execute.memory import LiveLimit
from batchgen.execute.settings import Window
from batchgen.jobs import Job, largest_jobs


def started(folder: Path, where: Path, jobs: list[Job], **more: Any) -> enginekit.Ran:
    ran = enginekit.Ran()
    enginekit.engine_for(folder, where, ran, smoke_jobs=tuple(job.as_json() for job in largest_jobs(jobs)), **more)
    return ran


def render(ran: enginekit.Ran, jobs: list[Job]) -> None:
    assert ran.engine is not None
    ran.engine.run_window(Window(0, tuple(jobs)))
    ran.engine.products.finish()


def decisions(ran: enginekit.Ran) -> list[tuple[str, str]]:
    return [(event.subject, event.decision) for event in ran.of(DecisionMade) if event.rule == "smoke"]


def test_the_largest_of_each_kind_of_input() -> None:
    sizes = ((64, 64, None), (128, 64, None), (64, 64, "a.png"), (64, 128, None), (32, 32, "b.png"))
    jobs = [enginekit.make_job(n, "x", width=width, height=height, image=image) for n, (width, height, image) in enumerate(sizes)]
    assert [job.index for job in largest_jobs(jobs)] == [1, 2]
    assert largest_jobs([]) == ()


def test_it_writes_nothing_and_changes_no_picture(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("z_image")
    jobs = [enginekit.make_job(n, "a red circle", steps=4, width=64 + 32 * n, height=64) for n in range(2)]
    plain = enginekit.run_jobs(folder, tmp_path / "plain", jobs)
    ran = started(folder, tmp_path / "ran", jobs)
    render(ran, jobs)
    assert decisions(ran) == [("run", "passed")]
    written = {path.name: path.read_bytes() for path in (tmp_path / "ran" / "outputs").iterdir()}
    assert sorted(written) == ["000.png", "001.png"]
    assert {event.key for event in ran.done} == {event.key for event in plain.done}
    assert all(not key.startswith("smoke") for event in ran.of(StageBatchDone) for key in event.keys)
    assert [event.sha256 for event in ran.done] == [event.sha256 for event in plain.done]
    assert not list((tmp_path / "ran" / "spool").glob("*-1-*"))


def test_both_experts_are_reached(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    jobs = [enginekit.make_job(0, "a red circle", steps=40, num_frames=5, output="0.mp4")]
    ran = started(tiny_folder("wan22"), tmp_path, jobs)
    assert ran.engine is not None
    ran.engine.smoke(jobs)
    assert decisions(ran) == [("run", "passed")]
    assert {"transformer", "transformer_2"} <= set(ran.engine.components.modules)


def test_a_fault_in_the_decode_stops_the_night_before_it_begins(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    jobs = [enginekit.make_job(0, "a red circle", steps=40)]
    ran = started(tiny_folder("z_image"), tmp_path, jobs)
    assert ran.engine is not None
    ran.engine.components.ensure(["vae"])

    def decode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("tiles do not fit together")

    ran.engine.components.modules["vae"].decode = decode
    with pytest.raises(PlanRefusedError, match=r"smoke test failed in decode at 64x64, 3 steps \(row 2\): RuntimeError: tiles do not fit"):
        render(ran, jobs)
    assert not ran.done
    assert not list((tmp_path / "outputs").iterdir())


def test_a_picture_of_no_numbers_stops_it_too(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    jobs = [enginekit.make_job(0, "a red circle", steps=40)]
    ran = started(tiny_folder("z_image"), tmp_path, jobs)
    assert ran.engine is not None
    ran.engine.components.ensure(["transformer"])
    with torch.no_grad():
        next(iter(ran.engine.components.modules["transformer"].parameters())).fill_(np.nan)
    with pytest.raises(PlanRefusedError, match="not numbers"):
        render(ran, jobs)


def test_the_largest_shape_is_what_memory_is_tried_with(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("z_image")
    jobs = [enginekit.make_job(n, "a red circle", steps=40, width=side, height=side) for n, side in enumerate((64, 384))]
    fixed = dict.fromkeys(("text_encoder", "transformer", "vae"), "resident")
    ran = started(folder, tmp_path, jobs, plan=enginekit.make_plan(folder, modes=fixed, batch_size=1))
    with LiveLimit("cpu", 5_000_000), pytest.raises(PlanRefusedError, match="at 384x384"):
        render(ran, jobs)
