"""The contact sheet: every picture in its place, whatever its shape, and captions that stay in their tile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from batchgen.report.contact import LINES, Tile, contact_sheet


def picture(folder: Path, name: str, size: tuple[int, int], colour: tuple[int, int, int]) -> Path:
    path = folder / name
    Image.new("RGB", size, colour).save(path)
    return path


def test_pictures_are_in_order_row_by_row(tmp_path: Path) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]
    tiles = [Tile(picture(tmp_path, f"{n}.png", (64, 64), colour), f"picture {n}") for n, colour in enumerate(colours)]
    sheet = contact_sheet(tiles, title="five", columns=2, side=64)
    places = [(12 + 32 + (n % 2) * 76, 52 + 32 + (n // 2) * (64 + 57 + 12)) for n in range(5)]
    assert [sheet.getpixel(place) for place in places] == colours


@pytest.mark.parametrize("size", [(64, 64), (300, 100), (100, 300), (1, 1), (8, 8)])
def test_a_picture_keeps_its_proportions(size: tuple[int, int], tmp_path: Path) -> None:
    sheet = contact_sheet([Tile(picture(tmp_path, "a.png", size, (255, 0, 0)), "a")], title="one", side=128)
    red = (np.asarray(sheet)[52:180, 12:140] == (255, 0, 0)).all(axis=-1)
    width, height = int(red.any(axis=0).sum()), int(red.any(axis=1).sum())
    assert width / height == pytest.approx(size[0] / size[1], rel=0.05)


def test_a_missing_picture_leaves_a_field(tmp_path: Path) -> None:
    good = picture(tmp_path, "a.png", (64, 64), (255, 0, 0))
    sheet = contact_sheet([Tile(tmp_path / "none.png", "gone"), Tile(good, "here")], title="two", side=64)
    assert sheet.getpixel((12 + 32, 52 + 32)) == (225, 225, 220)
    assert sheet.getpixel((12 + 76 + 32, 52 + 32)) == (255, 0, 0)


@pytest.mark.parametrize("caption", ["", "word " * 500, "x" * 5000, "a\nb\x1b[2J", "日本語 " * 40])
def test_any_caption_can_be_drawn(caption: str, tmp_path: Path) -> None:
    from batchgen.report.contact import _wrapped

    assert _wrapped(caption, 256).count("\n") < LINES
    contact_sheet([Tile(picture(tmp_path, "a.png", (8, 8), (0, 0, 0)), caption)], title="t")


def test_no_pictures_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a picture"):
        contact_sheet([], title="none")
