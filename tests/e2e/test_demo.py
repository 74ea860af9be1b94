"""`batchgen demo`: what the README's first command leaves behind, with nothing but the package."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commandline import batchgen, pixels, run_json, texts
from PIL import Image

from batchgen import builtin

METADATA = {"prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "model", "revision", "batchgen_version"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("demo")
    said = batchgen("demo", folder=here)
    assert said.code == 0, said
    assert "contact sheet: " in said.out
    assert "Next:" in said.out
    assert "Traceback" not in said.err
    return here / "results" / "demo-builtin"


def test_it_leaves_a_dozen_pictures_that_say_how_they_were_made(demo: Path) -> None:
    found = sorted((demo / "outputs").rglob("*.png"))
    assert len(found) >= 12
    for path in found:
        said = texts(path)
        assert set(said) >= METADATA
        height, width, _ = pixels(path).shape
        assert (said["width"], said["height"], said["model"]) == (str(width), str(height), "builtin")
        assert said["revision"] == run_json(demo)["model"]["revision"]


def test_it_leaves_what_every_run_leaves(demo: Path) -> None:
    for name in ("run.json", "journal.sqlite", "tables/residency.txt", "tables/timings.txt", "tables/jobs.csv", "contact.png"):
        assert (demo / name).stat().st_size > 0, name


def test_the_contact_sheet_shows_them(demo: Path) -> None:
    with Image.open(demo / "contact.png") as sheet:
        assert sheet.width > 512
        assert len(sheet.convert("RGB").getcolors(2**24) or []) > 100


def test_with_failure_one_job_alone_fails_and_says_why(tmp_path: Path) -> None:
    said = batchgen("demo", "--with-failure", folder=tmp_path)
    assert said.code == 3, said
    assert "Traceback" not in said.err
    folder = tmp_path / "results" / "demo-with-failure-builtin"
    with (folder / "tables" / "jobs.csv").open(encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    assert len(jobs) == 17
    failed = [job for job in jobs if job["state"] != "done"]
    assert [(job["id"], job["state"], job["kind"], job["stage"]) for job in failed] == [
        ("fails-on-purpose", "failed", "non-finite", "denoise"),
    ]
    assert "not numbers" in failed[0]["reason"]
    assert failed[0]["reason"] in said.out
    assert not (folder / "outputs" / failed[0]["output"]).exists()
    assert len(list((folder / "outputs").rglob("*.png"))) == 16
    assert "batchgen status results/demo-with-failure-builtin" in said.out
    known = json.loads(batchgen("status", folder, "--json", folder=tmp_path).out)
    assert (known["counts"]["done"], known["counts"]["failed"]) == (16, 1)


def test_the_failing_row_is_all_that_the_flag_adds() -> None:
    plain = builtin.demo_manifest().read_text()
    more = builtin.demo_manifest(with_failure=True).read_text()
    assert more.startswith(plain)
    assert len(more.splitlines()) == len(plain.splitlines()) + 1
