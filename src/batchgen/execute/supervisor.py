"""The supervisor: gives windows to worker processes, journals what they say, and brings the night to an end in good order.

Holds the journal and no device; imports neither torch nor diffusers. A worker may die at any moment: only jobs of the batch it
had in flight are suspected, they are tried again alone, and whoever kills a worker twice is set aside with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from batchgen.errors import BatchgenError, InterruptedRunError, WorkerLostError
from batchgen.events import (
    DecisionMade,
    Event,
    FailureKind,
    JobFailed,
    LatentsSpooled,
    MemorySample,
    OutputDone,
    StageBatchDone,
    StageBatchStarted,
    WindowDone,
    WorkerDied,
    WorkerReady,
    WorkerReplaced,
    WorkerStopped,
)
from batchgen.execute.aftermath import outcomes, sweep_files
from batchgen.execute.health import Health
from batchgen.execute.jobqueue import JobQueue
from batchgen.execute.launch import Launcher, LocalLauncher
from batchgen.execute.request import HANG_SECONDS, RunRequest, RunResult, WorkerMemory, window_sizes
from batchgen.execute.seats import Seat, stopping_error
from batchgen.execute.settings import StopAfterBatch, Window, WorkerSetup
from batchgen.execute.spool import Spool
from batchgen.execute.stopping import Clock, StopSignals
from batchgen.execute.watch import MemoryWatch
from batchgen.execute.worker import CRASH
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.urls import without_secrets
from batchgen.reconcile import Reconciled, reconcile
from batchgen.remotecheck import reconcile_remote
from batchgen.units import counted

__all__ = ["HANG_SECONDS", "RunRequest", "RunResult", "Supervisor", "WorkerMemory", "run_jobs", "window_sizes"]

Listen = Callable[[Event], None]

_TURN_SECONDS = 0.5  # the longest sleep between looks at clocks and processes
_STATUS_SECONDS = 2.0
_KEPT_CHARACTERS = 1000  # of an error's message
_QUIET_SECONDS = 900.0  # a worker may be silent for so long between batches: it loads a large model from a slow disk
_LOOK_SECONDS = 2.0  # between looks for room, where machines come and go
_PATIENCE_SECONDS = 1800.0  # that a run waits for room while it has no worker at all


def run_jobs(request: RunRequest, listen: Listen) -> RunResult:
    """Renders every pending job of the journal, or as many as time and signals let it.

    Returns when nothing is left, or at `stop_at`/`max_hours`. Raises InterruptedRunError after a signal, DiskError,
    WorkerLostError or what stopped a worker's engine, each with the journal in order and no child left. RefusedError if foreign
    files stand under planned names.
    """
    return Supervisor(request, listen).run()


def _kept(error: BatchgenError) -> str:
    """What the journal says of an error that ended the run, for `status`: its class and its message."""
    return f"{type(error).__name__}: {without_secrets(error.message)[:_KEPT_CHARACTERS]}"


class Supervisor:
    """Mutable; lives for one run, in one thread."""

    def __init__(self, request: RunRequest, listen: Listen) -> None:
        self.request = request
        self.journal = request.journal
        self._listen = listen
        self._clock = Clock(stop_at=request.stop_at, max_seconds=None if request.max_hours is None else request.max_hours * 3600)
        self._seats: list[Seat] = []
        devices = request.devices or (request.setup.device,) * max(1, request.workers)
        self._groups = request.groups or tuple((device,) for device in devices)
        self._launcher: Launcher = request.launcher or LocalLauncher(
            request.factory, len(self._groups), request.prewarmed, cfg_parallel=request.plan.cfg_parallel,
        )
        self._looked = 0.0  # monotonic: when room was last asked for
        self._alone_since: float | None = None  # monotonic: no worker since then, and work left
        first, full = window_sizes(request.plan)
        self._queue = JobQueue(self.journal, first=first, full=full)
        self._health = Health()
        self._stopped_by: str | None = None
        self._error: BatchgenError | None = None
        self._withdrawn: BatchgenError | None = None
        self._deaths = self._replaced = self._rendered = 0
        self._memory: list[WorkerMemory] = []
        self._slowest = 0.0  # seconds of the longest batch
        self._reconciled = Reconciled()
        self._spool = Spool(request.folder, self.journal)

    # --- the whole ------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        with StopSignals() as signals:
            try:
                self._begin()
                while self._error is None and (any(seat.open for seat in self._seats) or self._waiting()):
                    self._turn(signals)
            except BatchgenError as error:
                self._error = self._error or error
            finally:
                self._end(signals)
        if self._error is not None:
            raise self._error
        counts = self.journal.counts()
        return RunResult(
            counts, self._stopped_by if counts["pending"] else None, self._clock.seconds, self._rendered, self._deaths, self._replaced,
            self._reconciled, tuple(self._memory),
        )

    def _begin(self) -> None:
        request = self.request
        request.folder.prepare()
        orderly = self.journal.begin_run()
        overwrite = request.setup.outputs.overwrite
        asked = {"after_crash": not orderly, "verify": request.verify, "overwrite": overwrite}
        if request.delivery is None:
            self._reconciled = reconcile(request.folder, self.journal, **asked)
        else:
            self._reconciled = reconcile_remote(request.folder, self.journal, request.delivery, **asked)
        if request.say is not None:
            for line in self._reconciled.lines:
                request.say(line)
        if request.retry_failed:
            self.journal.retry_failed()
        self._spool.sweep(everything=True)
        self._fill_seats()

    def _fill_seats(self) -> None:
        """As many workers as there is room for, and no more than there are jobs."""
        self._looked = time.monotonic()
        held = sum(seat.open for seat in self._seats)
        for _ in range(min(self._launcher.room(held), self.journal.pending())):
            number = len(self._seats)
            group = self._groups[number % len(self._groups)]
            seat = Seat(number, "+".join(group), self._launcher.start(group), MemoryWatch(self.request.max_worker_bytes), group)
            self._seats.append(seat)
            self._set_up(seat)

    def _fill_anew(self, seat: Seat) -> None:
        """Another worker in the place of one that has ended."""
        seat.process = self._launcher.start(seat.group)
        seat.watch = MemoryWatch(self.request.max_worker_bytes)
        self._set_up(seat)

    def _set_up(self, seat: Seat) -> None:
        seat.begun, seat.heard = False, time.monotonic()
        if seat.process.ready:
            self._put_to_work(seat)

    def _put_to_work(self, seat: Seat) -> None:
        seat.begun = True
        setup = replace(self.request.setup, device=seat.group[0])
        seat.process.send(WorkerSetup(seat.number, setup, self.request.plan, self.request.factory))
        seat.heard = time.monotonic()
        self._note(seat, "starting", pid=seat.process.pid, device=seat.where(seat.device), since=time.time(), deaths=seat.deaths)
        self._give(seat)

    def _grow(self) -> None:
        """Where machines come and go: workers that run by now get work, and new ones are started as room appears."""
        for seat in self._seats:
            if seat.open and not seat.begun and seat.process.ready:
                self._put_to_work(seat)
        if self._stopped_by is None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._fill_seats()

    def _waiting(self) -> bool:
        """No worker, work left, and a launcher that may yet find room. Raises WorkerLostError after too long."""
        if not self._launcher.grows or self._stopped_by is not None or not self.journal.pending():
            return False
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > _PATIENCE_SECONDS:
            raise WorkerLostError(
                f"no machine had room for a worker for {_PATIENCE_SECONDS / 60:.0f} minutes",
                hint="Add machines to the cluster or free theirs, and run the same command again; it resumes.",
            )
        return True

    def _end(self, signals: StopSignals) -> None:
        """No child is left, no job is left running, the journal says how it ended."""
        for seat in self._seats:
            if seat.open:
                self._remember(seat)
                self._kill(seat, "stopped")
        self._launcher.close()
        try:
            self.journal.release()
            self._spool.sweep(everything=True)
            self.journal.end_run(self._stopped_by if self._error is None else _kept(self._error))
        except BatchgenError as error:
            self._error = self._error or error
        if self._error is None and self._withdrawn is not None and self.journal.pending():
            self._error = self._withdrawn
        if self._error is None and signals.received and (left := self.journal.counts()["pending"]):
            self._error = InterruptedRunError(
                signals.received[0],
                f"stopped by {signals.received[0]}; {counted(left, 'job is', 'jobs are')} left. The same command goes on from here.",
            )

    # --- one turn of the loop -------------------------------------------------------------------------------------

    def _turn(self, signals: StopSignals) -> None:
        ready = wait([signals.fileno(), *(pipe for seat in self._seats if seat.open for pipe in seat.process.pipes)], _TURN_SECONDS)
        if signals.fileno() in ready:
            signals.clear()
        if len(signals.received) > 1:
            self._stop_now(signals.received[0])
            return
        if self._stopped_by is None and (reason := signals.received[0] if signals.received else self._clock.ended_by()):
            self._stop(reason)
        if self._stopped_by is None and (withdrawn := self.request.withdrawn() if self.request.withdrawn is not None else None) is not None:
            self._withdraw(withdrawn)
        if self._launcher.grows:
            self._grow()
        heard = [(seat, seat.process, *seat.process.received()) for seat in self._seats if seat.open]
        self._take_in([event for _, _, events, _ in heard for event in events])
        for seat, process, events, ended in heard:
            for event in events:
                self._handle(seat, event)
            if seat.process is not process or self._error is not None:
                continue  # replaced meanwhile: what the old one says about itself no longer counts
            if seat.open and (ended or process.ended()):
                self._take_in_last(seat)
                if seat.open and self._error is None:
                    self._bury(seat)
        self._look_for_hangs()

    def _take_in(self, events: Sequence[Event]) -> None:
        """Journals first, tells listeners then: what a listener shows is what a resume would know."""
        if self.request.delivery is not None:
            events = [self._delivered(self.request.delivery, event) for event in events]
        self.journal.record(events)
        for event in events:
            self._listen(event)

    @staticmethod
    def _delivered(delivery: Delivery, event: Event) -> Event:
        """A finished file that its worker has not sent, having died or seeing another memory than this process, goes before its row."""
        return delivery.send(event) if isinstance(event, OutputDone) and delivery.staged(event) else event

    def _handle(self, seat: Seat, event: Event) -> None:
        seat.heard = time.monotonic()
        match event:
            case WorkerReady():
                self._note(seat, "ready", device=seat.where(event.device))
            case StageBatchStarted():
                seat.flight[event.stage] = event
                seat.stage = event.stage
                self._health.began(seat.number)
                if seat.heard - seat.noted > _STATUS_SECONDS:
                    self._note(seat, "working", stage=event.stage)
            case StageBatchDone():
                seat.flight.pop(event.stage, None)
                self._slowest = max(self._slowest, event.seconds)
                self._health.batch(seat.number, (event.stage, event.shape), event.seconds, event.size)
                self._look_at_health(seat)
            case OutputDone():
                seat.held.discard(event.key)
                seat.jobs += 1
                self._rendered += "adopted" not in event.flags
                self._alone_since = None
                self._health.picture(seat.number)
            case LatentsSpooled():
                self._spool.add(event.path)
            case JobFailed():
                seat.held.discard(event.key)
            case MemorySample():
                seat.watch.sample(event, seat.heard)
            case WindowDone() if event.window == seat.window:
                self._window_done(seat)
            case WorkerStopped() if event.fatal is not None:
                self._fatal(seat, event)

    # --- windows --------------------------------------------------------------------------------------------------

    def _give(self, seat: Seat) -> None:
        """The next window, or the worker's end where nothing is left to give."""
        if self._stopped_by is not None or self._error is not None:
            self._dismiss(seat)
            return
        first = seat.watch.windows == 0 and seat.jobs == 0
        taken = self._queue.take(seat.number, workers=sum(other.open for other in self._seats), first=first, prefer=seat.shape)
        if not taken.jobs:
            if any(other.held for other in self._seats if other is not seat):
                seat.window = None  # another worker may yet die and leave work
                self._note(seat, "idle", stage=None)
            else:
                self._dismiss(seat)
            return
        seat.window, seat.held, seat.flight, seat.shape = taken.number, {job.key for job in taken.jobs}, {}, taken.shape
        seat.heard = time.monotonic()
        seat.process.send(Window(taken.number, taken.jobs, tuple(sorted(self._spool.present(taken.spooled).items()))))
        self._note(seat, "working", window=taken.number)

    def _window_done(self, seat: Seat) -> None:
        if seat.held:
            if self._stopped_by is None and not seat.leaving:
                reason = "the engine ended the window without saying what became of the job"
                self._take_in([JobFailed(seat.number, key, "error", "", reason, True) for key in sorted(seat.held)])
            self.journal.release(seat.held)
        seat.window, seat.held, seat.flight = None, set(), {}
        seat.watch.window_done()
        self._note(seat, "working", rss_bytes=seat.watch.rss_bytes, slope_bytes_per_hour=seat.watch.slope_bytes_per_hour,
                   device_bytes=seat.watch.device_bytes, device_peak_bytes=seat.watch.device_peak_bytes)
        self._spool.sweep()
        if seat.leaving:
            self._dismiss(seat)
        elif seat.watch.outgrown and self._stopped_by is None and self.journal.pending():
            self._replace(seat)
        else:
            self._give(seat)
        self._wake_idle()

    def _wake_idle(self) -> None:
        for seat in self._seats:
            if seat.open and seat.begun and seat.window is None and not seat.held:
                self._give(seat)

    def _replace(self, seat: Seat) -> None:
        self._remember(seat)
        self._take_in([WorkerReplaced(seat.number, seat.watch.rss_bytes, seat.watch.watermark_bytes or 0)])
        self._replaced += 1
        seat.process.finish()
        self._fill_anew(seat)

    def _dismiss(self, seat: Seat) -> None:
        if seat.open:
            self._remember(seat)
            seat.open = False
            self._note(seat, "ended", stage=None)
            seat.process.finish()

    # --- endings --------------------------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        self._stopped_by = reason
        for seat in self._seats:
            if not seat.open:
                continue
            if seat.window is None:
                self._dismiss(seat)
            else:
                seat.process.send(StopAfterBatch())
                self._note(seat, "stopping")

    def _withdraw(self, error: BatchgenError) -> None:
        """Others do what is left: batches in flight are finished, and the run ends with the error if anything is."""
        self._withdrawn = error
        if self.request.say is not None:
            self.request.say(error.message)
        self._stop(_kept(error))

    def _stop_now(self, reason: str) -> None:
        self._stopped_by = reason
        for seat in self._seats:
            if seat.open:
                self._kill(seat, "stopped")

    def _kill(self, seat: Seat, cause: str) -> None:
        """Ends a worker at once; what it had finished before still counts."""
        seat.open = False
        seat.process.kill(cause)
        events, _ = seat.process.received()
        seat.process.close()
        try:
            self._take_in(events)
        except BatchgenError as error:
            self._error = self._error or error
        self._rendered += sum(isinstance(event, OutputDone) for event in events)
        sweep_files(seat, self.request.folder, self.journal)

    def _fatal(self, seat: Seat, event: WorkerStopped) -> None:
        """The engine cannot go on. An unforeseen exception counts as the worker's death; anything else ends the run."""
        if event.error == CRASH:
            seat.process.cause = f"ended by an unexpected error: {event.fatal}"
            return
        self._error = stopping_error(event)

    def _look_for_hangs(self) -> None:
        for seat in self._seats:
            limit = self.request.hang_seconds
            if limit == HANG_SECONDS:  # nobody set it: slow batches of a slow machine do not hang
                limit = max(limit, 10 * self._slowest)
            if not seat.flight:
                limit = max(limit, _QUIET_SECONDS)
            if seat.open and seat.window is not None and time.monotonic() - seat.heard > limit:
                seat.process.show_stacks()
                seat.process.kill(f"ended by the supervisor after {limit:.0f} s without a sign of life")
                self._take_in_last(seat)
                if seat.open:
                    self._bury(seat, kind="timeout")

    def _take_in_last(self, seat: Seat) -> None:
        events, _ = seat.process.received()
        self._take_in(events)
        for event in events:
            self._handle(seat, event)

    def _bury(self, seat: Seat, *, kind: FailureKind = "worker-died") -> None:
        """A worker has ended without being asked: blame, release, and put another in its place."""
        if seat.window is None and self._stopped_by is not None:
            seat.open = False
            return
        cause = seat.process.how_it_ended()
        seat.process.kill()
        self._deaths += 1
        seat.deaths += 1
        lost = seat.process.lost
        stage, suspects = (seat.stage, ()) if lost else seat.suspects()
        killers = any(self.journal.attempts(key) for key in suspects)
        self._settle(seat, WorkerDied(seat.number, seat.process.pid, cause, stage, suspects), kind)
        words = seat.process.last_words()
        seat.process.close()
        self._health.died(seat.number, suspects, known_killers=killers, lost=lost)
        if self._look_at_health(seat):
            return
        if self._health.hopeless(other.number for other in self._seats if other.open):
            seat.open = False
            self.journal.absolve(self._health.suspected)
            raise self._lost(cause, words)
        if self._stopped_by is not None or seat.leaving or self._launcher.grows:  # `_grow` fills its place when a machine has room
            seat.open = False
            self._note(seat, "ended", stage=None)
            self._wake_idle()
            return
        self._fill_anew(seat)
        self._wake_idle()

    def _settle(self, seat: Seat, death: WorkerDied, kind: FailureKind) -> None:
        """Journals the death and what is known of the jobs it was to render; the others are free again."""
        folder, journal = self.request.folder, self.journal
        self._take_in([death])
        sweep_files(seat, folder, journal)
        self._take_in(outcomes(seat.held, death, kind, folder=folder, journal=journal, delivery=self.request.delivery))
        journal.release(seat.held)
        seat.window, seat.held, seat.flight = None, set(), {}

    def _look_at_health(self, seat: Seat) -> bool:
        """Takes the seat's device out of the queue if it fails or has become slow, and others go on. True if it has no worker any more."""
        if seat.leaving or self._stopped_by is not None or self._launcher.grows:  # there machines are given and taken by others
            return False
        others = [other.number for other in self._seats if other.open and not other.leaving and other is not seat]
        found = self._health.verdict(seat.number, others)
        if found is None:
            return False
        why, numbers = found
        seat.leaving = True
        name = f"worker {seat.number} ({seat.device})"
        text = f"{name} leaves the queue: {why}. The others go on."
        self._take_in([DecisionMade(seat.number, "queue", name, "leaves", text, tuple(numbers.items()))])
        if self.request.say is not None:
            self.request.say(text)
        self.journal.forgive(self._health.blamed(seat.number))
        if seat.window is not None:
            seat.process.send(StopAfterBatch())
            return False
        seat.open = False
        self._health.left()
        self._note(seat, "ended", stage=None)
        self._wake_idle()
        return True

    def _lost(self, cause: str, words: str) -> WorkerLostError:
        tail = f"\nIts last words:\n{words[-1500:]}" if words else ""
        return WorkerLostError(
            f"no worker lives long enough to render: the last one was {cause}{tail}",
            hint="If memory ran out: --performance-mode memory, a smaller --batch-size, or fewer --workers. The same command resumes.",
        )

    # --- notes for status -----------------------------------------------------------------------------------------

    def _note(self, seat: Seat, state: str, **fields: object) -> None:
        seat.noted = time.monotonic()
        self.journal.set_worker(seat.number, state=state, jobs=seat.jobs, **({"since": time.time()} | fields))

    def _remember(self, seat: Seat) -> None:
        watch = seat.watch
        self._memory.append(
            WorkerMemory(seat.number, watch.rss_bytes, watch.rss_peak_bytes, watch.device_peak_bytes, watch.slope_bytes_per_hour)
        )
