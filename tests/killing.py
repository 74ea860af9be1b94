"""Kills a run at random moments and resumes it until it is done; counts what that cost. For the tests and the benchmark."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.errors import BatchgenError
from batchgen.journal import Journal
from batchgen.journalfile import JournalDamagedError
from batchgen.runlock import process_start

TARGETS = ("supervisor", "worker", "both")


@dataclass(slots=True)
class Killed:
    """What came of one run."""

    kills: list[str] = field(default_factory=list)  # what was killed, in order
    starts: int = 0
    returncode: int | None = None
    errors: str = ""
    outlived: list[int] = field(default_factory=list)  # workers that did not end with their supervisor
    slowest_end: float = 0.0  # seconds from a supervisor's end to its workers'
    again: int = 0  # renders begun of a picture that stood under its name
    denoised: int = 0  # jobs denoised, those in vain too

    @property
    def batches_at_risk(self) -> int:
        """Batches that kills may have cost: one of each worker hit."""
        return sum({"supervisor": 2, "worker": 1, "both": 2}[target] for target in self.kills)


def lines_of(log: Path) -> list[list[str]]:
    # A killed writer can leave a line without its end.
    return [line.split() for line in log.read_text().splitlines() if line.count(" ") == 4] if log.exists() else []


def kill_until_done(
    start: Callable[[], subprocess.Popen[bytes]], folder: Path, log: Path, chance: random.Random, *, kills: int, renders: int
) -> Killed:
    """Runs `start()` again and again, killing each of the first `kills` runs: mostly after up to `renders` more renders, sometimes
    after a stretch of time, so that starting and resuming are hit too.
    """
    killed = Killed()
    while True:
        run = start()
        killed.starts += 1
        if len(killed.kills) < kills and wait_for_moment(run, log, chance, renders):
            target = chance.choice(TARGETS)
            killed.kills.append(target)
            strike(run, folder, target, chance, killed)
            if target != "worker":
                run.communicate()
                continue
        _, err = run.communicate()
        killed.returncode, killed.errors = run.returncode, err.decode(errors="replace")
        break
    found = lines_of(log)
    killed.again = sum(line[3] == "AGAIN" for line in found)
    killed.denoised = sum(line[0] == "denoise" for line in found)
    return killed


def wait_for_moment(run: subprocess.Popen[bytes], log: Path, chance: random.Random, renders: int) -> bool:
    """Until the moment to strike; False if the run ended before."""
    if chance.random() < 0.2:
        deadline, wanted = time.monotonic() + chance.uniform(0, 3), 10**9
    else:
        deadline, wanted = time.monotonic() + 300, len(lines_of(log)) + chance.randrange(1, renders)
    while time.monotonic() < deadline and len(lines_of(log)) < wanted:
        if run.poll() is not None:
            return False
        time.sleep(0.005)
    return run.poll() is None


def strike(run: subprocess.Popen[bytes], folder: Path, target: str, chance: random.Random, killed: Killed) -> None:
    pids = workers_of(folder)
    if target in ("worker", "both") and pids:
        os.kill(chance.choice(pids), signal.SIGKILL)
    if target in ("supervisor", "both"):
        began = time.monotonic()
        run.kill()
        if not gone(pids):
            killed.outlived += pids
        killed.slowest_end = max(killed.slowest_end, time.monotonic() - began)


def workers_of(folder: Path) -> list[int]:
    """Pids of the living workers that the journal names; none where there is no journal yet."""
    try:
        with Journal.read(folder / "journal.sqlite") as journal:
            found = [row["pid"] for row in journal.workers() if row["state"] != "ended"]
    except (BatchgenError, JournalDamagedError):
        return []
    return [pid for pid in found if "batchgen.execute.worker" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Have all these processes ended within the time?"""
    started = {pid: process_start(pid) for pid in pids}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(command_of(pid) and process_start(pid) == started[pid] for pid in pids):
            return True
        time.sleep(0.01)
    return False
