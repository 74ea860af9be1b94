"""Two workers on two cores against one: each of 300 jobs once, though one worker is killed five times; and the wall time of both.

    python tools/bench/two_workers.py [--jobs N] [--kills N] [--size PIXELS] [--folder DIR]

The command line with the built-in model, batches of one. Three runs: one worker, two workers, two workers of which one is killed with
SIGKILL again and again. Times are the runs' own, from their start to their last output, as their events say. Writes
results/benchmarks/two_workers.json. Ratios of one run on one machine; seconds are not compared across machines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from _frame import MEASURED_ON, ONE_THREAD, parser_for, write_record
from killing import workers_of

ENVIRONMENT = os.environ | ONE_THREAD


@dataclass
class Ran:
    """One run of the command line."""

    seconds: float  # from the run's start to its last output, loading included
    rendering: float  # from the first output to the last, where loading plays no part
    outputs: dict[str, bytes]  # file name -> pixels
    told: Counter[str]  # job keys that were told done, how often
    deaths: int


def run(folder: Path, manifest: Path, workers: int, *, kills: int = 0) -> Ran:
    """Runs to the end, killing the first living worker each time another share of the outputs is there. What is there is only read."""
    events = folder.with_suffix(".jsonl")
    if not events.exists():
        render(folder, manifest, workers, events, kills)
    told, deaths, times = read_events(events)
    pictures = {path.name: np.asarray(Image.open(path).convert("RGB")).tobytes() for path in (folder / "outputs").iterdir()}
    return Ran(times[-1], times[-1] - times[0], pictures, told, deaths)


def render(folder: Path, manifest: Path, workers: int, events: Path, kills: int) -> None:
    command = [
        sys.executable, "-m", "batchgen", "run", str(manifest), "--model", "builtin", "-o", str(folder), "--workers", str(workers),
        "--threads", "1", "--batch-size", "1", "--quiet", "--events", str(events),
    ]
    jobs = len(manifest.read_text().splitlines()) - 1
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for number in range(1, kills + 1):
        wait_for_outputs(folder, number * jobs // (kills + 1), process)
        while not (pids := workers_of(folder)) and process.poll() is None:
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
    _, said = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nexit {process.returncode}\n{said.decode()}")


def wait_for_outputs(folder: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        if (folder / "outputs").is_dir() and len(list((folder / "outputs").iterdir())) >= count:
            return
        time.sleep(0.02)


def read_events(path: Path) -> tuple[Counter[str], int, list[float]]:
    told: Counter[str] = Counter()
    deaths, times = 0, []
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "OutputDone":
            told[event["key"]] += 1
            times.append(event["t"])
        deaths += event["event"] == "WorkerDied"
    return told, deaths, times


def write_manifest(path: Path, jobs: int, size: int, steps: int = 4) -> Path:
    rows = "".join(f"a red circle and a green star number {number},{size},{size},{steps}\n" for number in range(jobs))
    path.write_text(f"prompt,width,height,steps\n{rows}")
    return path


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="keep the runs here; those that are there are not run again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="two-workers-") as temp:
        folder = options.folder or Path(temp)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = write_manifest(folder / "list.csv", options.jobs, options.size)
        one, two = run(folder / "one", manifest, 1), run(folder / "two", manifest, 2)
        killed = run(folder / "killed", manifest, 2, kills=options.kills)
    for name, ran in {"two": two, "killed": killed}.items():
        lost = options.jobs - len(ran.outputs)
        doubled = sum(times > 1 for times in ran.told.values())
        if lost or doubled or len(ran.told) != options.jobs or ran.outputs != one.outputs:
            raise SystemExit(f"{name}: {lost} lost, {doubled} told twice, pictures equal: {ran.outputs == one.outputs}")
    record = {
        "what": "the command line with the built-in model, batches of one, one thread a worker; pixels of all three runs are equal",
        "command": f"python tools/bench/two_workers.py --jobs {options.jobs} --kills {options.kills} --size {options.size}",
        "aim": "each job once, though a worker is killed; two workers near twice as fast as one on two idle cores",
        "jobs": options.jobs, "kills": options.kills, "deaths_seen": killed.deaths, "lost": 0, "told_done_twice": 0,
        "one_worker_over_two": round(one.seconds / two.seconds, 2),
        "one_worker_over_two_first_to_last_output": round(one.rendering / two.rendering, 2),
        "with_kills_over_without": round(killed.seconds / two.seconds, 2),
        "load_average_at_end": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), **MEASURED_ON,
    }
    write_record("two_workers", record, show=True)


if __name__ == "__main__":
    main()
