"""Runs killed with SIGKILL at random moments and resumed until done: what was lost, rendered twice, or left behind. Aim: nothing.

    python tools/bench/kill_resume.py [--runs N] [--engine scripted|real|both] [--real-runs N]

Each run is a list of 60 jobs over two workers. `scripted` renders noise through the real supervisor, worker processes, journal and
file writing; `real` is the command line with a tiny Qwen-Image pipeline, compared with an undisturbed run of it (pixel-equal with
batches of one on even seeds, within a grey level with automatic batches on odd ones). Writes results/benchmarks/kill_resume.json and
kill_resume_real.json, after every run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from _frame import MEASURED_ON, ONE_THREAD, TESTS, parser_for, write_record
from killing import Killed, kill_until_done
from scripted import picture
from scripted_run import make_jobs

JOBS = 60
BATCH = 2
Pictures = dict[str, np.ndarray]


def run_scripted(seed: int, folder: Path) -> tuple[Killed, int, int]:
    """(what came of it, pictures missing or different, most jobs a batch may hold)."""
    log = folder / "log"
    script = {"log": str(log), "seconds": 0.01, "spool": True}
    spec = {"folder": str(folder / "run"), "jobs": JOBS, "workers": 2, "batch_size": BATCH, "window": 8, "script": script}
    (folder / "spec.json").write_text(json.dumps(spec))

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TESTS / "scripted_run.py"), str(folder / "spec.json")]
        return subprocess.Popen(command, env=environment(log), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    killed = kill_until_done(start, folder / "run", log, random.Random(seed), kills=5, renders=40)
    expected = {job.output: picture(job) for job in make_jobs(JOBS)}
    return killed, differences(folder / "run" / "outputs", expected, 0), BATCH


def environment(log: Path) -> dict[str, str]:
    return os.environ | ONE_THREAD | {"PYTHONPATH": str(TESTS), "RENDER_LOG": str(log)}


def differences(outputs: Path, expected: Pictures, grey_levels: int) -> int:
    """Pictures that are missing, too many, or further from the expected ones."""
    names = {path.name for path in outputs.iterdir()}
    wrong = len(names ^ set(expected))
    for name in names & set(expected):
        with Image.open(outputs / name) as image:
            wrong += bool(np.abs(np.asarray(image).astype(int) - expected[name]).max() > grey_levels)
    return wrong


class RealRuns:
    """The command line with a tiny model; undisturbed runs of it are made once."""

    def __init__(self, folder: Path) -> None:
        import tiny

        self.model = folder / "model"
        tiny.qwen_image(self.model)
        self.manifest = folder / "prompts.csv"
        rows = "".join(f"a red circle {number},64,64,2\n" for number in range(JOBS))
        self.manifest.write_text(f"prompt,width,height,steps\n{rows}")
        self.calm: dict[str, Pictures] = {}
        for batch in ("1", "auto"):
            calm = folder / f"calm-{batch}"
            subprocess.run(self.command(calm, batch), env=environment(folder / "calm.log"), check=True, stdout=subprocess.DEVNULL)
            self.calm[batch] = {path.name: np.asarray(Image.open(path)) for path in (calm / "outputs").iterdir()}

    def command(self, folder: Path, batch: str) -> list[str]:
        options = ["--model", str(self.model), "-o", str(folder), "--workers", "2", "--batch-size", batch, "--quiet"]
        return [sys.executable, str(TESTS / "logged_run.py"), "run", str(self.manifest), *options]

    def run(self, seed: int, folder: Path) -> tuple[Killed, int, int]:
        batch, grey_levels = ("1", 0) if seed % 2 == 0 else ("auto", 1)
        log = folder / "log"

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                self.command(folder / "run", batch), env=environment(log), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )

        killed = kill_until_done(start, folder / "run", log, random.Random(seed), kills=3, renders=60)
        wrong = differences(folder / "run" / "outputs", self.calm[batch], grey_levels)
        return killed, wrong, 1 if batch == "1" else 16


@contextmanager
def kept_on_failure(seed: int) -> Iterator[Path]:
    """A folder that goes when all went well, and stays to be looked at otherwise."""
    folder = tempfile.TemporaryDirectory(prefix=f"kill-{seed}-")
    yield Path(folder.name)
    folder.cleanup()


@dataclass
class Sums:
    """Over the runs so far."""

    engine: str
    kills: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    worst_overrun: float = 0.0
    slowest_end: float = 0.0

    def add(self, killed: Killed, wrong: int) -> None:
        over = killed.denoised - JOBS
        self.kills.update(killed.kills)
        self.counts.update(
            runs=1, jobs=JOBS, starts=killed.starts, pictures_wrong=wrong, rendered_after_rename=killed.again,
            workers_left=len(killed.outlived), jobs_denoised_again=over,
        )
        self.slowest_end = max(self.slowest_end, killed.slowest_end)
        if killed.kills:
            self.worst_overrun = max(self.worst_overrun, over / len(killed.kills))

    def write(self) -> None:
        name = "kill_resume" if self.engine == "scripted" else "kill_resume_real"
        record = {
            "what": "60-job runs over two workers, killed with SIGKILL at random moments (supervisor, a worker, both), resumed until done",
            "engine": self.engine,
            "command": f"python tools/bench/kill_resume.py --engine {self.engine} --runs {self.counts['runs']}",
            "aim": "no picture lost, different, or rendered after its rename; no worker left; a kill costs at most the batches in flight",
            **self.counts,
            "kills": dict(sorted(self.kills.items())),
            "most_jobs_denoised_again_per_kill": round(self.worst_overrun, 2),
            "workers_ended_within_seconds_of_their_supervisor": next(limit for limit in (1, 2, 5, 10) if self.slowest_end < limit),
            **MEASURED_ON,
        }
        write_record(name, record)


def measure(engine: str, run: Callable[[int, Path], tuple[Killed, int, int]], runs: int) -> None:
    """Runs all seeds; prints one line a run. Ends with the first run that fails the aim, and keeps its folder."""
    sums = Sums(engine)
    for seed in range(runs):
        with kept_on_failure(seed) as folder:
            killed, wrong, batch = run(seed, folder)
            over = killed.denoised - JOBS
            at_risk = batch * killed.batches_at_risk
            if killed.returncode != 0 or wrong or killed.again or killed.outlived or not 0 <= over <= at_risk:
                raise SystemExit(f"seed {seed}: {wrong} pictures wrong, {killed}")
        sums.add(killed, wrong)
        sums.write()
        print(f"{engine} {seed}: {len(killed.kills)} kills, {over} jobs denoised again", flush=True)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--engine", choices=["scripted", "real", "both"], default="both")
    parser.add_argument("--real-runs", type=int, default=None, help="default: as many as --runs")
    options = parser.parse_args()
    if options.engine in ("scripted", "both"):
        measure("scripted", run_scripted, options.runs)
    if options.engine in ("real", "both"):
        with tempfile.TemporaryDirectory() as folder:
            measure("real", RealRuns(Path(folder)).run, options.runs if options.real_runs is None else options.real_runs)


if __name__ == "__main__":
    main()
