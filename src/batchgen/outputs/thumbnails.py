"""Small pictures for the run's page. Of outputs that go to a store they are made before the file leaves, and kept in the state folder.

Kept are the first pictures made, up to a number and a sum of bytes; the page shows no more. A thumbnail that cannot be made or kept is
no fault of the run.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

from PIL import Image

from batchgen.errors import DiskError
from batchgen.outputs.files import atomic_write
from batchgen.units import MIB

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".avif")
SIDE = 192  # pixels, of the longer side
MOST = 1000  # pictures on a page: one of 100,000 jobs must still open
MOST_BYTES = 16 * MIB  # kept in a state folder
_FORMAT = ".webp"


def thumbnail(path: Path) -> bytes | None:
    """A small WebP of a picture file; None for what is no picture or cannot be opened."""
    if path.suffix.lower() not in PICTURES:
        return None
    try:
        with Image.open(path) as picture:
            picture.draft("RGB", (SIDE, SIDE))
            small = picture.convert("RGB")
            small.thumbnail((SIDE, SIDE))
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=75, method=3)
    return buffer.getvalue()


class Thumbnails:
    """Those of one run, below its state folder. Several processes may keep some at once; each may go beyond the budget by one."""

    def __init__(self, folder: Path) -> None:
        """`folder`: RUN/thumbs. Nothing is made until the first is kept."""
        self._folder = folder
        self._full = False

    def path(self, key: str) -> Path:
        """Where the thumbnail of the job of this key is, if it was kept."""
        return self._folder / f"{key}{_FORMAT}"

    def read(self, key: str) -> bytes | None:
        """None where there is none."""
        with suppress(OSError):
            return self.path(key).read_bytes()
        return None

    def keep(self, picture: Path, key: str) -> None:
        """Makes and keeps one while there is room."""
        if self._full:
            return
        count, size = self._held()
        self._full = count >= MOST or size >= MOST_BYTES
        made = None if self._full else thumbnail(picture)
        if made is not None and size + len(made) <= MOST_BYTES:
            with suppress(OSError, DiskError):
                atomic_write(self.path(key), made, overwrite=True)

    def _held(self) -> tuple[int, int]:
        """How many there are, and their bytes together. One moment's view: others may add some."""
        sizes = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    sizes.append(entry.stat().st_size)
        return len(sizes), sum(sizes)
