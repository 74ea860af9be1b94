"""Is a file that a row names a picture at all? Told from its header, so that a long list is checked in seconds.

What breaks only further in (a file cut short) fails its job alone when it is read.
"""

from __future__ import annotations

from functools import lru_cache

from PIL import Image, UnidentifiedImageError

from batchgen.manifest.values import Problem

BETWEEN = "|"  # several reference pictures of one row
_REMEMBERED = 4096  # lists often name one picture in many rows


def picture_paths(cell: str, *, several: bool) -> list[str]:
    """The paths that a row names in one cell. `several`: whether the model takes more than one."""
    return [part for part in map(str.strip, cell.split(BETWEEN)) if part] if several else [cell]


@lru_cache(maxsize=_REMEMBERED)
def picture_problem(path: bytes) -> Problem | None:
    """Why an existing file cannot be a picture input, or None. `path` as the system takes it."""
    try:
        # os.fsdecode would follow the locale; Pillow takes an open file
        with open(path, "rb") as file, Image.open(file):
            return None
    except UnidentifiedImageError:
        return Problem("is not a picture that can be read", "use PNG, JPEG, WebP or TIFF", "no-picture")
    except Image.DecompressionBombError:
        return Problem("has more pixels than any model can use", "make it smaller", "no-picture")
    except (OSError, ValueError, SyntaxError) as error:
        return Problem(f"cannot be read ({error.strerror if isinstance(error, OSError) and error.strerror else error})",
                       "look at the file and its permissions", "no-picture")
