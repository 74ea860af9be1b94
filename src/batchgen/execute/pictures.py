"""Picture inputs of jobs as the pipelines take them: upright, 8 bit, RGB. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from batchgen.errors import RefusedError
from batchgen.jobs import Job

_BETWEEN = " | "
INPUTS = (("image", "image"), ("last_image", "last_image"), ("mask", "mask_image"))  # a job's field, the blocks' name


Pictures = Image.Image | list[Image.Image]  # a list: reference pictures of one row


def read_inputs(job: Job) -> dict[str, Pictures]:
    """The job's picture inputs by the blocks' names. Raises RefusedError.

    With a mask, all are stretched to the job's size, as most inpainting calls do: some fail where the picture has another.
    """
    paths = {name: (getattr(job, field), field == "mask") for field, name in INPUTS}
    read = {name: _read(path, mask=mask) for name, (path, mask) in paths.items() if path is not None}
    if job.mask is None or job.width is None or job.height is None:
        return read
    return fitted(read, (job.width, job.height))


def fitted(pictures: Mapping[str, Pictures], size: tuple[int, int]) -> dict[str, Pictures]:
    """All of them stretched to (width, height)."""

    def fit(picture: Image.Image) -> Image.Image:
        return picture.resize(size, Image.Resampling.LANCZOS)

    return {name: [fit(one) for one in picture] if isinstance(picture, list) else fit(picture) for name, picture in pictures.items()}


def _read(path: str, *, mask: bool) -> Pictures:
    """A path may hold what stands between several of them: what is there as one file is one."""
    parts = path.split(_BETWEEN)
    if len(parts) == 1 or Path(path).exists():
        return read_picture(path, mask=mask)
    return [read_picture(part, mask=mask) for part in parts]


def read_picture(path: str | Path, *, mask: bool = False) -> Image.Image:
    """The file as RGB, or as L for a mask: EXIF orientation applied, 16 bits scaled to 8, CMYK and palettes converted.

    Raises RefusedError with the reason for what is no picture.
    """
    try:
        with Image.open(path) as opened:
            opened.load()
            picture = ImageOps.exif_transpose(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RefusedError(f"{path}: not a readable picture ({error})") from error
    if picture.mode.startswith("I"):
        # Pillow's own conversion cuts 16 bits off at 255 instead of scaling them
        picture = Image.fromarray((np.asarray(picture).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    return picture.convert("L" if mask else "RGB")
