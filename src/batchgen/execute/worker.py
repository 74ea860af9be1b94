"""The worker process: takes windows from its pipe, renders them, sends event records back. `python -m batchgen.execute.worker FD FACTORY`.

Everything heavy is imported here and never by the supervisor: first the engine's module, while the supervisor still reads the
manifest. A worker keeps nothing that is not on disk or sent; it may be killed at any moment. When its supervisor is gone the
pipe ends, and so does the worker.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchgen.errors import BatchgenError
from batchgen.events import Event, WindowDone, WorkerStopped
from batchgen.execute.settings import Shutdown, StopAfterBatch, Window, WorkerSetup, log_file
from batchgen.runlock import hold_for_worker

_PR_SET_PDEATHSIG = 1
PEER_LOST = "peer-lost"  # WorkerStopped.error of a rank that cannot reach another one of its group: that one is to blame
CRASH = "crash"  # WorkerStopped.error of an exception nobody foresaw: as good as dead, another worker may do better


def _offer_to_the_oom_killer() -> None:
    """Where host memory runs out, the kernel should take the worker, whose jobs are tried again, and nothing else on the machine."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


class Worker:
    """Mutable; one per process. The reader thread only queues messages and asks the engine to stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine: Any = None
        self._stopping = threading.Event()

    def emit(self, event: Event) -> None:
        """Sends an event; from any thread."""
        with self._send_lock:
            try:
                self._pipe.send(event)
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)

    def read(self) -> None:
        """Body of the reader thread. The end of the pipe is the end of the supervisor, and of this process."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, StopAfterBatch):
                self._stopping.set()
                if self._engine is not None:
                    self._engine.finish_current_batch()
            else:
                self._inbox.put(message)

    def run(self, prewarm: str) -> None:
        """Until shut down or unable to go on. Never returns to tear down: what matters is synced."""
        number = -1
        try:
            _offer_to_the_oom_killer()
            _import_quietly(prewarm)
            setup = self._inbox.get()
            if not isinstance(setup, WorkerSetup):
                return
            number = setup.worker
            _take_log(log_file(setup))
            hold_for_worker(Path(setup.engine.run_folder) / "run.lock")
            group = setup.engine.group
            speaks = group is None or group.rank == 0  # the first rank of a group speaks for all
            self._engine = load_factory(setup.factory)(number, setup.engine, setup.plan, self.emit if speaks else _unheard)
            gc.freeze()
            gc.enable()
            if self._stopping.is_set():
                self._engine.finish_current_batch()
            self._serve(number, alone=group is None)
            self.emit(WorkerStopped(number, None))
        except BatchgenError as error:
            self.emit(WorkerStopped(number, error.message, error.exit_code, error.hint, type(error).__name__))
        except BaseException as error:  # noqa: BLE001 the supervisor decides; the log has the traceback
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self.emit(WorkerStopped(number, reason, 1, None, PEER_LOST if getattr(error, "peer_lost", False) else CRASH))

    def _serve(self, number: int, *, alone: bool) -> None:
        while True:
            message = self._inbox.get()
            if isinstance(message, Shutdown):
                self._engine.close()
                return
            if isinstance(message, Window):
                if not self._stopping.is_set() or not alone:  # ranks of a group agree on a stop inside the window
                    self._engine.run_window(message)
                self.emit(WindowDone(number, message.number))


def _unheard(event: Event) -> None:
    """What the other ranks of a group have to say is what the first one says."""


def load_factory(name: str) -> Callable[..., Any]:
    """The callable that "module:callable" names. Raises ImportError or AttributeError."""
    module, _, attribute = name.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return made


def _import_quietly(factory: str) -> None:
    # A failure shows again, with its message, when the engine is built.
    try:
        load_factory(factory)
    except Exception:  # noqa: BLE001
        traceback.print_exc()


def _take_log(path: Path) -> None:
    """From here on what libraries print lands in the run folder, never between the supervisor's own lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


def _die_with(parent: int) -> None:
    """Linux: the kernel ends this process as soon as its supervisor has ended, even inside a call that never returns."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main(arguments: list[str]) -> None:
    """FD of the pipe, factory to import early, the parent's pid or 0 where it was not the parent's main thread that spawned."""
    # Imports make hundreds of thousands of objects that stay; every collection would walk them all, a fifth of the start-up.
    gc.disable()
    handle, factory, parent = arguments
    # A signal to the whole process group or job is the supervisor's to answer: it lets the batch in flight finish.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if parent != "0":
        _die_with(int(parent))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    worker = Worker(Connection(int(handle)))
    threading.Thread(target=worker.read, name="pipe", daemon=True).start()
    worker.run(factory)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
