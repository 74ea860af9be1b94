"""A worker's place on another machine: starts the worker there, passes messages to it and events from it, and says how it ended.

This is the body of the Ray actor (ray_cluster.py), but knows nothing of Ray. What is asked of it may come twice, after a broken
connection: messages and events are numbered, and nothing is carried out or told twice.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from batchgen import __version__
from batchgen.errors import BatchgenError, ModelError, RunStoppedError
from batchgen.events import Event, WorkerStopped
from batchgen.execute.launch import LocalLauncher, Message
from batchgen.execute.settings import EngineSettings, WorkerSetup
from batchgen.inventory.host import host_share
from batchgen.inventory.model import resolve
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.records import Platform


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a machine gets the model from if the run's own folder is not on it."""

    source: str  # a hub id, a folder, or "builtin"
    kind: str  # as in ModelFacts
    revision: str
    options: ModelOptions
    platform: Platform


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ended, in plain words."""

    how: str
    last_words: str


class Place:
    """Mutable; one worker, or one group of ranks, for one seat. Called from several threads at once."""

    def __init__(
        self, factory: str, group: Sequence[str], cfg_parallel: bool, model: ModelSource | None, version: str, *, sharing: int = 1
    ) -> None:
        """Starts the worker. `sharing`: worker processes that may stand on this machine, and share its memory.

        Raises RunStoppedError where this machine has another version of batchgen.
        """
        if version != __version__:
            raise RunStoppedError(f"{socket.gethostname()} has batchgen {__version__}, and the run is of {version}: install the same one")
        self._model = model
        self._sharing = sharing
        self._own: Path | None = None  # a run folder of this machine's own
        self._worker = LocalLauncher(factory, 1, cfg_parallel=cfg_parallel).start(group)
        self._taken = 0  # number of the last message
        self._first = 1  # number of the first event that is kept
        self._events: list[Event] = []
        self._ending: Ending | None = None
        self._news = threading.Condition()
        threading.Thread(target=self._read, name="events", daemon=True).start()

    def about(self) -> tuple[int, str]:
        """(process number, machine) of the worker."""
        return self._worker.pid, socket.gethostname()

    def deliver(self, number: int, message: Message) -> None:
        """To the worker, unless it had this one before, or has ended."""
        if number <= self._taken:
            return
        if isinstance(message, WorkerSetup):
            try:
                message = self._fitted(message)
            except BatchgenError as error:
                self._add([WorkerStopped(message.worker, error.message, error.exit_code, error.hint, type(error).__name__)])
                self._taken = number
                return
        with self._news:
            if self._ending is None:
                self._worker.send(message)
        self._taken = number

    def events(self, after: int, seconds: float) -> tuple[list[Event], Ending | None]:
        """The events behind number `after`, waited for up to so long; and the end, once no event is left before it."""
        deadline = time.monotonic() + seconds
        with self._news:
            del self._events[: max(0, after + 1 - self._first)]
            self._first = max(self._first, after + 1)
            while not self._events and self._ending is None and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)
            return list(self._events), self._ending

    def show_stacks(self) -> None:
        """Into the worker's log."""
        with self._news:
            if self._ending is None:
                self._worker.show_stacks()

    def end(self, cause: str | None = None) -> None:
        """Ends the worker at once and waits until all that it said is here."""
        self._worker.kill(cause)
        with self._news:
            self._news.wait_for(lambda: self._ending is not None, 5.0)

    def _add(self, events: Sequence[Event]) -> None:
        with self._news:
            self._events += events
            self._news.notify_all()

    def _read(self) -> None:
        """Body of the thread that hears the worker."""
        ended = False
        while not ended:
            wait(self._worker.pipes, 1.0)
            events, ended = self._worker.received()
            self._add(events)
            ended = ended or self._worker.ended()
        events, _ = self._worker.received()
        self._add(events)
        ending = Ending(self._worker.how_it_ended(), self._worker.last_words())
        self._worker.kill()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        with self._news:
            self._ending = ending
            self._news.notify_all()
            self._worker.close()

    def _fitted(self, setup: WorkerSetup) -> WorkerSetup:
        """The setup with this machine's own paths. Raises RunStoppedError or ModelError for what is not here."""
        engine = setup.engine
        if not os.path.isdir(engine.run_folder):
            if engine.outputs.remote is None:
                raise RunStoppedError(
                    f"the run folder {engine.run_folder} is not on {socket.gethostname()}",
                    hint="With --engine ray, -o names a folder that all machines share, or a URL.",
                )
            engine = self._with_own_folder(engine)
        engine = replace(engine, host_memory_bytes=host_share(engine.host_memory_bytes, self._sharing))
        return replace(setup, engine=self._with_own_model(engine))

    def _with_own_folder(self, engine: EngineSettings) -> EngineSettings:
        """Outputs go to a URL: what is written beside them stays on this machine, and latents are not kept for others."""
        self._own = Path(tempfile.mkdtemp(prefix="batchgen-run-"))
        outputs = self._own / "outputs"
        outputs.mkdir()
        return replace(engine, run_folder=str(self._own), outputs=replace(engine.outputs, folder=str(outputs)), spool_latents=False)

    def _with_own_model(self, engine: EngineSettings) -> EngineSettings:
        model = self._model
        if model is None or Path(engine.model_folder).is_dir():
            return engine
        if model.kind not in ("hub", "builtin"):
            raise ModelError(
                f"{engine.model_folder} is not on {socket.gethostname()}",
                hint="Put the model into a folder that all machines share, or name it by its hub id.",
            )
        options = replace(model.options, revision=model.revision if model.kind == "hub" else None)
        found = resolve(model.source, options, platform=model.platform)
        return replace(engine, model_folder=found.folder or "")
