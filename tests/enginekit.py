"""Runs an Engine over a model folder in tests, and calls the ordinary pipeline by hand for the same jobs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchgen.events import Event, JobFailed, OutputDone
from batchgen.execute import products
from batchgen.execute.engine import Engine
from batchgen.execute.load import ModelFolder
from batchgen.execute.settings import EngineSettings, OutputSettings, Window
from batchgen.inventory.records import DeviceFacts
from batchgen.jobs import Job
from batchgen.plan.records import Placement, Plan
from batchgen.plan.trail import Trail


def make_plan(folder: Path, *, modes: dict[str, str] | None = None, batch_size: int | None = None, **more: Any) -> Plan:
    """Everything resident on the CPU unless `modes` says otherwise."""
    placements = tuple(
        Placement(name, (modes or {}).get(name, "resident"), None, "user" if name in (modes or {}) else "default", "for a test", None)
        for name in ModelFolder.read(folder).models
    )
    device = DeviceFacts("CPU", "cpu", 2**40, 2**40)
    sharded = "fsdp" in (modes or {}).values()
    return Plan("manual", "cpu", (device,), sharded, False, 1, None, "global", placements, batch_size, Trail(), **more)


def make_job(index: int, prompt: str, **fields: Any) -> Job:
    chosen = {"negative_prompt": None, "width": 64, "height": 64, "steps": 3, "seed": 100 + index, "output": f"{index:03d}.png"} | fields
    return Job(key=f"{index:032x}", index=index, row=index + 2, k=0, id=f"j{index}", prompt=prompt, seed_source="row", **chosen)


@dataclass
class Ran:
    """What a run gave: events in order, and the float arrays handed to the file writers, by job key."""

    events: list[Event] = field(default_factory=list)
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    engine: Engine | None = None

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def done(self) -> list[OutputDone]:
        return self.of(OutputDone)

    @property
    def failed(self) -> list[JobFailed]:
        return self.of(JobFailed)


def engine_for(
    folder: Path, run_folder: Path, ran: Ran, *, plan: Plan | None = None, dtype: str = "float32", emit: Any = None, **settings: Any
) -> Engine:
    outputs = run_folder / "outputs"
    outputs.mkdir(parents=True, exist_ok=True)
    models = ModelFolder.read(folder).models
    made = EngineSettings(
        model_folder=str(folder), dtypes=tuple((name, dtype) for name in models), variants=(), device="cpu", run_folder=str(run_folder),
        outputs=OutputSettings(str(outputs), metadata=(("model", "tiny"), ("revision", "0"))),
    )
    ran.engine = Engine(0, replace(made, **settings), plan or make_plan(folder), emit or ran.events.append)
    return ran.engine


def run_jobs(folder: Path, run_folder: Path, jobs: list[Job], *, windows: int = 1, **options: Any) -> Ran:
    """All jobs through `Engine.run_window`, in one window or several, with the float arrays kept on their way to the writers."""
    ran = Ran()
    engine = engine_for(folder, run_folder, ran, **options)
    take = engine.products.take

    def keep(row: Any, product: Any, *args: Any, **kwargs: Any) -> None:
        ran.floats[row.job.key] = np.array(product, copy=True)
        take(row, product, *args, **kwargs)

    engine.products.take = keep  # type: ignore[method-assign]
    size = -(-len(jobs) // windows)
    for number in range(windows):
        engine.run_window(Window(number, tuple(jobs[number * size : (number + 1) * size])))
    engine.products.finish()
    return ran


def load_ordinary(folder: Path) -> Any:
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        for tensor in (*part.parameters(), *part.buffers()) if isinstance(part, torch.nn.Module) else ():
            tensor.data = tensor.data.clone()  # mapped weights lie where their file has them, and kernels sum unaligned ones in another order
    return pipe


def sister(folder: Path, name: str) -> Any:
    """The library's pipeline of that class, made from the parts of the folder's own."""
    import inspect

    import diffusers

    cls = getattr(diffusers, name)
    accepted = inspect.signature(cls.__init__).parameters
    pipe = cls(**{key: value for key, value in load_ordinary(folder).components.items() if key in accepted})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_by_hand(pipe: Any, job: Job, **more: Any) -> np.ndarray:
    """The ordinary pipeline for one job, as a user would call it; float array [H, W, C] or [frames, H, W, C]."""
    import inspect

    accepted = inspect.signature(pipe.__call__).parameters
    embedded = accepted.get("guidance_scale") is None or accepted["guidance_scale"].default is None
    guidance = "true_cfg_scale" if embedded else "guidance_scale"
    asked = {
        "negative_prompt": job.negative_prompt, "width": job.width, "height": job.height, "num_inference_steps": job.steps,
        guidance: job.guidance, "num_frames": job.num_frames, "frame_rate": job.fps, "strength": job.strength,
        "max_area": (job.width or 0) * (job.height or 0) or None,  # FLUX.1 Kontext brings every size to an area of its own
    } | more
    arguments = {name: value for name, value in asked.items() if value is not None and name in accepted}
    generator = torch.Generator("cpu").manual_seed(job.seed)
    result = pipe(prompt=job.prompt, generator=generator, output_type="np", **arguments)
    frames = getattr(result, "frames", None)
    return np.asarray(result.images[0] if frames is None else frames[0])


__all__ = ["Ran", "call_by_hand", "engine_for", "load_ordinary", "make_job", "make_plan", "products", "run_jobs", "sister"]
