"""The real engine, writing a line to RENDER_LOG for every job of every denoise and decode it begins."""

from __future__ import annotations

import os
from pathlib import Path

from batchgen.events import Emit, Event, StageBatchStarted
from batchgen.execute.engine import Engine
from batchgen.execute.settings import EngineSettings
from batchgen.plan.records import Plan
from batchgen.runfolder import RunFolder

LINES = {"denoise": "denoise", "pipeline": "denoise", "decode": "render"}


class LoggedEngine(Engine):
    def __init__(self, worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> None:
        outputs, log = RunFolder(Path(settings.run_folder)).outputs, os.environ["RENDER_LOG"]
        names: dict[str, str] = {}

        def heard(event: Event) -> None:
            if isinstance(event, StageBatchStarted) and event.stage in LINES:
                for key in event.keys:
                    there = (outputs / names[key]).exists()
                    with open(log, "a", encoding="utf-8") as file:
                        file.write(f"{LINES[event.stage]} {key} {names[key]} {'AGAIN' if there else 'new'} {os.getpid()}\n")
            emit(event)

        self._names = names
        super().__init__(worker, settings, plan, heard)

    def run_window(self, window: object) -> None:
        self._names.update({job.key: job.output for job in window.jobs})  # type: ignore[attr-defined]
        super().run_window(window)  # type: ignore[arg-type]
