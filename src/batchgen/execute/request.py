"""What a run is asked to do and how it ended: the records between the command line and the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from batchgen import errors
from batchgen.errors import BatchgenError
from batchgen.execute.launch import Launcher
from batchgen.execute.process import WorkerProcess
from batchgen.execute.settings import ENGINE, EngineSettings
from batchgen.journal import Journal
from batchgen.outputs.delivery import Delivery
from batchgen.plan.records import Plan
from batchgen.reconcile import Reconciled
from batchgen.runfolder import RunFolder
from batchgen.units import counted, size_text

HANG_SECONDS = 3600.0
_BATCHES_A_WINDOW = 8
_LEAST_WINDOW = 16
_TOLD_SLOPE = 2**30  # bytes an hour of growth that a user hears of


@dataclass(frozen=True, slots=True)
class RunRequest:
    """All of one run. The journal holds the manifest's jobs already, the folder is locked."""

    folder: RunFolder
    journal: Journal
    setup: EngineSettings
    plan: Plan
    workers: int = 1
    devices: tuple[str, ...] = ()  # torch names, one a worker; empty: setup.device for every one
    groups: tuple[tuple[str, ...], ...] = ()  # torch names by group of ranks that hold one model together, in `devices`' place
    stop_at: float | None = None  # epoch seconds; see stopping.next_time
    max_hours: float | None = None
    retry_failed: bool = False
    verify: bool = False
    hang_seconds: float = HANG_SECONDS  # a worker silent for so long with work in hand is ended
    max_worker_bytes: int | None = None  # resident memory beyond which a worker is replaced
    factory: str = ENGINE  # "module:callable" that makes the engine in the worker
    prewarmed: tuple[WorkerProcess, ...] = ()
    launcher: Launcher | None = None  # where workers come from; None: processes of this machine
    delivery: Delivery | None = None  # where outputs go to a store
    withdrawn: Callable[[], BatchgenError | None] | None = None  # why no more work may be begun, once that is so
    say: Callable[[str], None] | None = None  # hears what the disk's look brought up, before the first window


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Over a worker's life in this run. Bytes."""

    worker: int
    rss_bytes: int
    rss_peak_bytes: int
    device_peak_bytes: int
    slope_bytes_per_hour: float | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `stopped_by`: None when nothing is left, else "stop-at" or "max-hours" (signals and errors raise)."""

    counts: dict[str, int]
    stopped_by: str | None
    seconds: float
    rendered: int  # outputs made in this run
    deaths: int = 0
    replaced: int = 0
    reconciled: Reconciled = field(default_factory=Reconciled)
    memory: tuple[WorkerMemory, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all done; 3 some failed or were filtered; 1 jobs are left for the next run."""
        if self.counts["pending"] or self.counts["running"]:
            return errors.EXIT_STOPPED
        return errors.EXIT_SOME_FAILED if self.counts["failed"] or self.counts["filtered"] else errors.EXIT_DONE

    @property
    def lines(self) -> list[str]:
        """For people: what the workers went through, where it is worth saying."""
        said = []
        if self.deaths:
            said.append(f"{counted(self.deaths, 'time')} a worker died and was started again; their logs are in logs/")
        if self.replaced:
            said.append(f"{counted(self.replaced, 'worker had grown and was', 'workers had grown and were')} replaced between windows")
        for worker in self.memory:
            slope = worker.slope_bytes_per_hour
            # Less than a tenth of itself an hour is the allocator's to and fro.
            if slope is not None and slope > max(_TOLD_SLOPE, worker.rss_bytes / 10):
                said.append(f"worker {worker.worker} grew by {size_text(round(slope))} an hour, to {size_text(worker.rss_bytes)}")
        return said


def window_sizes(plan: Plan) -> tuple[int, int]:
    """Jobs in the first window of a worker (one batch, so that the first pictures come soon) and in the ones after."""
    batch = plan.batch_size or max((stage.batch for stage in plan.stages if stage.name in ("denoise", "pipeline")), default=0) or 4
    return batch, max(plan.window or _BATCHES_A_WINDOW * batch, _LEAST_WINDOW if plan.window is None else batch)
