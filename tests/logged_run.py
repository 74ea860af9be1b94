"""The command line as it is, with workers that log what they render: `python logged_run.py run prompts.csv --model ...`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchgen.cli import main, rendering
from batchgen.execute.process import WorkerProcess
from batchgen.execute.supervisor import RunRequest

FACTORY = "logged:LoggedEngine"


def logged(request: RunRequest, listen: Any) -> Any:
    return run_jobs(replace(request, factory=FACTORY), listen)


if __name__ == "__main__":
    run_jobs = rendering.run_jobs
    rendering.run_jobs = logged
    rendering.prewarm = lambda: WorkerProcess(FACTORY)
    main.main()
