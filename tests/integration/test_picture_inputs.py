"""Pictures as inputs: image-to-image and edit through the same stages, and what kinds of picture files are taken."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tiny
from batchgen.errors import ModelError, RefusedError
from batchgen.events import StageBatchDone
from batchgen.execute.load import ModelFolder
from batchgen.execute.pictures import read_picture
from batchgen.execute.settings import Window
from conftest import TinyFolder
from enginekit import Ran, call_by_hand, engine_for, load_ordinary, make_job, make_plan, run_jobs, sister

CLOSE = 1e-5
SISTERS = {  # the library's pipeline for the same model with a picture
    "z_image": "ZImageImg2ImgPipeline",
    "flux": "FluxImg2ImgPipeline",
    "sd3": "StableDiffusion3Img2ImgPipeline",
    "sdxl": "StableDiffusionXLImg2ImgPipeline",
    "ltx": "LTXImageToVideoPipeline",
    "ltx2": "LTX2ImageToVideoPipeline",
    "flux_kontext": "FluxKontextPipeline",
    "flux2": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.RandomState(0).randint(0, 255, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / "in.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(
    ("family", "name", "mask"),
    [
        ("qwen_image", "QwenImageImg2ImgPipeline", False),
        ("qwen_image", "QwenImageInpaintPipeline", True),
        ("z_image", "ZImageInpaintPipeline", True),
        ("flux", "FluxInpaintPipeline", True),
        ("sdxl", "StableDiffusionXLInpaintPipeline", True),
    ],
)
def test_what_the_stages_do_otherwise_takes_the_sister_pipelines_own_call(
    family: str, name: str, mask: bool, picture: Path, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    half = tmp_path / "mask.png"
    Image.fromarray(np.repeat([[255] * 32 + [0] * 32], 64, axis=0).astype(np.uint8)).save(half)
    more = {"mask": str(half)} if mask else {}
    job = make_job(0, "a red circle", negative_prompt="blurry", guidance=3.0, strength=0.9, image=str(picture), **more)
    ran = run_jobs(tiny_folder(family), tmp_path / "run", [job])
    assert ran.failed == []
    pictures = {"image": Image.open(picture)} | ({"mask_image": Image.open(half)} if mask else {})
    theirs = call_by_hand(sister(tiny_folder(family), name), job, **pictures)
    assert (ran.floats[job.key] == theirs).all()


@pytest.mark.parametrize("family", list(SISTERS))
def test_image_to_image_is_the_sister_pipelines(family: str, picture: Path, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder(family)
    more: dict[str, Any] = {"num_frames": 9} if family.startswith("ltx") else {}
    if not family.startswith(("ltx", "flux2", "flux_kontext")):
        more["strength"] = 0.7
    ending = ".mp4" if family.startswith("ltx") else ".png"
    jobs = [
        make_job(index, prompt, negative_prompt="blurry", guidance=3.0, image=str(picture), output=f"{index}{ending}", **more)
        for index, prompt in enumerate(("a red circle", "a small green square"))
    ]
    ran = run_jobs(folder, tmp_path / "run", jobs, plan=make_plan(folder, batch_size=2))
    assert ran.failed == []
    assert [event.size for event in ran.of(StageBatchDone) if event.stage == "denoise"] == [2]
    pipe = sister(folder, SISTERS[family])
    for job in jobs:
        theirs = call_by_hand(pipe, job, image=Image.open(picture))
        assert np.abs(ran.floats[job.key] - theirs).max() <= CLOSE


def test_edit_runs_its_encoders_row_by_row(picture: Path, tmp_path: Path) -> None:
    folder = tmp_path / "edit"  # Edit itself: e2e/test_picture_lists.py
    with tiny.stand_in_processor():
        tiny.qwen_image_edit(folder, plus=True)
        second = picture.with_name("second.png")
        Image.new("RGB", (32, 64), "red").save(second)
        more = {"negative_prompt": "blurry", "image": f"{picture} | {second}", "steps": 1}
        jobs = [make_job(index, text, **more) for index, text in enumerate(("red", "a green one"))]
        ran = run_jobs(folder, tmp_path / "run", jobs, plan=make_plan(folder, batch_size=2))
        assert ran.failed == []
        theirs = call_by_hand(load_ordinary(folder), jobs[0], image=[Image.open(picture), Image.open(second)])
    assert np.abs(ran.floats[jobs[0].key] - theirs).max() <= CLOSE
    sizes = [(event.stage, event.size) for event in ran.of(StageBatchDone)]
    # both texts with their picture, the picture's latents once for both rows, and both rows denoised together
    assert sizes == [("text_encoder", 1), ("text_encoder", 1), ("vae_encoder", 1), ("denoise", 2), ("decode", 2)]


@pytest.mark.parametrize("family", ["flux2", "flux2_klein"])
def test_several_reference_pictures_are_the_ordinary_calls(family: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    paths = [tmp_path / "a | b.png", tmp_path / "c.png"]  # the first has what stands between paths in its name: it is there as one file
    for path, colour in zip(paths, ("red", "blue"), strict=True):
        Image.new("RGB", (64, 64), colour).save(path)
    one = make_job(0, "x", image=str(paths[0]), steps=1)
    two = make_job(1, "x", image=f"{paths[1]} | {paths[1]}", steps=1)
    ran = run_jobs(tiny_folder(family), tmp_path / "run", [one, two])
    assert ran.failed == []
    pipe = load_ordinary(tiny_folder(family))
    assert np.abs(ran.floats[one.key] - call_by_hand(pipe, one, image=Image.open(paths[0]))).max() <= CLOSE
    assert np.abs(ran.floats[two.key] - call_by_hand(pipe, two, image=[Image.open(paths[1])] * 2)).max() <= CLOSE


def test_edit_without_torchvision_names_the_extra(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    with tiny.stand_in_processor():
        tiny.qwen_image_edit(tmp_path / "edit")
    with pytest.raises(ModelError) as caught:
        ModelFolder.read(tmp_path / "edit").load_plain("processor")
    assert caught.value.exit_code == 2
    assert "batchgen[edit]" in str(caught.value)


def test_rows_of_different_pictures_keep_their_own(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    # FLUX.2 takes a list of latents as several reference pictures of every row
    jobs = []
    for index, colour in enumerate(("red", "blue", "red")):
        path = tmp_path / f"{colour}.png"
        Image.new("RGB", (64, 64), colour).save(path)
        jobs.append(make_job(index, "x", image=str(path), seed=1, steps=1))
    folder = tiny_folder("flux2_klein")
    together = run_jobs(folder, tmp_path / "run", jobs, plan=make_plan(folder, batch_size=3))
    alone = run_jobs(folder, tmp_path / "alone", jobs, plan=make_plan(folder, batch_size=1))
    for job in jobs:
        assert np.abs(together.floats[job.key] - alone.floats[job.key]).max() <= CLOSE
    assert np.abs(alone.floats[jobs[0].key] - alone.floats[jobs[1].key]).max() > 100 * CLOSE


def test_a_clip_has_the_size_asked_for_whatever_shape_the_picture_has(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    wide = tmp_path / "wide.png"
    Image.new("RGB", (128, 32), "red").save(wide)
    job = make_job(0, "x", image=str(wide), num_frames=5, steps=1, output="0.mp4")
    ran = run_jobs(tiny_folder("wan22_i2v"), tmp_path / "run", [job])
    assert ran.floats[job.key].shape == (5, 64, 64, 3)
    theirs = call_by_hand(load_ordinary(tiny_folder("wan22_i2v")), job, image=Image.open(wide))
    assert np.abs(ran.floats[job.key] - theirs).max() <= CLOSE


def test_an_unreadable_picture_fails_its_job_alone(picture: Path, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(picture.read_bytes()[:100])
    jobs = [make_job(index, "x", image=str(path), strength=0.9, steps=2) for index, path in enumerate((picture, broken, picture))]
    ran = Ran()
    engine_for(tiny_folder("z_image"), tmp_path / "run", ran).run_window(Window(0, tuple(jobs)))
    assert [(event.key, event.kind, event.stage) for event in ran.failed] == [(jobs[1].key, "input", "vae_encoder")]
    assert "broken.png: not a readable picture" in ran.failed[0].reason
    assert {event.key for event in ran.done} == {jobs[0].key, jobs[2].key}


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_a_rotated_photo_stands_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 2), "blue")
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    read = read_picture(save(tmp_path / "a.png", image, exif=exif))
    assert read.size == (2, 4)
    assert read.getpixel((1, 0)) == (255, 0, 0)


def test_a_cmyk_jpeg_is_read_as_rgb(tmp_path: Path) -> None:
    read = read_picture(save(tmp_path / "a.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=100))
    red, green, blue = read.getpixel((4, 4))  # type: ignore[misc]
    assert read.mode == "RGB"
    assert red > 230
    assert max(green, blue) < 30


def test_sixteen_bits_are_scaled_not_cut(tmp_path: Path) -> None:
    grey = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    read = read_picture(save(tmp_path / "a.png", Image.fromarray(grey)))
    assert [read.getpixel((x, 0)) for x in range(4)] == [(0,) * 3, (1,) * 3, (128,) * 3, (255,) * 3]


def test_one_pixel_is_a_picture(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    dot = save(tmp_path / "dot.png", Image.new("RGB", (1, 1), "red"))
    ran = run_jobs(tiny_folder("z_image"), tmp_path / "run", [make_job(0, "x", image=str(dot), strength=0.9, steps=2)])
    assert ran.failed == []
    assert next(iter(ran.floats.values())).shape == (64, 64, 3)


def test_a_mask_is_grey(tmp_path: Path) -> None:
    assert read_picture(save(tmp_path / "m.png", Image.new("RGBA", (2, 2), (255, 255, 255, 0))), mask=True).mode == "L"


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=r"x\.png: not a readable picture"):
        read_picture(path)
