"""Lists with picture inputs as people bring them: scans, phone photos, print files. Each is read right or refused with the reason."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import Said, batchgen, environment
from PIL import Image

import tiny
from batchgen.execute.products import to_uint8
from batchgen.outputs.pixels import read_pixels
from conftest import TinyFolder
from enginekit import call_by_hand, load_ordinary, make_job, sister

TESTS = Path(__file__).parents[1]
EXIF_ORIENTATION, TURNED_LEFT = 0x0112, 6  # shown upright by a turn of 90 degrees clockwise


def picture_files(folder: Path) -> dict[str, Image.Image]:
    """Writes the awkward files; gives, for each, the picture that a careful person would hand to the pipeline."""
    folder.mkdir()
    pixels = np.random.RandomState(0).randint(0, 255, (8, 12, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    upright = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED_LEFT
    upright.rotate(90, expand=True).save(folder / "turned.jpg", exif=exif, quality=95)
    upright.convert("CMYK").save(folder / "print.jpg", quality=95)
    grey = (np.arange(96 * 64, dtype=np.uint32).reshape(64, 96) * 65535 // (96 * 64 - 1)).astype(np.uint16)
    Image.fromarray(grey).save(folder / "deep.png")
    Image.new("RGB", (1, 1), (200, 30, 30)).save(folder / "dot.png")
    (folder / "note.jpg").write_text("to do: find the photo", encoding="utf-8")
    with Image.open(folder / "turned.jpg") as stored:
        turned = Image.fromarray(np.rot90(np.asarray(stored), -1))
    with Image.open(folder / "print.jpg") as stored:
        assert stored.mode == "CMYK"
        inks = np.asarray(stored).astype(float) / 255
        printed = Image.fromarray(((1 - inks[..., :3]) * (1 - inks[..., 3:]) * 255).round().astype(np.uint8))
    deep = Image.fromarray(np.repeat((grey / 257).round().astype(np.uint8)[..., None], 3, axis=2))
    return {"turned.jpg": turned, "print.jpg": printed, "deep.png": deep, "dot.png": Image.new("RGB", (1, 1), (200, 30, 30))}


def write_list(path: Path, names: list[str], **columns: Any) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "image", "seed", *columns])
        for number, name in enumerate(names):
            writer.writerow([f"a red circle {number}", f"pictures/{name}", number, *columns.values()])
    return path


def refused_before_the_night(said: Said, manifest: str, folder: Path) -> None:
    assert said.code == 2, said
    assert f"{manifest}:4:image: there is no such file ('pictures/lost.png')" in said.err
    assert f"{manifest}:5:image: is not a picture that can be read ('pictures/note.jpg')" in said.err
    assert not (folder / "out").exists()


def test_an_image_to_video_list(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    wanted = picture_files(tmp_path / "pictures")
    names = list(wanted)
    shape = {"width": 64, "height": 64, "num_frames": 5, "steps": 1}
    model = tiny_folder("wan21_i2v")
    options = ("--model", model, "-o", "out", "--quiet", "--video-format", "png", "--batch-size", "1")
    write_list(tmp_path / "lost.csv", [*names[:2], "lost.png", "note.jpg", *names[2:]], **shape)
    refused_before_the_night(batchgen("run", "lost.csv", *options, folder=tmp_path), "lost.csv", tmp_path)

    write_list(tmp_path / "clips.csv", names, **shape)
    said = batchgen("run", "clips.csv", *options, folder=tmp_path)
    assert said.code == 0, said
    pipe = load_ordinary(model)
    for number, (name, output) in enumerate(zip(names, sorted((tmp_path / "out" / "outputs").iterdir()), strict=True)):
        theirs = call_by_hand(pipe, make_job(number, f"a red circle {number}", seed=number, **shape), image=wanted[name])
        assert np.abs(read_pixels(output).astype(int) - to_uint8(theirs)).max() <= 1, name


def edit(arguments: list[str], folder: Path) -> Said:
    command = [sys.executable, str(TESTS / "factory_run.py"), "special_engines:with_stand_in_processor", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment({"PYTHONPATH": str(TESTS)}), capture_output=True, text=True, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def test_an_edit_list(tmp_path: Path) -> None:
    wanted = picture_files(tmp_path / "pictures")
    names = list(wanted)
    shape = {"width": 64, "height": 64, "steps": 1}
    with tiny.stand_in_processor():
        tiny.qwen_image_edit(tmp_path / "edit")
    options = ["--model", "edit", "-o", "out", "--quiet", "--batch-size", "1"]
    write_list(tmp_path / "lost.csv", [*names[:2], "lost.png", "note.jpg", *names[2:]], **shape)
    refused_before_the_night(batchgen("run", "lost.csv", *options, folder=tmp_path), "lost.csv", tmp_path)

    write_list(tmp_path / "edits.csv", names, **shape)
    if importlib.util.find_spec("torchvision") is None:
        said = batchgen("run", "edits.csv", *options, folder=tmp_path)
        assert said.code == 2, said
        assert "batchgen[edit]" in said.err
    said = edit(["run", "edits.csv", *options], tmp_path)
    assert said.code == 0, said
    outputs = sorted((tmp_path / "out" / "outputs").iterdir())
    with tiny.stand_in_processor():
        pipe = load_ordinary(tmp_path / "edit")
        for number, (name, output) in enumerate(zip(names, outputs, strict=True)):
            theirs = call_by_hand(pipe, make_job(number, f"a red circle {number}", seed=number, **shape), image=wanted[name])
            assert np.abs(read_pixels(output)[0].astype(int) - to_uint8(theirs)).max() <= 1, name


@pytest.mark.long
def test_a_list_of_several_reference_pictures_a_row(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Some files are awkward, some rows have one picture and some three, and the bar stands with blanks and without."""
    wanted = picture_files(tmp_path / "pictures")
    rows = [["turned.jpg", "deep.png"], ["print.jpg"], ["deep.png", "print.jpg", "turned.jpg"], ["deep.png", "turned.jpg"]]
    shape = {"width": 64, "height": 64, "steps": 1}
    model = tiny_folder("flux2")
    options = ("--model", model, "-o", "out", "--quiet", "--batch-size", "1")

    def listed(name: str, cells: list[str]) -> str:
        lines = [{"prompt": f"a red circle {number}", "seed": number, "image": cell, **shape} for number, cell in enumerate(cells)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return name

    cells = [bar.join(f"pictures/{name}" for name in row) for row, bar in zip(rows, (" | ", "|", "|", "  |"), strict=True)]
    lost = batchgen("run", listed("lost.jsonl", [*cells, "pictures/deep.png | pictures/lost.png"]), *options, folder=tmp_path)
    assert lost.code == 2, lost
    assert "lost.jsonl:5:image: there is no such file ('pictures/lost.png')" in lost.err
    assert not (tmp_path / "out").exists()

    said = batchgen("run", listed("refs.jsonl", cells), *options, folder=tmp_path)
    assert said.code == 0, said
    outputs = sorted((tmp_path / "out" / "outputs").iterdir())
    pipe = load_ordinary(model)
    made = []
    for number, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        theirs = call_by_hand(pipe, make_job(number, f"a red circle {number}", seed=number, **shape), image=[wanted[name] for name in row])
        made.append(read_pixels(output)[0].astype(int))
        assert np.abs(made[-1] - to_uint8(theirs)).max() <= 1, row
    again = batchgen("rerender", outputs[2], folder=tmp_path)
    assert again.code == 0, again
    assert again.out == "the pixels are equal\n"

    # the order of the pictures is part of the row
    turned = batchgen("run", listed("refs.jsonl", [*cells[:3], "pictures/turned.jpg | pictures/deep.png"]), *options, folder=tmp_path)
    assert turned.code == 0, turned
    assert len(sorted((tmp_path / "out" / "outputs").iterdir())) == 5


def test_a_list_of_texts_pictures_strengths_and_masks(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Each row takes the pipeline that a user would call for what the row brings."""
    wanted = picture_files(tmp_path / "pictures")
    Image.fromarray(np.repeat([[255] * 48 + [0] * 48], 64, axis=0).astype(np.uint8)).save(tmp_path / "pictures" / "half.png")
    rows: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("Img2Img", {"image": "pictures/print.jpg", "strength": 0.5}),
        ("Img2Img", {"image": "pictures/print.jpg", "strength": 0.9}),
        ("Inpaint", {"image": "pictures/turned.jpg", "mask": "pictures/half.png", "strength": 0.9}),
    ]
    shape = {"width": 64, "height": 64, "steps": 3, "guidance": 3.0}
    lines = [json.dumps({"prompt": f"a red circle {number}", "seed": number, **shape, **row}) for number, (_, row) in enumerate(rows)]
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = tiny_folder("z_image")
    said = batchgen("run", "mixed.jsonl", "--model", model, "-o", "out", "--quiet", "--batch-size", "1", folder=tmp_path)
    assert said.code == 0, said
    for number, (kind, row) in enumerate(rows):
        given = {"image": wanted[Path(row["image"]).name]} if "image" in row else {}
        given |= {"mask_image": Image.open(tmp_path / row["mask"])} if "mask" in row else {}
        # these calls do not stretch pictures to the size asked for themselves
        given = {name: picture.resize((64, 64), Image.Resampling.LANCZOS) for name, picture in given.items()}
        job = make_job(number, f"a red circle {number}", seed=number, **shape, strength=row.get("strength"))
        theirs = call_by_hand(sister(model, f"ZImage{kind}Pipeline"), job, **given)
        (output,) = (tmp_path / "out" / "outputs").glob(f"{number:06d}-*.png")
        assert np.abs(read_pixels(output)[0].astype(int) - to_uint8(theirs)).max() <= 1, row
