"""What can end a night early: signals and the clock."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """While entered: SIGINT, SIGTERM and SIGHUP are counted instead of ending the process, and make `fileno` readable.

    A signal that was ignored before (nohup, a background job of a shell) stays ignored. Outside the main thread it hears nothing.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._before: dict[int, Any] = {}
        self._read, self._write = -1, -1

    def __enter__(self) -> StopSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                number = getattr(signal, name)
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number).name)
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")

    def fileno(self) -> int:
        return self._read

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 64)


class Clock:
    """Seconds of a run, and when it must end. `stop_at` is in epoch seconds, by the wall clock, which may be set meanwhile."""

    def __init__(self, *, stop_at: float | None = None, max_seconds: float | None = None) -> None:
        self._began = time.monotonic()
        self._stop_at = stop_at
        self._max_seconds = max_seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def ended_by(self) -> str | None:
        if self._stop_at is not None and time.time() >= self._stop_at:
            return "stop-at"
        if self._max_seconds is not None and self.seconds >= self._max_seconds:
            return "max-hours"
        return None


def next_time(clock: str, *, now: float | None = None) -> float:
    """The next moment the local clock shows `HH:MM`, in epoch seconds. Raises ValueError for another form."""
    wanted = time.strptime(clock.strip(), "%H:%M")
    today = time.localtime(now)
    parts = (today.tm_year, today.tm_mon, today.tm_mday, wanted.tm_hour, wanted.tm_min, 0, 0, 0, -1)
    moment = time.mktime(parts)
    if moment <= (time.time() if now is None else now):
        moment = time.mktime((parts[0], parts[1], parts[2] + 1, *parts[3:]))
    return moment
