"""One progress display for the whole list, on stderr.

On a terminal: a single rich bar. Without one: a plain line for each finished batch, with the time and what is left, no carriage returns
and no escapes, so that a log of a night stays readable. A listener of events; a stderr that has gone away never stops a run.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from batchgen.events import (
    DecisionMade,
    Event,
    JobFailed,
    OutputDone,
    StageBatchDone,
    WorkerDied,
    WorkerReady,
    WorkerReplaced,
    WorkerStopped,
)
from batchgen.report.console import console as console_of
from batchgen.units import counted, duration_text, size_text


class Pace:
    """Counts and forecasts: how many are done, how fast, how long still.

    The rest is forecast from what each stage took per job so far, so that there is a figure before the first picture's window is through.
    """

    def __init__(
        self, total: int, *, done: int = 0, failed: int = 0, workers: int = 1, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.done = done
        self.failed = failed
        self._begun_with = done + failed
        self._workers = max(workers, 1)
        self._clock = clock
        self._start = clock()
        self._stages: dict[str, tuple[int, float]] = {}  # jobs served, seconds
        self._expected: tuple[str, ...] = ()

    def listen(self, event: Event) -> None:
        match event:
            case WorkerReady():
                self._expected = event.stages
            case StageBatchDone():
                jobs, seconds = self._stages.get(event.stage, (0, 0.0))
                self._stages[event.stage] = (jobs + len(event.keys), seconds + event.seconds)
            case OutputDone():
                self.done += 1
            case JobFailed() if not event.retry:
                self.failed += 1
            case _:
                pass

    def rebase(self, *, done: int, failed: int) -> None:
        """What the journal says stands: outputs found or lost on disk since the count began. They are no work of this session."""
        self._begun_with += done + failed - self.done - self.failed
        self.done, self.failed = done, failed

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def per_minute(self) -> float | None:
        """Pictures a minute of this session; None before the first."""
        finished = self.done + self.failed - self._begun_with
        return 60 * finished / self.elapsed if finished > 0 and self.elapsed > 0 else None

    @property
    def remaining_seconds(self) -> float | None:
        """None while a stage has not been seen at work."""
        left = self.total - self._begun_with
        if left <= 0 or self.done + self.failed >= self.total:
            return 0.0
        if not self._stages or any(stage not in self._stages for stage in self._expected):
            return None
        return sum(max(left - jobs, 0) * seconds / jobs for jobs, seconds in self._stages.values() if jobs) / self._workers

    def text(self) -> str:
        """`24/100 done, 1 failed, 11.2 a minute, 6 min 47 s left`."""
        parts = [f"{min(self.done, self.total)}/{self.total} done"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.per_minute is not None:
            parts.append(f"{self.per_minute:.1f} a minute")
        left = self.remaining_seconds
        if left is not None and left > 0:
            parts.append(f"{duration_text(left)} left")
        return ", ".join(parts)


def _worker_note(event: Event) -> str | None:
    """What befell a worker, or None where the event is about something else."""
    match event:
        case WorkerStopped() if event.fatal is not None:
            return f"worker {event.worker} stopped: {event.fatal}"
        case WorkerDied():
            blamed = f", with {counted(len(event.keys), 'job')} in {event.stage or 'work'}" if event.keys else ""
            return f"worker {event.worker} died{blamed}: {event.cause}"
        case WorkerReplaced():
            return f"worker {event.worker} had grown to {size_text(event.rss_bytes)} and is replaced"
        case _:
            return None


class PlainLines:
    """A line a batch, for logs."""

    def __init__(self, pace: Pace, stream: TextIO, *, now: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self._pace = pace
        self._stream: TextIO | None = stream
        self._now = now

    def listen(self, event: Event) -> None:
        self._pace.listen(event)
        match event:
            case WorkerReady():
                self.note(f"worker {event.worker} ready on {event.device} in {duration_text(event.seconds)}")
            case StageBatchDone():
                what = f"{event.stage}: {event.size}{f' of {event.shape}' if event.shape else ''} in {duration_text(event.seconds)}"
                self.note(f"{what}; {self._pace.text()}")
            case JobFailed():
                again = ", will be tried again" if event.retry else ""
                self.note(f"job {event.key[:8]} failed in {event.stage} ({event.kind}): {event.reason}{again}")
            case DecisionMade():
                self.note(f"{event.subject}: {event.text}")
            case _:
                if (text := _worker_note(event)) is not None:
                    self.note(text)

    def note(self, text: str) -> None:
        if self._stream is None:
            return
        line = "".join(char if char.isprintable() else " " for char in text)
        try:
            self._stream.write(f"{self._now()} {line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None  # closed or full: the run goes on without us

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.note(self._pace.text())


class Display(Protocol):
    """What shows a run: a context manager that listens to its events. `note` says a line of its own."""

    def listen(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...

    def __enter__(self) -> Display: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class _Rest(ProgressColumn):
    """Pictures a minute and the time left, from our own pace."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        return Text(self._pace.text(), no_wrap=True, overflow="ellipsis")


