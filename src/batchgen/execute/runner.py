"""Runs a stage's batches: components in, work done, failures pinned on the job they belong to, the memory ladder climbed down.

A batch that fails is tried again item by item, so that one bad job fails alone; a batch that runs out of memory takes the next step
of the ladder. Knows stages and placements; what the work is, it is told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from batchgen.errors import BatchgenError, RunStoppedError
from batchgen.events import DecisionMade, Emit, FailureKind, JobFailed, MemorySample, StageBatchDone, StageBatchStarted
from batchgen.execute.components import Components
from batchgen.execute.group import Alone, GroupDivergedError, GroupLostError, PeerError
from batchgen.execute.load import first_line
from batchgen.execute.memory import DeviceMemory, rss_bytes
from batchgen.execute.recovery import Action, Ladder, Situation, free_after_oom, is_out_of_memory
from batchgen.execute.stages import PIPELINE, Stage
from batchgen.execute.windows import Row, chunks
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.trail import Decision

T = TypeVar("T")
BARREN = 25  # jobs that may fail before the first product; then the fault is not theirs


def row_keys(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.job.key for row in rows)


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one kind and shape for a stage, to be done in batches of at most `size` items (rows, or texts to encode)."""

    shape: ShapeKey | None
    items: Sequence[Any]
    size: int
    work: Callable[[Sequence[Any]], None]
    fail: Callable[[Any, FailureKind, str], None]
    keys: Callable[[Sequence[Any]], tuple[str, ...]] = row_keys  # the jobs that a batch serves

    @property
    def where(self) -> str:
        return self.shape.text if self.shape is not None else ""


Queue = deque[tuple[Task, Sequence[Any]]]


class Stopping:
    """The wish to stop after the batch in flight. `set` from any thread; `is_set` where every rank of a group asks."""

    def __init__(self, group: Alone) -> None:
        self._group = group
        self._asked = threading.Event()
        self._told = False

    def set(self) -> None:
        self._asked.set()

    def is_set(self) -> bool:
        """What the first rank has heard, so that all ranks end after the same batch."""
        self._told = self._told or self._group.told(self._asked.is_set())
        return self._told


