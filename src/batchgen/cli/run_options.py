"""The options that say how a run goes: where to, which devices, when to stop, what is written and what is said."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from batchgen.cli.numbers import FiniteRange, WholeRange
from batchgen.cli.parsed import parsed
from batchgen.errors import UsageError
from batchgen.shards import Shard
from batchgen.units import parse_size

IMAGE_FORMATS = ("png", "jpeg", "webp", "avif")
EXTENSIONS = {"png": ".png", "jpeg": ".jpg", "webp": ".webp", "avif": ".avif"}
# diffusers' dispatcher's own names; those that end in _hub fetch kernels, which is code
ATTENTION_BACKENDS = (
    "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math", "flash", "flash_varlen", "flash_hub", "_flash_3",
    "_flash_3_hub", "_flash_varlen_3", "flex", "sage", "sage_hub", "sage_varlen", "xformers",
)
ENGINES = ("local", "ray")
VIDEO_FORMATS = ("mp4", "webp", "png")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """As given; None is unset."""

    output: str | None = None
    state: str | None = None  # where outputs go to a URL: the local folder of journal and tables; None: the user's state folder
    new: bool = False
    take_over: bool = False  # where outputs go to a URL: from a run that holds it
    limit: int | None = None
    shard: Shard | None = None  # this run's share of the jobs; None: all
    devices: tuple[str, ...] = ()  # empty: all
    workers: int | None = None  # None: one a device
    engine: str = "local"
    ray_address: str | None = None
    threads: int | None = None
    events: str | None = None
    stop_at: datetime.time | None = None
    max_hours: float | None = None
    retry_failed: bool = False
    overwrite: bool = False
    verify: bool = False
    reserve_device_bytes: int | None = None
    host_memory_bytes: int | None = None
    image_format: str = "png"
    image_options: tuple[tuple[str, int], ...] = ()
    video_format: str = "mp4"
    vae_tiling: bool = False
    attention_backend: str | None = None
    compile: bool = False
    smoke: bool = False
    job_timeout: float | None = None
    quiet: bool = False
    verbose: bool = False


def _time_of_day(context: click.Context, parameter: click.Parameter, value: str | None) -> datetime.time | None:
    if value is None:
        return None
    match = re.fullmatch(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no time of day; write it like 07:00", context, parameter)
    return datetime.time(int(match.group(1)), int(match.group(2)))


def _devices(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip() for value in values for name in value.split(",")]
    if any(not name for name in names):
        raise click.BadParameter("names no device; write it like cuda:0,cuda:1", context, parameter)
    return tuple(name for index, name in enumerate(names) if name == "cpu" or name not in names[:index])


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("-o", "--output", metavar="DIR|URL", help="Run folder, default results/<manifest>-<model>; or s3://bucket/prefix."),
    click.option("--state", metavar="DIR", help="With outputs at a URL: where journal and tables are kept."),
    click.option("--new", is_flag=True, help="Start beside a folder that holds another run."),
    click.option(
        "--take-over", is_flag=True, help="With outputs at a URL: take it over from a run that writes there; that one stops.",
    ),
    click.option("--limit", type=WholeRange(min=1), metavar="N", help="Only the first N rows."),
    click.option(
        "--shard", metavar="I/N", callback=parsed(Shard.parse),
        help="Only the Ith of N shares of the jobs, for job arrays; see `batchgen merge`.",
    ),
    click.option(
        "--device", "--devices", "devices", multiple=True, metavar="LIST", callback=_devices,
        help="cuda:0, cuda, mps or cpu (cpu,cpu: two processes); several run side by side.",
    ),
    click.option(
        "--workers", type=WholeRange(min=1), metavar="N", help="Worker processes on the CPU, default 1; at most so many in a cluster.",
    ),
    click.option(
        "--engine", type=click.Choice(ENGINES), default="local", show_default=True,
        help="Where workers run: on this machine, or on a Ray cluster (extra: ray).",
    ),
    click.option("--ray-address", metavar="HOST:PORT", help="Head of the Ray cluster; default: RAY_ADDRESS, this machine's, or a new one."),
    click.option("--threads", type=WholeRange(min=1), metavar="N", help="CPU threads of each worker."),
    click.option("--stop-at", metavar="HH:MM", callback=_time_of_day, help="End in good order at this time; resumable."),
    click.option("--max-hours", type=FiniteRange(min=0, min_open=True), metavar="H", help="End in good order after H hours."),
    click.option("--smoke", is_flag=True, help="Before the first job, try three steps of the largest shape, decode included."),
    click.option("--retry-failed", is_flag=True, help="Try jobs again that failed in an earlier run."),
    click.option("--verify", is_flag=True, help="Hash every finished output before going on."),
    click.option("--overwrite", is_flag=True, help="Replace files that are not batchgen's where an output has to go."),
    click.option(
        "--job-timeout", type=FiniteRange(min=0, min_open=True), metavar="SECONDS", help="Set a batch aside that hangs this long.",
    ),
    click.option("--reserve-vram", metavar="GB", callback=parsed(parse_size), help="Device memory left to others (GiB)."),
    click.option("--host-memory", metavar="GB", callback=parsed(parse_size), help="Host memory to use at most (GiB)."),
    click.option("--image-format", type=click.Choice(IMAGE_FORMATS), default="png", show_default=True, help="How pictures are written."),
    click.option("--image-quality", type=WholeRange(1, 100), metavar="Q", help="Of JPEG, WebP and AVIF."),
    click.option("--png-compression", type=WholeRange(0, 9), metavar="0-9", help="Of PNG; 0 is fastest."),
    click.option(
        "--video-format", type=click.Choice(VIDEO_FORMATS), default="mp4", show_default=True,
        help="How clips are written; png: a folder of frames.",
    ),
    click.option("--vae-tiling/--no-vae-tiling", default=False, help="Decode in tiles; alters pixels slightly."),
    click.option(
        "--attention-backend", metavar="NAME", type=click.Choice(ATTENTION_BACKENDS),
        help="Kernels of the denoisers' attention: native, flash, sage, xformers, ... as diffusers names them.",
    ),
    click.option(
        "--compile", is_flag=True,
        help="Compile the denoiser's repeated blocks (torch.compile); it must stay on the device. Alters pixels slightly.",
    ),
    click.option("--events", metavar="FILE", help="Write every event as a JSON line."),
    click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors and the tables."),
    click.option("-v", "--verbose", is_flag=True, help="Show the whole trail of the plan as well."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `run: RunOptions` in their place."""

    @wraps(command)
    def gathered(*args: Any, image_quality: int | None, png_compression: int | None, reserve_vram: int | None, host_memory: int | None,
                 **rest: Any) -> Any:
        own = {name: rest.pop(name) for name in RunOptions.__dataclass_fields__ if name in rest}
        options = RunOptions(
            **own, reserve_device_bytes=reserve_vram, host_memory_bytes=host_memory,
            image_options=_image_options(own["image_format"], image_quality, png_compression),
        )
        if options.quiet and options.verbose:
            raise UsageError("--quiet and --verbose contradict each other", option="--quiet")
        return command(*args, run=options, **rest)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


def _image_options(image_format: str, quality: int | None, compression: int | None) -> tuple[tuple[str, int], ...]:
    if image_format == "png":
        if quality is not None:
            raise UsageError("PNG has no quality", option="--image-quality", hint="Use --png-compression, or another --image-format.")
        return () if compression is None else (("compress_level", compression),)
    if compression is not None:
        raise UsageError(f"--png-compression does not go with --image-format {image_format}", option="--png-compression")
    return () if quality is None else (("quality", quality),)