class LiveBar:
    """The bar on a terminal, with the stage at work before it; failures and decisions are printed above it."""

    def __init__(self, pace: Pace, console: Console) -> None:
        self._pace = pace
        columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), _Rest(pace)]
        if console.width < 60:
            columns = [_Rest(pace)]
        self._progress = Progress(*columns, console=console, refresh_per_second=4, transient=False)
        self._task = self._progress.add_task("starting", total=max(pace.total, 1), completed=pace.done + pace.failed)
        self._lost = False

    def listen(self, event: Event) -> None:
        self._pace.listen(event)
        match event:
            case WorkerReady():
                self._update("loading")
            case StageBatchDone():
                self._update(event.stage)
            case OutputDone():
                self._update(None)
            case JobFailed():
                self._update(None)
                self.note(f"job {event.key[:8]} failed in {event.stage} ({event.kind}): {event.reason}")
            case DecisionMade():
                self.note(f"{event.subject}: {event.text}")
            case _:
                if (text := _worker_note(event)) is not None:
                    self.note(text)

    def _update(self, stage: str | None) -> None:
        finished = self._pace.done + self._pace.failed
        self._safely(lambda: self._progress.update(self._task, completed=finished, description=stage))

    def note(self, text: str) -> None:
        line = "".join(char if char.isprintable() else " " for char in text)
        self._safely(lambda: self._progress.console.print(Text(line)))

    def _safely(self, action: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            action()
        except (OSError, ValueError):
            self._lost = True

    def __enter__(self) -> LiveBar:
        self._safely(self._progress.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._safely(self._progress.stop)


class Silent:
    """--quiet: counts only, says nothing."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def listen(self, event: Event) -> None:
        self._pace.listen(event)

    def note(self, text: str) -> None:
        return

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return


def open_display(pace: Pace, *, quiet: bool = False, stream: TextIO | None = None) -> Display:
    """The display that suits stderr: a bar on a capable terminal, lines elsewhere, nothing with `quiet`."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Silent(pace)
    if stream.isatty() and os.environ.get("TERM", "") not in ("dumb", ""):
        found = console_of(stream)
        if found.width > 0:
            return LiveBar(pace, found)
    return PlainLines(pace, stream)


class DownloadLines:
    """A model's download, called with (bytes here, bytes in all) from any thread: one live line on a terminal, else a line a twentieth."""

    def __init__(
        self, name: str, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "")
        self._clock = clock
        self._start: tuple[float, int] | None = None
        self._said = -1.0
        self._lock = threading.Lock()

    def __call__(self, here: int, total: int) -> None:
        if self._quiet or total <= 0:
            return
        with self._lock:
            now = self._clock()
            self._start = self._start or (now, here)
            due = now - self._said >= 0.2 if self._live else here * 20 // total > self._said
            if due or (here >= total and self._said != math.inf):
                self._said = math.inf if here >= total else now if self._live else here * 20 // total
                self._write(self._text(here, total, now), end=here >= total)

    def _text(self, here: int, total: int, now: float) -> str:
        began, had = self._start or (now, here)
        text = f"downloading {self._name}: {size_text(here)} of {size_text(total)}"
        if now > began and here > had:
            rate = (here - had) / (now - began)
            text += f", {size_text(int(rate))}/s, {duration_text((total - here) / rate)} left"
        return text

    def _write(self, text: str, *, end: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"\r\x1b[K{text}" + ("\n" if end else "") if self._live else f"{text}\n")
            self._stream.flush()