class Runner:
    """One worker's batches. `window` is the window at work; `ended` the keys of jobs that have had their last event."""

    def __init__(self, worker: int, emit: Emit, components: Components, *, tiling: bool = False) -> None:
        self.worker, self.emit, self.components = worker, emit, components
        self.residency, self.meter = components.residency, components.meter
        self.memory = DeviceMemory(self.residency.device)
        self.ladder = Ladder()
        self.group = self.residency.group
        self.stopping = Stopping(self.group)
        self.window = 0
        self.ended: set[str] = set()
        self._tiling = tiling
        self._barren: int | None = 0  # jobs failed before the first product; None once there is one
        self._singly: set[str] = set()  # stages whose batches fail while their rows succeed

    # -- jobs -------------------------------------------------------------------------------------------------------

    def fail_job(self, job: Job, kind: FailureKind, stage: str, reason: str) -> None:
        """The job's last event, unless it has had it."""
        if job.key not in self.ended:
            self.ended.add(job.key)
            self.emit(JobFailed(self.worker, job.key, kind, stage, reason))
            self._barren = self._barren + 1 if kind == "error" and self._barren is not None else self._barren
            if self._barren == BARREN:
                raise RunStoppedError(
                    f"the first {BARREN} jobs all failed, the last of them in {stage}: {reason}",
                    hint="nothing this model makes would come out; the failed jobs can be tried again with --retry-failed",
                )

    def job_made(self, key: str) -> None:
        """The job has its product; its last event is the writer's."""
        self.ended.add(key)
        self._barren = None

    def alive(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.job.key not in self.ended]

    def batch_done(self, stage: Stage, shape: ShapeKey | None, rows: Sequence[Row], size: int, seconds: float) -> None:
        """Tells of a batch: `rows` it served, `size` rows really computed."""
        text = shape.text if shape is not None else ""
        keys = tuple(row.job.key for row in rows)
        streamed = self.residency.take_streamed_bytes()
        self.emit(StageBatchDone(self.worker, self.window, stage.name, text, keys, size, seconds, self.meter.take(), streamed))

    def decide(self, decision: Decision) -> None:
        self.emit(DecisionMade(self.worker, decision.rule, decision.subject, decision.decision, decision.text, decision.numbers))

    # -- batches ----------------------------------------------------------------------------------------------------

    def run(self, stage: Stage, tasks: Iterable[Task], then: Iterable[str] = (), *, last: bool = False) -> None:
        """All tasks of a stage, its components in once for all of them, until a stop is requested. Raises what no job would survive.

        `then`: the components of the stage that comes next, brought in beside the last batch where the device can. `last`: the work
        belongs to the batch in flight, so it is done although a stop is requested.
        """
        queue: Queue = deque((task, batch) for task in tasks for batch in chunks(task.items, task.size))
        if not queue:
            return
        self.memory.reset_peak()
        while queue and (last or not self.stopping.is_set()):
            try:
                self.agreed(lambda: self.components.ensure(stage.components))
                self.components.settle(stage.components)
                with ExitStack() as leaving:
                    whole = stage.name == PIPELINE
                    self.agreed(lambda: leaving.enter_context(self.residency.stage(stage.components, one_at_a_time=whole)))  # noqa: B023
                    step = self._drain(stage, queue, then, last)
            except (torch.OutOfMemoryError, MemoryError) as error:
                step = self._no_room(stage, queue, error)
            if step == "leaner" and (placed := self.residency.leaner(stage.components)) is not None:
                name, mode = placed
                self.decide(Decision.of("out-of-memory", name, mode, f"{name} is {mode} from now on: {stage.name} lacks memory"))
            elif step == "fail":
                self._restore_planned()
        # of a group the rank that takes most
        ranks = self.group.gather((rss_bytes(), self.memory.allocated(), self.memory.peak()))
        resident, allocated, peak = (max(values) for values in zip(*ranks, strict=True))
        self.emit(MemorySample(self.worker, stage.name, resident, allocated, peak))

    def _drain(self, stage: Stage, queue: Queue, then: Iterable[str], last: bool) -> Action | None:
        """Works the queue off. "leaner", "fail": what is on the device must change first, and that takes leaving the stage."""
        while queue and (last or not self.stopping.is_set()):
            task, batch = queue.popleft()
            limit = 1 if stage.name in self._singly else self.ladder.batch_size(stage.name, task.where, len(batch))
            if len(batch) > limit:
                queue.extendleft((task, part) for part in reversed(list(chunks(batch, limit))))
                continue
            if self.ladder.hopeless(stage.name, task.where):
                for item in batch:
                    task.fail(item, "out-of-memory", f"{stage.name} at {task.where} does not fit, as jobs like it before did not")
                continue
            if not queue:
                self.residency.prefetch_next(then)
            error = self._attempt(stage, task, batch)
            if error is None:
                continue
            if is_out_of_memory(error) and self._without_prefetched():
                # this batch needed more than any before it: the next stage's weights had its room
                free_after_oom(error)
                then = ()
                queue.appendleft((task, batch))
            elif is_out_of_memory(error):
                step = self._climb_down(stage, task, batch, queue, error)
                if step in ("leaner", "fail"):
                    return step
            elif len(batch) == 1:
                task.fail(batch[0], *_cause(error))
            else:
                self._one_by_one(stage, task, batch, queue, error)
        return None

    def _without_prefetched(self) -> bool:
        """Takes out what came in before its stage. Whether any rank had such a thing, so that all try the same again."""
        return not self.group.everywhere(not self.residency.drop_prefetched())

    def _attempt(self, stage: Stage, task: Task, batch: Sequence[Any]) -> Exception | None:
        self.emit(StageBatchStarted(self.worker, self.window, stage.name, task.where, task.keys(batch)))
        try:
            with self._tiled(stage, task.where):
                self.agreed(lambda: task.work(batch))
        except (RunStoppedError, GroupLostError, GroupDivergedError):
            raise
        except Exception as error:
            if _device_is_lost(error):
                raise  # every later call would fail too: another process may do better
            self.meter.take()
            self.residency.rest()
            return error
        self.residency.rest()
        return None

    def agreed(self, work: Callable[[], T]) -> T:
        """Work that every rank of a group does: what one of them raises is raised on all. Raises GroupLostError where one is gone."""
        error: Exception | None = None
        try:
            made = work()
        except (GroupLostError, GroupDivergedError):
            raise
        except Exception as raised:
            if _device_is_lost(raised):
                raise
            error = raised
        error = self.group.agree(error)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # it knows this frame: what it holds would stay until the next collection
        return made

    def _one_by_one(self, stage: Stage, task: Task, batch: Sequence[Any], queue: Queue, cause: Exception) -> None:
        """Finds the item that fails its batch. Where none does, the stage cannot batch (a VAE's attention mask): remembered."""
        reason = _cause(cause)[1]
        failed = 0
        for index, item in enumerate(batch):
            if self.stopping.is_set():
                return
            error = self._attempt(stage, task, [item])
            if error is not None and is_out_of_memory(error):
                free_after_oom(error)
                queue.appendleft((task, batch[index:]))
                return
            if error is not None:
                task.fail(item, *_cause(error))
                failed += 1
        if not failed:
            self._singly.add(stage.name)
            text = f"{stage.name} fails for {len(batch)} rows at once ({reason}) and not for each alone: one row at a time from now on"
            self.decide(Decision.of("batch", stage.name, "1", text, {"batch": len(batch)}))

    # -- memory -----------------------------------------------------------------------------------------------------

    def _climb_down(self, stage: Stage, task: Task, batch: Sequence[Any], queue: Queue, error: BaseException) -> Action:
        reason = first_line(error)
        free_after_oom(error)
        leaner = any(self.residency.next_leaner(name, in_stage=name in stage.components) for name in self.residency.names)
        leaner = self.group.everywhere(leaner)
        situation = Situation(
            stage.name, task.where, len(batch), can_tile=bool(self._tilers(stage)), tiled=self._tiles(stage, task.where),
            can_be_leaner=leaner,
        )
        step = self.ladder.next_step(situation)
        self.group.check_same("the step after running out of memory", (step.action, step.batch))
        self.decide(step.decision(situation))
        if step.action == "fail":
            task.fail(batch[0], "out-of-memory", f"{step.text} ({reason})")
        else:
            queue.appendleft((task, batch))
        return step.action

    def _no_room(self, stage: Stage, queue: Queue, error: BaseException) -> Action:
        """The stage's own weights do not fit: no batch size helps. With nothing leaner left, everything that waits for it fails."""
        task, batch = queue[0]
        step = self._climb_down(stage, task, batch[:1], deque(), error)
        if step == "fail":
            reason = f"the weights of {stage.name} do not fit on {self.residency.device}"
            while queue:
                task, batch = queue.popleft()
                for item in batch:
                    task.fail(item, "out-of-memory", reason)
        return step

    def _restore_planned(self) -> None:
        """A job that did not fit however lean must not slow the rest of the night down."""
        for name in self.residency.restore_planned():
            mode = self.residency.mode(name)
            text = f"{name} is {mode} again, as planned: the job that asked for less did not fit all the same"
            self.decide(Decision.of("out-of-memory", name, mode, text))

    def _tilers(self, stage: Stage) -> list[Any]:
        modules = [self.components.modules.get(name) for name in stage.components]
        return [module for module in modules if hasattr(module, "enable_tiling") and hasattr(module, "use_tiling")]

    def _tiles(self, stage: Stage, where: str) -> bool:
        return (self._tiling or self.ladder.tiles(stage.name, where)) and bool(self._tilers(stage))

    def tiles(self, stage: Stage, shape: ShapeKey) -> bool:
        """Whether this shape is decoded in tiles, which alters its pixels."""
        return self._tiles(stage, shape.text)

    @contextmanager
    def _tiled(self, stage: Stage, where: str) -> Iterator[None]:
        tilers = self._tilers(stage) if self._tiles(stage, where) else []
        for module in tilers:
            module.enable_tiling()
        try:
            yield
        finally:
            for module in tilers:
                module.disable_tiling()


def _device_is_lost(error: Exception) -> bool:
    """Whether the device's context is broken for good: an illegal access, a failed assertion, a device gone."""
    return not is_out_of_memory(error) and (type(error).__name__ == "AcceleratorError" or "CUDA error:" in str(error))


def _cause(error: Exception) -> tuple[FailureKind, str]:
    if isinstance(error, BatchgenError):
        return "input", error.message
    if isinstance(error, PeerError):
        return "error", error.reason
    return "error", f"{type(error).__name__}: {first_line(error)}"
