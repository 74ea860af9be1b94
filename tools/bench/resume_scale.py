"""Resuming a list of 100,000 rows: what the supervisor does before its first batch, and its memory. Aim: under 500 MB.

    python tools/bench/resume_scale.py [--rows N]

The command line, up to the first batch a worker begins, with no row done, half of them, and nine in ten. CPU seconds and peak memory
are the supervisor's own; the worker renders with a scripted engine, so that no model is loaded. Rendering what is left is what a night
takes: a resume must add little to that however much is done. Writes results/benchmarks/resume_scale.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _frame import MEASURED_ON, ONE_THREAD, TESTS, parser_for, write_record

AIM_BYTES = 500_000_000
CONTENT = b"stands for a picture" * 100

# The command line, which ends itself and tells its figures when the first batch begins.
DRIVER = """
import json, os, time
from dataclasses import replace
from batchgen.cli import main, rendering
from batchgen.events import StageBatchStarted
from batchgen.execute.process import WorkerProcess

BEGAN = time.monotonic()
run_jobs, FACTORY = rendering.run_jobs, "scripted:ScriptedEngine"

def until_first_batch(request, listen):
    at = time.process_time()
    def heard(event):
        if isinstance(event, StageBatchStarted):
            # Not ru_maxrss: it begins with what the process had that this one was spawned from.
            peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
            figures = {"cpu_before": at, "cpu": time.process_time(), "wall": time.monotonic() - BEGAN, "peak_bytes": peak}
            with open(os.environ["FIGURES"], "w") as file:
                json.dump(figures, file)
            os.kill(event_pid(request), 9)
            os._exit(0)
    return run_jobs(replace(request, factory=FACTORY), heard)

def event_pid(request):
    return request.journal.workers()[0]["pid"]

rendering.run_jobs = until_first_batch
rendering.prewarm = lambda: WorkerProcess(FACTORY)
main.main()
"""


def first_batch(manifest: Path, model: Path, folder: Path, figures: Path) -> dict[str, float]:
    command = [sys.executable, "-c", DRIVER, "run", str(manifest), "--model", str(model), "-o", str(folder), "--quiet"]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(TESTS), "FIGURES": str(figures)}
    figures.unlink(missing_ok=True)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not figures.exists():
        raise SystemExit(f"the run never began a batch:\n{ran.stdout}\n{ran.stderr}")
    found: dict[str, float] = json.loads(figures.read_text())
    return found


def mark_done(folder: Path, count: int) -> None:
    """As if so many rows had been rendered an hour ago and the run had ended in good order."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        rows = journal.execute("SELECT key, output FROM jobs ORDER BY idx LIMIT ?", (count,)).fetchall()
        journal.execute("UPDATE jobs SET state = 'pending' WHERE state = 'running'")
        journal.executemany(
            "UPDATE jobs SET state = 'done', size_bytes = ?, sha256 = ?, written_at = ? WHERE key = ?",
            [(len(CONTENT), digest, time.time() - 3600, key) for key, _ in rows],
        )
        journal.execute("UPDATE runs SET ended = ?", (time.time(),))
    journal.close()
    for _, output in rows:
        path = folder / "outputs" / output
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(CONTENT)


def measure(rows: int) -> dict[str, Any]:
    import tiny

    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        tiny.qwen_image(base / "model")
        manifest = base / "prompts.csv"
        lines = "".join(f"a red circle beside {number} green squares on a table,64,64,2\n" for number in range(rows))
        manifest.write_text(f"prompt,width,height,steps\n{lines}")
        found: dict[str, dict[str, float]] = {}
        for name, done in (("new", 0), ("none done", 0), ("half done", rows // 2), ("nine in ten done", rows * 9 // 10)):
            if name != "new":
                mark_done(base / "run", done)
            found[name] = first_batch(manifest, base / "model", base / "run", base / "figures.json")
            print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    found = measure(rows)
    resumes = {name: figures for name, figures in found.items() if name != "new"}
    least = min(figures["cpu"] for figures in resumes.values())
    peak = max(figures["peak_bytes"] for figures in found.values())
    record = {
        "what": "the supervisor of the command line up to the first batch, over a manifest with that many rows",
        "command": "python tools/bench/resume_scale.py",
        "rows": rows,
        "aim_peak_bytes": AIM_BYTES,
        "peak_bytes": {name: int(figures["peak_bytes"]) for name, figures in found.items()},
        "within_aim": peak < AIM_BYTES,
        "cpu_against_the_least_resume": {name: round(figures["cpu"] / least, 2) for name, figures in found.items()},
        "cpu_share_after_manifest_and_journal": {
            name: round((figures["cpu"] - figures["cpu_before"]) / figures["cpu"], 2) for name, figures in found.items()
        },
        "microseconds_of_cpu_a_row": {name: round(1e6 * figures["cpu"] / rows) for name, figures in found.items()},
        **MEASURED_ON,
    }
    write_record("resume_scale", record, show=True)


if __name__ == "__main__":
    main()
