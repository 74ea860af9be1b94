"""Pictures reopen everywhere with their pixels and their settings, whatever a prompt holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from batchgen.jobs import Job
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import MAX_TEXT_BYTES, RECORD, read_settings, settings_for
from batchgen.outputs.whole import condition, judge

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
RUN = {"model": "some/model", "revision": "0123abcd"}


def job(**fields: Any) -> Job:
    plain: dict[str, Any] = {
        "key": "k" * 32, "index": 4, "row": 6, "k": 0, "id": "cat", "prompt": "a cat", "negative_prompt": "blurry", "seed": 2**64 - 1,
        "seed_source": "row", "output": "x.png", "width": 40, "height": 24, "steps": 8, "guidance": 4.5,
    }
    return Job(**plain | fields)


def test_a_png_names_all_its_settings_for_people_and_programs(tmp_path: Path) -> None:
    write_image(PIXELS, tmp_path / "x.png", settings_for(job(), RUN, 3, ["tiled"]))
    with Image.open(tmp_path / "x.png") as image:
        assert np.array_equal(np.asarray(image), PIXELS)
        texts = {name: text for name, text in image.info.items() if name != RECORD}
        record = json.loads(image.info[RECORD])
    assert texts == {
        "prompt": "a cat", "negative_prompt": "blurry", "seed": "18446744073709551615", "width": "40", "height": "24", "steps": "8",
        "guidance": "4.5", "model": "some/model", "revision": "0123abcd", "batchgen_version": record["batchgen_version"],
    }
    assert record["key"] == "k" * 32
    assert (record["batch"], record["flags"], record["seed"], record["model"]) == (3, ["tiled"], 2**64 - 1, "some/model")


def test_what_the_model_chose_itself_is_told(tmp_path: Path) -> None:
    texts = settings_for(job(steps=None, guidance=None), RUN, 1, (), {"steps": 50, "guidance": 4.0, "width": 999})
    assert (texts["steps"], texts["guidance"], texts["width"]) == ("50", "4", "40")
    assert json.loads(texts[RECORD])["steps"] == 50


def test_a_size_that_was_snapped_is_told_beside_the_one_asked_for() -> None:
    texts = settings_for(job(snapped=(("width", 41),)), RUN, 1)
    assert (texts["width"], json.loads(texts[RECORD])["asked"]) == ("40", {"width": 41})
    assert "asked" not in json.loads(settings_for(job(), RUN, 1)[RECORD])


PROMPTS = {
    "latin": "café crème",
    "beyond latin-1": "猫と宇宙 🐈‍⬛ “quoted”",
    "line ends": "one\ntwo\r\nthree\rfour\ttab",
    "escapes": "\x1b[31mred\x07 \\n {prompt} <b>&amp;",
    "empty": "",
    "edge spaces": "  both sides  ",
    "long": "x" * 20_000,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "avif"])
def test_prompts_come_back_as_they_went_in(tmp_path: Path, kind: str, prompt: str) -> None:
    path = tmp_path / f"x.{kind}"
    write_image(PIXELS, path, settings_for(job(prompt=prompt), RUN, 1), kind)
    read = read_settings(path)
    assert read is not None
    if kind == "png":
        with Image.open(path) as image:
            assert image.info["prompt"] == prompt
    assert read["prompt"] == prompt
    assert read["seed"] == 2**64 - 1


def test_a_text_of_just_the_cap_is_whole_for_people(tmp_path: Path) -> None:
    write_image(PIXELS, tmp_path / "x.png", settings_for(job(prompt="x" * MAX_TEXT_BYTES), RUN, 1))
    with Image.open(tmp_path / "x.png") as image:
        assert image.info["prompt"] == "x" * MAX_TEXT_BYTES


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "avif"])
@pytest.mark.parametrize("char", ["x", "猫", "\x01"], ids=["ascii", "three bytes", "escaped in JSON"])
def test_texts_of_a_megabyte_are_cut_with_a_note_and_reopen(tmp_path: Path, kind: str, char: str) -> None:
    path = tmp_path / f"x.{kind}"
    prompt = char * (1_100_000 // len(char.encode()))
    write_image(PIXELS, path, settings_for(job(prompt=prompt), RUN, 1), kind)
    read = read_settings(path)
    assert read is not None
    assert read["key"] == "k" * 32
    assert read["cut"] == {"prompt": len(prompt.encode())}
    assert f"cut: {len(prompt.encode())} bytes in all" in read["prompt"]
    assert read["prompt"].startswith(char * 100)
    with Image.open(path) as image:
        image.load()
        for text in (value for value in image.info.values() if isinstance(value, str)):
            assert len(text.encode()) <= MAX_TEXT_BYTES


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200))
def test_any_text_comes_back_from_default_pillow(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    path = tmp_path_factory.mktemp("any") / "x.png"
    texts = settings_for(job(prompt=prompt), RUN, 1)
    write_image(PIXELS, path, texts)
    with Image.open(path) as image:
        assert {name: str(text) for name, text in image.info.items()} == texts
        assert texts["prompt"] == prompt


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS.astype(np.float32),
        PIXELS[:, :, 0],
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
    ids=["floats", "no channels", "two channels", "empty"],
)
def test_other_pixels_are_refused(tmp_path: Path, pixels: Any) -> None:
    with pytest.raises(ValueError, match="uint8"):
        write_image(pixels, tmp_path / "x.png", settings_for(job(), RUN, 1))
    assert not list(tmp_path.iterdir())


def test_alpha_is_kept_in_png_and_dropped_in_jpeg(tmp_path: Path) -> None:
    pixels = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 128, np.uint8)])
    for kind, mode in (("png", "RGBA"), ("jpeg", "RGB"), ("webp", "RGBA")):
        write_image(pixels, tmp_path / kind, settings_for(job(), RUN, 1), kind)
        with Image.open(tmp_path / kind) as image:
            assert image.mode == mode


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "avif"])
def test_whole_cut_and_foreign_pictures_are_told_apart(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    write_image(PIXELS, path, settings_for(job(), RUN, 1), kind)
    data = path.read_bytes()
    assert condition(path) == "whole"
    assert judge(path, "k" * 32)[0] == "ours"
    assert judge(path, "other" * 6)[0] == "foreign"
    for length in (0, 1, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert condition(path) == "damaged", length
        assert judge(path, "k" * 32)[0] == "damaged", length


def test_a_png_with_one_flipped_bit_is_damaged(tmp_path: Path) -> None:
    write_image(PIXELS, tmp_path / "x.png", settings_for(job(), RUN, 1))
    data = bytearray((tmp_path / "x.png").read_bytes())
    data[-100] ^= 1
    (tmp_path / "x.png").write_bytes(data)
    assert condition(tmp_path / "x.png") == "damaged"


@pytest.mark.parametrize(
    "content", [b"just notes", b"\x89PNG but no picture", b"\xff\xd8 no", b"\0" * 50, b"GIF89a"], ids=repr
)
def test_strangers_files_are_nobodys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(content)
    assert read_settings(path) is None
    assert judge(path, "k" * 32)[0] == "foreign"


def test_a_strangers_picture_without_settings_is_nobodys(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "x.png", comment="hello")
    assert judge(tmp_path / "x.png", "k" * 32) == ("foreign", None)
