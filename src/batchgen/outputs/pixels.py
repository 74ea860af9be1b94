"""The pixels of an output as written, for comparing two of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from batchgen.errors import RefusedError

CLIPS = (".mp4",)


def read_pixels(path: Path) -> NDArray[np.uint8]:
    """Frames [N, H, W, 3] of a picture (N = 1), a clip or a folder of frames. Raises RefusedError for what cannot be read."""
    try:
        if path.is_dir():
            return np.stack([_picture(frame) for frame in sorted(path.glob("*.png"))])
        if path.suffix.lower() in CLIPS:
            return _clip(path)
        with Image.open(path) as image:
            if getattr(image, "n_frames", 1) == 1:
                return _picture(path)[None]
            count = int(getattr(image, "n_frames", 1))
            return np.stack([_frame(image, number) for number in range(count)])
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}") from None


def _picture(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _frame(image: Image.Image, number: int) -> NDArray[np.uint8]:
    image.seek(number)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _clip(path: Path) -> NDArray[np.uint8]:
    # The video library is an extra; pictures do without it.
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
