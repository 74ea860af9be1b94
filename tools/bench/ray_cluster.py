"""A Ray cluster that loses a node and gets one, in the middle of a list: what is done twice or lost, and how soon it is noticed.

    python tools/bench/ray_cluster.py [--runs N] [--jobs N]

A head and two nodes of one processor each, processes of this machine, with Ray's own settings. The scripted engine renders 200 pictures,
a tenth of a second each, in windows of 8. After 40 pictures one node's processes are killed; when its loss is noticed another one joins.
Aim: nothing lost, nothing told twice, no more rendered again than the lost window. Seconds are those of Ray's health checks, which miss
five answers before a node is dead. Writes results/benchmarks/ray_cluster.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _frame import TESTS, write_record

WINDOW = 8
STORE_BYTES = 80 * 2**20
FACTORY = "scripted:ScriptedEngine"
# what Ray's workers import
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path[1:]])

import ray  # noqa: E402 the environment comes first
from ray.cluster_utils import Cluster  # noqa: E402

from batchgen.events import Event, OutputDone, WorkerDied, WorkerReady  # noqa: E402
from batchgen.execute.ray_cluster import RayLauncher, connected  # noqa: E402
from batchgen.execute.supervisor import RunRequest, run_jobs  # noqa: E402
from batchgen.reconcile import open_journal  # noqa: E402
from batchgen.runfolder import RunFolder  # noqa: E402
from scripted_run import engine_settings, make_jobs, make_plan  # noqa: E402


@dataclass
class Ran:
    """One list."""

    done: int
    told_twice: int
    rendered: int  # pictures begun, those in vain too
    blamed: int  # jobs that lost an attempt by the node's end
    noticed_seconds: float  # from the node's end to its jobs' return to the queue
    joined_seconds: float  # from a node's start, its own processes included, to its worker's readiness


def run(jobs: int, path: Path) -> Ran:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(2)]
        with connected(cluster.address):
            return _listed(jobs, RunFolder(path / "run"), path / "log", cluster, nodes)
    finally:
        cluster.shutdown()


def _listed(count: int, folder: RunFolder, log: Path, cluster: Any, nodes: list[Any]) -> Ran:
    events: list[Event] = []
    moments: dict[str, float] = {}

    def listen(event: Event) -> None:
        events.append(event)
        done = sum(isinstance(other, OutputDone) for other in events)
        if done == count // 5 and "killed" not in moments:
            moments["killed"] = time.monotonic()
            cluster.remove_node(nodes[0], allow_graceful=False)
        if isinstance(event, WorkerDied) and "noticed" not in moments:
            moments["noticed"] = moments["started"] = time.monotonic()
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        if isinstance(event, WorkerReady) and "started" in moments:
            moments.setdefault("ready", time.monotonic())

    with folder.lock():
        journal, _ = open_journal(folder)
        with journal:
            journal.ingest(make_jobs(count))
            settings = engine_settings(folder, {"log": str(log), "seconds": 0.1})
            request = RunRequest(folder, journal, settings, make_plan(1, WINDOW), factory=FACTORY, launcher=RayLauncher(FACTORY, gpus=0))
            result = run_jobs(request, listen)
    keys = [event.key for event in events if isinstance(event, OutputDone)]
    return Ran(
        result.counts["done"], len(keys) - len(set(keys)), log.read_text().count("render "),
        sum(len(event.keys) for event in events if isinstance(event, WorkerDied)),
        round(moments["noticed"] - moments["killed"], 1), round(moments.get("ready", time.monotonic()) - moments["started"], 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=200)
    asked = parser.parse_args()
    ran = []
    for _ in range(asked.runs):
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:
            ran.append(run(asked.jobs, Path(folder)))
        print(ran[-1], flush=True)
        record = {
            "command": "python tools/bench/ray_cluster.py", "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {"python": platform.python_version(), "ray": ray.__version__}, "jobs": asked.jobs, "window": WINDOW,
            "lost": sum(asked.jobs - one.done for one in ran), "told_twice": sum(one.told_twice for one in ran),
            "most_rendered_again": max(one.rendered for one in ran) - asked.jobs, "runs": [asdict(one) for one in ran],
        }  # fmt: skip
        write_record("ray_cluster", record)


if __name__ == "__main__":
    main()
