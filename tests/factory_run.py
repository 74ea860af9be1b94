"""The command line as it is, with workers whose engine another factory makes: `python factory_run.py FACTORY run prompts.csv ...`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from batchgen.cli import main, rendering
from batchgen.execute.process import WorkerProcess
from batchgen.execute.supervisor import RunRequest

if __name__ == "__main__":
    factory = sys.argv.pop(1)
    run_jobs = rendering.run_jobs

    def with_factory(request: RunRequest, listen: Any) -> Any:
        return run_jobs(replace(request, factory=factory), listen)

    rendering.run_jobs = with_factory
    rendering.prewarm = lambda: WorkerProcess(factory)
    main.main()
