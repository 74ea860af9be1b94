"""rerender: a picture again from the settings inside it, with and without its run folder."""

from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pytest
from commandline import batchgen, pixels
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def made(folder, model, *options):
    """A run of 24 pictures: odd prompts, two sizes, negative prompts, the largest seed."""
    rows = [
        {"prompt": "a red circle {on} 100 % \"blue\"", "seed": 2**64 - 1, "width": 64, "height": 64},
        {"prompt": "a square", "negative_prompt": "blurry", "guidance": 3.5, "width": 64, "height": 96, "num_images": 3},
        *({"prompt": f"{number} boats in a harbour {'at night ' * (number % 5)}", "width": 64, "height": 64} for number in range(20)),
    ]
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = batchgen("run", "list.jsonl", "--model", model, "--steps", 2, "-o", "out", *options, folder=folder)
    assert said.code == 0, said
    assert len(list((folder / "out" / "outputs").iterdir())) == 24
    return folder / "out"


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_folder):
    return made(tmp_path_factory.mktemp("rerender"), tiny_folder("qwen_image"), "--batch-size", 1)


def some_of(run, count):
    return random.Random(count).sample(sorted((run / "outputs").iterdir()), count)


def test_twenty_pictures_made_at_batch_one_come_out_equal(run, tmp_path):
    chosen = some_of(run, 20)
    said = batchgen("rerender", *chosen, "--json", "-o", tmp_path / "kept", folder=run.parent)
    assert said.code == 0, said
    verdicts = [json.loads(line) for line in said.out.splitlines()]
    assert [verdict["file"] for verdict in verdicts] == [str(path) for path in chosen]
    assert all(verdict["equal"] and verdict["largest_difference"] == 0 for verdict in verdicts)
    assert all((pixels(tmp_path / "kept" / path.name) == pixels(path)).all() for path in chosen)  # and not by its own word alone


def test_pictures_of_large_batches_are_a_grey_level_apart_at_most_and_it_is_said(tmp_path, tiny_folder):
    run = made(tmp_path, tiny_folder("qwen_image"))
    said = batchgen("rerender", *sorted((run / "outputs").iterdir()), folder=tmp_path)
    assert said.code == 0, said
    *lines, total = said.out.splitlines()
    assert len(lines) == 24
    assert all(line.endswith(": the pixels are equal") or re.search(r": at most 1/255 apart: it was made in a batch of \d+", line) for line in lines)
    apart = sum("1/255" in line for line in lines)
    assert total == f"24 files: {24 - apart} equal" + (f", {apart} a grey level apart" if apart else "")


def test_a_picture_away_from_its_run_needs_only_its_model(run, tmp_path, tiny_folder):
    picture = sorted((run / "outputs").iterdir())[0]
    away = tmp_path / "away.png"
    shutil.copyfile(picture, away)
    said = batchgen("rerender", away, "--model", tiny_folder("qwen_image"), "-o", tmp_path / "again.png", folder=tmp_path)
    assert said.code == 0, said
    assert said.out == "the pixels are equal\n"
    assert not any(word in said.err for word in ("Stages", "Components", "batchgen-rerender-"))  # its run is nobody's concern
    with Image.open(away) as one, Image.open(tmp_path / "again.png") as other:
        assert (np.asarray(one) == np.asarray(other)).all()


def test_changed_pixels_are_told(run, tmp_path, tiny_folder):
    picture = sorted((run / "outputs").iterdir())[0]
    with Image.open(picture) as image:
        image.load()
        texts, values = PngInfo(), np.asarray(image).copy()
        texts.add_itxt("batchgen", image.text["batchgen"])
    values[0, 0, 0] ^= 64
    Image.fromarray(values).save(tmp_path / "changed.png", pnginfo=texts)
    said = batchgen("rerender", tmp_path / "changed.png", picture, "--model", tiny_folder("qwen_image"), folder=tmp_path)
    assert said.code == 3, said
    first, second, total = said.out.splitlines()
    assert "changed.png: the pixels differ by up to 64/255" in first
    assert second.endswith("the pixels are equal")
    assert total == "2 files: 1 equal, 1 differ"


def test_nothing_is_written_over(run, tmp_path):
    pictures = some_of(run, 2)
    shutil.copyfile(pictures[0], tmp_path / pictures[0].name)
    for arguments in ((pictures[0], "-o", pictures[1]), (*pictures, "-o", tmp_path)):
        said = batchgen("rerender", *arguments, folder=tmp_path)
        assert said.code == 2, said
        assert "exists already" in said.err


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


def test_a_folder_of_pictures_is_not_taken_for_a_clip(run, tmp_path):
    said = batchgen("rerender", run / "outputs", folder=tmp_path)
    assert said.code == 2, said
    assert "a folder of pictures, not a clip" in said.err
    assert f"{run / 'outputs'}/*" in said.err


def test_another_model_is_refused_before_it_is_loaded(run, tiny_folder, tmp_path):
    picture = sorted((run / "outputs").iterdir())[0]
    said = batchgen("rerender", picture, "--model", tiny_folder("z_image"), folder=tmp_path)
    assert said.code == 2, said
    assert "another model" in said.err
