"""`batchgen rerender FILE...`: makes pictures again from the settings inside them, and compares the pixels."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from batchgen.cli.model_options import model_options
from batchgen.cli.run_options import EXTENSIONS, RunOptions
from batchgen.errors import EXIT_DONE, EXIT_SOME_FAILED, RefusedError, RunStoppedError
from batchgen.inventory.options import ModelOptions
from batchgen.report.safe import printable

# Fields of the embedded record that a manifest row takes under the same name.
_ROW = (
    "prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "true_cfg_scale", "num_frames", "fps", "image",
    "last_image", "mask", "strength", "lora",
)
GREY_LEVEL = 1  # between batch sizes kernels may round differently


@dataclass(frozen=True, slots=True)
class Origin:
    """How a file was made: the settings inside it, and its run's record where the file still lies in its run folder."""

    settings: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def batch(self) -> int:
        return int(self.settings.get("batch") or 0)

    @property
    def model(self) -> str:
        """What to load: the folder that the run used for a local model, else the name that the file gives."""
        began = self.run.get("model", {})
        if began.get("kind") == "folder" and began.get("folder"):
            return str(began["folder"])
        return str(self.settings.get("model", ""))

    def setting(self, name: str) -> Any:
        return self.run.get("settings", {}).get(name, {}).get("value")


@dataclass(frozen=True, slots=True)
class Task:
    """One file and all that its run has in common with those of other files: such files are made by one run."""

    file: Path
    origin: Origin
    source: str
    options: ModelOptions
    run: RunOptions
    loras: tuple[str, ...] = ()

    @property
    def together(self) -> tuple[object, ...]:
        return self.source, self.options, self.run, self.loras


