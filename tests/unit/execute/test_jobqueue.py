"""How much a worker gets and of what; and that whatever dies when, every job has one end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.events import DecisionMade, Event, JobFailed, OutputDone, StageBatchDone, StageBatchStarted, WindowDone
from batchgen.execute.jobqueue import JobQueue, choose, window_size
from batchgen.execute.settings import Shutdown, StopAfterBatch, Window
from batchgen.execute.supervisor import RunRequest, run_jobs
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.reconcile import open_journal
from batchgen.report.summary import Summary
from batchgen.report.tables import as_text, decision_table
from batchgen.runfolder import RunFolder
from scripted import written
from scripted_run import engine_settings, make_job, make_plan

SHAPES = ({}, {"width": 64}, {"width": 64, "steps": 8})


def mixed(count: int) -> list[Job]:
    """Jobs of three shapes by turns."""
    return [make_job(f"job{index}", index, **SHAPES[index % 3]) for index in range(count)]


SIZES = {
    "the first window is one batch": (1000, 4, True, 4),
    "much left: full windows": (1000, 2, False, 32),
    "alone, no straggler to fear": (10, 1, False, 32),
    "half an even share, in whole batches": (100, 2, False, 24),
    "near the end": (30, 2, False, 4),
    "never less than a batch": (3, 8, False, 4),
}


@pytest.mark.parametrize(("left", "workers", "first", "size"), SIZES.values(), ids=SIZES)
def test_windows_are_sized_to_what_is_left(left: int, workers: int, first: bool, size: int) -> None:
    assert window_size(left, workers, batch=4, full=32, first=first) == size


@given(jobs=st.integers(1, 2000), workers=st.integers(2, 8), batch=st.integers(1, 16), batches=st.integers(1, 16))
def test_nobody_ends_much_later_than_the_others(jobs: int, workers: int, batch: int, batches: int) -> None:
    """Workers of one speed, each taking its next window when it is free: the last ends at most two batches after the first."""
    free, left = [0] * workers, jobs
    while left:
        worker = min(range(workers), key=lambda number: free[number])
        taken = min(left, window_size(left, workers, batch=batch, full=batch * batches))
        free[worker] += taken
        left -= taken
    if jobs >= 2 * workers * batch:
        assert max(free) - min(free) <= max(2 * batch, jobs // (2 * workers)) if batches == 1 else max(free) - min(free) <= 2 * batch


@given(count=st.integers(1, 30), batch=st.integers(1, 6), jobs=st.integers(0, 60))
def test_a_window_holds_whole_batches_of_a_shape_or_all_of_it(count: int, batch: int, jobs: int) -> None:
    made = mixed(jobs)
    chosen = choose(made, count, batch=batch)
    assert len(chosen) <= count
    assert len({job.key for job in chosen}) == len(chosen)
    assert bool(chosen) == bool(made)
    shapes = list(dict.fromkeys(job.shape for job in chosen))
    runs = [job.shape for number, job in enumerate(chosen) if number == 0 or chosen[number - 1].shape != job.shape]
    assert runs == shapes, "jobs of a shape stand together"
    for shape in shapes[1:]:
        part, whole = (sum(job.shape == shape for job in some) for some in (chosen, made))
        assert part == whole or part % batch == 0


def test_a_worker_goes_on_with_the_shape_it_has_and_takes_others_when_that_is_gone() -> None:
    made = mixed(9)
    assert [job.index for job in choose(made, 3, batch=1, prefer=made[1].shape)] == [1, 4, 7]
    assert [job.index for job in choose(made, 5, batch=1, prefer=made[1].shape)] == [1, 4, 7, 0, 3]
    assert [job.index for job in choose(made[:1], 3, batch=1, prefer=made[1].shape)] == [0]


def test_jobs_with_latents_come_first_whatever_the_worker_has_at_hand(tmp_path: Path) -> None:
    made = mixed(9)
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        journal.ingest(made)
        journal._db.execute("UPDATE jobs SET spool = 'spool/x' WHERE idx IN (5, 8)")
        taken = JobQueue(journal, first=2, full=2).take(0, workers=1, first=False, prefer=made[0].shape)
    assert [job.index for job in taken.jobs] == [5, 8]
    assert set(taken.spooled) == {made[5].key, made[8].key}


# --- the real supervisor, queue and journal over workers that die when they like -------------------------------------


class Scripted:
    """A worker in this process: renders by the word of `fate`, a list of what happens at each next step."""

    place, ready, lost, cause = "", True, False, None
    pid = 0

    def __init__(self, fate: list[str], log: Counter[str], outputs: Path) -> None:
        self.ours, self.theirs = Pipe()
        self.fate, self.log, self.outputs = fate, log, outputs
        self.window: Window | None = None
        self.dead = self.stopping = False

    @property
    def pipes(self) -> tuple[Connection, ...]:
        return (self.ours,)

    def send(self, message: Any) -> None:
        if isinstance(message, Window):
            self.window = message
            self.theirs.send_bytes(b"!")
        if isinstance(message, StopAfterBatch | Shutdown):
            self.stopping = True

    def received(self) -> tuple[list[Event], bool]:
        if self.ours.poll():
            self.ours.recv_bytes()
        events: list[Event] = []
        if self.window is not None and not self.dead:
            window, self.window = self.window, None
            self.render(window, events)
        return events, self.dead

    def render(self, window: Window, events: list[Event]) -> None:
        for job in window.jobs:
            step = self.fate.pop() if self.fate else "render"
            if step == "die before":
                self.dead = True
                return
            events.append(StageBatchStarted(0, window.number, "denoise", job.shape.text, (job.key,)))
            if step == "die in it":
                self.dead = True
                return
            if step == "fail":
                events.append(JobFailed(0, job.key, "error", "denoise", "the script says so"))
            else:
                done = self.written(job)
                if step == "die untold":
                    self.dead = True
                    return
                events.append(done)
            events.append(StageBatchDone(0, window.number, "denoise", job.shape.text, (job.key,), 1, 10.0 if step == "slow" else 0.1))
            if self.stopping:
                break
        events.append(WindowDone(0, window.number))

    def written(self, job: Job) -> OutputDone:
        self.log[job.key] += 1
        return written(self.outputs, job)

    def ended(self) -> bool:
        return self.dead

    def kill(self, cause: str | None = None) -> None:
        self.dead = True

    def how_it_ended(self) -> str:
        return "died as scripted"

    def last_words(self) -> str:
        return ""

    def finish(self, seconds: float = 5.0) -> None:
        self.dead = True
        self.close()

    def show_stacks(self) -> None: ...

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class Fates:
    """A launcher that gives each new worker the next fate; when there are no more, workers live."""

    grows = False

    def __init__(self, workers: int, fates: list[list[str]], outputs: Path) -> None:
        self.workers, self.fates, self.outputs = workers, list(fates), outputs
        self.rendered: Counter[str] = Counter()

    def start(self, group: Sequence[str]) -> Scripted:
        return Scripted(self.fates.pop(0) if self.fates else [], self.rendered, self.outputs)

    def room(self, held: int) -> int:
        return max(0, self.workers - held)

    def close(self) -> None: ...


class Places(Fates):
    """A launcher whose devices have fates of their own: each worker on one goes the same way."""

    def __init__(self, fates: dict[str, list[str]], outputs: Path) -> None:
        super().__init__(len(fates), [], outputs)
        self.by_device = fates
        self.starts: Counter[str] = Counter()

    def start(self, group: Sequence[str]) -> Scripted:
        self.starts[group[0]] += 1
        return Scripted(list(self.by_device[group[0]]), self.rendered, self.outputs)


LEAVING = {
    "nothing begins on it": (["die before"] * 9, "3 times in a row before a batch began", 3),
    "it dies on job after job": (["die in it"] * 9, "3 times in a row with nothing rendered between", 3),
    "it becomes slow": (["slow"] * 30 + ["render"] * 6, "3 batches in a row took more than 4 times", 1),
}


@pytest.mark.parametrize(("fate", "why", "starts"), LEAVING.values(), ids=LEAVING)
def test_a_device_that_fails_or_slows_down_leaves_and_the_rest_goes_on(tmp_path: Path, fate: list[str], why: str, starts: int) -> None:
    folder, said, events = RunFolder(tmp_path / "run"), [], []
    made = [make_job(f"job{index}", index) for index in range(60)]
    launcher = Places({"cpu:0": fate, "cpu:1": []}, folder.outputs)
    with folder.lock():
        journal, _ = open_journal(folder)
        with journal:
            journal.ingest(made)
            request = RunRequest(folder, journal, engine_settings(folder, {}), make_plan(1, 4), devices=("cpu:0", "cpu:1"))
            result = run_jobs(replace(request, launcher=launcher, say=said.append), events.append)
            assert {row["attempts"] for row in journal.rows()} == {0}, "no job is blamed for the device"
    assert (result.counts["done"], result.exit_code) == (60, 0)
    assert launcher.rendered == Counter(job.key for job in made)
    assert launcher.starts == Counter({"cpu:0": starts, "cpu:1": 1})
    (left,) = [event for event in events if isinstance(event, DecisionMade)]
    assert (left.rule, left.subject, left.decision) == ("queue", "worker 0 (cpu:0)", "leaves")
    assert why in left.text
    assert said == [left.text]
    summary = Summary()
    summary.listen(left)
    assert "worker 0 (cpu:0)" in as_text([decision_table(summary)])


STEP = st.sampled_from(["render"] * 6 + ["slow", "fail", "die before", "die in it", "die untold"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.integers(0, 40), workers=st.integers(1, 5), batch=st.integers(1, 4),
    fates=st.lists(st.lists(STEP, max_size=12), max_size=8),
)
def test_the_union_of_work_is_exactly_the_jobs_whatever_dies_when(
    tmp_path_factory: pytest.TempPathFactory, jobs: int, workers: int, batch: int, fates: list[list[str]]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    made, events = mixed(jobs), []
    launcher = Fates(workers, fates, folder.outputs)
    with folder.lock():
        journal, _ = open_journal(folder)
        with journal:
            journal.ingest(made)
            request = RunRequest(folder, journal, engine_settings(folder, {}), make_plan(batch, 4 * batch), workers=workers)
            result = run_jobs(replace(request, launcher=launcher), events.append)
            rows = {row["key"]: row for row in journal.rows()}
    assert set(rows) == {job.key for job in made}
    assert Counter(row["state"] for row in rows.values()) + Counter() == Counter({s: n for s, n in result.counts.items() if n})
    told = Counter(event.key for event in events if isinstance(event, OutputDone))
    done = {key for key, row in rows.items() if row["state"] == "done"}
    assert told == Counter(done), "told done exactly once"
    assert launcher.rendered == Counter(done), "rendered exactly once, the untold ones too"
    ends = {event.key: event for event in events if isinstance(event, JobFailed) and not event.retry}
    for key, row in rows.items():
        assert row["state"] in ("done", "failed")
        if row["state"] == "failed":
            assert row["attempts"] == 2 or key in ends, "only what failed itself, or ended two workers, is set aside"
