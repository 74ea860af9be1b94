"""One run per folder: a lock file made exclusively, that says who holds it and shows by its age whether they live.

Works on network file systems, where a process of another machine cannot be asked: there the heartbeat, the file's own time as
the file server keeps it, decides.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from batchgen.errors import RunLockedError
from batchgen.outputs.files import disk_errors, make_folders
from batchgen.units import duration_text

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 120.0
_ORPHAN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a run folder."""

    host: str
    pid: int
    boot_id: str  # of the machine's current boot; empty where the system has none
    pid_space: str  # Linux: the pid namespace, so that a container's pids are not taken for the host's
    process_start: str  # of that pid, in clock ticks since boot: a pid can be used again
    since: float  # epoch seconds
    token: str

    @property
    def text(self) -> str:
        return f"process {self.pid} on {self.host}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"

    @classmethod
    def me(cls) -> Holder:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _boot_id(), _pid_space(), process_start(pid), time.time(), secrets.token_hex(8))


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def _pid_space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def process_start(pid: int) -> str:
    """When a process began, as text to compare; empty if unknown or gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    return ""


def _process_lives(holder: Holder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if sys.platform == "linux":
        with suppress(OSError):
            state = Path(f"/proc/{holder.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
            if state in "ZX":  # ended, only not yet collected by its parent
                return False
    start = process_start(holder.pid)
    return not (holder.process_start and start and start != holder.process_start)


def read_holder(path: Path) -> Holder | None:
    """Who the lock file names; None where there is no lock. A lock that cannot be read names nobody, but is held."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(text)
        return Holder(**fields)
    except (ValueError, TypeError):
        return Holder("an unknown machine", 0, "", "", "", 0.0, "")


def lives_here(holder: Holder) -> bool | None:
    """Whether the holder's process goes on, where the system of this machine can say so; None where it cannot."""
    me = Holder.me()
    if holder.pid and holder.host == me.host and holder.boot_id and me.boot_id:
        if holder.boot_id != me.boot_id:
            return False  # the machine was started again since
        if holder.pid_space == me.pid_space:
            return _process_lives(holder)
    return None


def is_alive(path: Path, holder: Holder) -> bool:
    """Does the run that made this lock still go on? Asks the system on the same machine, the heartbeat on any other."""
    lives = lives_here(holder)
    if lives is not None:
        return lives
    age = heartbeat_age(path)
    return age is not None and age < STALE_SECONDS


def live_holder(path: Path) -> Holder | None:
    """Who holds the folder of this lock now; None where no run goes on in it."""
    holder = read_holder(path)
    return holder if holder is not None and is_alive(path, holder) else None


def heartbeat_age(path: Path) -> float | None:
    """Seconds since the holder last touched the lock, by the file system's own clock where a file can be made; None if it is gone."""
    probe = path.with_name(f".batchgen-{secrets.token_hex(8)}.tmp")
    now = time.time()
    with suppress(OSError):
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
    try:
        return max(0.0, now - path.stat().st_mtime)
    except FileNotFoundError:
        return None


class RunLock:
    """Held from `acquire` to `release`; a thread keeps the heartbeat. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder = Holder.me()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.taken_over: Holder | None = None  # a dead run whose lock this was

    def acquire(self) -> RunLock:
        """Raises RunLockedError naming the holder, or DiskError."""
        with disk_errors(self.path):
            make_folders(self.path.parent)
            for _ in range(5):
                if self._make():
                    break
                self._take_over_dead()
            else:
                raise self._locked(read_holder(self.path) or self.holder)
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()
        return self

    def _make(self) -> bool:
        # The text is linked into place whole: a lock is never seen half-written.
        temp = self.path.with_name(f".batchgen-{self.holder.token}.tmp")
        temp.write_text(json.dumps(asdict(self.holder)), "utf-8")
        try:
            os.link(temp, self.path)
        except FileExistsError:
            return False
        except OSError:
            try:  # no hard links here
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.holder)))
        finally:
            temp.unlink(missing_ok=True)
        return True

    def _take_over_dead(self) -> None:
        holder = read_holder(self.path)
        if holder is None:
            return
        if is_alive(self.path, holder):
            raise self._locked(holder)
        _wait_for_orphans(self.path, holder)
        aside = self.path.with_name(f".batchgen-{secrets.token_hex(8)}.tmp")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return  # another run was quicker
        moved = read_holder(aside)
        if moved != holder:
            # Between the look and the rename somebody else took over: give it back.
            with suppress(FileExistsError):
                os.link(aside, self.path)
            aside.unlink()
            raise self._locked(moved or holder)
        aside.unlink(missing_ok=True)
        self.taken_over = holder

    def _locked(self, holder: Holder) -> RunLockedError:
        age = heartbeat_age(self.path)
        seen = f", last sign of life {duration_text(age)} ago" if age is not None else ""
        return RunLockedError(
            f"{self.path.parent} is in use by another run: {holder.text}{seen}",
            holder=holder.text,
            hint="Wait for it, stop it, or give this run a folder of its own with -o or --new. `batchgen status` shows how far it is.",
        )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Gives the folder free. Does nothing to a lock that is no longer ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if read_holder(self.path) == self.holder:
                with suppress(OSError):
                    self.path.unlink()

    def __enter__(self) -> RunLock:
        return self if self._thread is not None else self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def hold_for_worker(path: Path) -> int | None:
    """Called by a worker: marks that a process still works for this lock, until it ends. Returns the open handle, None if impossible."""
    try:
        handle = os.open(path, os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return handle


def _wait_for_orphans(path: Path, holder: Holder) -> None:
    """Until the dead run's workers have ended too: they could still rename a picture that a new run would render again."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunLockedError(
                        f"{path.parent}: a worker of the run that died ({holder.text}) has not ended yet",
                        holder=holder.text,
                        hint="End it, then run the same command again.",
                    ) from None
                time.sleep(0.02)
            except OSError:
                return  # a file system without such locks
    finally:
        os.close(handle)
