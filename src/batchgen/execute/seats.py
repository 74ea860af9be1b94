"""A worker's place in a run, as the supervisor keeps it, and what a worker's last words mean for the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchgen import errors
from batchgen.errors import BatchgenError, RunStoppedError
from batchgen.events import StageBatchStarted, WorkerStopped
from batchgen.execute.launch import WorkerHandle
from batchgen.execute.watch import MemoryWatch
from batchgen.jobs import ShapeKey


@dataclass(slots=True, eq=False)
class Seat:
    """One worker's place: the process in it changes, the number and the device do not."""

    number: int
    device: str
    process: WorkerHandle
    watch: MemoryWatch
    group: tuple[str, ...]  # torch names of its devices, one a rank
    begun: bool = False  # its process runs and was told what to render
    window: int | None = None
    held: set[str] = field(default_factory=set)  # jobs of the window without an outcome
    flight: dict[str, StageBatchStarted] = field(default_factory=dict)  # by stage
    heard: float = 0.0  # monotonic
    noted: float = 0.0
    stage: str = ""
    jobs: int = 0
    deaths: int = 0
    shape: ShapeKey | None = None  # of the jobs it had last
    leaving: bool = False  # its device gets no more work
    open: bool = True

    def where(self, device: str) -> str:
        """The device, and its machine where that is another one."""
        return f"{device} on {self.process.place}" if self.process.place else device

    def suspects(self) -> tuple[str, tuple[str, ...]]:
        """Stage and jobs of the batches in flight; none where it ended between batches, as in loading the model."""
        if not self.flight:
            return self.stage, ()
        keys = {key for batch in self.flight.values() for key in batch.keys}
        return list(self.flight.values())[-1].stage, tuple(sorted(keys & self.held))


_OTHERS = (errors.ManifestError, errors.RunLockedError, errors.LeaseHeldError, errors.LeaseLostError)  # no worker raises them


def stopping_error(event: WorkerStopped) -> BatchgenError:
    """What a worker's engine could not go on with, as the run's own error."""
    kind = getattr(errors, event.error or "", RunStoppedError)
    known = isinstance(kind, type) and issubclass(kind, BatchgenError) and kind not in _OTHERS
    made = kind if known else RunStoppedError
    found: BatchgenError = made(event.fatal or "", hint=event.hint)
    return found
