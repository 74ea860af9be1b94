"""Animated WebP, frame by frame onto the disk.

Pillow takes an animation's frames as a list, so that a clip would be held twice; here each frame is encoded by itself, which Pillow
does as well, and wrapped as the container wants it. Every frame stands alone, so players can seek to any of them.
Source: WebP Container Specification, "Extended File Format" and "Animation".
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import BinaryIO

from batchgen.outputs.image import Pixels, as_image

_ANIMATION, _EXIF = 0x02, 0x08  # flags of VP8X
_NO_BLEND = 0x02  # flag of a frame: it replaces what was there
_EXIF_PREFIX = b"Exif\0\0"  # a JPEG's, which a WebP does without
MAX_SIDE = 2**14 - 1  # of VP8's frame header


def write_animation(handle: BinaryIO, frames: Iterator[Pixels], *, fps: float, exif: bytes | None, quality: int = 90) -> None:
    """Writes uint8 frames [H, W, 3] of one size, endlessly repeated. `handle` must be able to seek.

    Times are whole milliseconds in this format: each frame begins at the nearest one, so that the clip as a whole keeps its rate.
    Raises ValueError for a side beyond 16,383 pixels.
    """
    begun = handle.tell()
    handle.write(b"RIFF\0\0\0\0WEBP")
    for number, pixels in enumerate(frames):
        height, width = pixels.shape[:2]
        if number == 0:
            if max(height, width) > MAX_SIDE:
                raise ValueError(f"a WebP cannot be {width}x{height}: its sides end at {MAX_SIDE}")
            flags = _ANIMATION | (_EXIF if exif else 0)
            _chunk(handle, b"VP8X", bytes((flags, 0, 0, 0)) + _three(width - 1) + _three(height - 1))
            _chunk(handle, b"ANIM", struct.pack("<IH", 0xFF000000, 0))
        shown_ms = round((number + 1) * 1000 / fps) - round(number * 1000 / fps)
        place = _three(0) * 2 + _three(width - 1) + _three(height - 1)
        _chunk(handle, b"ANMF", place + _three(max(1, shown_ms)) + bytes((_NO_BLEND,)) + _still(pixels, quality))
    if exif:
        _chunk(handle, b"EXIF", exif.removeprefix(_EXIF_PREFIX))
    end = handle.tell()
    handle.seek(begun + 4)
    handle.write(struct.pack("<I", end - begun - 8))
    handle.seek(end)


def _still(pixels: Pixels, quality: int) -> bytes:
    """One frame's picture chunks: a still WebP without its outer header."""
    still = io.BytesIO()
    as_image(pixels).save(still, format="WEBP", quality=quality, method=4)
    return still.getvalue()[12:]


def _chunk(handle: BinaryIO, name: bytes, content: bytes) -> None:
    handle.write(name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2))


def _three(number: int) -> bytes:
    """A number in three bytes, the least first."""
    return number.to_bytes(3, "little")
