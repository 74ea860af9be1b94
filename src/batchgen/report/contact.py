"""A contact sheet: one PNG with every picture small and its prompt under it. For looking at a run at once."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MARGIN = 12
LINES = 3  # of a caption
LIMIT = 400  # pictures: a sheet beyond that is no longer looked at, and is a gigabyte in memory
_PAPER, _INK, _EMPTY = (250, 250, 248), (40, 40, 40), (225, 225, 220)


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture and what stands under it."""

    picture: Path
    caption: str


def contact_sheet(tiles: Sequence[Tile], *, title: str, columns: int = 4, side: int = 256) -> Image.Image:
    """All tiles (the first LIMIT), row by row; pictures keep their proportions and fill their field.

    A picture that cannot be opened leaves an empty field. Raises ValueError for no tiles.
    """
    if not tiles:
        raise ValueError("a contact sheet needs a picture")
    shown = list(tiles[:LIMIT])
    columns = min(columns, len(shown))
    font, heading = ImageFont.load_default(13), ImageFont.load_default(18)
    caption_height = LINES * 17 + 6
    rows = -(-len(shown) // columns)
    head = 40
    size = (MARGIN + columns * (side + MARGIN), head + MARGIN + rows * (side + caption_height + MARGIN))
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, fill=_INK, font=heading)
    for number, tile in enumerate(shown):
        left = MARGIN + (number % columns) * (side + MARGIN)
        top = head + MARGIN + (number // columns) * (side + caption_height + MARGIN)
        _place(sheet, draw, tile.picture, left, top, side)
        draw.multiline_text((left, top + side + 4), _wrapped(tile.caption, side), fill=_INK, font=font, spacing=3)
    return sheet


def _place(sheet: Image.Image, draw: ImageDraw.ImageDraw, path: Path, left: int, top: int, side: int) -> None:
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError):
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=_EMPTY)
        return
    scale = side / max(picture.size)
    # A tiny picture enlarged in whole steps keeps its pixels square; any other is resampled.
    method = Image.Resampling.NEAREST if scale >= 1 and scale == int(scale) else Image.Resampling.LANCZOS
    width, height = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    small = picture.resize((width, height), method)
    sheet.paste(small, (left + (side - width) // 2, top + (side - height) // 2))


def _wrapped(caption: str, side: int) -> str:
    """At most LINES lines that fit the tile's width, an ellipsis where more was to say."""
    text = " ".join("".join(char if char.isprintable() else " " for char in caption).split())
    return "\n".join(textwrap.wrap(text, width=max(8, side // 7), max_lines=LINES, placeholder=" …"))
