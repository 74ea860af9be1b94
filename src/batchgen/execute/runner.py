"""Runs a stage's batches: components in, work done, failures pinned on the job they belong to, the memory ladder climbed down.

A batch that fails is tried again item by item, so that one bad job fails alone; a batch that runs out of memory takes the next step
of the ladder. Knows stages and placements; what the work is, it is told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from batchgen.errors import BatchgenError, RunStoppedError
from batchgen.events import DecisionMade, Emit, FailureKind, JobFailed, MemorySample, StageBatchDone
from batchgen.execute.components import Components
from batchgen.execute.load import first_line
from batchgen.execute.memory import DeviceMemory, rss_bytes
from batchgen.execute.recovery import Ladder, Situation, free_after_oom, is_out_of_memory
from batchgen.execute.stages import PIPELINE, Stage
from batchgen.execute.windows import Row, chunks
from batchgen.jobs import Job, ShapeKey
from batchgen.plan.trail import Decision

T = TypeVar("T")
Work = Callable[[Sequence[T]], None]
Fail = Callable[[T, FailureKind, str], None]


class Runner:
    """One worker's batches. `window` is the window at work; `ended` the keys of jobs that have had their last event."""

    def __init__(self, worker: int, emit: Emit, components: Components, *, tiling: bool = False) -> None:
        self.worker, self.emit, self.components = worker, emit, components
        self.residency, self.meter = components.residency, components.meter
        self.memory = DeviceMemory(self.residency.device)
        self.ladder = Ladder()
        self.stopping = threading.Event()
        self.window = 0
        self.ended: set[str] = set()
        self._tiling = tiling
        self._singly: set[str] = set()  # stages whose batches fail while their rows succeed

    # -- jobs -------------------------------------------------------------------------------------------------------

    def fail_job(self, job: Job, kind: FailureKind, stage: str, reason: str) -> None:
        """The job's last event, unless it has had it."""
        if job.key not in self.ended:
            self.ended.add(job.key)
            self.emit(JobFailed(self.worker, job.key, kind, stage, reason))

    def alive(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.job.key not in self.ended]

    def batch_done(self, stage: Stage, shape: ShapeKey | None, rows: Sequence[Row], size: int, seconds: float) -> None:
        """Tells of a batch: `rows` it served, `size` rows really computed."""
        text = shape.text if shape is not None else ""
        keys = tuple(row.job.key for row in rows)
        self.emit(StageBatchDone(self.worker, self.window, stage.name, text, keys, size, seconds, self.meter.take()))

    def decide(self, decision: Decision) -> None:
        self.emit(DecisionMade(self.worker, decision.rule, decision.subject, decision.decision, decision.text, decision.numbers))

    # -- batches ----------------------------------------------------------------------------------------------------

    def run(self, stage: Stage, shape: ShapeKey | None, items: Sequence[T], size: int, work: Work[T], fail: Fail[T]) -> None:
        """`work` on all items in batches of at most `size`, until a stop is requested. Raises what no job would survive."""
        where = shape.text if shape is not None else ""
        queue = deque(chunks(items, self.ladder.batch_size(stage.name, where, size))) if items else deque[Sequence[T]]()
        while queue and not self.stopping.is_set():
            self.components.ensure(stage.components)
            with self.residency.stage(stage.components, one_at_a_time=stage.name == PIPELINE):
                in_the_way = self._drain(stage, where, queue, work, fail)
            if in_the_way is not None:
                self.residency.leaner(in_the_way)
        self.emit(MemorySample(self.worker, stage.name, rss_bytes(), self.memory.allocated(), self.memory.peak()))

    def _drain(self, stage: Stage, where: str, queue: deque[Sequence[T]], work: Work[T], fail: Fail[T]) -> str | None:
        """Works the queue off. Returns the component that must go to a leaner placement first, which takes leaving the stage."""
        while queue and not self.stopping.is_set():
            batch = queue.popleft()
            limit = 1 if stage.name in self._singly else self.ladder.batch_size(stage.name, where, len(batch))
            if len(batch) > limit:
                queue.extendleft(reversed(list(chunks(batch, limit))))
                continue
            if self.ladder.hopeless(stage.name, where):
                for item in batch:
                    fail(item, "out-of-memory", f"{stage.name} at {where} does not fit, as jobs of this shape before it did not")
                continue
            error = self._attempt(stage, where, batch, work)
            if error is None:
                continue
            if is_out_of_memory(error):
                component = self._climb_down(stage, where, batch, queue, error, fail)
                if component is not None:
                    return component
            elif len(batch) == 1:
                fail(batch[0], *_cause(error))
            else:
                self._one_by_one(stage, where, batch, queue, error, work, fail)
        return None

    def _attempt(self, stage: Stage, where: str, batch: Sequence[T], work: Work[T]) -> Exception | None:
        try:
            with self._tiled(stage, where):
                work(batch)
        except RunStoppedError:
            raise
        except Exception as error:  # noqa: BLE001  one bad job must not end the night
            self.meter.take()
            return error
        return None

    def _one_by_one(
        self, stage: Stage, where: str, batch: Sequence[T], queue: deque[Sequence[T]], cause: Exception, work: Work[T], fail: Fail[T]
    ) -> None:
        """Finds the item that fails its batch. Where none does, the stage cannot batch (a VAE's attention mask): remembered."""
        reason = _cause(cause)[1]
        failed = 0
        for item in batch:
            if self.stopping.is_set():
                return
            error = self._attempt(stage, where, [item], work)
            if error is not None and is_out_of_memory(error):
                free_after_oom(error)
                queue.appendleft([item])
            elif error is not None:
                fail(item, *_cause(error))
            failed += error is not None
        if not failed:
            self._singly.add(stage.name)
            text = f"{stage.name} fails for {len(batch)} rows at once ({reason}) and not for each alone: one row at a time from now on"
            self.decide(Decision.of("batch", stage.name, "1", text, {"batch": len(batch)}))

    # -- memory -----------------------------------------------------------------------------------------------------

    def _climb_down(
        self, stage: Stage, where: str, batch: Sequence[T], queue: deque[Sequence[T]], error: Exception, fail: Fail[T]
    ) -> str | None:
        reason = first_line(error)
        free_after_oom(error)
        leaner = self._could_leave(stage)
        situation = Situation(
            stage.name, where, len(batch), can_tile=bool(self._tilers(stage)), tiled=self._tiles(stage, where), can_be_leaner=leaner is not None
        )
        step = self.ladder.next_step(situation)
        self.decide(step.decision(situation))
        if step.action == "fail":
            fail(batch[0], "out-of-memory", f"{step.text} ({reason})")
            return None
        queue.appendleft(batch)
        return leaner if step.action == "leaner" else None

    def _could_leave(self, stage: Stage) -> str | None:
        """The component whose leaner placement frees most: those the stage does not call before those it does."""
        able = [name for name in self.residency.names if self.residency.next_leaner(name) is not None]
        sizes = {name: sum(weight.nbytes for weight in self.components.modules[name].parameters()) for name in able}
        return max(able, key=lambda name: (name not in stage.components, sizes[name]), default=None)

    def _tilers(self, stage: Stage) -> list[Any]:
        modules = [self.components.modules.get(name) for name in stage.components]
        return [module for module in modules if hasattr(module, "enable_tiling") and hasattr(module, "use_tiling")]

    def _tiles(self, stage: Stage, where: str) -> bool:
        return (self._tiling or self.ladder.tiles(stage.name, where)) and bool(self._tilers(stage))

    def tiles(self, stage: Stage, shape: ShapeKey) -> bool:
        """Whether this shape is decoded in tiles, which alters its pixels."""
        return self._tiles(stage, shape.text)

    @contextmanager
    def _tiled(self, stage: Stage, where: str) -> Any:
        tilers = self._tilers(stage) if self._tiles(stage, where) else []
        for module in tilers:
            module.enable_tiling()
        try:
            yield
        finally:
            for module in tilers:
                module.disable_tiling()


def _cause(error: Exception) -> tuple[FailureKind, str]:
    if isinstance(error, BatchgenError):
        return "input", error.message
    return "error", f"{type(error).__name__}: {first_line(error)}"


def call_arguments(call: dict[str, Any], job: Job | None, rows: int) -> dict[str, Any]:
    """What stages are called with besides carried values: the ordinary call's defaults, then the job's own settings.

    Guidance is not among them: it is the guiders' business.
    """
    arguments = {name: value for name, value in call.items() if value is not None and name != "guidance_scale"}
    if job is not None:
        own = {
            "height": job.height, "width": job.width, "num_inference_steps": job.steps, "num_frames": job.num_frames,
            "frame_rate": job.fps, "strength": job.strength,
        }
        arguments |= {name: value for name, value in own.items() if value is not None}
    return arguments | {"batch_size": rows}
