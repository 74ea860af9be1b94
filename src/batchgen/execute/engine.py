"""Takes windows of jobs through the stages: encode all, denoise all, decode all.

Every job of a window ends in exactly one OutputDone or JobFailed event; only what no other job would survive (a full disk, weights that
do not load, a model that makes another size than asked) is raised. Placements are `residency`'s, batches and failures the
`runner`'s, files are written by `products`; the engine decides what is done in which order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batchgen.errors import ModelError, RunStoppedError
from batchgen.events import Emit, Event, FailureKind, LatentsSpooled, WorkerReady
from batchgen.execute.arguments import block_names, call_arguments, cast_latents, guidance_rules, ordinary_guidance
from batchgen.execute.attention import check_attention
from batchgen.execute.branches import split_branches
from batchgen.execute.components import Components
from batchgen.execute.confirm import use_device
from batchgen.execute.encoding import Encoding
from batchgen.execute.experts import idle_experts, stand_in
from batchgen.execute.group import RankGroup, join
from batchgen.execute.guidance import GuidanceRules
from batchgen.execute.load import ModelFolder, quiet_libraries
from batchgen.execute.loras import Loras
from batchgen.execute.memory import HostBudget
from batchgen.execute.meter import Meter
from batchgen.execute.ordinary import guide_by_part
from batchgen.execute.pictures import read_inputs
from batchgen.execute.products import Products, Sound, Unwritten, difference, rows_of
from batchgen.execute.residency import Residency
from batchgen.execute.runner import Runner, Task
from batchgen.execute.settings import EngineSettings, Window
from batchgen.execute.stages import DECODE, DENOISE, PIPELINE, Stage, Stages, build_stages, call_stage, join_rows, split_rows, to_host
from batchgen.execute.trial import Trial
from batchgen.execute.windows import BatchSizes, EncodedCache, Row, chunks, group_rows, spool_rows, unspool
from batchgen.jobs import Job, ShapeKey
from batchgen.outputs.files import disk_errors
from batchgen.plan.records import Plan
from batchgen.plan.trail import Decision

DEFAULT_FPS = 16.0  # of a clip where neither the job nor the pipeline's call says
FLAG_TILED = "tiled"


class Engine:
    """One worker's executor. Building it makes the stages, loads no weights and emits WorkerReady."""

    def __init__(self, worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> None:
        started = time.perf_counter()
        ranks = settings.group.size if settings.group is not None and settings.device == "cpu" else 1
        if settings.threads is not None or ranks > 1:
            torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // ranks))
        quiet_libraries()
        lock = threading.Lock()  # the writers emit from threads of their own

        def emit_one(event: Event) -> None:
            with lock:
                emit(event)

        self.worker, self.settings, self.emit = worker, settings, emit_one
        self.device = torch.device(settings.device)
        self.folder = ModelFolder.read(
            settings.model_folder, trust_remote_code=settings.trust_remote_code, allow_pickle=settings.allow_pickle
        )
        self.group = join(settings.group, self.device)
        budget = HostBudget.find(settings.host_memory_bytes)
        # what depends on the budget all ranks must do alike; where none was stated, each found what all of them share
        found_alone = settings.host_memory_bytes is None
        budget.limit_bytes = self.group.least(budget.limit_bytes // (self.group.size if found_alone else 1))
        self.residency = Residency(
            plan.modes, self.device, prefetch=plan.prefetch, host_budget=budget, emit=self.emit, worker=worker,
            fixed=[placement.component for placement in plan.placements if placement.by == "user"], keep_bytes=dict(plan.keep_bytes),
            group=self.group,
        )
        check_attention(settings.attention_backend)
        loras = Loras.read(settings.loras, self.folder.pipeline_class)
        self.components = Components(settings, self.folder, self.residency, Meter(self.device), self.emit, worker, loras)
        self.runner = Runner(worker, self.emit, self.components, tiling=settings.vae_tiling)
        self.sizes = BatchSizes(plan)
        self.cache = EncodedCache(budget)
        self.products: Products | Unwritten = Products(worker, settings.outputs, self.emit) if self.group.leads else Unwritten()
        self._roads: dict[tuple[tuple[str, ...], bool], tuple[Stages, GuidanceRules]] = {}
        self._spooled = 0
        self._spools = self._may_spool = settings.spool_latents and self.group.leads
        self._smoke = tuple(Job.from_json(text) for text in settings.smoke_jobs)  # still to be tried
        self._told_idle: frozenset[str] = frozenset()
        self._proven = False  # a product of the right size has been seen: the model can make what jobs ask for
        self._announce(started)

    def _announce(self, started: float) -> None:
        import diffusers
        import transformers

        stages, _ = self.road(())
        versions = (("torch", str(torch.__version__)), ("diffusers", diffusers.__version__), ("transformers", transformers.__version__))
        self.emit(WorkerReady(
            self.worker, os.getpid(), self._device_text(), tuple(stage.name for stage in stages.stages),
            tuple((stage.name, stage.components) for stage in stages.stages),
            "stages" if stages.family is not None else "pipeline", time.perf_counter() - started, versions,
        ))

    def _device_text(self) -> str:
        return "+".join(self.settings.group.devices) if self.settings.group is not None else str(self.device)

    def road(self, inputs: tuple[str, ...], *, whole: bool = False) -> tuple[Stages, GuidanceRules]:
        """The stages for jobs that bring these picture inputs, and what guidance means in them. Built at first use.

        `whole`: the ordinary call, for jobs that ask for what only it can do.
        """
        if (inputs, whole) not in self._roads:
            stages = build_stages(self.folder, self.device, self.components.dtypes, inputs=inputs, whole=whole)
            self.components.add_road(stages)
            self._roads[inputs, whole] = stages, guidance_rules(stages)
        return self._roads[inputs, whole]

    # -- from outside -----------------------------------------------------------------------------------------------

    def finish_current_batch(self) -> None:
        """From any thread: the batch in flight is finished, then `run_window` returns; its other jobs get no event."""
        self.runner.stopping.set()

    def close(self) -> None:
        """Waits for the writers. Weights are left to the process's end: taking placements off would copy them back first."""
        self.products.close()

    def smoke(self, asked: Sequence[Job]) -> None:
        """Tries the jobs in a few steps, decode included, and writes nothing. Raises PlanRefusedError where one does not come through."""
        self._smoke = ()
        trial, jobs = Trial(self.emit, self.worker), Trial.jobs(asked)
        kept: tuple[Any, ...] = (self.products, self.emit, self.runner.emit)
        stand_in: Any = trial
        self.products, self.emit, self.runner.emit, self._spools = stand_in, trial.emit, trial.emit, False
        try:
            self.run_window(Window(-1, jobs))
        finally:
            self.products, self.emit, self.runner.emit = kept
            self._spools = self._may_spool
        if not self.runner.stopping.is_set():
            trial.judge(jobs, self.components.modules)

    def run_window(self, window: Window) -> None:
        """Ends every job of the window, unless a stop is requested.

        Raises RunStoppedError (DiskError is one) for what every later job would meet too, ModelError for weights that do not load.
        """
        if self._smoke:
            self.smoke(self._smoke)
        self.runner.window, self.runner.ended = window.number, set()
        by_inputs: dict[tuple[str, ...], list[Job]] = {}
        for job in window.jobs:
            by_inputs.setdefault(block_names(job.shape.inputs), []).append(job)
        for inputs, jobs in by_inputs.items():
            try:
                stages, rules = self.runner.agreed(partial(self.road, inputs))
                whole = [job for job in jobs if rules.beyond_stages(job)]
                if whole:
                    self._ordinary(self.road(inputs, whole=True)[0], [Row(job, rules.of(job)) for job in whole])
                    jobs = [job for job in jobs if not rules.beyond_stages(job)]
            except ModelError as error:
                for job in jobs:
                    self.runner.fail_job(job, "input", "", error.message)
                continue
            rows = [Row(job, rules.of(job)) for job in jobs]
            if stages.family is None:
                self._ordinary(stages, rows)
            else:
                self._staged(stages, rules, rows, dict(window.spooled))
        self.products.finish()

    # -- the stages -------------------------------------------------------------------------------------------------

    def _staged(self, stages: Stages, rules: GuidanceRules, rows: list[Row], spooled: dict[str, str]) -> None:
        denoised = self._unspooled(rows, spooled)
        fresh = [row for row in rows if row not in denoised]
        Encoding(self.runner, self.sizes, self.cache, stages, rules).run(fresh)
        groups = group_rows(self.runner.alive(fresh), mixes_guidance=rules.mixes_rows)
        stage = self._without_idle(stages, stages.named(DENOISE), [shape for shape, _ in groups])
        tasks = [self._task(stages, stage, shape, group, partial(self._denoise, stages, rules, shape)) for shape, group in groups]
        while tasks and self._nothing_moves(stages) and not self.runner.stopping.is_set():
            # each batch is decoded at once: its pictures come early, and its latents take no memory meanwhile
            task = tasks.pop(0)
            for batch in chunks(task.items, task.size):
                self.runner.run(stage, [replace(task, items=batch)])
                self._decode_all(stages, self._ready(batch), last=not self.settings.spool_latents)
        self.runner.run(stage, tasks, stages.named(DECODE).components)
        self._decode_all(stages, denoised + self._ready(row for task in tasks for row in task.items))

    def _task(
        self, stages: Stages, stage: Stage, shape: ShapeKey, rows: Sequence[Row], work: Callable[[Sequence[Row]], None]
    ) -> Task:
        def fail(row: Row, kind: FailureKind, reason: str) -> None:
            self.runner.fail_job(row.job, kind, stage.name, reason)

        return Task(shape, rows, self.sizes.of(stage.name, shape, self._pixels(stages, rows[0].job)), work, fail)

    def _without_idle(self, stages: Stages, stage: Stage, shapes: Sequence[ShapeKey]) -> Stage:
        """The stage without components that none of these jobs calls, unless they are loaded already."""
        idle = idle_experts(stages, stage, [shape.steps for shape in shapes]) if shapes else frozenset()
        idle -= self.components.modules.keys()
        if not idle:
            return stage
        stand_in(stages, stage, idle)
        for name in sorted(idle - self._told_idle):
            text = f"{name} is not loaded: at the steps asked for so far, every timestep is the other denoiser's"
            self.runner.decide(Decision.of("expert", name, "not loaded", text))
        self._told_idle |= idle
        return replace(stage, components=tuple(name for name in stage.components if name not in idle))

    def _nothing_moves(self, stages: Stages) -> bool:
        parts = (*stages.named(DENOISE).components, *stages.named(DECODE).components)
        return all(self.residency.mode(name) == "resident" for name in parts)

    def _ready(self, rows: Iterable[Row]) -> list[Row]:
        """Rows with latents to decode: not failed, and not cut off by a stop."""
        return [row for row in self.runner.alive(rows) if row.batch]

    def _denoise(self, stages: Stages, rules: GuidanceRules, shape: ShapeKey, batch: Sequence[Row]) -> None:
        stage = stages.named(DENOISE)
        stages.fresh_scheduler(stage)
        self.components.loras.use(stage.components, shape.lora)
        carried = self._joined(batch)
        fields = {name: value for name, value in carried.items() if any(name in other.denoiser_fields for other in stages.encoders)}
        generators = self._noise(batch)
        arguments = call_arguments(stages.call, batch[0].job, len(batch)) | carried | {"generator": generators}
        if rules.embeds_scale and batch[0].guidance.scale is not None:
            arguments["guidance_scale"] = batch[0].guidance.scale
        guiders = rules.guiders_for([row.guidance for row in batch])
        if isinstance(self.group, RankGroup) and self.group.cfg_parallel:
            guiders = split_branches(guiders, self.group)
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, guiders, fields)
        wanted = stages.named(DECODE).inputs
        kept = {name: split_rows(value, len(batch)) for name, value in outputs.items() if name in wanted and value is not None}
        values = [{name: to_host(split[index]) for name, split in kept.items()} for index in range(len(batch))]
        values = self.group.settled("the denoised latents", values)
        seconds = time.perf_counter() - started
        self.runner.batch_done(stage, shape, batch, len(batch), seconds)
        for row, made, generator in zip(batch, values, generators, strict=True):
            row.values = {name: value for name, value in row.values.items() if name in wanted} | made
            row.batch, row.seconds = len(batch), row.seconds + seconds / len(batch)
            if "generator" in wanted:
                row.generator = generator.get_state()
            if not _finite(row.values.get("latents")):
                self.runner.fail_job(row.job, "non-finite", DENOISE, "the denoised latents hold values that are not numbers")
        self._spool(self.runner.alive(batch))

    def _decode_all(self, stages: Stages, rows: Sequence[Row], *, last: bool = False) -> None:
        stage = stages.named(DECODE)
        groups = group_rows(rows, mixes_guidance=True, apart=False)
        tasks = [self._task(stages, stage, shape, group, partial(self._decode, stages, shape)) for shape, group in groups]
        self.runner.run(stage, tasks, last=last)

    def _decode(self, stages: Stages, shape: ShapeKey, batch: Sequence[Row]) -> None:
        stage = stages.named(DECODE)
        carried = self._joined(batch)
        cast_latents(carried, self.components.dtypes.get("vae"))
        arguments = call_arguments(stages.call, batch[0].job, len(batch)) | carried
        arguments |= {"output_type": "np", "generator": [row.generator_now() for row in batch]}
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, {})
        self._finish(stages, stage, shape, batch, outputs, time.perf_counter() - started)

    def _noise(self, batch: Sequence[Row]) -> list[torch.Generator]:
        """The rows' generators. Ranks of a group must draw the same: raises GroupDivergedError where theirs stand elsewhere."""
        generators = [row.generator_now() for row in batch]
        states = [(row.job.key, made.get_state()) for row, made in zip(batch, generators, strict=True)]
        self.group.check_same("the jobs and their noise", states)
        return generators

    def _joined(self, batch: Sequence[Row]) -> dict[str, Any]:
        names = [name for name in batch[0].values if all(name in row.values for row in batch)]
        return {name: join_rows([row.values[name] for row in batch], self.device) for name in names}

    def _ordinary(self, stages: Stages, rows: Sequence[Row]) -> None:
        """The model's ordinary call as the one stage. Rows with and without a negative prompt are different calls."""
        stage = self._without_idle(stages, stages.named(PIPELINE), [row.shape for row in rows])
        tasks = []
        for shape, group in group_rows(rows, mixes_guidance=False):
            for without in (True, False):
                part = [row for row in group if (row.job.negative_prompt is None) == without]
                if part:
                    task = self._task(stages, stage, shape, part, partial(self._call_ordinary, stages, shape))
                    # pipelines that take a picture take one
                    tasks.append(replace(task, size=1) if shape.inputs else task)
        self.runner.run(stage, tasks)

    def _call_ordinary(self, stages: Stages, shape: ShapeKey, batch: Sequence[Row]) -> None:
        stage, job = stages.named(PIPELINE), batch[0].job
        stages.fresh_scheduler(stage)
        self.components.loras.use(stage.components, shape.lora)
        arguments = call_arguments(stages.call, job, len(batch))
        arguments |= {"prompt": [row.job.prompt for row in batch], "generator": self._noise(batch)}
        arguments |= read_inputs(job) if len(batch) == 1 else {}
        if job.negative_prompt is not None:
            arguments["negative_prompt"] = [row.job.negative_prompt for row in batch]
        guide_by_part(stage.pipe, stages.plain.get("guider"), stage.inputs, job.guidance)
        arguments |= ordinary_guidance(stages, stage, job)
        started = time.perf_counter()
        outputs = call_stage(stage, arguments, {})
        for row in batch:
            row.batch = len(batch)
        self._finish(stages, stage, shape, batch, outputs, time.perf_counter() - started)

    def _finish(
        self, stages: Stages, stage: Stage, shape: ShapeKey, batch: Sequence[Row], outputs: dict[str, Any], seconds: float
    ) -> None:
        products, filtered = rows_of(outputs, len(batch))
        filtered = self.group.settled("what the safety filter says", list(filtered))
        self.runner.batch_done(stage, shape, batch, len(batch), seconds)
        sounds = self._sounds(stage, outputs, len(batch))
        for row, product, flagged, sound in zip(batch, products, filtered, sounds, strict=True):
            row.seconds += seconds / len(batch)
            asked = call_arguments(stages.call, row.job, 1)
            wrong = difference(product, asked)
            if flagged:
                self.runner.fail_job(row.job, "filtered", stage.name, "the model's safety filter replaced the picture")
                continue
            if wrong is not None and not self._proven:
                raise RunStoppedError(
                    f"the model does not make what was asked for: {wrong} (row {row.job.row}, {row.job.id})",
                    hint="ask for sizes that the model can make (batchgen check names them), or use --snap",
                )
            if wrong is not None:
                self.runner.fail_job(row.job, "error", stage.name, f"the model does not make what was asked for: {wrong}")
                continue
            self._proven = True
            if self.runner.tiles(stage, shape):
                row.flags = (*row.flags, FLAG_TILED)
            self.runner.job_made(row.job.key)
            self.products.take(row, product, self._resolved(stages, row, product, asked), sound=sound)

    def _sounds(self, stage: Stage, outputs: dict[str, Any], rows: int) -> list[Sound | None]:
        """Each row's sound track, where the stage makes one; its rate is in the config of the component that makes it."""
        audio = outputs.get("audio")
        configs = [getattr(self.components.modules.get(name), "config", None) for name in stage.components]
        rates = [config["output_sampling_rate"] for config in configs if config is not None and "output_sampling_rate" in config]
        if audio is None or not rates:
            return [None] * rows
        return [(track.float().cpu().numpy(), int(rates[0])) for track in audio]

    # -- small things -----------------------------------------------------------------------------------------------

    def _pixels(self, stages: Stages, job: Job) -> int:
        width, height = job.width or stages.call.get("width") or 1024, job.height or stages.call.get("height") or 1024
        return int(width) * int(height) * int(job.num_frames or stages.call.get("num_frames") or 1)

    def _resolved(self, stages: Stages, row: Row, product: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """What the job left to the model, as it came out."""
        found = {"width": product.shape[-2], "height": product.shape[-3]}
        found |= {"steps": asked.get("num_inference_steps"), "guidance": row.guidance.told}
        if product.ndim == 4:
            fps = row.job.fps if row.job.fps is not None else stages.call.get("frame_rate") or DEFAULT_FPS
            found |= {"num_frames": product.shape[0], "fps": fps}
        return found

    def _spool(self, rows: Sequence[Row]) -> None:
        if not rows or not self._spools:
            return
        self._spooled += 1
        name = f"spool/{self.worker}-{self.runner.window}-{self._spooled}.safetensors"
        path = Path(self.settings.run_folder) / name
        try:
            with disk_errors(path):
                spool_rows(path, rows)
        except TypeError:
            return  # carries something that has no file form: a kill then costs this batch's denoising
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
                readable = True
            except (OSError, ValueError):
                readable = False
            if self.group.everywhere(readable):
                found.extend(wanted.values())
            else:
                for row in wanted.values():
                    row.values, row.generator, row.batch, row.spool = {}, None, 0, None
        return found


def open_engine(worker: int, settings: EngineSettings, plan: Plan, emit: Emit) -> Engine:
    """An engine on a device that torch has confirmed. Raises PlanRefusedError where it is not the one planned for."""
    use_device(plan.devices, settings.device)
    return Engine(worker, settings, plan, emit)


def _finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())
