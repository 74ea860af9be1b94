"""A run on a Ray cluster: the same worker, queue and journal over machines that come and go.

The cluster is real: processes of Ray's own on this machine, one set a node. It is started once for all tests here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.errors import InterruptedRunError, ModelError, UsageError, WorkerLostError
from batchgen.events import Event, OutputDone, WorkerDied, WorkerReady
from batchgen.execute import supervisor
from batchgen.execute.supervisor import RunRequest, RunResult, run_jobs
from batchgen.jobs import Job
from batchgen.reconcile import open_journal
from batchgen.runfolder import RunFolder
from killing import gone
from scripted import picture
from scripted_run import engine_settings, make_jobs, make_plan

ray_cluster = pytest.importorskip("batchgen.execute.ray_cluster", reason="ray is not installed: python -m pip install 'batchgen[ray]'")
TESTS = Path(__file__).parents[1]
STORE_BYTES = 80 * 2**20


class Nodes:
    """A cluster of this machine's own: a head without processors, and nodes of one processor each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES,
        }))  # fmt: skip
        self.nodes: list[Any] = []

    def add(self) -> Any:
        node = _patiently(lambda: self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
        self.nodes.append(node)
        return node

    def remove(self, node: Any) -> None:
        """At once, as a machine that loses its power."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def keep(self, count: int) -> None:
        while len(self.nodes) < count:
            self.add()


def _patiently(make: Any) -> Any:
    """Ray gives its processes half a minute to start, which a busy machine may not do the first time."""
    for attempt in range(3):
        try:
            return make()
        except Exception:
            if attempt == 2:
                raise
            time.sleep(2.0)
    raise AssertionError


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # what Ray's workers import; and a node that does not answer for about two seconds is gone
    wanted = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path[1:]]),
        **{f"RAY_{name}": "500" for name in ("health_check_period_ms", "health_check_initial_delay_ms")},
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    made = Nodes()
    made.keep(2)
    try:
        with ray_cluster.connected(made.cluster.address):
            yield made
    finally:
        made.cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Bench:
    """One run folder, and runs of it on the cluster."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path / "run")
        self.log = path / "log"
        self.events: list[Event] = []

    def run(self, jobs: list[Job], *, script: dict[str, Any] | None = None, window: int = 8, factory: str = "scripted:ScriptedEngine",
            workers: int | None = None, listen: Any = None, **request: Any) -> RunResult:
        def hear(event: Event) -> None:
            self.events.append(event)
            if listen is not None:
                listen(event)

        with self.folder.lock():
            journal, _ = open_journal(self.folder)
            with journal:
                journal.ingest(jobs)
                setup = engine_settings(self.folder, {"log": str(self.log)} | (script or {}))
                launcher = ray_cluster.RayLauncher(factory, gpus=0, workers=workers)
                asked = RunRequest(self.folder, journal, setup, make_plan(1, window), factory=factory, launcher=launcher)
                return run_jobs(replace(asked, **request), hear)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_node_is_removed_and_one_added_in_the_middle_and_all_200_jobs_are_done_once(nodes: Nodes, bench: Bench) -> None:
    nodes.keep(2)
    jobs = make_jobs(200)
    removed: list[int] = []

    def listen(event: Event) -> None:
        done = len(bench.of(OutputDone))
        if isinstance(event, OutputDone) and done >= 40 and not removed:
            removed.append(done)
            nodes.remove(nodes.nodes[0])
        if isinstance(event, WorkerDied):
            nodes.add()

    result = bench.run(jobs, script={"seconds": 0.12}, listen=listen)
    assert result.counts["done"] == 200
    assert sorted(event.key for event in bench.of(OutputDone)) == sorted(job.key for job in jobs), "each told once"
    (died,) = bench.of(WorkerDied)
    assert died.cause.startswith("lost with its machine")
    assert died.keys == (), "nobody's fault"
    assert len(bench.of(WorkerReady)) == 3, "the node that joined got a worker"
    for job in jobs:
        with Image.open(bench.folder.outputs / job.output) as image:
            assert np.array_equal(np.asarray(image), picture(job))
    renders = [line.split()[2] for line in bench.log.read_text().splitlines() if line.startswith("render ")]
    assert len(renders) <= 200 + 8, "no more is done again than the lost machine's window"
    with open_journal(bench.folder)[0] as journal:
        assert {row["attempts"] for row in journal.rows()} <= {0, 1}
        workers = journal.workers()
    assert {row["state"] for row in workers} == {"ended"}
    assert all(" on " in row["device"] for row in workers)


def test_a_worker_that_is_killed_is_blamed_as_here_and_another_goes_on(nodes: Nodes, bench: Bench) -> None:
    nodes.keep(2)
    result = bench.run(make_jobs(6), script={"jobs": {"job2": "kill", "job4": "kill-once"}}, workers=1)
    assert result.counts["done"] == 5
    assert result.counts["failed"] == 1
    assert all("SIGKILL" in event.cause for event in bench.of(WorkerDied))
    assert len(bench.of(WorkerDied)) == 3


@pytest.mark.long
def test_a_signal_lets_the_batch_in_flight_finish_and_the_rest_for_later(nodes: Nodes, bench: Bench) -> None:
    nodes.keep(1)

    def listen(event: Event) -> None:
        if isinstance(event, OutputDone) and len(bench.of(OutputDone)) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        bench.run(make_jobs(40), script={"seconds": 0.1}, window=40, workers=1, listen=listen)
    assert 3 <= len(bench.of(OutputDone)) < 40
    assert bench.run(make_jobs(40)).counts["done"] == 40


@pytest.mark.long
def test_a_model_that_is_refused_there_stops_the_run_with_its_own_error(nodes: Nodes, bench: Bench) -> None:
    nodes.keep(1)
    with pytest.raises(ModelError, match="a shard is missing"):
        bench.run(make_jobs(4), script={"refuse": "a shard is missing"})


def test_a_cluster_without_room_is_waited_for_and_given_up_in_order(
    nodes: Nodes, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(ray_cluster.RayLauncher, "room", lambda self, held: 0)
    with pytest.raises(WorkerLostError, match="no machine had room") as caught:
        bench.run(make_jobs(4))
    assert caught.value.exit_code == 1


@pytest.mark.long
def test_workers_end_with_a_supervisor_that_is_killed_and_the_next_run_goes_on(nodes: Nodes, bench: Bench, tmp_path: Path) -> None:
    nodes.keep(2)
    spec = {"folder": str(bench.folder.path), "jobs": 60, "script": {"log": str(bench.log), "seconds": 0.2}, "ray": nodes.cluster.address,
            "window": 8}  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    run = subprocess.Popen([sys.executable, str(TESTS / "ray_run.py"), str(tmp_path / "spec.json")], cwd=TESTS)
    deadline = time.monotonic() + 120
    while (not bench.log.exists() or bench.log.read_text().count("render ") < 6) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.kill()
    run.wait()
    workers = {int(line.split()[4]) for line in bench.log.read_text().splitlines() if line.count(" ") == 4}
    assert workers
    assert gone(sorted(workers), seconds=60.0)
    result = bench.run(make_jobs(60))
    assert result.counts["done"] == 60


def test_each_worker_has_gpus_of_its_own_and_sees_no_others(nodes: Nodes, bench: Bench) -> None:
    node = _patiently(lambda: nodes.cluster.add_node(num_cpus=0, num_gpus=2, object_store_memory=STORE_BYTES))
    try:
        groups = ray_cluster.RayLauncher("ray_run:SeeingEngine", gpus=2)
        assert groups.room(0) == 1
        launcher = ray_cluster.RayLauncher("ray_run:SeeingEngine", gpus=1)
        assert launcher.room(0) == 2
        with pytest.raises(UsageError, match=r"cannot say what it has: .*CUDA"):
            ray_cluster.cluster_facts()
        result = bench.run(make_jobs(12), script={"seconds": 0.3}, factory="ray_run:SeeingEngine", window=2, launcher=launcher,
                           groups=(("cuda:0",),))  # fmt: skip
        assert result.counts["done"] == 12
        assert {event.device for event in bench.of(WorkerReady)} == {"cuda:0"}, "each counts its own from 0"
        seen = {line.split()[1] for line in bench.log.read_text().splitlines() if line.startswith("sees ")}
        assert seen == {"0", "1"}
    finally:
        nodes.cluster.remove_node(node, allow_graceful=True)


def test_facts_of_a_cluster_of_processors_are_those_of_its_smallest_machine(nodes: Nodes) -> None:
    nodes.keep(1)
    facts = ray_cluster.cluster_facts()
    assert (facts.platform, len(facts.devices), facts.largest_group) == ("cpu", 1, 1)
    assert 0 < facts.devices[0].available_bytes <= facts.devices[0].total_bytes


@pytest.mark.long
def test_pictures_of_the_built_in_model_are_those_of_a_run_on_this_machine(nodes: Nodes, tmp_path: Path) -> None:
    nodes.keep(1)
    (tmp_path / "list.csv").write_text("prompt,seed,width,height,steps\na red star,1,64,64,3\na blue square,2,64,64,3\na ring,3,64,64,2\n")
    ways = {"here": [], "there": ["--engine", "ray", "--ray-address", nodes.cluster.address, "--workers", "1"]}
    for name, options in ways.items():
        command = [sys.executable, "-m", "batchgen", "run", "list.csv", "--model", "builtin", "-o", name, "--batch-size", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert "raylet" not in done.stdout + done.stderr
    found = [sorted(path.name for path in (tmp_path / name / "outputs").iterdir()) for name in ways]
    assert found[0] == found[1]
    assert len(found[0]) == 3
    for name in found[0]:
        with Image.open(tmp_path / "here" / "outputs" / name) as here, Image.open(tmp_path / "there" / "outputs" / name) as there:
            assert np.array_equal(np.asarray(here), np.asarray(there))
