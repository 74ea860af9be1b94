"""Where workers come from: the one seam between the supervisor and whatever starts them, here or on another machine.

The supervisor asks a launcher for workers and speaks to each through `WorkerHandle`; the worker itself (worker.py) knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from batchgen.events import Event
from batchgen.execute.process import WorkerProcess
from batchgen.execute.ranks import GroupProcess
from batchgen.execute.settings import Shutdown, StopAfterBatch, Window, WorkerSetup

Message = WorkerSetup | Window | StopAfterBatch | Shutdown


class WorkerHandle(Protocol):
    """One worker, or one group of ranks, as the supervisor sees it. `WorkerProcess` says what each method does."""

    cause: str | None  # why the supervisor ended it, if it did

    @property
    def pipes(self) -> tuple[Connection, ...]: ...  # readable where there are events or the worker has ended
    @property
    def pid(self) -> int: ...  # on its own machine; 0 while it is not yet running
    @property
    def place(self) -> str: ...  # the machine it runs on; "" for this one
    @property
    def ready(self) -> bool: ...  # it runs: work may be given to it
    @property
    def lost(self) -> bool: ...  # it ended because its machine is gone, which is no job's fault
    def send(self, message: Message) -> None: ...
    def received(self) -> tuple[list[Event], bool]: ...
    def ended(self) -> bool: ...
    def show_stacks(self) -> None: ...
    def kill(self, cause: str | None = None) -> None: ...
    def finish(self, seconds: float = 5.0) -> None: ...
    def close(self) -> None: ...
    def how_it_ended(self) -> str: ...
    def last_words(self) -> str: ...


class Launcher(Protocol):
    """Starts workers."""

    @property
    def grows(self) -> bool: ...  # machines may come and go: seats are filled as room appears, not at the start alone
    def start(self, group: Sequence[str]) -> WorkerHandle: ...  # on these devices; raises WorkerLostError if it cannot be
    def room(self, held: int) -> int: ...  # how many more may be started now, beside the `held` ones that live
    def close(self) -> None: ...  # whatever was started and never asked for


class LocalLauncher:
    """Processes of this machine, those that were started early first."""

    grows = False

    def __init__(self, factory: str, workers: int, prewarmed: Sequence[WorkerProcess] = (), *, cfg_parallel: bool = False) -> None:
        """`workers`: how many there are to be. `factory`: the engine they run."""
        self._factory = factory
        self._workers = workers
        self._spare = list(prewarmed)
        self._cfg_parallel = cfg_parallel

    def start(self, group: Sequence[str]) -> WorkerHandle:
        spare = self._spare.pop() if self._spare else None
        if len(group) > 1:
            return GroupProcess(group, self._factory, cfg_parallel=self._cfg_parallel, first=spare)
        return spare or WorkerProcess(self._factory)

    def room(self, held: int) -> int:
        return max(0, self._workers - held)

    def close(self) -> None:
        for spare in self._spare:
            spare.kill()
            spare.close()
        self._spare.clear()
