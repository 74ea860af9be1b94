"""Whole runs killed with SIGKILL at random moments and resumed until done: nothing lost, nothing rendered twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchgen.journal import Journal
from batchgen.runlock import process_start
from scripted import picture
from scripted_run import make_jobs

TESTS = Path(__file__).parents[1]
JOBS = 60


def start(spec: dict, folder: Path) -> subprocess.Popen[bytes]:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.Popen(
        [sys.executable, str(TESTS / "scripted_run.py"), str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def workers_of(folder: Path) -> list[int]:
    """Pids of the living workers that the journal names."""
    try:
        with Journal.read(folder / "journal.sqlite") as journal:
            found = [row["pid"] for row in journal.workers() if row["state"] != "ended"]
    except Exception:  # noqa: BLE001 the journal may not be there yet
        return []
    return [pid for pid in found if "batchgen.execute.worker" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Have all these processes ended within the time?"""
    started = {pid: process_start(pid) for pid in pids}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(command_of(pid) and process_start(pid) == started[pid] for pid in pids):
            return True
        time.sleep(0.02)
    return False


def check_outputs(folder: Path, jobs: int) -> None:
    """Every picture once, whole, with its own pixels and settings; the journal agrees; nothing else lies there."""
    outputs = folder / "outputs"
    expected = {job.output: job for job in make_jobs(jobs)}
    assert {path.name for path in outputs.iterdir()} == set(expected)
    for name, job in expected.items():
        with Image.open(outputs / name) as image:
            assert np.array_equal(np.asarray(image), picture(job)), name
            assert json.loads(image.info["batchgen"])["key"] == job.key
    with Journal.read(folder / "journal.sqlite") as journal:
        assert journal.counts()["done"] == jobs


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_run_resumes_to_the_same_pictures(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder, log = tmp_path / "run", tmp_path / "log"
    script = {"log": str(log), "seconds": 0.01, "spool": True}
    spec = {"folder": str(folder), "jobs": JOBS, "workers": 2, "batch_size": 2, "window": 8, "script": script}
    kills = 0
    while True:
        run = start(spec, tmp_path)
        # Kills come at a moment of the work, wherever the start of Python ends on this machine.
        wanted = chance.randrange(1, 20)
        target = chance.choice(["supervisor", "worker", "both"])
        renders = log.read_text().count("\n") if log.exists() else 0
        while run.poll() is None and kills < 5 and (log.read_text().count("\n") if log.exists() else 0) < renders + wanted:
            time.sleep(0.005)
        if run.poll() is not None or kills >= 5:
            _, err = run.communicate()
            assert run.returncode == 0, err.decode()
            break
        kills += 1
        pids = workers_of(folder)
        if target in ("worker", "both") and pids:
            os.kill(chance.choice(pids), signal.SIGKILL)
        if target in ("supervisor", "both"):
            run.kill()
            assert gone(pids), "a worker outlived its supervisor"
        if target == "worker":
            _, err = run.communicate()
            assert run.returncode == 0, err.decode()
            break
        run.communicate()
    check_outputs(folder, JOBS)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert not [line for line in lines if line[3] == "AGAIN"], "rendered after its rename"
    assert not list((folder / "spool").iterdir())
    # A kill costs at most the batch in flight of each worker.
    denoised = sum(line[0] == "denoise" for line in lines)
    assert denoised <= JOBS + 2 * 2 * (kills + 1)
