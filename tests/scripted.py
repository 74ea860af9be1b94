"""An engine of the executor's shape that needs no model: it really writes pictures, and misbehaves as a script says.

`RunRequest.factory="scripted:ScriptedEngine"` with tests/ on PYTHONPATH. The script is JSON in `EngineSettings.extra` under
"script": {"log": FILE, "batch": N, "seconds": S, "jobs": {ID: ACT}}, with ACT one of raise, nan, filtered, hang, exit137, kill,
segv, oom, retry, silent, crash, grow, or kill-once (only while FILE.ID does not exist).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.errors import ModelError
from batchgen.events import (
    Emit,
    JobFailed,
    LatentsSpooled,
    MemorySample,
    OutputDone,
    StageBatchDone,
    StageBatchStarted,
    WorkerReady,
)
from batchgen.execute.settings import EngineSettings, Window
from batchgen.jobs import Job
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import RECORD, settings_for
from batchgen.outputs.whole import judge
from batchgen.plan.records import Plan
from batchgen.reconcile import adoption


def picture(job: Job) -> np.ndarray:
    """The job's pixels: from its seed alone, uint8 [H, W, 3]."""
    size = (job.height or 32, job.width or 32, 3)
    return np.random.default_rng(job.seed).integers(0, 256, size, dtype=np.uint8)


def written(outputs: Path, job: Job) -> OutputDone:
    """Writes the job's picture as a worker does, and says so."""
    settings = settings_for(job, {}, 1)
    size, digest = write_image(picture(job), outputs / job.output, settings)
    return OutputDone(0, job.key, job.output, size, digest, 1, 0.1, settings[RECORD])


class ScriptedEngine:
    def __init__(self, worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> None:
        self.worker, self.settings, self.emit = worker, settings, emit
        self.script: dict[str, Any] = json.loads(dict(settings.extra).get("script", "{}"))
        self.batch = int(self.script.get("batch", plan.batch_size or 1))
        self.outputs = Path(settings.outputs.folder)
        self._stop = threading.Event()
        self._grown: list[bytes] = []
        if self.script.get("refuse"):
            raise ModelError(self.script["refuse"])
        emit(WorkerReady(worker, os.getpid(), settings.device, ("denoise", "decode"), (), "stages", 0.0))

    def finish_current_batch(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._grown.clear()

    def run_window(self, window: Window) -> None:
        spooled = dict(window.spooled)
        for start in range(0, len(window.jobs), self.batch):
            if self._stop.is_set():
                return
            self._run_batch(window, window.jobs[start : start + self.batch], spooled)

    def _run_batch(self, window: Window, jobs: Iterable[Job], spooled: dict[str, str]) -> None:
        jobs = list(jobs)
        keys = tuple(job.key for job in jobs)
        shape = jobs[0].shape.text
        fresh = [job for job in jobs if job.key not in spooled]
        self.emit(StageBatchStarted(self.worker, window.number, "denoise", shape, keys))
        began = time.monotonic()
        alive = []
        for job in jobs:
            act = self.script.get("jobs", {}).get(job.id)
            if job in fresh:
                self.log("denoise", job)
            if act is None or not self._misbehave(act, job):
                alive.append(job)
        time.sleep(float(self.script.get("seconds", 0)))
        if self.script.get("spool") and fresh:
            path = f"spool/{fresh[0].key}.latents"
            Path(self.settings.run_folder, path).write_text(json.dumps([job.key for job in fresh]))
            self.emit(LatentsSpooled(self.worker, tuple(job.key for job in fresh), path, len(jobs)))
        self.emit(StageBatchDone(self.worker, window.number, "denoise", shape, keys, len(jobs), time.monotonic() - began))
        self.emit(StageBatchStarted(self.worker, window.number, "decode", shape, keys))
        for job in alive:
            if self.script.get("jobs", {}).get(job.id) == "kill-in-decode":
                flag = Path(f"{self.script['log']}.{job.id}")
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            self._write(job, len(jobs))
        self.emit(StageBatchDone(self.worker, window.number, "decode", shape, keys, len(jobs), 0.0))
        rss = int(self.script.get("rss", 0)) + sum(map(len, self._grown))
        self.emit(MemorySample(self.worker, "decode", rss, 0, 0))

    def _write(self, job: Job, batch: int) -> None:
        path = self.outputs / job.output
        settings = settings_for(job, dict(self.settings.outputs.metadata), batch)
        self.log("render", job)
        try:
            size, digest = write_image(picture(job), path, settings, overwrite=self.settings.outputs.overwrite)
        except FileExistsError:
            verdict, found = judge(path, job.key)
            if verdict != "ours" or found is None:
                self.emit(JobFailed(self.worker, job.key, "error", "decode", f"{job.output} is taken"))
                return
            self.emit(adoption(path, job.key, job.output, found, self.worker))
            return
        self.emit(OutputDone(self.worker, job.key, job.output, size, digest, batch, 0.01, settings[RECORD]))

    def log(self, what: str, job: Job) -> None:
        """One line a render, written before it begins; says whether the picture stood there already."""
        if "log" in self.script:
            there = (self.outputs / job.output).exists()
            with open(self.script["log"], "a", encoding="utf-8") as log:
                log.write(f"{what} {job.key} {job.id} {'AGAIN' if there else 'new'} {os.getpid()}\n")

    def _misbehave(self, act: str, job: Job) -> bool:
        """True if the job has had its outcome by that."""
        flag = Path(f"{self.script.get('log', '')}.{job.id}")
        match act:
            case "raise":
                self.emit(JobFailed(self.worker, job.key, "error", "denoise", "ValueError: the script says so"))
            case "nan":
                self.emit(JobFailed(self.worker, job.key, "non-finite", "decode", "not a number in the picture"))
            case "filtered":
                self.emit(JobFailed(self.worker, job.key, "filtered", "decode", "the model's own safety check"))
            case "oom":
                self.emit(JobFailed(self.worker, job.key, "out-of-memory", "denoise", "out of memory at batch 1"))
            case "retry":
                self.emit(JobFailed(self.worker, job.key, "error", "denoise", "a passing fault", retry=True))
            case "hang":
                time.sleep(3600)
            case "exit137":
                os._exit(137)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "crash":
                raise RuntimeError("nobody foresaw this")
            case "kill-once":
                if not flag.exists():
                    flag.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return False
            case "silent":
                pass
            case "grow":
                self._grown.append(b"x" * 1_000_000)
                return False
            case _:
                return False
        return True
