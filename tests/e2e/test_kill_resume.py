"""Whole runs killed with SIGKILL at random moments and resumed until done: nothing lost, nothing rendered twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchgen.journal import Journal
from killing import Killed, kill_until_done
from scripted import picture
from scripted_run import make_jobs

TESTS = Path(__file__).parents[1]
JOBS = 60
BATCH = 2

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")


def nothing_lost(killed: Killed, folder: Path, jobs: int, batch: int) -> None:
    assert killed.returncode == 0, killed.errors
    assert killed.outlived == [], "a worker outlived its supervisor"
    assert killed.again == 0, "a picture was rendered after its rename"
    # A kill costs at most the batch in flight of each worker it ends.
    assert jobs <= killed.denoised <= jobs + batch * killed.batches_at_risk
    assert not [path for path in folder.rglob("*") if ".tmp" in path.name or path.suffix == ".part"]
    assert not list((folder / "spool").iterdir())
    with Journal.read(folder / "journal.sqlite") as journal:
        assert journal.counts()["done"] == jobs


@pytest.mark.parametrize("seed", range(8))
def test_a_killed_run_resumes_to_the_same_pictures(tmp_path: Path, seed: int) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    script = {"log": str(log), "seconds": 0.01, "spool": True}
    spec = {"folder": str(folder), "jobs": JOBS, "workers": 2, "batch_size": BATCH, "window": 8, "script": script}
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TESTS / "scripted_run.py"), str(tmp_path / "spec.json")]
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    killed = kill_until_done(start, folder, log, random.Random(seed), kills=5, renders=40)
    nothing_lost(killed, folder, JOBS, BATCH)
    expected = {job.output: job for job in make_jobs(JOBS)}
    assert {path.name for path in (folder / "outputs").iterdir()} == set(expected)
    for name, job in expected.items():
        with Image.open(folder / "outputs" / name) as image:
            assert np.array_equal(np.asarray(image), picture(job)), name
            assert json.loads(image.info["batchgen"])["key"] == job.key


@pytest.mark.parametrize(("batch", "grey_levels"), [("1", 0), pytest.param("auto", 1, marks=pytest.mark.long)])
def test_the_command_line_with_a_real_model_killed_and_resumed(tiny_folder, tmp_path: Path, batch: str, grey_levels: int) -> None:
    """Against an undisturbed run: pixel-equal with batches of one, within a grey level with batches the tuner chose."""
    manifest = tmp_path / "prompts.csv"
    manifest.write_text("prompt,width,height,steps\n" + "".join(f"a red circle {number},32,32,2\n" for number in range(24)))
    model = str(tiny_folder("qwen_image"))

    def command(folder: Path) -> list[str]:
        options = ["--model", model, "-o", str(folder), "--workers", "2", "--batch-size", batch, "--quiet"]
        return [sys.executable, str(TESTS / "logged_run.py"), "run", str(manifest), *options]

    def environment(log: Path) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(TESTS), "RENDER_LOG": str(log)}

    calm, folder, log = tmp_path / "calm", tmp_path / "run", tmp_path / "log"
    undisturbed = subprocess.run(command(calm), env=environment(tmp_path / "calm.log"), capture_output=True, text=True, check=False)
    assert undisturbed.returncode == 0, undisturbed.stderr

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(folder), env=environment(log), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    killed = kill_until_done(start, folder, log, random.Random(batch), kills=2, renders=16)
    nothing_lost(killed, folder, 24, 1 if batch == "1" else 24)
    names = {path.name for path in (calm / "outputs").iterdir()}
    assert {path.name for path in (folder / "outputs").iterdir()} == names
    for name in names:
        with Image.open(calm / "outputs" / name) as one, Image.open(folder / "outputs" / name) as other:
            assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= grey_levels, name
