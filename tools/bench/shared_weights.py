"""What worker processes share of a model's weights: their proportional set size, of one and of two on a model of some hundred megabytes.

    python tools/bench/shared_weights.py [--megabytes N]

The command line on the CPU with a Qwen-Image pipeline whose denoiser is that large, float32 as in its file. PSS shares each page out
among the processes that map it; it is read from /proc while they render. Linux only. Writes results/benchmarks/shared_weights.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from _frame import MEASURED_ON, ONE_THREAD, parser_for, write_record
from killing import workers_of

ENVIRONMENT = os.environ | ONE_THREAD


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
    """A Qwen-Image pipeline with a denoiser of about so many megabytes of float32 weights; returns their bytes."""
    import diffusers

    import tiny

    tiny.qwen_image(folder)
    place = folder / "transformer"
    config = {name: value for name, value in json.loads((place / "config.json").read_text()).items() if not name.startswith("_")}
    # a block holds about 36 matrices of width x width
    width = (megabytes * 2**20 / (4 * 36 * config["num_layers"])) ** 0.5
    config["num_attention_heads"] = max(1, round(width / config["attention_head_dim"]))
    for path in place.glob("*.safetensors"):
        path.unlink()
    diffusers.QwenImageTransformer2DModel(**config).save_pretrained(place, max_shard_size="50GB")
    return sum(path.stat().st_size for path in place.glob("*.safetensors"))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shared-weights-") as temp:
        folder = Path(temp)
        weights = middling_model(folder / "model", options.megabytes)
        rows = "".join(f"a red circle {number},64,64,2\n" for number in range(12))
        (folder / "list.csv").write_text(f"prompt,width,height,steps\n{rows}")
        one, two = (held_while_rendering(folder / f"held-{workers}", folder / "list.csv", workers, folder / "model") for workers in (1, 2))
    record = {
        "what": "worker processes of one run on the CPU, at the moment when they hold most, by the kernel's own counts",
        "command": f"python tools/bench/shared_weights.py --megabytes {options.megabytes}",
        "aim": "a second worker holds no second copy of the weights",
        "denoiser_bytes": weights, "one_worker": asdict(one), "two_workers": asdict(two),
        "second_worker_adds_bytes": two.pss_bytes - one.pss_bytes,
        "pss_of_two_over_one": round(two.pss_bytes / one.pss_bytes, 3),
        **MEASURED_ON,
    }
    write_record("shared_weights", record, show=True)


if __name__ == "__main__":
    main()
