"""What a run did, counted from its events: per component, per stage, failures by reason, steps of the ladder.

Pure: no clock, no files, no tables. Holds counts, never a list of jobs, so that a million jobs cost no more than ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchgen.events import (
    ComponentLoaded,
    ComponentMoved,
    DecisionMade,
    Event,
    JobFailed,
    MemorySample,
    OutputDone,
    StageBatchDone,
    WorkerReady,
    WorkerStopped,
)


@dataclass(slots=True)
class ComponentUse:
    """One component over the whole run, all workers together. Seconds add up over workers."""

    loads: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    moves_in: int = 0
    moved_bytes: int = 0
    move_seconds: float = 0.0
    calls: int = 0
    compute_seconds: float = 0.0
    placement: str | None = None  # as carried out at the last load


@dataclass(slots=True)
class StageUse:
    """One stage over the whole run."""

    batches: int = 0
    rows: int = 0  # computed
    jobs: int = 0  # served: equal prompts are encoded once and serve many
    largest_batch: int = 0
    seconds: float = 0.0
    streamed_bytes: int = 0


@dataclass(slots=True)
class Summary:
    """Collects events; `listen` is the only thing that changes it."""

    components: dict[str, ComponentUse] = field(default_factory=dict)
    stages: dict[str, StageUse] = field(default_factory=dict)
    failures: dict[tuple[str, str, str], int] = field(default_factory=dict)  # (kind, stage, reason) -> jobs
    flags: dict[str, int] = field(default_factory=dict)  # "flat", "tiled" -> pictures
    decisions: list[DecisionMade] = field(default_factory=list)
    done: int = 0
    output_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    stage_peaks: dict[str, int] = field(default_factory=dict)  # stage -> most device bytes while it ran
    stage_components: dict[str, tuple[str, ...]] = field(default_factory=dict)  # stage -> components that it calls
    workers: int = 0
    startup_seconds: float = 0.0  # slowest worker
    road: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)  # why workers could not go on

    MAX_DECISIONS = 1000  # a night of ladder steps on every shape is still readable; beyond that only the journal has them

    def listen(self, event: Event) -> None:
        """Takes one event into account. Events that say nothing about sums are passed over."""
        match event:
            case ComponentLoaded():
                self._loaded(event)
            case ComponentMoved():
                self._moved(event)
            case StageBatchDone():
                self._batch(event)
            case OutputDone():
                self.done += 1
                self.output_bytes += event.size_bytes
                for flag in event.flags:
                    self.flags[flag] = self.flags.get(flag, 0) + 1
            case JobFailed():
                if not event.retry:
                    key = (event.kind, event.stage, event.reason)
                    self.failures[key] = self.failures.get(key, 0) + 1
            case DecisionMade():
                if len(self.decisions) < self.MAX_DECISIONS:
                    self.decisions.append(event)
            case MemorySample():
                self.peak_device_bytes = max(self.peak_device_bytes, event.device_peak_bytes)
                self.peak_host_bytes = max(self.peak_host_bytes, event.rss_bytes)
                self.stage_peaks[event.when] = max(self.stage_peaks.get(event.when, 0), event.device_peak_bytes)
            case WorkerReady():
                self._ready(event)
            case WorkerStopped():
                if event.fatal is not None:
                    self.stopped.append(event.fatal)
            case _:
                pass

    def _component(self, name: str) -> ComponentUse:
        return self.components.setdefault(name, ComponentUse())

    def _loaded(self, event: ComponentLoaded) -> None:
        use = self._component(event.component)
        use.loads += 1
        use.loaded_bytes += event.bytes
        use.load_seconds += event.seconds
        use.placement = event.placement

    def _moved(self, event: ComponentMoved) -> None:
        use = self._component(event.component)
        use.move_seconds += event.seconds
        if event.direction == "in":
            use.moves_in += 1
            use.moved_bytes += event.bytes

    def _batch(self, event: StageBatchDone) -> None:
        stage = self.stages.setdefault(event.stage, StageUse())
        stage.batches += 1
        stage.rows += event.size
        stage.jobs += len(event.keys)
        stage.largest_batch = max(stage.largest_batch, event.size)
        stage.seconds += event.seconds
        stage.streamed_bytes += event.streamed_bytes
        for name, calls, seconds in event.compute:
            use = self._component(name)
            use.calls += calls
            use.compute_seconds += seconds

    def _ready(self, event: WorkerReady) -> None:
        self.workers += 1
        self.startup_seconds = max(self.startup_seconds, event.seconds)
        self.road = event.road
        self.stage_components = dict(event.stage_components)
        self.versions = dict(event.versions)

    @property
    def failed(self) -> int:
        """Jobs that failed for good."""
        return sum(self.failures.values())

    @property
    def stage_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages.values())
