"""Takes windows of jobs through the stages: encode all, denoise all, decode all.

Every job of a window ends in exactly one OutputDone or JobFailed event; only what no other job would survive (a full disk, a model
that makes another size than asked) is raised. Placements are carried out by `residency`, files by `products`; the engine
decides who shares a batch and what is tried again.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from batchgen.errors import BatchgenError, RunStoppedError
from batchgen.events import Emit, Event, FailureKind, JobFailed, LatentsSpooled, MemorySample, StageBatchDone, WorkerReady
from batchgen.execute.components import Components
from batchgen.execute.encoding import Encoding
from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.load import ModelFolder, first_line, quiet_libraries
from batchgen.execute.memory import DeviceMemory, HostBudget, rss_bytes
from batchgen.execute.meter import Meter
from batchgen.execute.products import Products, check_size, rows_of
from batchgen.execute.residency import Residency
from batchgen.execute.settings import EngineSettings, Window
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE, Stage, Stages, build_stages, call_stage, join_rows, split_rows, to_device
from batchgen.execute.windows import BatchSizes, EncodedCache, Row, chunks, group_rows, spool_rows, unspool
from batchgen.jobs import Job, ShapeKey
from batchgen.outputs.files import disk_errors
from batchgen.plan.records import Plan

CPU = torch.device("cpu")
T = TypeVar("T")


class Engine:
    """One worker's executor. Building it makes the stages and loads no weights."""

    def __init__(self, worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> None:
        started = time.perf_counter()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        quiet_libraries()
        lock = threading.Lock()

        def emit_one(event: Event) -> None:
            with lock:
                emit(event)

        self.worker, self.settings, self.plan, self.emit = worker, settings, plan, emit_one
        self.device = torch.device(settings.device)
        self.folder = ModelFolder.read(
            settings.model_folder, trust_remote_code=settings.trust_remote_code, allow_pickle=settings.allow_pickle
        )
        budget = HostBudget.find(settings.host_memory_bytes)
        self.residency = Residency(
            plan.modes, self.device, prefetch=plan.prefetch, host_budget=budget, emit=self.emit, worker=worker,
            fixed=[placement.component for placement in plan.placements if placement.by == "user"],
        )
        self.meter = Meter(self.device)
        self.memory = DeviceMemory(self.device)
        self.components = Components(settings, self.folder, self.residency, self.meter, self.emit, worker)
        self.sizes = BatchSizes(plan)
        self.cache = EncodedCache(budget)
        self.products = Products(worker, settings.outputs, self.emit)
        self._roads: dict[tuple[str, ...], tuple[Stages, GuidanceRules]] = {}
        self._stop = threading.Event()
        self._spooled = 0
        self._ended: set[str] = set()
        self.window = 0
        stages, _ = self.road(())
        self.ready = self._ready(stages, started)

    def _ready(self, stages: Stages, started: float) -> WorkerReady:
        import os

        import diffusers
        import transformers

        versions = (("torch", torch.__version__), ("diffusers", diffusers.__version__), ("transformers", transformers.__version__))
        return WorkerReady(
            self.worker, os.getpid(), str(self.device), tuple(stage.name for stage in stages.stages),
            tuple((stage.name, stage.components) for stage in stages.stages),
            "stages" if stages.family is not None else "pipeline", time.perf_counter() - started, versions,
        )

    def road(self, inputs: tuple[str, ...]) -> tuple[Stages, GuidanceRules]:
        """The stages for jobs that bring these picture inputs, and what guidance means in them. Built at first use."""
        if inputs not in self._roads:
            stages = build_stages(self.folder, self.device, self.components.dtypes, inputs=inputs)
            main = stages.named(DENOISE if stages.family is not None else PIPELINE)
            guiders = {name: getattr(main.pipe, name) for name in main.guiders}
            extra = dict(stages.family.guider) if stages.family is not None else {}
            rules = GuidanceRules(stages.call, guiders, "guidance_scale" in main.inputs, extra)
            self.components.add_road(stages)
            self._roads[inputs] = stages, rules
        return self._roads[inputs]

    # -- from outside -----------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """From any thread: the batch in flight is finished, then `run_window` returns; its other jobs get no event."""
        self._stop.set()

    def close(self) -> None:
        self.products.close()
        self.residency.release()

    def run_window(self, window: Window) -> None:
        """Ends every job of the window, unless a stop is requested. Raises RunStoppedError (DiskError is one)."""
        self.window = window.number
        self._ended = set()
        spooled = dict(window.spooled)
        by_inputs: dict[tuple[str, ...], list[Job]] = {}
        for job in window.jobs:
            by_inputs.setdefault(input_names(job), []).append(job)
        for inputs, jobs in by_inputs.items():
            try:
                stages, rules = self.road(inputs)
            except RunStoppedError:
                raise
            except BatchgenError as error:
                for job in jobs:
                    self._fail_job(job, "input", "", error.message)
                continue
            rows = [Row(job, rules.of(job)) for job in jobs]
            if stages.family is None:
                self._ordinary(stages, rules, rows)
            else:
                self._staged(stages, rules, rows, spooled)
        self.products.finish()

    # -- the stages -------------------------------------------------------------------------------------------------

    def _staged(self, stages: Stages, rules: GuidanceRules, rows: list[Row], spooled: dict[str, str]) -> None:
        kept = self._unspooled(rows, spooled)
        fresh = [row for row in rows if row not in kept]
        Encoding(self, stages, rules).run(fresh)
        fresh = self._alive(fresh)
        denoise, decode = stages.named(DENOISE), stages.named(DECODE)
        fused = all(self.residency.mode(name) == "resident" for name in (*denoise.components, *decode.components))
        done: list[Row] = list(kept)
        for shape, group in group_rows(fresh, mixes_guidance=rules.mixes_rows):

            def work(batch: Sequence[Row], shape: ShapeKey = shape) -> None:
                self._denoise(stages, rules, shape, batch)
                alive = self._alive(batch)
                if fused:
                    self._decode_all(stages, alive)
                else:
                    done.extend(alive)

            size = self.sizes.of(DENOISE, shape, self._pixels(stages, group[0].job))
            self.run_stage(denoise, shape, group, size, work, lambda row, kind, reason: self._fail_job(row.job, kind, DENOISE, reason))
        self._decode_all(stages, done)

    def _decode_all(self, stages: Stages, rows: Iterable[Row]) -> None:
        decode = stages.named(DECODE)
        for shape, group in group_rows(rows, mixes_guidance=True):
            size = self.sizes.of(DECODE, shape, self._pixels(stages, group[0].job))

            def work(batch: Sequence[Row]) -> None:
                self._decode(stages, batch)

            self.run_stage(decode, shape, group, size, work, lambda row, kind, reason: self._fail_job(row.job, kind, DECODE, reason))

    def _denoise(self, stages: Stages, rules: GuidanceRules, shape: ShapeKey, batch: Sequence[Row]) -> None:
        stage = stages.named(DENOISE)
        stages.fresh_scheduler(stage)
        names = list(batch[0].values)
        carried = {name: join_rows([row.values[name] for row in batch], self.device) for name in names}
        fields = {name: carried[name] for name in names if any(name in other.denoiser_fields for other in stages.encoders)}
        generators = [row.generator_now() for row in batch]
        arguments = self.arguments(stages, batch) | carried | {"generator": generators}
        if rules.embeds_scale and batch[0].guidance.scale is not None:
            arguments["guidance_scale"] = batch[0].guidance.scale
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, rules.guiders_for([row.guidance for row in batch]), fields)
        wanted = stages.named(DECODE).inputs
        kept = {name: split_rows(value, len(batch)) for name, value in outputs.items() if name in wanted and value is not None}
        seconds = time.perf_counter() - started
        for index, row in enumerate(batch):
            row.values = {name: to_device(values[index], CPU) for name, values in kept.items()}
            row.batch, row.seconds = len(batch), row.seconds + seconds / len(batch)
            if "generator" in wanted:
                row.generator = generators[index].get_state()
        for row in batch:
            if not _finite(row.values.get("latents")):
                self._fail_job(row.job, "non-finite", DENOISE, "the denoised latents hold values that are not numbers")
        self._batch_done(stage, shape, batch, len(batch), seconds)
        self._spool(self._alive(batch))

    def _decode(self, stages: Stages, batch: Sequence[Row]) -> None:
        stage = stages.named(DECODE)
        names = list(batch[0].values)
        carried = {name: join_rows([row.values[name] for row in batch], self.device) for name in names}
        dtype = self.components.dtypes.get("vae")
        if dtype is not None and isinstance(carried.get("latents"), torch.Tensor) and carried["latents"].is_floating_point():
            carried["latents"] = carried["latents"].to(dtype)
        arguments = self.arguments(stages, batch) | carried | {"output_type": "np", "generator": [row.generator_now() for row in batch]}
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, {})
        self._finish(stages, batch, outputs, time.perf_counter() - started, stage)

    def _ordinary(self, stages: Stages, rules: GuidanceRules, rows: list[Row]) -> None:
        """The model's ordinary call as the one stage."""
        stage = stages.named(PIPELINE)
        for shape, group in group_rows(rows, mixes_guidance=False):
            for without in (True, False):
                part = [row for row in group if (row.job.negative_prompt is None) == without]

                def work(batch: Sequence[Row]) -> None:
                    self._call_ordinary(stages, shape, batch)  # noqa: B023  used within this turn of the loop only

                size = self.sizes.of(PIPELINE, shape, self._pixels(stages, group[0].job))
                self.run_stage(stage, shape, part, size, work, lambda row, kind, reason: self._fail_job(row.job, kind, PIPELINE, reason))

    def _call_ordinary(self, stages: Stages, shape: ShapeKey, batch: Sequence[Row]) -> None:
        stage = stages.named(PIPELINE)
        stages.fresh_scheduler(stage)
        arguments = self.arguments(stages, batch)
        arguments |= {"prompt": [row.job.prompt for row in batch], "generator": [row.generator_now() for row in batch]}
        if batch[0].job.negative_prompt is not None:
            arguments["negative_prompt"] = [row.job.negative_prompt for row in batch]
        if batch[0].job.guidance is not None:
            arguments["true_cfg_scale" if "guidance_scale" not in stage.inputs else "guidance_scale"] = batch[0].job.guidance
        if batch[0].job.true_cfg_scale is not None:
            arguments["true_cfg_scale"] = batch[0].job.true_cfg_scale
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, {})
        seconds = time.perf_counter() - started
        for row in batch:
            row.batch, row.seconds = len(batch), seconds / len(batch)
        self._finish(stages, batch, outputs, 0.0, stage)

    def _finish(self, stages: Stages, batch: Sequence[Row], outputs: dict[str, Any], seconds: float, stage: Stage) -> None:
        products, nsfw = rows_of(outputs, len(batch))
        self._batch_done(stage, batch[0].shape, batch, len(batch), seconds)
        for row, product, flagged in zip(batch, products, nsfw, strict=True):
            row.seconds += seconds / len(batch)
            asked = self.arguments(stages, [row])
            check_size(row, product, asked)
            if flagged:
                self._fail_job(row.job, "filtered", stage.name, "the model's safety filter replaced the picture")
                continue
            self._ended.add(row.job.key)
            self.products.take(row, product, self._resolved(stages, row, product, asked))

    # -- batches and failures ---------------------------------------------------------------------------------------

    def run_stage(
        self, stage: Stage, shape: ShapeKey | None, items: Sequence[T], size: int, work: Callable[[Sequence[T]], None],
        fail: Callable[[T, FailureKind, str], None],
    ) -> None:
        """Runs `work` on all items in batches of `size`, the stage's components in. A batch that fails is tried item by item."""
        queue = deque(chunks(items, size)) if items else deque()
        while queue and not self._stop.is_set():
            self.components.ensure(stage.components)
            with self.residency.stage(stage.components, one_at_a_time=stage.name == PIPELINE):
                self._drain(queue, work, fail)
        self._sample(stage.name)

    def _drain(self, queue: deque[Sequence[T]], work: Callable[[Sequence[T]], None], fail: Callable[[T, FailureKind, str], None]) -> None:
        while queue and not self._stop.is_set():
            batch = queue.popleft()
            try:
                work(batch)
                continue
            except RunStoppedError:
                raise
            except torch.OutOfMemoryError as error:
                kind, reason = "out-of-memory", first_line(error)
            except Exception as error:  # noqa: BLE001  one bad job must not end the night
                kind, reason = "error", error.message if isinstance(error, BatchgenError) else f"{type(error).__name__}: {first_line(error)}"
            self.meter.take()
            gc.collect()
            if len(batch) > 1:
                queue.extendleft(reversed([[item] for item in batch]))
            else:
                fail(batch[0], kind, reason)

    def _fail_job(self, job: Job, kind: FailureKind, stage: str, reason: str) -> None:
        if job.key not in self._ended:
            self._ended.add(job.key)
            self.emit(JobFailed(self.worker, job.key, kind, stage, reason))

    def _alive(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if row.job.key not in self._ended]

    # -- small things -----------------------------------------------------------------------------------------------

    def arguments(self, stages: Stages, batch: Sequence[Row]) -> dict[str, Any]:
        """What the stages are called with besides carried values: the ordinary call's defaults, then the jobs' own settings."""
        own: dict[str, Any] = {}
        if batch:
            job = batch[0].job
            own = {
                "height": job.height, "width": job.width, "num_inference_steps": job.steps, "num_frames": job.num_frames,
                "frame_rate": job.fps, "strength": job.strength,
            }
        defaults = {name: value for name, value in stages.call.items() if value is not None and name != "guidance_scale"}
        return defaults | {name: value for name, value in own.items() if value is not None} | {"batch_size": len(batch)}

    def _pixels(self, stages: Stages, job: Job) -> int:
        width = job.width or stages.call.get("width") or 1024
        height = job.height or stages.call.get("height") or 1024
        return int(width) * int(height) * int(job.num_frames or stages.call.get("num_frames") or 1)

    def _resolved(self, stages: Stages, row: Row, product: Any, asked: dict[str, Any]) -> dict[str, Any]:
        scale = row.guidance.scale if row.guidance.scale is not None else stages.call.get("true_cfg_scale") or stages.call.get("guidance_scale")
        found = {"width": product.shape[-2], "height": product.shape[-3], "steps": asked.get("num_inference_steps"), "guidance": scale}
        if product.ndim == 4:
            found |= {"num_frames": product.shape[0], "fps": row.job.fps or stages.call.get("frame_rate") or 16.0}
        return found

    def _batch_done(self, stage: Stage, shape: ShapeKey | None, batch: Sequence[Row], size: int, seconds: float) -> None:
        self.emit(StageBatchDone(
            self.worker, self.window, stage.name, shape.text if shape is not None else "", tuple(row.job.key for row in batch), size,
            seconds, self.meter.take(),
        ))

    def _sample(self, when: str) -> None:
        self.emit(MemorySample(self.worker, when, rss_bytes(), self.memory.allocated(), self.memory.peak()))

    def _spool(self, rows: Sequence[Row]) -> None:
        if not rows or not self.settings.spool_latents:
            return
        self._spooled += 1
        name = f"spool/{self.worker}-{self.window}-{self._spooled}.safetensors"
        path = Path(self.settings.run_folder) / name
        with disk_errors(path):
            spool_rows(path, rows)
        for row in rows:
            row.spool = path
        self.emit(LatentsSpooled(self.worker, tuple(row.job.key for row in rows), name, rows[0].batch))

    def _unspooled(self, rows: Sequence[Row], spooled: dict[str, str]) -> list[Row]:
        """Rows whose latents an earlier attempt left on disk; a lost or broken file only costs denoising again."""
        by_file: dict[str, dict[str, Row]] = {}
        for row in rows:
            if row.job.key in spooled:
                by_file.setdefault(spooled[row.job.key], {})[row.job.key] = row
        found: list[Row] = []
        for name, wanted in by_file.items():
            try:
                unspool(Path(self.settings.run_folder) / name, wanted)
            except (OSError, ValueError):
                continue
            found.extend(wanted.values())
        return found


def input_names(job: Job) -> tuple[str, ...]:
    """The picture inputs of a job, by the blocks' names."""
    named = (("image", job.image), ("last_image", job.last_image), ("mask_image", job.mask))
    return tuple(name for name, value in named if value is not None)


def _finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())