@click.command(epilog="Exit codes: 0 equal (or one grey level apart across batch sizes); 2 refused; 3 the pixels of some differ.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@model_options
@click.option(
    "-o", "--output", metavar="PATH", type=click.Path(path_type=Path), help="Keep the new picture here; of several files: in this folder.",
)
@click.option("--device", metavar="NAME", help="cuda:0, mps or cpu; default: what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a file, one a line.")
def command(
    files: tuple[Path, ...], model: str | None, model_options: ModelOptions, output: Path | None, device: str | None, as_json: bool,
) -> int:
    """Make pictures or clips again, alone, from the settings inside each FILE, and say whether the pixels are equal.

    \b
    batchgen rerender results/prompts-Qwen-Image/outputs/000003-a-red-fox.png
    batchgen rerender picture.png --model ./my-model -o again.png
    batchgen rerender results/prompts-Qwen-Image/outputs/00001*

    The model is loaded once for all files that one model made.
    """
    files = tuple(dict.fromkeys(files))
    places = _places(files, output)
    tasks = [_task(file, model, model_options, device) for file in files]
    verdicts: dict[Path, dict[str, Any]] = {}
    for _, group in groupby(sorted(tasks, key=lambda task: repr(task.together)), key=lambda task: repr(task.together)):
        with tempfile.TemporaryDirectory(prefix="batchgen-rerender-") as folder:
            alike = list(group)
            for task, again in zip(alike, _render(alike, Path(folder)), strict=True):
                verdicts[task.file] = _lost(task) if again is None else compare(task.file, again, task.origin.batch)
                if again is not None and task.file in places:
                    _keep(again, places[task.file])
    _say([(task.file, verdicts[task.file]) for task in tasks], as_json=as_json)
    return EXIT_DONE if all(verdict["accepted"] for verdict in verdicts.values()) else EXIT_SOME_FAILED


def _task(file: Path, model: str | None, options: ModelOptions, device: str | None) -> Task:
    """What makes the file again. Raises RefusedError, ModelError, before anything is loaded."""
    origin = read_origin(file)
    source = model or origin.model
    if not source:
        raise RefusedError(f"{file} does not say which model made it", hint="Name it with --model.")
    loras = tuple(map(str, origin.setting("lora") or ()))
    if origin.settings.get("lora") and not loras:
        raise RefusedError(f"{file} was made with the LoRA {origin.settings['lora']}, and only its run folder says where that lies",
                           hint="Name the file where its run left it.")
    options = _same_loading(origin, options, named=model is not None)
    _check_revision(file, origin, source, options)
    return Task(file, origin, source, options, _run_options(origin, file, device), loras)


def _run_options(origin: Origin, file: Path, device: str | None) -> RunOptions:
    quality = origin.setting("image-quality")
    return RunOptions(
        devices=(device,) if device else (), quiet=True, vae_tiling="tiled" in origin.settings.get("flags", ()),
        image_format={extension: name for name, extension in EXTENSIONS.items()}.get(file.suffix.lower(), "png"),
        image_options=(("quality", int(quality)),) if quality is not None else (),
        video_format="png" if file.is_dir() else file.suffix.lower().lstrip(".") or "mp4",
        attention_backend=origin.setting("attention-backend"), compile=bool(origin.setting("compile")),
    )


def _places(files: Sequence[Path], output: Path | None) -> dict[Path, Path]:
    """Where each new output is kept. Raises RefusedError where one would take another's place."""
    if output is None:
        return {}
    places = {file: output if len(files) == 1 else output / file.name for file in files}
    taken = next((place for place in places.values() if os.path.lexists(place)), None)
    if taken is not None:
        raise RefusedError(f"{taken} exists already", hint="Name another place with -o.")
    if len(set(places.values())) < len(places):
        raise RefusedError("two of the files have one name", hint="Make them again one by one, or leave out -o.")
    return places


def _keep(again: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(again, place) if again.is_dir() else shutil.copyfile(again, place)


def _lost(task: Task) -> dict[str, Any]:
    text = "it could not be made again; the tables on stderr say why"
    return {"accepted": False, "equal": False, "largest_difference": None, "batch": task.origin.batch, "text": text}


def _say(verdicts: Sequence[tuple[Path, Mapping[str, Any]]], *, as_json: bool) -> None:
    if as_json:
        for file, verdict in verdicts:
            click.echo(json.dumps({"schema": 1, "file": str(file), **verdict}))
        return
    for file, verdict in verdicts:
        click.echo(verdict["text"] if len(verdicts) == 1 else f"{printable(str(file))}: {verdict['text']}")
    if len(verdicts) > 1:
        equal, close = (sum(bool(verdict[name]) for _, verdict in verdicts) for name in ("equal", "accepted"))
        other = len(verdicts) - close
        parts = [f"{equal} equal"] + [f"{close - equal} a grey level apart"] * (close > equal) + [f"{other} differ"] * (other > 0)
        click.echo(f"{len(verdicts)} files: {', '.join(parts)}")


def read_origin(file: Path) -> Origin:
    """Raises RefusedError where the file has no settings of ours, or not whole ones."""
    from batchgen.outputs.metadata import read_settings
    from batchgen.runfolder import RunFolder

    if not file.exists():
        raise RefusedError(f"there is no {file}")
    settings = read_settings(file)
    if settings is None:
        raise RefusedError(f"{file} has no settings of batchgen inside", hint="Only files that batchgen wrote can be made again.")
    if file.is_dir() and not settings.get("num_frames"):
        raise RefusedError(f"{file} is a folder of pictures, not a clip kept as frames", hint=f"Name the pictures: {file}/*")
    if cut := settings.get("cut"):
        raise RefusedError(f"{file}: {', '.join(cut)} was too long to be kept whole inside", hint="Render its manifest row again instead.")
    for folder in file.absolute().parents:
        if (folder / "run.json").is_file():
            return Origin(settings, RunFolder(folder).read_run() or {})
    return Origin(settings, {})


def _check_revision(file: Path, origin: Origin, source: str, options: ModelOptions) -> None:
    """Another model gives another picture: found out before anything is loaded. Raises RefusedError, ModelError."""
    made = str(origin.settings.get("revision", ""))
    found = _revision(source, replace(options, download=False))
    if found != made:
        raise RefusedError(
            f"{source} is another model now: revision {found[:12]}, and {file} was made by {made[:12]}",
            hint="Name the old one with --revision or --model.",
        )


@cache
def _revision(source: str, options: ModelOptions) -> str:
    """Asked once for all files of a model."""
    from batchgen.inventory.model import resolve

    return resolve(source, options, platform="cpu").revision


def _render(tasks: Sequence[Task], folder: Path) -> list[Path | None]:
    """The new outputs of tasks that go together, in a run folder of its own below `folder`; None for one that failed."""
    from batchgen.cli.rendering import render
    from batchgen.cli.request import RenderRequest
    from batchgen.inventory.loras import parse_loras
    from batchgen.manifest.options import ManifestOptions
    from batchgen.plan.records import Overrides

    manifest = folder / "again.jsonl"
    with manifest.open("w", encoding="utf-8") as lines:
        for task in tasks:
            row = {name: task.origin.settings[name] for name in _ROW if task.origin.settings.get(name) is not None}
            lines.write(json.dumps(row) + "\n")
    first = tasks[0]
    rows = ManifestOptions(allow_empty_prompt=True, name_template="{index:06d}", loras=parse_loras(first.loras))
    run = replace(first.run, output=str(folder / "run"))
    request = RenderRequest(str(manifest), first.source, first.options, Overrides(batch_size=1), rows, run, ())
    out, sys.stdout = sys.stdout, io.StringIO()  # the run's own tables are not this command's result, but they say what failed
    try:
        whole = render(request).exit_code == EXIT_DONE
    except BaseException:
        whole = False
        raise
    finally:
        tables, sys.stdout = sys.stdout.getvalue(), out
        if not whole:
            sys.stderr.write("".join(line for line in tables.splitlines(keepends=True) if not line.startswith(str(folder))))
    found = {path.stem: path for path in (folder / "run" / "outputs").iterdir()}
    if not found:
        raise RunStoppedError("nothing could be made again; the tables above say why")
    return [found.get(f"{number:06d}") for number in range(len(tasks))]


def _same_loading(origin: Origin, options: ModelOptions, *, named: bool) -> ModelOptions:
    """Revision, variant and dtypes as the file was made with, unless the command line says otherwise."""
    began = origin.run.get("model", {})
    if options.revision is None and not named and began.get("kind") == "hub":
        options = replace(options, revision=str(origin.settings.get("revision")))
    if options.variant is None and origin.setting("variant"):
        options = replace(options, variant=str(origin.setting("variant")))
    if options.dtype is None and not options.component_dtypes:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        parts = began.get("components", {})
        known = tuple((name, short[part["dtype"]]) for name, part in parts.items() if part.get("dtype") in short)
        options = replace(options, component_dtypes=known)
    return options


def compare(one: Path, other: Path, batch: int) -> dict[str, Any]:
    """How far apart two outputs are; `batch` is the batch size that the first was made with."""
    from batchgen.outputs.pixels import read_pixels

    first, second = read_pixels(one), read_pixels(other)
    if first.shape != second.shape:
        return {"accepted": False, "equal": False, "largest_difference": None, "batch": batch,
                "text": f"other shapes: {_shape(first.shape)} and now {_shape(second.shape)}"}
    largest = int(abs(first.astype("int16") - second.astype("int16")).max())
    if largest == 0:
        text, accepted = "the pixels are equal", True
    elif largest <= GREY_LEVEL and batch != 1:
        text, accepted = f"at most {largest}/255 apart: it was made in a batch of {batch}, and alone now", True
    else:
        text, accepted = f"the pixels differ by up to {largest}/255 (made in a batch of {batch}, alone now)", False
    return {"accepted": accepted, "equal": largest == 0, "largest_difference": largest, "batch": batch, "text": text}


def _shape(shape: tuple[int, ...]) -> str:
    frames, height, width = shape[:3]
    return f"{width}x{height}" + (f", {frames} frames" if frames > 1 else "")
