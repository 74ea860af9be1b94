"""A run with the scripted engine on a Ray cluster, as a process that tests can kill: `python ray_run.py SPEC.json`.

SPEC: as of scripted_run.py (folder, jobs, script, window), and ray, the cluster's address.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from batchgen.execute.settings import Window
from batchgen.execute.supervisor import RunRequest, run_jobs
from batchgen.reconcile import open_journal
from batchgen.runfolder import RunFolder
from scripted import ScriptedEngine
from scripted_run import engine_settings, make_jobs, make_plan


class SeeingEngine(ScriptedEngine):
    """Writes into the log which GPUs its process may use."""

    def run_window(self, window: Window) -> None:
        with open(self.script["log"], "a", encoding="utf-8") as log:
            log.write(f"sees {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
        super().run_window(window)


def main() -> None:
    # the engine above is made where Ray's own libraries are not needed
    from batchgen.execute.ray_cluster import RayLauncher, connected

    spec = json.loads(Path(sys.argv[1]).read_text())
    factory = "scripted:ScriptedEngine"
    folder = RunFolder(Path(spec["folder"]))
    with connected(spec["ray"]), folder.lock():
        journal, _ = open_journal(folder)
        with journal:
            journal.ingest(make_jobs(spec["jobs"]))
            request = RunRequest(
                folder, journal, engine_settings(folder, spec["script"]), make_plan(1, spec["window"]), factory=factory,
                launcher=RayLauncher(factory, gpus=0),
            )
            run_jobs(request, lambda event: None)


if __name__ == "__main__":
    main()
