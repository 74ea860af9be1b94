"""What a run is asked to do, and what follows from it: the folder's name, what the model decides, run.json. No effects here."""

from __future__ import annotations

import datetime
import platform as machine
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from batchgen import __version__
from batchgen.cli.run_options import EXTENSIONS, RunOptions
from batchgen.cli.settings import Resolved
from batchgen.errors import UsageError
from batchgen.execute.settings import EngineSettings, OutputSettings
from batchgen.inventory import device, rules
from batchgen.inventory.host import host_share
from batchgen.inventory.loras import fingerprint
from batchgen.inventory.model import ModelOptions
from batchgen.inventory.prompt_limits import picture_inputs, prompt_limits, takes_negative_prompt
from batchgen.inventory.records import DeviceFacts, ModelFacts, Platform, Profile
from batchgen.jobs import Job
from batchgen.manifest.options import JobDefaults, ManifestOptions
from batchgen.outputs.urls import Location, without_secrets
from batchgen.plan.records import Overrides, Plan
from batchgen.report.plan_json import plan_object
from batchgen.runfolder import RunFolder
from batchgen.shards import Shard

RESULTS = Path("results")
LORA_INPUT = frozenset({"lora"})
LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "huggingface_hub", "tokenizers", "accelerate", "peft", "pillow", "numpy")


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """What the user asked for. `manifest_options` as given: what the model decides is filled in here."""

    manifest: str  # a path, or "-" for standard input
    model: str
    model_options: ModelOptions
    overrides: Overrides
    manifest_options: ManifestOptions
    run: RunOptions
    settings: tuple[Resolved, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before the manifest is read."""

    model: ModelFacts
    profile: Profile
    platform: Platform
    devices: tuple[DeviceFacts, ...]
    plan: Plan


def default_folder(manifest_path: str, model_name: str, shard: Shard | None = None) -> Path:
    """results/<manifest stem>-<model stem>, for each shard one of its own, with names that any file system takes."""
    stem = "stdin" if manifest_path == "-" else Path(manifest_path).stem or "manifest"
    name = re.sub(r"[^\w.+-]+", "_", f"{stem}-{model_stem(model_name)}").strip("._ ")[:100]
    return RESULTS / (name if shard is None else f"{name}-shard-{shard.number}-of-{shard.count}")


def model_stem(model_name: str) -> str:
    """The last part of a hub id or a folder."""
    return Path(model_name.rstrip("/")).name or "model"


def manifest_options(request: RenderRequest, facts: Facts) -> ManifestOptions:
    """The options with what the model decides: defaults of its profile, size rules, prompt limits, identity."""
    given = request.manifest_options
    video = facts.profile.task == "video"
    extension = f".{request.run.video_format}" if video else EXTENSIONS[request.run.image_format]
    return replace(
        given, defaults=with_profile(given.defaults, facts.profile), extension="" if extension == ".png" and video else extension,
        model_name=model_stem(request.model), model_revision=facts.model.revision, rules=rules.size_rules(facts.model),
        tokenizers=prompt_limits(facts.model), inputs_supported=picture_inputs(facts.model) | LORA_INPUT,
        takes_negative_prompt=takes_negative_prompt(facts.model),
        pixel_settings=tuple(sorted((name, str(value)) for name, value in engine_pixels(request, facts).items())),
        limit=request.run.limit,
    )


def with_profile(given: JobDefaults, profile: Profile) -> JobDefaults:
    """The run's defaults, with the profile's where nothing is said."""
    unset = {name: value for name, value in profile.defaults if getattr(given, name) is None}
    whole = ("width", "height", "steps", "num_frames")
    return replace(given, **{name: int(value) if name in whole else float(value) for name, value in unset.items()})  # type: ignore[arg-type]


def engine_pixels(request: RenderRequest, facts: Facts) -> dict[str, object]:
    """Run-wide settings that alter pixels and that no row can set."""
    found: dict[str, object] = {f"dtype.{part.name}": part.dtype for part in facts.model.components}
    found.update({f"variant.{part.name}": part.variant for part in facts.model.components if part.variant})
    if request.run.vae_tiling:
        found["vae_tiling"] = True
    if request.run.attention_backend is not None:
        found["attention_backend"] = request.run.attention_backend
    if request.run.compile:
        found["compile"] = True
    found.update({f"lora.{lora.name}": f"{fingerprint(lora)} x {lora.weight:g}" for lora in request.manifest_options.loras})
    if request.run.image_format != "png":
        found["image_format"] = request.run.image_format
        found.update(request.run.image_options)
    return found


def pixel_settings(request: RenderRequest, facts: Facts) -> dict[str, object]:
    """What run.json keeps to refuse a resume that would mix two kinds of pictures."""
    defaults = with_profile(request.manifest_options.defaults, facts.profile)
    fields = {name: getattr(defaults, name) for name in JobDefaults.__dataclass_fields__ if name not in ("num_images",)}
    said = {name: value for name, value in fields.items() if value is not None}
    return {"model": facts.model.revision, **said, **engine_pixels(request, facts)}


def engine_settings(
    request: RenderRequest, facts: Facts, folder: RunFolder, trial: Sequence[Job] = (), remote: Location | None = None
) -> EngineSettings:
    """What the workers are told. `trial`: jobs for the smoke test."""
    run, found = request.run, facts.model
    return EngineSettings(
        model_folder=found.folder or "",
        dtypes=tuple((part.name, part.dtype or "float32") for part in found.components),
        variants=tuple((part.name, part.variant) for part in found.components if part.variant),
        device=facts.devices[0].torch_name,
        run_folder=str(folder.path),
        outputs=OutputSettings(
            folder=str(folder.outputs), image_format=run.image_format, image_options=run.image_options, video_format=run.video_format,
            metadata=(("model", found.source), ("revision", found.revision)), overwrite=run.overwrite, remote=remote,
        ),
        trust_remote_code=request.model_options.trust_remote_code, allow_pickle=request.model_options.allow_pickle,
        host_memory_bytes=host_share(run.host_memory_bytes, processes(request, facts)),
        reserve_device_bytes=run.reserve_device_bytes, threads=run.threads,
        vae_tiling=run.vae_tiling or facts.plan.vae_tiling,
        attention_backend=_attention(request), compile_blocks=_compile(request, facts), smoke_jobs=tuple(job.as_json() for job in trial),
        loras=tuple((lora.name, lora.path, lora.weight) for lora in request.manifest_options.loras),
        share_weights=facts.platform == "cpu" and not facts.plan.fsdp and processes(request, facts) > 1,
    )


def _compile(request: RenderRequest, facts: Facts) -> bool:
    """--compile, refused before anything is loaded where a denoiser's weights would move under the compiled code."""
    if not request.run.compile:
        return False
    moving = [part for part in facts.plan.placements if part.group == "dit" and part.mode != "resident"]
    if moving:
        what = ", ".join(f"{part.component} is {part.mode}" for part in moving)
        raise UsageError(
            f"--compile needs the denoiser to stay on the device, and {what}", option="--compile",
            hint=f"Leave it out, or keep the denoiser in: --component-residency {moving[0].component}=resident",
        )
    if request.manifest_options.loras:
        raise UsageError("--compile does not go with --lora: adapters change the blocks between batches", option="--compile")
    return True


def _attention(request: RenderRequest) -> str | None:
    backend = request.run.attention_backend
    if backend is not None and backend.endswith("_hub") and not request.model_options.trust_remote_code:
        message = f"--attention-backend {backend} fetches its kernels, which are code, from the hub"
        raise UsageError(message, option="--attention-backend", hint="Allow it with --trust-remote-code.")
    return backend


def run_record(request: RenderRequest, facts: Facts, pixels: dict[str, object], remote: Location | None = None) -> dict[str, Any]:
    """run.json, its manifest left out: the folder adds that."""
    found = facts.model
    return {
        "batchgen": __version__,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": {
            "source": found.source, "kind": found.kind, "revision": found.revision, "folder": found.folder, "class": found.pipeline_class,
            "components": {
                part.name: {"class": part.class_name, "dtype": part.dtype, "variant": part.variant, "bytes": part.bytes_as_loaded}
                for part in found.components
            },
        },
        "remote": None if remote is None else remote.shown,
        "shard": None if request.run.shard is None else str(request.run.shard),
        "settings": {setting.name: _setting(setting) for setting in request.settings},
        "pixel_settings": pixels,
        "plan": plan_object(facts.plan),
        "versions": library_versions(),
    }


