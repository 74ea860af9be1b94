"""Groups of ranks under the supervisor: the same windows to all, one that speaks, the one that died by its name, and a new start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.events import Event, WorkerDied, WorkerReady
from batchgen.execute.ranks import GroupProcess
from batchgen.execute.settings import EngineSettings, OutputSettings
from batchgen.execute.supervisor import RunRequest, RunResult, run_jobs
from batchgen.journal import Journal
from batchgen.reconcile import open_journal
from batchgen.runfolder import RunFolder
from conftest import TinyFolder
from scripted import picture
from scripted_run import engine_settings, make_jobs, make_plan

TESTS = Path(__file__).parents[1]
PAIR = (("cpu", "cpu"),)


class Bench:
    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.log = path / "log"
        self.events: list[Event] = []

    def run(self, count: int = 6, *, script: dict[str, Any] | None = None, groups: tuple[tuple[str, ...], ...] = PAIR) -> RunResult:
        self.folder.prepare()
        with self.folder.lock():
            journal, _ = open_journal(self.folder)
            with journal:
                journal.ingest(make_jobs(count))
                setup = engine_settings(self.folder, {"log": str(self.log)} | (script or {}))
                asked = RunRequest(
                    self.folder, journal, setup, make_plan(1, 3), groups=groups, factory="scripted_group:GroupEngine",
                )
                return run_jobs(asked, self.events.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        with Journal.read(self.folder.journal) as journal:
            return {row["id"]: row for row in journal.rows()}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return Bench(tmp_path)


def test_every_rank_gets_every_window_and_the_first_one_writes(bench: Bench) -> None:
    result = bench.run(6, groups=(("cpu", "cpu"), ("cpu", "cpu")))
    assert result.counts["done"] == 6
    assert sorted(ready.worker for ready in bench.of(WorkerReady)) == [0, 1]
    lines = bench.log.read_text().split("\n")
    denoised = sorted(line.split()[2] for line in lines if line.startswith("denoise"))
    assert denoised == sorted([f"job{index}" for index in range(6)] * 2), "by both ranks of its group"
    for job in make_jobs(6):
        with Image.open(bench.folder.outputs / job.output) as image:
            assert np.array_equal(np.asarray(image), picture(job))
    assert len((bench.folder.path / "rank-1").read_text().split("\n")) - 1 == 2
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"batchgen-group-*/{bench.folder.path.name}"))


ENDS = [
    ("kill", 0, "killed by SIGKILL"), ("kill", 1, "killed by SIGKILL"), ("crash", 1, "ended by an unexpected error"),
    ("others-lose-touch", 1, "killed by SIGKILL"),  # rank 0 may say so before the system has buried the one that died
]  # fmt: skip


@pytest.mark.parametrize(("act", "rank", "words"), ENDS)
def test_the_rank_that_ended_is_named_and_the_jobs_go_on(bench: Bench, act: str, rank: int, words: str) -> None:
    """The job that kills is set aside after its second attempt; all others are done by groups that were started anew."""
    result = bench.run(4, script={"rank": rank, "jobs": {"job1": act}})
    died = bench.of(WorkerDied)
    assert result.deaths == len(died) == 2
    for death in died:
        assert f"rank {rank} (cpu, pid " in death.cause
        assert f"rank {1 - rank}" not in death.cause
        assert words in death.cause
        assert [bench.rows["job1"]["key"]] == list(death.keys)
    assert {name: row["state"] for name, row in bench.rows.items()} == {
        "job0": "done", "job1": "failed", "job2": "done", "job3": "done",
    }
    assert f"rank {rank}" in bench.rows["job1"]["reason"]


def test_a_group_leaves_nothing_behind(bench: Bench) -> None:
    group = GroupProcess(("cpu", "cpu"), "scripted_group:GroupEngine")
    folder, pids = group._folder, group.pids
    assert folder.is_dir()
    group.kill("for a test")
    group.close()
    assert not folder.exists()
    assert group.how_it_ended() == "for a test"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_killed_in_step_two_is_named_and_the_jobs_are_done_after_a_new_start(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engine: a sharded tiny Qwen-Image whose second rank is killed in the middle of the first denoise."""
    from dataclasses import replace

    from enginekit import make_plan as plan_of
    from enginekit import run_jobs as run_alone

    model = tiny_folder("qwen_image")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("BATCHGEN_TEST_FAULT", f"1:{tmp_path / 'fired'}")
    jobs = [replace(job, width=64, height=64, steps=3, negative_prompt="blurry", guidance=4.0) for job in make_jobs(3)]
    plan = replace(plan_of(model, modes={"transformer": "fsdp"}, batch_size=1), window=4)
    folder, events = RunFolder(tmp_path / "run"), []
    setup = EngineSettings(
        str(model), tuple((spot.component, "float32") for spot in plan.placements), (), "cpu", str(folder.path),
        OutputSettings(str(folder.outputs), metadata=(("model", "tiny"), ("revision", "0"))), threads=1,
    )
    folder.prepare()
    with folder.lock():
        journal, _ = open_journal(folder)
        with journal:
            journal.ingest(jobs)
            result = run_jobs(RunRequest(folder, journal, setup, plan, groups=PAIR, factory="scripted_group:open_faulty"), events.append)
    (death,) = [event for event in events if isinstance(event, WorkerDied)]
    assert death.cause.startswith("rank 1 (cpu, pid ")
    assert "killed by SIGKILL" in death.cause
    assert death.stage == "denoise"
    assert len(death.keys) == 1
    assert (result.deaths, result.counts["done"], result.counts["failed"]) == (1, 3, 0)
    alone = run_alone(model, tmp_path / "alone", jobs, plan=plan_of(model, batch_size=1))
    for job in jobs:
        with Image.open(folder.outputs / job.output) as image:
            apart = np.abs(np.asarray(image).astype(int) - (alone.floats[job.key] * 255).round().astype(int))
        assert apart.max() <= 1
    shutil.rmtree(folder.path)
