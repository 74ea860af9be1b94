"""A group of ranks as its supervisor sees it: several worker processes that stand for one worker.

All ranks get the same windows in the same order; the first one writes the outputs and speaks for all. When one of them ends, for
whatever reason, the whole group is at its end, and the one that ended by itself is named. Imports no torch.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from batchgen.errors import BatchgenError
from batchgen.events import Event, WorkerStopped
from batchgen.execute.process import WorkerProcess
from batchgen.execute.settings import ENGINE, GroupPlace, Shutdown, StopAfterBatch, Window, WorkerSetup
from batchgen.execute.worker import PEER_LOST

_CULPRIT_SECONDS = 2.0  # ranks that lose touch say so before the one that died is buried by the system


class GroupProcess:
    """Mutable. In a WorkerProcess's place: the same calls, carried out on every rank."""

    place = ""  # this machine
    ready = True
    lost = False

    def __init__(
        self, devices: Sequence[str], factory: str = ENGINE, *, cfg_parallel: bool = False, first: WorkerProcess | None = None,
    ) -> None:
        """Spawns a process a device; `first`: one that was started early. Raises WorkerLostError if the system refuses."""
        self.factory = factory
        self.devices = tuple(devices)
        self.cause: str | None = None
        self._cfg_parallel = cfg_parallel
        self._folder = Path(tempfile.mkdtemp(prefix="batchgen-group-"))
        self._lost_touch: dict[int, str] = {}
        self._ranks = [first] if first is not None else []
        try:
            while len(self._ranks) < len(self.devices):
                self._ranks.append(WorkerProcess(factory))
        except BatchgenError:
            self.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The first rank's: the one that writes."""
        return self._ranks[0].pid

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._ranks)

    @property
    def pipes(self) -> tuple[Connection, ...]:
        return tuple(pipe for rank in self._ranks for pipe in rank.pipes)

    def send(self, message: WorkerSetup | Window | StopAfterBatch | Shutdown) -> None:
        """To all ranks; a wish to stop to the first alone, which tells the others between two batches."""
        for number, rank in enumerate(self._ranks):
            if isinstance(message, StopAfterBatch) and number > 0:
                continue
            rank.send(self._setup_of(message, number) if isinstance(message, WorkerSetup) else message)

    def _setup_of(self, setup: WorkerSetup, number: int) -> WorkerSetup:
        place = GroupPlace(number, self.devices, str(self._folder / "store"), self._cfg_parallel)
        return replace(setup, engine=replace(setup.engine, device=self.devices[number], group=place))

    def received(self) -> tuple[list[Event], bool]:
        """The first rank's events and what stopped any other one; whether a rank's pipe has ended."""
        events: list[Event] = []
        ended = False
        for number, rank in enumerate(self._ranks):
            found, end = rank.received()
            ended |= end
            events += [told for event in found if (told := self._told(number, event)) is not None]
        return events, ended

    def _told(self, number: int, event: Event) -> Event | None:
        if not isinstance(event, WorkerStopped):
            return event if number == 0 else None
        if event.error == PEER_LOST:
            self._lost_touch[number] = event.fatal or ""
            return None
        if number == 0 and event.fatal is None:
            return event
        return replace(event, fatal=f"{self._name(number)}: {event.fatal}") if event.fatal is not None else None

    def _name(self, number: int) -> str:
        return f"rank {number} ({self.devices[number]}, pid {self._ranks[number].pid})"

    def ended(self) -> bool:
        """Whether any rank has: the others cannot go on without it."""
        return any(rank.ended() for rank in self._ranks)

    def show_stacks(self) -> None:
        for rank in self._ranks:
            rank.show_stacks()

    def kill(self, cause: str | None = None) -> None:
        """Ends all ranks and whatever they started, at once."""
        if cause is not None and self.cause is None:
            self.cause = cause
        for rank in self._ranks:
            rank.kill(cause)

    def finish(self, seconds: float = 5.0) -> None:
        """Lets the ranks end by themselves, then ends them."""
        self.send(Shutdown())
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def how_it_ended(self) -> str:
        """In plain words, with the rank that ended first and for reasons of its own."""
        if self.cause is not None:
            return self.cause
        number = self._culprit()
        if number is not None:
            return f"{self._name(number)} {self._ranks[number].how_it_ended()}"
        return "; ".join(f"{self._name(number)} lost touch with its group: {why}" for number, why in self._lost_touch.items())

    def _culprit(self) -> int | None:
        """The first rank that ended without saying that another one is gone; None where all say so."""
        deadline = time.monotonic() + _CULPRIT_SECONDS
        while True:
            self.received()
            found = [number for number, rank in enumerate(self._ranks) if number not in self._lost_touch and rank.ended()]
            if found:
                return found[0]
            if time.monotonic() > deadline or len(self._lost_touch) == len(self._ranks):
                return None if self._lost_touch else 0
            time.sleep(0.02)

    def last_words(self) -> str:
        """Of the rank that is to blame, where one is, else of the first that printed any."""
        blamed = [rank for number, rank in enumerate(self._ranks) if number not in self._lost_touch]
        return next((words for rank in (*blamed, *self._ranks) if (words := rank.last_words())), "")
