"""Two workers on two cores against one: each of 300 jobs once, though one worker is killed five times; and the wall time of both.

    python tools/bench/two_workers.py [--jobs N] [--kills N] [--size PIXELS] [--megabytes N]

The command line with the built-in model, batches of one. Three runs: one worker, two workers, two workers of which one is killed with
SIGKILL again and again. Then what the processes hold: proportional set sizes (PSS, which share a page out among those that map it) of
one worker and of two on a model of some hundred megabytes, read from /proc while they render. Writes
results/benchmarks/two_workers.json. Ratios of one run on one machine; seconds are not compared across machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from killing import workers_of  # noqa: E402 the tests' own modules are found by the path above

RECORD = ROOT / "results" / "benchmarks" / "two_workers.json"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Ran:
    """One run of the command line."""

    seconds: float  # wall, loading included
    rendering: float  # wall, from the first output to the last, where loading plays no part
    outputs: dict[str, bytes]  # file name -> pixels
    told: Counter[str]  # job keys that were told done, how often
    deaths: int


def run(folder: Path, manifest: Path, workers: int, *, model: str = "builtin", kills: int = 0) -> Ran:
    """Runs to the end; kills the first living worker as soon as each next sixth of the outputs is there."""
    events = folder.with_suffix(".jsonl")
    command = [
        sys.executable, "-m", "batchgen", "run", str(manifest), "--model", model, "-o", str(folder), "--workers", str(workers),
        "--threads", "1", "--batch-size", "1", "--quiet", "--events", str(events),
    ]
    jobs = len(manifest.read_text().splitlines()) - 1
    began = time.monotonic()
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for number in range(1, kills + 1):
        wait_for_outputs(folder, number * jobs // (kills + 1), process)
        while not (pids := workers_of(folder)) and process.poll() is None:
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
    _, said = process.communicate()
    seconds = time.monotonic() - began
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nexit {process.returncode}\n{said.decode()}")
    told, deaths, times = read_events(events)
    pictures = {path.name: np.asarray(Image.open(path).convert("RGB")).tobytes() for path in (folder / "outputs").iterdir()}
    return Ran(seconds, times[-1] - times[0], pictures, told, deaths)


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


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """Bytes over all workers at their most, by the kernel's own counts."""

    workers: int
    pss_bytes: int
    rss_bytes: int
    shared_clean_bytes: int  # mapped from files and shared: weights and libraries
    private_dirty_bytes: int  # each process's own


def held_while_rendering(folder: Path, manifest: Path, workers: int, model: Path) -> Held:
    command = [
        sys.executable, "-m", "batchgen", "run", str(manifest), "--model", str(model), "-o", str(folder), "--workers", str(workers),
        "--threads", "1", "--batch-size", "1", "--quiet",
    ]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = Held(workers, 0, 0, 0, 0)
    while process.poll() is None:
        pids = workers_of(folder)
        if len(pids) == workers and len(list((folder / "outputs").glob("*"))) >= 2 * workers:
            sums = [rollup(pid) for pid in pids]
            if all(sums):
                now = Held(workers, *(sum(part[name] for part in sums) for name in ("Pss", "Rss", "Shared_Clean", "Private_Dirty")))
                most = max(most, now, key=lambda held: held.pss_bytes)
        time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nexit {process.returncode}")
    return most


def rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def middling_model(folder: Path, megabytes: int) -> int:
    """A Qwen-Image pipeline of about so many megabytes of float32 weights; returns their bytes."""
    import tiny

    tiny.qwen_image(folder)
    return grow(folder / "transformer", megabytes)


def grow(folder: Path, megabytes: int) -> int:
    """Makes the transformer deeper until its file has the size."""
    import diffusers

    config = json.loads((folder / "config.json").read_text())
    base = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    layers = config["num_layers"]
    per_layer = base / (layers + 1)
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    config["num_layers"] = max(layers, int(megabytes * 2**20 / per_layer))
    model = diffusers.QwenImageTransformer2DModel(**config)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    model.save_pretrained(folder, max_shard_size="50GB")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--megabytes", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="two-workers-") as temp:
        folder = Path(temp)
        manifest = write_manifest(folder / "list.csv", options.jobs, options.size)
        one, two = run(folder / "one", manifest, 1), run(folder / "two", manifest, 2)
        killed = run(folder / "killed", manifest, 2, kills=options.kills)
        for name, ran in {"two": two, "killed": killed}.items():
            lost = options.jobs - len(ran.outputs)
            doubled = sum(times > 1 for times in ran.told.values())
            if lost or doubled or len(ran.told) != options.jobs or ran.outputs != one.outputs:
                raise SystemExit(f"{name}: {lost} lost, {doubled} told twice, pictures equal: {ran.outputs == one.outputs}")
        print(f"one {one.seconds:.0f} s, two {two.seconds:.0f} s, with {killed.deaths} deaths {killed.seconds:.0f} s", flush=True)
        memory: dict[str, Any] = {}
        if Path("/proc/self/smaps_rollup").exists():
            weights = middling_model(folder / "model", options.megabytes)
            small = write_manifest(folder / "small.csv", 8, 64, 2)
            held = [held_while_rendering(folder / f"held-{workers}", small, workers, folder / "model") for workers in (1, 2)]
            memory = {
                "transformer_bytes": weights, "one_worker": asdict(held[0]), "two_workers": asdict(held[1]),
                "pss_of_two_against_one": round(held[1].pss_bytes / held[0].pss_bytes, 3),
                "second_worker_adds_bytes": held[1].pss_bytes - held[0].pss_bytes,
            }
    record = {
        "what": "the command line with the built-in model, batches of one, one thread a worker; pixels of all three runs are equal",
        "command": f"python tools/bench/two_workers.py --jobs {options.jobs} --kills {options.kills} --size {options.size}",
        "aim": "each job once, though a worker is killed; two workers near twice as fast as one",
        "jobs": options.jobs, "kills": options.kills, "deaths_seen": killed.deaths, "lost": 0, "told_done_twice": 0,
        "one_worker_over_two_wall": round(one.seconds / two.seconds, 2),
        "one_worker_over_two_first_to_last_output": round(one.rendering / two.rendering, 2),
        "with_kills_over_without_wall": round(killed.seconds / two.seconds, 2),
        "load_average_at_end": round(os.getloadavg()[0], 1), "cores": os.cpu_count(),
        "memory": memory, "python": platform.python_version(), "machine": platform.machine(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
