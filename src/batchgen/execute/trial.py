"""The smoke test before a night: three steps of the largest shapes, with everything a real job passes, and nothing written.

Three, because faults of schedulers beside offload begin at the second step, and because a model's second expert is reached by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.errors import PlanRefusedError
from batchgen.events import DecisionMade, Emit, Event, JobFailed, LatentsSpooled, OutputDone, StageBatchDone, StageBatchStarted
from batchgen.execute.windows import Row
from batchgen.jobs import Job
from batchgen.plan.trail import Decision

STEPS = 3


class Trial:
    """Stands in for the writers and listens in the supervisor's place while trial jobs run."""

    def __init__(self, emit: Emit, worker: int) -> None:
        self._emit = emit
        self._worker = worker
        self.failures: list[tuple[str, str, str]] = []  # key, stage, reason
        self.made: set[str] = set()
        self.called: set[str] = set()

    @staticmethod
    def jobs(asked: Sequence[Job]) -> tuple[Job, ...]:
        """The jobs as they are tried: few steps, keys of their own."""
        return tuple(replace(job, steps=STEPS, key=f"smoke-{number}") for number, job in enumerate(asked))

    def emit(self, event: Event) -> None:
        """What is about jobs stays here; loads, moves, memory and decisions go on."""
        if isinstance(event, JobFailed):
            self.failures.append((event.key, event.stage, event.reason))
        elif isinstance(event, StageBatchDone):
            self.called |= {name for name, _, _ in event.compute}
        elif not isinstance(event, StageBatchStarted | OutputDone | LatentsSpooled):
            self._emit(event)

    # -- in the place of Products -----------------------------------------------------------------------------------

    def take(self, row: Row, product: npt.NDArray[Any], resolved: Mapping[str, Any], *, sound: object = None) -> None:
        if not np.isfinite(product).all():
            self.failures.append((row.job.key, "decode", "the decoded picture holds values that are not numbers"))
        else:
            self.made.add(row.job.key)

    def finish(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""

    # -- the verdict ------------------------------------------------------------------------------------------------

    def judge(self, jobs: Sequence[Job], components: Iterable[str]) -> None:
        """Raises PlanRefusedError for a job that did not come through; says which components were not reached."""
        for job in jobs:
            failed = next((found for found in self.failures if found[0] == job.key), None)
            if failed is None and job.key in self.made:
                continue
            stage, reason = failed[1:] if failed is not None else ("", "it ended without a picture")
            raise PlanRefusedError(
                f"the smoke test failed{f' in {stage}' if stage else ''} at {job.shape.text} (row {job.row}): {reason}",
                hint="nothing was rendered; change what the reason names, or leave --smoke out",
            )
        shapes = " and ".join(dict.fromkeys(job.shape.text for job in jobs))
        decisions = [Decision.of("smoke", "run", "passed", f"the smoke test came through: {shapes}")]
        for name in sorted(set(components) - self.called):
            text = f"{name} was not called in {STEPS} steps: the smoke test says nothing of it"
            decisions.append(Decision.of("smoke", name, "not called", text))
        for step in decisions:
            self._emit(DecisionMade(self._worker, step.rule, step.subject, step.decision, step.text, step.numbers))
