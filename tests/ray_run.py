"""A run with the scripted engine on a Ray cluster, as a process that tests can kill: `python ray_run.py SPEC.json`.

SPEC: as of scripted_run.py (folder, jobs, script, window), and ray, the cluster's address.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from batchgen.execute.ray_cluster import RayLauncher, connected
from batchgen.execute.supervisor import RunRequest, run_jobs
from batchgen.reconcile import open_journal
from batchgen.runfolder import RunFolder
from scripted_run import engine_settings, make_jobs, make_plan


def main() -> None:
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
