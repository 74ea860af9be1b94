"""Is a file that a row names a whole picture? Told from its two ends, so that a long list is checked in seconds.

A PNG, JPEG or WebP whose end is not where it should be is read in full, for some lack it and can be read. What breaks in between
fails its job alone when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from batchgen.manifest.values import Problem

BETWEEN = "|"  # several reference pictures of one row
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_REMEMBERED = 4096  # lists often name one picture in many rows


def picture_paths(cell: str, absolute: Callable[[str], str], *, several: bool) -> list[str]:
    """The paths that a row names in one cell. `several`: whether the model takes more than one.

    `absolute` says where a path is: a cell that is there as one file is one, whatever stands in its name.
    """
    if not several or BETWEEN not in cell or os.path.isfile(absolute(cell).encode("utf-8", "surrogateescape")):
        return [cell]
    return [part for part in map(str.strip, cell.split(BETWEEN)) if part]


@lru_cache(maxsize=_REMEMBERED)
def picture_problem(path: bytes) -> Problem | None:
    """Why an existing file cannot be a picture input, or None. `path` as the system takes it."""
    try:
        # os.fsdecode would follow the locale; Pillow takes an open file
        with open(path, "rb") as file, Image.open(file) as picture:
            if _may_be_cut(file, picture.format):
                picture.load()
            return None
    except UnidentifiedImageError:
        return Problem("is not a picture that can be read", "use PNG, JPEG, WebP or TIFF", "no-picture")
    except Image.DecompressionBombError:
        return Problem("has more pixels than any model can use", "make it smaller", "no-picture")
    except (OSError, ValueError, SyntaxError) as error:
        return Problem(f"cannot be read ({error.strerror if isinstance(error, OSError) and error.strerror else error})",
                       "look at the file and its permissions", "no-picture")


def _may_be_cut(file: BinaryIO, kind: str | None) -> bool:
    """Whether the file lacks the end that its kind has; False for kinds without one. Its position stays."""
    here = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_PNG_END)))
    tail = file.read()
    file.seek(4)
    stated = int.from_bytes(file.read(4), "little") + 8  # a WebP's length, which does not count its first eight bytes
    file.seek(here)
    whole = {"PNG": tail == _PNG_END, "JPEG": tail.endswith(b"\xff\xd9"), "WEBP": stated <= size}
    return not whole.get(kind or "", True)
