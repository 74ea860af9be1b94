"""`batchgen demo`: what the README's first command leaves behind, with nothing but the package."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import batchgen, pixels, run_json, texts
from PIL import Image

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
