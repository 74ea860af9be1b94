"""A worker process as its supervisor sees it: spawned, spoken to, ended, and its end put into words."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from batchgen.errors import WorkerLostError
from batchgen.events import Event
from batchgen.execute.settings import ENGINE, Shutdown, StopAfterBatch, Window, WorkerSetup, log_file

_TAIL_BYTES = 4000


class WorkerProcess:
    """Mutable. Made early, before it is known what it will render: its imports overlap the supervisor's own work."""

    place = ""  # this machine
    ready = True
    lost = False

    def __init__(self, factory: str = ENGINE) -> None:
        """Spawns the process. Raises WorkerLostError if the system refuses."""
        ours, theirs = Pipe(duplex=True)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        self.log_path: Path | None = None
        # The kernel ties a child to the thread that spawned it; only the main thread lives as long as the process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [sys.executable, "-m", "batchgen.execute.worker", str(theirs.fileno()), factory, str(parent)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=(theirs.fileno(),), start_new_session=True,
            )
        except OSError as error:
            ours.close()
            self._log.close()
            raise WorkerLostError(
                f"no worker process could be started: {error}", hint="Free memory or processes, then run again."
            ) from error
        finally:
            theirs.close()
        self.factory = factory
        self.pipe = ours
        self.cause: str | None = None  # why the supervisor ended it, if it did

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pipes(self) -> tuple[Connection, ...]:
        """What to wait on."""
        return (self.pipe,)

    def fileno(self) -> int:
        return self.pipe.fileno()

    def send(self, message: WorkerSetup | Window | StopAfterBatch | Shutdown) -> None:
        """To a worker that has died meanwhile: nothing happens, its end is noticed on the pipe."""
        if isinstance(message, WorkerSetup):
            self.log_path = log_file(message)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message)

    def received(self) -> tuple[list[Event], bool]:
        """All events that are there now, and whether the pipe has ended."""
        return received(self.pipe)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def show_stacks(self) -> None:
        """Asks for every thread's stack in the log: what a hanging worker hangs in."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def kill(self, cause: str | None = None) -> None:
        """Ends the worker and whatever it started, at once."""
        if cause is not None and self.cause is None:
            self.cause = cause
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def finish(self, seconds: float = 5.0) -> None:
        """Lets the worker end by itself, then ends it. Everything it wrote is synced by then."""
        self.send(Shutdown())
        self.wait(seconds)
        self.kill()
        self.close()

    def wait(self, seconds: float) -> None:
        """Until the worker has ended, emptying the pipe so that it can."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            self.received()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)

    def close(self) -> None:
        self.pipe.close()
        self._log.close()

    def how_it_ended(self) -> str:
        """In plain words, once it has: the supervisor's own cause, a signal's name or an exit code."""
        if self.cause is not None:
            return self.cause
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        if code is None:
            return "closed its pipe without ending"
        number = -code if code < 0 else code - 128 if 128 < code < 128 + signal.NSIG else 0
        if number == signal.SIGKILL:
            return "killed by SIGKILL: most likely host memory ran out and the system ended it"
        if number:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(number).name}"
        return f"ended by itself with exit code {code}"

    def last_words(self) -> str:
        """The end of what the process printed."""
        with contextlib.suppress(OSError, ValueError):
            if self.log_path is not None and self.log_path.exists():
                with self.log_path.open("rb") as log:
                    log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
                    return log.read().decode("utf-8", "replace").strip()
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
            return self._log.read().decode("utf-8", "replace").strip()
        return ""


def prewarm(factory: str = ENGINE) -> WorkerProcess:
    """Starts a worker before anything is known, so that its imports run beside the manifest's check. `finish` it if the run is refused."""
    return WorkerProcess(factory)


def received(pipe: Connection) -> tuple[list[Event], bool]:
    """All events that are in a pipe now, and whether it has ended."""
    events: list[Event] = []
    try:
        while pipe.poll():
            events.append(pipe.recv())
    except (EOFError, OSError):
        return events, True
    return events, False
