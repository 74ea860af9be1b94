"""Every model family through the engine, held against its ordinary pipeline called by hand.

The table below is also what docs/models.md is made from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.events import StageBatchDone, WorkerReady
from batchgen.execute.load import ModelFolder
from batchgen.jobs import Job
from conftest import TinyFolder
from enginekit import call_by_hand, load_ordinary, make_job, make_plan, run_jobs

CLOSE = 1e-5
LONG = "a small green square, describe the image of the system, user and assistant in as many words as the tokenizer knows " * 2


@dataclass(frozen=True)
class Case:
    family: str  # builder in tests/tiny.py
    exact: bool  # at batch 1 bit for bit with the ordinary pipeline; else within 1e-5 (its two branches run as one batch)
    road: str = "stages"
    frames: int | None = None
    image: bool = False
    name: str = ""  # as people call it


CASES = (
    Case("qwen_image", True, name="Qwen-Image"),
    Case("z_image", False, name="Z-Image"),
    Case("flux", True, name="FLUX.1"),
    Case("flux2_klein", True, name="FLUX.2 klein"),
    Case("sd3", False, name="Stable Diffusion 3"),
    Case("sdxl", False, name="Stable Diffusion XL"),
    Case("wan21", True, frames=5, name="Wan 2.1 text-to-video"),
    Case("wan21_i2v", True, frames=5, image=True, name="Wan 2.1 image-to-video"),
    Case("wan22", True, frames=5, name="Wan 2.2 text-to-video (two experts)"),
    Case("wan22_i2v", True, frames=5, image=True, name="Wan 2.2 image-to-video (two experts)"),
    Case("ltx", False, frames=9, name="LTX-Video"),
    Case("ltx2", False, frames=9, name="LTX-2 (with sound)"),
    Case("hunyuan_video15", True, frames=5, name="HunyuanVideo 1.5"),
    Case("pixart_sigma", True, "pipeline", name="PixArt-Sigma"),
    Case("lumina2", True, "pipeline", name="Lumina 2"),
    Case("wan22_ti2v", True, "pipeline", frames=5, name="Wan 2.2 TI2V-5B"),
)
ids = [case.family for case in CASES]


def jobs_of(case: Case, folder: Path) -> list[Job]:
    """Four rows: prompts of different length, own seeds, a negative shared, another and none, four ways to say guidance."""
    extra: dict[str, Any] = {"num_frames": case.frames} if case.frames else {}
    if case.image:
        extra["image"] = str(picture(folder))
    told = [
        ("a red circle on a blue background", None, None), (LONG, "blurry", 3.0), ("x", "blurry", 5.0),
        ("a red circle on a blue background", "grey and dull", 1.0),
    ]
    ending = ".mp4" if case.frames else ".png"
    return [
        make_job(index, prompt, negative_prompt=negative, guidance=guidance, output=f"{index}{ending}", **extra)
        for index, (prompt, negative, guidance) in enumerate(told)
    ]


def picture(folder: Path) -> Path:
    path = folder.parent / "input.png"
    if not path.exists():
        pixels = np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return path


def by_hand(pipe: Any, job: Job) -> np.ndarray:
    more = {"image": Image.open(job.image)} if job.image else {}
    if hasattr(pipe, "guider") and job.guidance is not None:  # its call takes no guidance: the component holds it
        pipe.guider = pipe.guider.new(guidance_scale=job.guidance)
    return call_by_hand(pipe, job, **more)


def worst(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in theirs)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_products_are_the_ordinary_pipelines(case: Case, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder(case.family)
    jobs = jobs_of(case, folder)
    pipe = load_ordinary(folder)
    theirs = {job.key: by_hand(pipe, job) for job in jobs}
    assert len({array.tobytes() for array in theirs.values()}) == len(jobs)

    alone = run_jobs(folder, tmp_path / "alone", jobs, plan=make_plan(folder, batch_size=1))
    assert alone.failed == []
    assert worst(alone.floats, theirs) <= (0.0 if case.exact else CLOSE)
    (ready,) = alone.of(WorkerReady)
    assert ready.road == case.road

    together = run_jobs(folder, tmp_path / "together", jobs, plan=make_plan(folder, batch_size=4))
    assert together.failed == []
    assert worst(together.floats, theirs) <= CLOSE
    assert sorted(event.key for event in together.done) == sorted(job.key for job in jobs)
    # rows that differ in guidance shared a batch where the guider allows it
    shared = max(event.size for event in together.of(StageBatchDone) if event.stage in ("denoise", "pipeline"))
    assert shared == {"flux": 1, "ltx2": 1, "qwen_image": 2, "z_image": 4}.get(case.family, 3 if case.road == "stages" else 1)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_placements_do_not_alter_products(case: Case, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder(case.family)
    jobs = [replace(job, guidance=3.0) for job in jobs_of(case, folder)[1:3]]
    models = ModelFolder.read(folder).models
    resident = run_jobs(folder, tmp_path / "resident", jobs, plan=make_plan(folder, batch_size=2))
    assert resident.failed == []
    for mode in ("component-offload", "layerwise-offload"):
        moved = run_jobs(folder, tmp_path / mode, jobs, plan=make_plan(folder, batch_size=2, modes=dict.fromkeys(models, mode)))
        assert moved.failed == []
        assert worst(moved.floats, resident.floats) == 0.0
