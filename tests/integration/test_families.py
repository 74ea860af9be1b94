"""Every model family through the engine, held against its ordinary pipeline called by hand.

The table is in family_cases.py; docs/models.md is made from it too.
"""

from __future__ import annotations

from dataclasses import replace
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
from family_cases import CASES, Case, models_page

CLOSE = 1e-5
LONG = "a small green square, describe the image of the system, user and assistant in as many words as the tokenizer knows " * 2


ids = [case.family for case in CASES]


def jobs_of(case: Case, folder: Path) -> list[Job]:
    """Four rows: prompts of different length, own seeds, a negative shared, another and none, four ways to say guidance."""
    extra: dict[str, Any] = {"num_frames": case.frames} if case.frames else {}
    if case.image:
        extra["image"] = str(picture(folder, 0))
    if case.last_image:
        extra["last_image"] = str(picture(folder, 1))
    told = [
        ("a red circle on a blue background", None, None), (LONG, "blurry", 3.0), ("x", "blurry", 5.0),
        ("a red circle on a blue background", "grey and dull", 1.0),
    ]
    ending = ".mp4" if case.frames else ".png"
    return [
        make_job(index, prompt, negative_prompt=negative, guidance=guidance, output=f"{index}{ending}", **extra)
        for index, (prompt, negative, guidance) in enumerate(told)
    ]


def picture(folder: Path, number: int) -> Path:
    path = folder.parent / f"input{number}.png"
    if not path.exists():
        pixels = np.random.RandomState(number).randint(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return path


def by_hand(pipe: Any, job: Job) -> np.ndarray:
    more = {name: Image.open(path) for name, path in (("image", job.image), ("last_image", job.last_image)) if path}
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
    with_branches = {"qwen_image": 2, "z_image": 4}.get(case.family, 3)  # rows whose second branch runs
    assert shared == (with_branches if case.shares else 1)


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


def test_the_page_about_models_is_what_the_table_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == models_page(), "run python tools/docs/models_page.py"
