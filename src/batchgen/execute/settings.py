"""What a worker is told before its first window. Plain values: it crosses a process boundary, and building it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from batchgen.jobs import Job
from batchgen.outputs.urls import Location
from batchgen.plan.records import Plan


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How files are written."""

    folder: str  # absolute: RUN/outputs
    image_format: str = "png"  # png, jpeg, webp, avif
    image_options: tuple[tuple[str, int], ...] = ()  # compress_level, quality
    video_format: str = "mp4"  # mp4, webp, png (a folder of frames)
    metadata: tuple[tuple[str, str], ...] = ()  # the same in every file: model, revision, batchgen's version
    overwrite: bool = False
    remote: Location | None = None  # where finished files go from `folder`; None: they stay


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A rank's place among the ranks that hold one model together. All of them run on one machine."""

    rank: int
    devices: tuple[str, ...]  # torch names, one a rank
    store: str  # file over which the ranks find each other; a new one at every start
    cfg_parallel: bool = False  # the first half of the ranks runs the conditional branch, the second half the other

    @property
    def size(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything about a run that the executor needs and the plan does not hold."""

    model_folder: str
    dtypes: tuple[tuple[str, str], ...]  # component -> torch dtype name, one for every weight-carrying component
    variants: tuple[tuple[str, str], ...]  # component -> variant of its files, where one is used
    device: str  # torch name: "cuda:0", "cpu"
    run_folder: str  # absolute; the spool lies in RUN/spool
    outputs: OutputSettings
    trust_remote_code: bool = False
    allow_pickle: bool = False
    host_memory_bytes: int | None = None  # budget for host copies and what passes between stages; None: find out
    reserve_device_bytes: int | None = None
    threads: int | None = None  # torch threads; None: torch's own choice
    spool_latents: bool = True
    vae_tiling: bool = False
    attention_backend: str | None = None
    compile_blocks: bool = False
    loras: tuple[tuple[str, str, float], ...] = ()  # name, path, weight
    smoke_jobs: tuple[str, ...] = ()  # jobs, as JSON, to be tried in a few steps before the first window
    extra: tuple[tuple[str, str], ...] = field(default=())
    group: GroupPlace | None = None  # None: this worker holds its model alone
    share_weights: bool = False  # with other workers on this machine's CPU: weights lie in files that all of them map


ENGINE = "batchgen.execute.engine:open_engine"


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a worker. `factory` is "module:callable", called like Engine: another one makes a worker of another kind."""

    worker: int
    engine: EngineSettings
    plan: Plan
    factory: str = ENGINE


def log_file(setup: WorkerSetup) -> Path:
    """Where a worker's libraries print, below the run folder; a file for each rank of a group."""
    group = setup.engine.group
    rank = f"-rank-{group.rank}" if group is not None and group.rank else ""
    return Path(setup.engine.run_folder) / "logs" / f"worker-{setup.worker}{rank}.log"


@dataclass(frozen=True, slots=True)
class StopAfterBatch:
    """To a worker: finish the batch in flight, then end the window."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """To a worker: nothing more will come."""


@dataclass(frozen=True, slots=True)
class Window:
    """Jobs that one worker takes at once, of one or several shapes. `spooled`: latents kept from an earlier attempt."""

    number: int
    jobs: tuple[Job, ...]
    spooled: tuple[tuple[str, str], ...] = ()  # job key -> path below the run folder
