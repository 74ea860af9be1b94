"""A rank of a sharded group killed with SIGKILL in the middle of a denoise: how soon it is named, and what became of the jobs.

    python tools/bench/rank_loss.py [--runs N]

Each run is the command line on a tiny Qwen-Image, its denoiser sharded over two CPU ranks; one of them, in turn, is killed while a batch is
denoised. Aim: named right within a second, the group started anew, every job done once. Seconds are of the machine named in the record.
Writes results/benchmarks/rank_loss.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from _frame import ONE_THREAD, parser_for, write_record

JOBS = 4
STEPS = 120
AIM_SECONDS = 1.0


def events(path: Path) -> list[dict[str, Any]]:
    """What the run has said so far; a line that is still being written is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def wait_for(path: Path, what: str, process: subprocess.Popen[bytes], **fields: object) -> dict[str, Any]:
    """The first event of that name and with these fields. Raises RuntimeError if the run ends without it."""
    while True:
        for event in events(path):
            if event["event"] == what and all(event.get(name) == value for name, value in fields.items()):
                return event
        if process.poll() is not None:
            raise RuntimeError(f"the run ended without {what}")
        time.sleep(0.002)


def ranks_of(parent: int) -> list[int]:
    """Pids of the workers, in the order in which they were started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent and b"batchgen.execute.worker" in (folder / "cmdline").read_bytes():
                found.append((int(fields[19]), int(folder.name)))
        except (OSError, ValueError):
            continue
    return [pid for _, pid in sorted(found)]


def one_run(model: Path, folder: Path, rank: int) -> dict[str, Any]:
    """Kills the rank in the first denoise and waits for the end."""
    manifest = folder / "prompts.csv"
    manifest.write_text("prompt,negative_prompt\n" + "".join(f"picture {number} of a red circle,blurry\n" for number in range(JOBS)))
    told = folder / "events.jsonl"
    command = [
        sys.executable, "-m", "batchgen", "run", str(manifest), "--model", str(model), "-o", str(folder / "run"), "--device", "cpu",
        "--workers", "2", "--fsdp", "--steps", str(STEPS), "--width", "64", "--height", "64", "--batch-size", "1", "--events",
        str(told), "-q",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(told, "StageBatchStarted", process, stage="denoise")
        time.sleep(0.2)
        pids = ranks_of(process.pid)
        killed = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        died = wait_for(told, "WorkerDied", process)
        noticed = time.monotonic() - killed
        while sum(event["event"] == "WorkerReady" for event in events(told)) < 2:
            time.sleep(0.002)
        ready = time.monotonic() - killed
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    done = [event["key"] for event in events(told) if event["event"] == "OutputDone"]
    return {
        "rank": rank, "noticed_seconds": round(noticed, 3), "ready_again_seconds": round(ready, 3), "exit_code": code,
        "named": f"rank {rank} (cpu, pid {pids[rank]})" in died["cause"] and "SIGKILL" in died["cause"],
        "blamed_jobs": len(died["keys"]), "done": len(done), "done_twice": len(done) - len(set(done)),
    }


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--runs", type=int, default=4)
    count = parser.parse_args().runs
    os.environ.update(ONE_THREAD)
    import tiny

    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        tiny.qwen_image(model)
        runs = []
        for number in range(count):
            folder = Path(temporary) / f"run-{number}"
            folder.mkdir()
            runs.append(one_run(model, folder, number % 2))
            print(runs[-1], flush=True)
    seconds = sorted(run["noticed_seconds"] for run in runs)
    good = all(run["named"] and run["done"] == JOBS and not run["done_twice"] and run["exit_code"] == 0 for run in runs)
    record = {
        "command": "python tools/bench/rank_loss.py", "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "load_at_the_end": round(os.getloadavg()[0], 1), "torch": metadata.version("torch"), "jobs": JOBS, "steps": STEPS, "runs": runs,
        "noticed_seconds": {"least": seconds[0], "median": seconds[len(seconds) // 2], "most": seconds[-1]},
        "aim_seconds": AIM_SECONDS, "aim_met": good and seconds[-1] <= AIM_SECONDS,
    }  # fmt: skip
    write_record("rank_loss", record)
    print(f"named within {seconds[-1]:.2f} s at most; {'as aimed' if record['aim_met'] else 'NOT as aimed'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