def _setting(setting: Resolved) -> dict[str, Any]:
    value = setting.value
    plain: Any = list(value) if isinstance(value, tuple) else value
    if not isinstance(plain, str | int | float | bool | list | None):
        plain = str(plain)
    if isinstance(plain, str):
        plain = without_secrets(plain)
    return {"value": plain, "source": setting.source, **({"where": setting.where} if setting.where else {})}


def library_versions() -> dict[str, str]:
    """Versions as installed, asked of the package metadata: nothing is imported."""
    found = {"batchgen": __version__, "python": machine.python_version(), "system": f"{machine.system()} {machine.machine()}"}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def worker_count(request: RenderRequest, facts: Facts) -> int:
    """Workers, or groups of ranks, that render side by side."""
    replicas = max(1, facts.plan.replicas)
    return request.run.workers or replicas if facts.platform == "cpu" and not facts.plan.fsdp else replicas


def processes(request: RenderRequest, facts: Facts) -> int:
    """Worker processes of this host, ranks of groups counted singly: they share its memory. On a cluster each finds out by itself."""
    if request.run.engine != "local":
        return 1
    return worker_count(request, facts) * max(1, facts.plan.group_size)


def cpu_ranks(request: RenderRequest, platform: Platform, devices: tuple[DeviceFacts, ...]) -> tuple[DeviceFacts, ...]:
    """The devices; with --fsdp on the CPU each of --workers is one, for a group has a process a device. Raises UsageError."""
    workers = request.run.workers
    if not request.overrides.fsdp or platform != "cpu":
        return devices
    if len(request.run.devices) > 1 and workers is not None and workers != len(devices):
        raise UsageError(
            f"--workers {workers} beside --fsdp and {len(devices)} devices: a sharded denoiser has one process a device",
            option="--workers", hint=f"Leave it out, or write --devices {','.join(['cpu'] * min(workers, 8))}.",
        )
    if len(devices) != 1 or (workers or 1) < 2:
        return devices
    return device.probe(("cpu",) * (request.run.workers or 1))[1]
