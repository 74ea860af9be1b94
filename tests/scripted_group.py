"""Engines for groups of ranks under the real supervisor.

`GroupEngine`: the scripted engine whose first rank alone writes, and whose acts only the rank named in the script's "rank" commits.
`open_faulty`: the real engine; the rank named in BATCHGEN_TEST_FAULT ("RANK:FLAG FILE") kills itself in the denoiser's second step, once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from batchgen.events import Emit
from batchgen.execute.settings import EngineSettings
from batchgen.jobs import Job
from batchgen.plan.records import Plan
from scripted import ScriptedEngine


class PeerGoneError(Exception):
    peer_lost = True


class GroupEngine(ScriptedEngine):
    def __init__(self, worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> None:
        super().__init__(worker, settings, plan, emit)
        assert settings.group is not None
        self.rank = settings.group.rank
        self.mine = self.rank == self.script.get("rank", 0)
        with Path(settings.run_folder, f"rank-{self.rank}").open("a") as told:
            print(settings.device, settings.group.devices, settings.group.cfg_parallel, file=told)

    def _misbehave(self, act: str, job: Job) -> bool:
        """Not before the first rank, which tells what is in flight, has come so far: else an earlier job would be suspected."""
        assert self.settings.group is not None
        come = Path(f"{self.settings.group.store}-{job.key}")
        if self.rank == 0:
            come.touch()
        while self.mine and not come.exists():
            time.sleep(0.01)
        if act == "others-lose-touch" and not self.mine:
            raise PeerGoneError("Connection closed by peer")
        return super()._misbehave("kill" if act == "others-lose-touch" else act, job) if self.mine else False

    def _write(self, job: Job, batch: int) -> None:
        """Not before the other rank has come so far: real ranks agree on every batch."""
        passed = Path(self.settings.run_folder, f"passed-{job.key}")
        if self.mine:
            passed.touch()
        if self.rank == 0:
            while not passed.exists():
                time.sleep(0.01)
            super()._write(job, batch)


def open_faulty(worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> Any:
    from batchgen.execute.engine import open_engine

    engine = open_engine(worker, settings, plan, emit)
    rank, _, flag = os.environ["BATCHGEN_TEST_FAULT"].partition(":")
    if settings.group is None or settings.group.rank != int(rank):
        return engine
    watch, calls = engine.components.meter.watch, [0]

    def loaded(name: str, part: Any) -> None:
        watch(name, part)
        if name == "transformer":
            part.register_forward_pre_hook(step)

    def step(module: Any, args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3 and not Path(flag).exists():  # two branches a step
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    engine.components.meter.watch = loaded  # type: ignore[method-assign]
    return engine
