"""The supervisor over real worker processes and a scripted engine: who is blamed, what is kept, how a night ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.errors import InterruptedRunError, LeaseLostError, ModelError, RefusedError, WorkerLostError
from batchgen.events import Event, OutputDone, WorkerDied, WorkerReplaced
from batchgen.execute import health
from batchgen.execute.process import WorkerProcess, prewarm
from batchgen.execute.stopping import Clock
from batchgen.execute.supervisor import RunRequest, RunResult, run_jobs, window_sizes
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import settings_for
from batchgen.plan.records import StagePlan
from batchgen.reconcile import open_journal
from batchgen.report.status import collect
from batchgen.runfolder import RunFolder
from scripted import picture
from scripted_run import engine_settings, make_jobs, make_plan

TESTS = Path(__file__).parents[1]


class Bench:
    """One run folder with a manifest of jobs, and runs of it."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.log = path / "log"
        self.events: list[Event] = []

    def run(self, jobs: int | list[Job] = 8, *, batch: int = 1, window: int | None = 4, script: dict[str, Any] | None = None,
            overwrite: bool = False, **request: Any) -> RunResult:
        script = {"log": str(self.log)} | (script or {})
        with self.folder.lock():
            journal, _ = open_journal(self.folder)
            with journal:
                journal.ingest(make_jobs(jobs) if isinstance(jobs, int) else jobs)
                setup = engine_settings(self.folder, script, overwrite=overwrite)
                plan = make_plan(batch, window)
                asked = RunRequest(self.folder, journal, setup, plan, factory="scripted:ScriptedEngine")
                return run_jobs(replace(asked, **request), self.events.append)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        with Journal.read(self.folder.journal) as journal:
            return {row["id"]: row for row in journal.rows()}

    @property
    def states(self) -> dict[str, str]:
        return {name: row["state"] for name, row in self.rows.items()}

    @property
    def renders(self) -> list[str]:
        """Ids in the order in which they were rendered, also in vain."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[2] for line in lines if line.startswith("render ")]

    def output(self, job: Job) -> Path:
        return self.folder.outputs / job.output


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return Bench(tmp_path)


def children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


# --- misbehaving jobs -----------------------------------------------------------------------------------------------

MISDEEDS = {
    "raise": ("failed", "error", "the script says so"),
    "nan": ("failed", "non-finite", "not a number"),
    "filtered": ("filtered", "filtered", "safety check"),
    "oom": ("failed", "out-of-memory", "batch 1"),
    "exit137": ("failed", "worker-died", "host memory"),
    "kill": ("failed", "worker-died", "SIGKILL: most likely host memory"),
    "segv": ("failed", "worker-died", "SIGSEGV"),
    "hang": ("failed", "timeout", "without a sign of life"),
    "crash": ("failed", "worker-died", "RuntimeError: nobody foresaw this"),
    "silent": ("failed", "error", "without saying what became"),
}


@pytest.mark.parametrize("batch", [1, 3])
def test_exactly_the_misbehaving_jobs_are_reported_each_with_its_reason(bench: Bench, batch: int) -> None:
    """One of each kind among good ones, with two workers; the good ones are all done, with their own pixels."""
    names = [name for act in MISDEEDS for name in (act, f"good-{act}")]
    jobs = make_jobs(names)
    result = bench.run(jobs, batch=batch, workers=2, script={"jobs": {act: act for act in MISDEEDS}}, hang_seconds=2.0)
    assert result.exit_code == 3
    assert result.counts["done"] == len(MISDEEDS)
    for job in jobs:
        row = bench.rows[job.id]
        if job.id not in MISDEEDS:
            assert row["state"] == "done", row
            with Image.open(bench.output(job)) as image:
                assert np.array_equal(np.asarray(image), picture(job))
            continue
        state, kind, words = MISDEEDS[job.id]
        assert (row["state"], row["kind"]) == (state, kind)
        assert words in row["reason"]
        assert not bench.output(job).exists()
    for act in ("exit137", "kill", "segv", "hang"):
        assert bench.rows[act]["attempts"] == 2
        assert "stage denoise" in bench.rows[act]["reason"]
    assert not children()


def test_a_job_that_kills_its_worker_once_is_done_at_the_second_attempt(bench: Bench) -> None:
    result = bench.run(4, script={"jobs": {"job1": "kill-once", "job2": "retry"}})
    assert bench.states == {"job0": "done", "job1": "done", "job2": "failed", "job3": "done"}
    assert result.deaths == 1
    (died,) = [event for event in bench.events if isinstance(event, WorkerDied)]
    assert (died.stage, [bench.rows["job1"]["key"]]) == ("denoise", list(died.keys))


def test_retry_failed_tries_failed_jobs_again_and_no_others(bench: Bench) -> None:
    acts = {"job1": "raise", "job2": "filtered"}
    assert bench.run(4, script={"jobs": acts}).exit_code == 3
    done_before = len(bench.renders)
    assert bench.run(4).exit_code == 3, "failed stays failed until asked"
    assert len(bench.renders) == done_before
    assert bench.run(4, retry_failed=True).counts["done"] == 3
    assert bench.states["job2"] == "filtered"
    assert bench.renders[done_before:] == ["job1"]


# --- workers that cannot live ---------------------------------------------------------------------------------------


def test_a_model_that_is_refused_stops_the_run_with_its_own_error(bench: Bench) -> None:
    with pytest.raises(ModelError, match="a shard is missing"):
        bench.run(4, script={"refuse": "a shard is missing"})
    assert set(bench.states.values()) == {"pending"}
    assert not children()


def test_workers_that_die_before_any_batch_end_the_run_and_no_job_is_blamed(bench: Bench) -> None:
    with pytest.raises(WorkerLostError, match="no_such_engine") as caught:
        bench.run(4, factory="scripted:no_such_engine")
    assert caught.value.exit_code == 1
    assert set(bench.states.values()) == {"pending"}
    assert {row["attempts"] for row in bench.rows.values()} == {0}


def test_when_every_job_kills_its_worker_the_run_ends_and_no_job_is_blamed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_FRUITLESS_IN_ALL", 5)
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        bench.run(20, script={"jobs": {f"job{number}": "kill" for number in range(20)}})
    assert set(bench.states.values()) == {"pending"}
    assert {row["attempts"] for row in bench.rows.values()} == {0}


def test_a_killed_worker_costs_its_batch_and_no_more(bench: Bench) -> None:
    result = bench.run(12, batch=2, window=12, script={"spool": True, "jobs": {"job5": "kill-in-decode"}})
    assert (result.counts["done"], result.deaths) == (12, 1)
    denoised = [line.split()[2] for line in bench.log.read_text().splitlines() if line.startswith("denoise ")]
    assert sorted(denoised) == sorted(f"job{number}" for number in range(12)), "spooled latents were not taken up"
    assert not list(bench.folder.spool.iterdir())


# --- windows --------------------------------------------------------------------------------------------------------


def test_the_first_window_is_one_batch(bench: Bench) -> None:
    bench.run(20, batch=2, window=10)
    windows: dict[str, int] = {}
    plan = make_plan(2, 10)
    assert window_sizes(plan) == (2, 10)
    for event in bench.events:
        if type(event).__name__ == "StageBatchStarted" and event.stage == "denoise":
            windows[event.window] = windows.get(event.window, 0) + len(event.keys)
    assert list(windows.values()) == [2, 10, 8]


def test_without_a_batch_size_the_plans_largest_denoise_batch_counts() -> None:
    stages = tuple(StagePlan(name, "8x8", (), batch, 0, 0, 0, 0, 0) for name, batch in (("denoise", 6), ("denoise", 3), ("decode", 50)))
    assert window_sizes(replace(make_plan(None), stages=stages)) == (6, 48)


@pytest.mark.parametrize(("jobs", "workers"), [(0, 2), (1, 4), (3, 2), (17, 3)])
def test_each_job_goes_to_exactly_one_worker(bench: Bench, jobs: int, workers: int) -> None:
    result = bench.run(jobs, workers=workers, window=3)
    assert result.counts["done"] == jobs
    assert sorted(bench.renders) == sorted(f"job{number}" for number in range(jobs))
    assert len({event.key for event in bench.events if isinstance(event, OutputDone)}) == jobs


def test_nothing_left_starts_no_worker(bench: Bench) -> None:
    bench.run(3)
    bench.events.clear()
    spare = prewarm("scripted:ScriptedEngine")
    result = bench.run(3, prewarmed=(spare,))
    assert (result.exit_code, result.rendered, bench.events) == (0, 0, [])
    assert spare.ended()


def test_a_prewarmed_worker_is_the_one_that_renders(bench: Bench) -> None:
    spare = prewarm("scripted:ScriptedEngine")
    bench.run(3, prewarmed=(spare,))
    pids = {line.split()[4] for line in bench.log.read_text().splitlines()}
    assert pids == {str(spare.pid)}


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_grows_past_the_mark_is_replaced_between_windows(bench: Bench) -> None:
    grow = {f"job{number}": "grow" for number in range(24)}
    result = bench.run(24, window=2, script={"jobs": grow, "rss": 10_000_000}, max_worker_bytes=16_000_000)
    assert result.counts["done"] == 24
    assert result.replaced >= 2
    assert result.deaths == 0
    replaced = [event for event in bench.events if isinstance(event, WorkerReplaced)]
    assert all(event.rss_bytes > event.watermark_bytes == 16_000_000 for event in replaced)
    assert len(bench.renders) == 24
    assert any(memory.rss_peak_bytes > 16_000_000 for memory in result.memory)


def test_a_worker_above_the_mark_from_the_start_is_left_alone(bench: Bench) -> None:
    assert bench.run(12, window=2, script={"rss": 50_000_000}, max_worker_bytes=16_000_000).replaced == 0


# --- resume ---------------------------------------------------------------------------------------------------------


def damage_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [damage_half, damage_empty, damage_removed])
def test_damaged_outputs_are_found_and_redone_and_nothing_else(bench: Bench, damage: Any) -> None:
    jobs = make_jobs(8)
    bench.run(jobs)
    before = {job.id: bench.output(job).stat().st_mtime_ns for job in jobs}
    rendered = len(bench.renders)
    damage(bench.output(jobs[2]))
    damage(bench.output(jobs[5]))
    result = bench.run(jobs)
    assert sorted(bench.renders[rendered:]) == ["job2", "job5"]
    assert result.counts["done"] == 8
    assert sorted(result.reconciled.redone) == [jobs[2].output, jobs[5].output]
    for job in jobs:
        with Image.open(bench.output(job)) as image:
            assert np.array_equal(np.asarray(image), picture(job))
        assert (bench.output(job).stat().st_mtime_ns == before[job.id]) == (job.id not in ("job2", "job5"))


def test_a_changed_byte_is_found_by_verify_and_only_then(bench: Bench) -> None:
    jobs = make_jobs(3)
    bench.run(jobs)
    data = bytearray(bench.output(jobs[1]).read_bytes())
    data[-30] ^= 1
    bench.output(jobs[1]).write_bytes(data)
    assert bench.run(jobs).reconciled.redone == []
    result = bench.run(jobs, verify=True)
    assert (result.reconciled.redone, result.reconciled.hashed) == ([jobs[1].output], 3)
    assert bench.renders[3:] == ["job1"]


def test_files_of_another_maker_under_planned_names_stop_the_run_before_it_begins(bench: Bench) -> None:
    jobs = make_jobs(3)
    bench.folder.outputs.mkdir(parents=True)
    bench.output(jobs[1]).write_bytes(b"my holiday")
    with pytest.raises(RefusedError, match=jobs[1].output):
        bench.run(jobs)
    assert bench.renders == []
    assert bench.output(jobs[1]).read_bytes() == b"my holiday"
    assert bench.run(jobs, overwrite=True).counts["done"] == 3
    with Image.open(bench.output(jobs[1])) as image:
        assert np.array_equal(np.asarray(image), picture(jobs[1]))


def test_an_output_the_journal_does_not_know_is_adopted(bench: Bench) -> None:
    jobs = make_jobs(3)
    bench.folder.outputs.mkdir(parents=True)
    write_image(picture(jobs[1]), bench.output(jobs[1]), settings_for(jobs[1], {}, 4))
    stamp = bench.output(jobs[1]).stat().st_mtime_ns
    result = bench.run(jobs)
    assert (result.rendered, result.counts["done"], result.reconciled.adopted) == (2, 3, [jobs[1].output])
    assert bench.output(jobs[1]).stat().st_mtime_ns == stamp
    assert bench.rows["job1"]["flags"] == "adopted"


def test_a_half_written_file_of_nobody_known_is_moved_aside(bench: Bench) -> None:
    jobs = make_jobs(2)
    bench.folder.outputs.mkdir(parents=True)
    bench.output(jobs[0]).write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    result = bench.run(jobs)
    assert result.reconciled.moved_aside == [jobs[0].output]
    assert (bench.folder.aside / jobs[0].output).read_bytes() == b"\x89PNG\r\n\x1a\n\0\0"
    assert result.counts["done"] == 2


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.37, 0.5, 0.9, 0.999])
def test_a_cut_journal_is_recovered_from_the_outputs_and_nothing_is_rendered_again(bench: Bench, cut: float) -> None:
    jobs = make_jobs(30)
    bench.run(jobs)
    data = bench.folder.journal.read_bytes()
    bench.folder.journal.write_bytes(data[: int(len(data) * cut)])
    rendered = len(bench.renders)
    result = bench.run(jobs)
    assert len(bench.renders) == rendered
    assert result.counts["done"] == 30
    assert all(row["sha256"] for row in bench.rows.values())


def test_a_deleted_journal_is_recovered_though_rows_have_moved_and_seeds_are_drawn(bench: Bench) -> None:
    jobs = [replace(job, seed_source="drawn") for job in make_jobs(6)]
    bench.run(jobs)
    seeds = {job.id: job.seed for job in jobs}
    bench.folder.journal.unlink()
    again = [replace(job, index=5 - job.index, output=f"{5 - job.index:06d}-{job.id}.png", seed=1000 + job.index) for job in jobs]
    result = bench.run(list(reversed(again)))
    assert (result.rendered, result.counts["done"]) == (0, 6)
    assert {name: row["seed"] for name, row in bench.rows.items()} == seeds
    assert {name: row["output"] for name, row in bench.rows.items()} == {job.id: job.output for job in jobs}


# --- endings --------------------------------------------------------------------------------------------------------


def start(tmp_path: Path, **spec: Any) -> subprocess.Popen[str]:
    path = tmp_path / "spec.json"
    script = {"log": str(tmp_path / "log")} | spec.pop("script", {})
    path.write_text(json.dumps({"folder": str(tmp_path / "run"), "script": script} | spec))
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "scripted_run.py"), str(path)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_log(tmp_path: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("\n") >= lines:
            return
        time.sleep(0.01)
    raise AssertionError("the run never got so far")


SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


@pytest.mark.parametrize(("name", "code"), SIGNALS.items())
def test_the_first_signal_finishes_the_batch_in_flight(tmp_path: Path, name: str, code: int) -> None:
    """Batches of three take their time; whatever has begun is done when the run ends, and nothing else."""
    run = start(tmp_path, jobs=30, batch_size=3, window=30, script={"seconds": 0.2})
    wait_for_log(tmp_path, 7)
    run.send_signal(getattr(signal, name))
    _, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    begun = {line.split()[2] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("denoise ")}
    bench = Bench(tmp_path)
    assert {name for name, state in bench.states.items() if state == "done"} == begun
    assert len(begun) < 30
    assert set(bench.states.values()) == {"done", "pending"}
    assert not (tmp_path / "run" / "run.lock").exists()
    with Journal.read(bench.folder.journal) as journal:
        assert journal.runs()[-1]["stopped_by"] == name
    assert "goes on from here" in err
    again = start(tmp_path, jobs=30)
    again.communicate(timeout=60)
    assert again.returncode == 0
    assert sorted(bench.renders) == sorted(f"job{number}" for number in range(30))


def test_the_second_signal_stops_at_once_and_leaves_no_child(tmp_path: Path) -> None:
    run = start(tmp_path, jobs=4, script={"jobs": {"job1": "hang"}})
    wait_for_log(tmp_path, 3)
    pids = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    assert pids
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.poll() is None, "the batch in flight hangs, and one signal waits for it"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 130, err
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert Bench(tmp_path).states == {"job0": "done", "job1": "pending", "job2": "pending", "job3": "pending"}


def test_signals_ignored_from_the_start_stay_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"folder": str(tmp_path / "run"), "jobs": 6, "script": {"log": str(tmp_path / "log"), "seconds": 0.05}}))
    run = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, str(TESTS / "scripted_run.py"), str(path)],
        env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    wait_for_log(tmp_path, 2)
    run.send_signal(signal.SIGHUP)
    run.communicate(timeout=60)
    assert run.returncode == 0


def test_a_signal_to_the_whole_group_reaches_no_worker(tmp_path: Path) -> None:
    run = start(tmp_path, jobs=12, batch_size=2, window=12, workers=2, script={"seconds": 0.2})
    wait_for_log(tmp_path, 3)
    for pid in [run.pid, *map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())]:
        os.kill(pid, signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err
    begun = {line.split()[2] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("denoise ")}
    assert {name for name, state in Bench(tmp_path).states.items() if state == "done"} == begun


def test_a_night_with_an_end_stops_in_good_order_and_goes_on_next_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        # The clock strikes when five pictures have begun, however slow the machine is.
        patched.setattr(Clock, "ended_by", lambda _: "max-hours" if len(bench.renders) >= 5 else None)
        result = bench.run(40, script={"seconds": 0.05})
    assert (result.stopped_by, result.exit_code) == ("max-hours", 1)
    assert 5 <= result.counts["done"] < 40
    assert result.counts["done"] + result.counts["pending"] == 40
    assert len(bench.renders) == result.counts["done"]
    assert bench.run(40, stop_at=time.time() - 1).stopped_by == "stop-at"
    last = bench.run(40)
    assert (last.stopped_by, last.exit_code) == (None, 0)
    assert len(bench.renders) == 40


@pytest.mark.parametrize("mode", ["wal", "rollback"])
def test_status_answers_each_time_while_two_workers_write_at_full_rate(tmp_path: Path, mode: str) -> None:
    run = start(tmp_path, jobs=20_000, workers=2, batch_size=4, window=32, mode=mode)
    wait_for_log(tmp_path, 2)
    folder = RunFolder(tmp_path / "run")
    done = []
    for _ in range(500):  # a thousand over both modes
        status = collect(folder)
        assert status["state"] == "running"
        assert status["jobs"] == 20_000
        done.append(status["counts"]["done"])
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 143, err
    assert done == sorted(done)
    assert collect(folder)["counts"]["done"] > done[0], "the writers were starved"


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    first = start(tmp_path, jobs=3, script={"jobs": {"job1": "hang"}})
    wait_for_log(tmp_path, 2)
    second = start(tmp_path, jobs=3)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"process {first.pid} on " in err
    first.kill()
    first.communicate()
    third = start(tmp_path, jobs=3)
    _, err = third.communicate(timeout=60)
    assert third.returncode == 0, err


def test_a_worker_ends_when_its_supervisor_is_gone_even_while_it_waits(tmp_path: Path) -> None:
    code = "import sys, time\nfrom batchgen.execute.process import prewarm\nprint(prewarm('json:loads').pid, flush=True)\ntime.sleep(60)\n"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_the_supervisor_loads_nothing_heavy() -> None:
    code = (
        "import sys\nimport batchgen.execute.supervisor, batchgen.reconcile, batchgen.report.status\n"
        "print([name for name in ('torch', 'diffusers', 'transformers', 'pandas', 'numpy', 'av') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_worker_that_cannot_be_started_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerLostError, match="no worker process"):
        WorkerProcess("json:loads")


def test_interruptions_bear_the_signals_exit_codes() -> None:
    assert {name: InterruptedRunError(name, "").exit_code for name in SIGNALS} == SIGNALS


def test_a_run_whose_place_is_taken_finishes_its_batch_begins_no_more_and_says_why(bench: Bench) -> None:
    said: list[str] = []
    reason = LeaseLostError("the place was taken over by another", holder="another")

    def withdrawn() -> LeaseLostError | None:
        return reason if any(isinstance(event, OutputDone) for event in bench.events) else None

    with pytest.raises(LeaseLostError) as raised:
        bench.run(8, window=8, script={"seconds": 0.3}, withdrawn=withdrawn, say=said.append)
    assert raised.value is reason
    states = list(bench.states.values())
    assert states.count("done") in (1, 2, 3), states  # what was in flight when it was noticed
    assert set(states) == {"done", "pending"}
    assert bench.renders == [f"job{number}" for number in range(states.count("done"))], "begun in vain"
    assert said.count(reason.message) == 1
    assert (collect(bench.folder)["stopped_by"], collect(bench.folder)["stopped_because"]) == ("LeaseLostError", reason.message)
    # nothing is lost: the next run renders the rest
    bench.run(8)
    assert set(bench.states.values()) == {"done"}
    assert len(bench.renders) == 8
