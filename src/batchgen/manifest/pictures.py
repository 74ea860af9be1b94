"""Is a file that a row names a whole picture? Told from its two ends, so that a long list is checked in seconds.

A file whose end is not where its kind or its own tables say is read in full, for some lack it and can be read. What breaks in between
would take reading every file whole at every start; it fails its job alone where the kind can tell (PNG by its sums; JPEG and WebP cannot).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, BinaryIO

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
        with warnings.catch_warnings(action="ignore"), open(path, "rb") as file, Image.open(file) as picture:
            if _may_be_cut(file, picture):
                picture.load()
            return None
    except UnidentifiedImageError:
        return Problem("is not a picture that can be read", "use PNG, JPEG, WebP or TIFF", "no-picture")
    except Image.DecompressionBombError:
        return Problem("has more pixels than any model can use", "make it smaller", "no-picture")
    except (OSError, ValueError, SyntaxError) as error:
        return Problem(f"cannot be read ({error.strerror if isinstance(error, OSError) and error.strerror else error})",
                       "look at the file and its permissions", "no-picture")


def _may_be_cut(file: BinaryIO, picture: Image.Image) -> bool:
    """Whether the file lacks the end that it should have; False for kinds that do not tell. Its position stays."""
    here = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_PNG_END)))
    tail = file.read()
    file.seek(0)
    head = file.read(8)
    file.seek(here)
    match picture.format:
        case "PNG":
            return tail != _PNG_END
        case "JPEG":
            return not tail.endswith(b"\xff\xd9")
        case "GIF":
            return not tail.endswith(b";")
        case "WEBP":  # states a length that does not count its first eight bytes
            return int.from_bytes(head[4:], "little") + 8 > size
        case "BMP":
            return int.from_bytes(head[2:6], "little") > size
        case "TIFF":
            return _end_of_strips(getattr(picture, "tag_v2", {})) > size
    return False


def _end_of_strips(tags: Mapping[int, Any]) -> int:
    """Where the last strip or tile of a TIFF ends; 0 where its table does not say."""
    ends = [0]
    for offsets, counts in ((273, 279), (324, 325)):  # StripOffsets and StripByteCounts, TileOffsets and TileByteCounts
        ends += [int(offset) + int(count) for offset, count in zip(tags.get(offsets, ()), tags.get(counts, ()), strict=False)]
    return max(ends)
