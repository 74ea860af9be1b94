"""Pictures on disk: pixels and settings in, one whole file out.

Knows nothing of jobs or of where names come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin

from batchgen.outputs.files import atomic_write
from batchgen.outputs.metadata import RECORD, exif_for

Pixels = npt.NDArray[np.uint8]

EXTENSIONS = {"png": ".png", "jpeg": ".jpg", "webp": ".webp", "avif": ".avif"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "png": {"compress_level": 4},
    "jpeg": {"quality": 95, "subsampling": 0},
    "webp": {"quality": 95},
    "avif": {"quality": 90},
}


def write_image(
    pixels: Pixels,
    path: Path,
    settings: Mapping[str, str],
    image_format: str = "png",
    options: Mapping[str, int] | None = None,
    *,
    overwrite: bool = False,
) -> tuple[int, str]:
    """Writes `pixels` (uint8 [H, W, 3 or 4]) to `path` and returns the file's size in bytes and SHA-256 (hex).

    `settings` come from `metadata.settings_for`. Raises ValueError for other pixels or an unknown format, FileExistsError
    where the name is taken, DiskError where the disk gives out.
    """
    if image_format not in EXTENSIONS:
        raise ValueError(f"unknown picture format {image_format!r} (known: {', '.join(EXTENSIONS)})")
    image = as_image(pixels)
    if image_format == "jpeg" and image.mode == "RGBA":
        image = image.convert("RGB")
    arguments = _DEFAULTS[image_format] | dict(options or {})
    arguments |= embedded(settings, image_format)

    def save(handle: BinaryIO) -> None:
        image.save(handle, format=image_format.upper(), **arguments)

    return atomic_write(path, save, overwrite=overwrite)


def embedded(settings: Mapping[str, str], image_format: str) -> dict[str, Any]:
    """Pillow's arguments that put the settings into a file of that format."""
    if image_format != "png":
        return {"exif": exif_for(settings)} if RECORD in settings else {}
    info = PngImagePlugin.PngInfo()
    for name, text in settings.items():
        info.add_itxt(name, text, zip=False)
    return {"pnginfo": info}


def as_image(pixels: Pixels) -> Image.Image:
    """uint8 [H, W, 3 or 4] as a Pillow picture. Raises ValueError for anything else."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or 0 in pixels.shape:
        raise ValueError(f"pixels must be uint8 [H, W, 3 or 4], got {pixels.dtype} {list(pixels.shape)}")
    return Image.fromarray(np.ascontiguousarray(pixels))
