"""rerender: a picture again from the settings inside it, with and without its run folder."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from commandline import batchgen
from PIL import Image
from PIL.PngImagePlugin import PngInfo


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("rerender")
    rows = [
        {"prompt": "a red circle {on} 100 % \"blue\"", "seed": 2**64 - 1, "width": 64, "height": 64},
        {"prompt": "a square", "negative_prompt": "blurry", "guidance": 3.5, "width": 64, "height": 96, "num_images": 2},
    ]
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = batchgen("run", "list.jsonl", "--model", tiny_folder("qwen_image"), "--steps", 2, "--batch-size", 1, "-o", "out", folder=folder)
    assert said.code == 0, said
    return folder / "out"


def test_every_picture_made_at_batch_one_comes_out_equal(run):
    pictures = sorted((run / "outputs").iterdir())
    assert len(pictures) == 3
    for picture in (pictures[0], pictures[2]):
        said = batchgen("rerender", picture, "--json", folder=run.parent)
        assert said.code == 0, said
        assert json.loads(said.out)["equal"] is True


def test_a_picture_away_from_its_run_needs_only_its_model(run, tmp_path, tiny_folder):
    picture = sorted((run / "outputs").iterdir())[0]
    away = tmp_path / "away.png"
    shutil.copyfile(picture, away)
    said = batchgen("rerender", away, "--model", tiny_folder("qwen_image"), "-o", tmp_path / "again.png", folder=tmp_path)
    assert said.code == 0, said
    assert said.out == "the pixels are equal\n"
    with Image.open(away) as one, Image.open(tmp_path / "again.png") as other:
        assert (np.asarray(one) == np.asarray(other)).all()


def test_changed_pixels_are_told(run, tmp_path, tiny_folder):
    picture = sorted((run / "outputs").iterdir())[0]
    with Image.open(picture) as image:
        image.load()
        texts, pixels = PngInfo(), np.asarray(image).copy()
        texts.add_itxt("batchgen", image.text["batchgen"])
    pixels[0, 0, 0] ^= 64
    Image.fromarray(pixels).save(tmp_path / "changed.png", pnginfo=texts)
    said = batchgen("rerender", tmp_path / "changed.png", "--model", tiny_folder("qwen_image"), folder=tmp_path)
    assert said.code == 3, said
    assert "64/255" in said.out


REFUSED = [
    ("no such file", "nothing.png", "there is no"),
    ("a stranger's picture", "stranger.png", "no settings of batchgen inside"),
]


@pytest.mark.parametrize(("name", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_made_again_is_refused(name, message, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "stranger.png")
    said = batchgen("rerender", name, folder=tmp_path)
    assert said.code == 2, said
    assert message in said.err
    assert "Traceback" not in said.err


def test_another_model_is_refused_before_it_is_loaded(run, tiny_folder, tmp_path):
    picture = sorted((run / "outputs").iterdir())[0]
    said = batchgen("rerender", picture, "--model", tiny_folder("z_image"), folder=tmp_path)
    assert said.code == 2, said
    assert "another model" in said.err
