"""A tiny real model and its hollow twin, played side by side."""

from __future__ import annotations

from pathlib import Path

from batchgen.execute import hollow_model, playing
from batchgen.execute.load import ModelFolder
from batchgen.jobs import ShapeKey

VIDEO = ("wan", "ltx", "hunyuan")


def shape(family: str, width: int, height: int, inputs: tuple[str, ...] = ()) -> ShapeKey:
    frames = 9 if family.startswith(VIDEO) else None
    inputs = inputs or (("image",) if family.endswith("_i2v") else ())
    return ShapeKey(width, height, frames, None, 3, 4.0, None, None, None, inputs)


def dtypes(folder: Path, dtype: str = "float32") -> dict[str, str]:
    return dict.fromkeys(ModelFolder.read(folder).models, dtype)


def assert_equal_to_the_byte(family: str, folder: Path, inputs: tuple[str, ...] = ()) -> None:
    """Every stage at two shapes and two batches: weights, peaks, outputs, FLOPs and calls."""
    inputs = shape(family, 64, 64, inputs).inputs
    hollow_run = hollow_model.hollow_rehearsal(str(folder), dtypes(folder), inputs=inputs)
    real_run = hollow_model.real_rehearsal(str(folder), dtypes(folder), inputs=inputs)
    assert hollow_run.weights == real_run.weights
    for width, height in ((64, 64), (96, 64)):
        job = playing.job_of(shape(family, width, height, inputs), "a red circle on a blue background")
        for batch in (1, 2):
            assert playing.play(hollow_run, job, batch) == playing.play(real_run, job, batch)
