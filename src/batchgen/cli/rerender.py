"""`batchgen rerender FILE`: makes a picture again from the settings inside it, and compares the pixels."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from batchgen.cli.model_options import model_options
from batchgen.cli.run_options import EXTENSIONS, RunOptions
from batchgen.errors import EXIT_DONE, EXIT_SOME_FAILED, RefusedError, RunStoppedError
from batchgen.inventory.options import ModelOptions

# Fields of the embedded record that a manifest row takes under the same name.
_ROW = (
    "prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "true_cfg_scale", "num_frames", "fps", "image",
    "last_image", "mask", "strength",
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


@click.command(epilog="Exit codes: 0 equal (or one grey level apart across batch sizes); 2 refused; 3 the pixels differ.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@model_options
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Keep the new picture here.")
@click.option("--device", metavar="NAME", help="cuda:0, mps or cpu; default: what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path, model: str | None, model_options: ModelOptions, output: Path | None, device: str | None, as_json: bool) -> int:
    """Make a picture or clip again, alone, from the settings inside FILE, and say whether the pixels are equal.

    \b
    batchgen rerender results/prompts-Qwen-Image/outputs/000003-a-red-fox.png
    batchgen rerender picture.png --model ./my-model -o again.png
    """
    if output is not None and os.path.lexists(output):
        raise RefusedError(f"{output} exists already", hint="Name another file with -o.")
    origin = read_origin(file)
    source = model or origin.model
    if not source:
        raise RefusedError(f"{file} does not say which model made it", hint="Name it with --model.")
    model_options = _same_loading(origin, model_options, named=model is not None)
    _check_revision(origin, source, model_options)
    with tempfile.TemporaryDirectory(prefix="batchgen-rerender-") as folder:
        again = _render(origin, file, Path(folder), source, model_options, device)
        verdict = compare(file, again, origin.batch)
        if output is not None:
            shutil.copytree(again, output) if again.is_dir() else shutil.copyfile(again, output)
    click.echo(json.dumps({"schema": 1, "file": str(file), **verdict}) if as_json else verdict["text"])
    return EXIT_DONE if verdict["accepted"] else EXIT_SOME_FAILED


def read_origin(file: Path) -> Origin:
    """Raises RefusedError where the file has no settings of ours, or not whole ones."""
    from batchgen.outputs.metadata import read_settings
    from batchgen.runfolder import RunFolder

    if not file.exists():
        raise RefusedError(f"there is no {file}")
    settings = read_settings(file)
    if settings is None:
        raise RefusedError(f"{file} has no settings of batchgen inside", hint="Only files that batchgen wrote can be made again.")
    if cut := settings.get("cut"):
        raise RefusedError(f"{file}: {', '.join(cut)} was too long to be kept whole inside", hint="Render its manifest row again instead.")
    for folder in file.absolute().parents:
        if (folder / "run.json").is_file():
            return Origin(settings, RunFolder(folder).read_run() or {})
    return Origin(settings, {})


def _check_revision(origin: Origin, source: str, options: ModelOptions) -> None:
    """Another model gives another picture: found out before anything is loaded. Raises RefusedError, ModelError."""
    from batchgen.inventory.model import resolve

    made = str(origin.settings.get("revision", ""))
    found = resolve(source, replace(options, download=False), platform="cpu").revision
    if found != made:
        raise RefusedError(
            f"{source} is another model now: revision {found[:12]}, the file was made by {made[:12]}",
            hint="Name the old one with --revision or --model.",
        )


def _render(origin: Origin, file: Path, folder: Path, source: str, options: ModelOptions, device: str | None) -> Path:
    """The new output, in a run folder of its own below `folder`."""
    from batchgen.cli.rendering import render
    from batchgen.cli.request import RenderRequest
    from batchgen.manifest.options import ManifestOptions
    from batchgen.plan.records import Overrides

    row = {name: origin.settings[name] for name in _ROW if origin.settings.get(name) is not None}
    manifest = folder / "again.jsonl"
    manifest.write_text(json.dumps(row) + "\n", encoding="utf-8")
    image_format = {extension: name for name, extension in EXTENSIONS.items()}.get(file.suffix.lower(), "png")
    quality = origin.setting("image-quality")
    run = RunOptions(
        output=str(folder / "run"), devices=(device,) if device else (), quiet=True, vae_tiling="tiled" in origin.settings.get("flags", ()),
        image_format=image_format, image_options=(("quality", int(quality)),) if quality is not None else (),
        video_format="png" if file.is_dir() else file.suffix.lower().lstrip(".") or "mp4",
    )
    options_of_rows = ManifestOptions(allow_empty_prompt=True)
    request = RenderRequest(str(manifest), source, options, Overrides(batch_size=1), options_of_rows, run, ())
    out, sys.stdout = sys.stdout, sys.stderr  # the run's own tables are not this command's result
    try:
        outcome = render(request)
    finally:
        sys.stdout = out
    outputs = sorted((folder / "run" / "outputs").iterdir())
    if outcome.exit_code != EXIT_DONE or len(outputs) != 1:
        raise RunStoppedError("the picture could not be made again; the tables above say why")
    return outputs[0]


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
