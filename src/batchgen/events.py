"""What the executor says while it works. The journal, the progress display and the tables only listen.

Every event is a frozen record of plain values, so that it crosses a process boundary and fits one JSON line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

FailureKind = Literal["error", "out-of-memory", "non-finite", "filtered", "input", "worker-died", "timeout", "disk"]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has imported what it needs and knows the model's stages."""

    worker: int
    pid: int
    device: str
    stages: tuple[str, ...]
    stage_components: tuple[tuple[str, tuple[str, ...]], ...]  # stage -> components with weights it calls
    road: Literal["stages", "pipeline"]  # stage-major, or the model's ordinary call as one stage
    seconds: float  # start-up
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentLoaded:
    worker: int
    component: str
    placement: str
    bytes: int
    seconds: float
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentMoved:
    """Weights went onto the device (`in`) or their device copy was dropped (`out`, which copies nothing)."""

    worker: int
    component: str
    direction: Literal["in", "out"]
    bytes: int  # copied; 0 for out
    seconds: float


@dataclass(frozen=True, slots=True)
class StageBatchStarted:
    """A batch of a stage begins: what a worker's death or silence is blamed on. Same `keys` as its StageBatchDone."""

    worker: int
    window: int
    stage: str
    shape: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageBatchDone:
    """One batch of one stage. `compute` lists per component its calls and seconds in this batch."""

    worker: int
    window: int
    stage: str
    shape: str
    keys: tuple[str, ...]  # jobs of the batch (for an encode: every job served by it)
    size: int  # rows really computed
    seconds: float
    compute: tuple[tuple[str, int, float], ...] = ()  # component, calls, seconds
    streamed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LatentsSpooled:
    """Denoised latents of these jobs are on disk, before their decode. `path` below the run folder."""

    worker: int
    keys: tuple[str, ...]
    path: str
    batch: int


@dataclass(frozen=True, slots=True)
class OutputDone:
    """A job's file stands under its final name, synced. `settings` is what the file's own metadata says, as JSON text."""

    worker: int
    key: str
    path: str  # below outputs/, POSIX separators
    size_bytes: int
    sha256: str
    batch: int  # rows the picture was denoised with
    seconds: float  # its share of the stages' time
    settings: str
    flags: tuple[str, ...] = ()  # "flat", "tiled", "snapped", "adopted"


@dataclass(frozen=True, slots=True)
class JobFailed:
    """This job, alone, failed. `retry`: another attempt may succeed."""

    worker: int
    key: str
    kind: FailureKind
    stage: str
    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """A step taken while running (a smaller batch, tiling, a leaner placement): same fields as plan.trail.Decision."""

    worker: int
    rule: str
    subject: str
    decision: str
    text: str
    numbers: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class MemorySample:
    worker: int
    when: str  # "stage" the sample was taken after
    rss_bytes: int
    device_bytes: int  # allocated now
    device_peak_bytes: int


@dataclass(frozen=True, slots=True)
class WindowDone:
    worker: int
    window: int


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    """The worker cannot go on (`fatal` says why), or ended as asked (`fatal` None). `exit_code` is what the run should exit with."""

    worker: int
    fatal: str | None
    exit_code: int = 0
    hint: str | None = None
    error: str | None = None  # the class in errors.py that `fatal` comes from


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """Sent by the supervisor: a worker ended by itself or was ended. `cause` in plain words; `keys`: the jobs it is blamed on."""

    worker: int
    pid: int
    cause: str
    stage: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerReplaced:
    """Sent by the supervisor: a worker that had grown was replaced between two windows."""

    worker: int
    rss_bytes: int
    watermark_bytes: int


Event = (
    WorkerReady | ComponentLoaded | ComponentMoved | StageBatchStarted | StageBatchDone | LatentsSpooled | OutputDone | JobFailed
    | DecisionMade | MemorySample | WindowDone | WorkerStopped | WorkerDied | WorkerReplaced
)
Emit = Callable[[Event], None]


def event_line(event: Event, seconds: float) -> str:
    """One JSON line: the event's name, the time since the run began, and its fields."""
    fields: dict[str, Any] = asdict(event)
    return json.dumps({"event": type(event).__name__, "t": round(seconds, 3), **fields}, ensure_ascii=False, separators=(",", ":"))
