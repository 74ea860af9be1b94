"""Is a file whole? Found from its structure alone, without decoding a pixel, so that a folder of pictures is checked at disk speed.

Knows the formats batchgen writes. A file of any other kind is neither whole nor damaged: it is not ours.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Literal

from batchgen.outputs.metadata import boxes, read_settings

Condition = Literal["whole", "damaged", "other"]
Verdict = Literal["absent", "ours", "damaged", "foreign"]


def condition(path: Path) -> Condition:
    """`damaged`: empty, or begins as a format batchgen writes and does not end as one. `other`: not such a format at all."""
    if path.is_dir():
        frames = list(path.iterdir())
        if frames and all(frame.is_file() for frame in frames):
            kinds = {condition(frame) for frame in frames}
            return "other" if "other" in kinds else "damaged" if "damaged" in kinds else "whole"
        return "other" if frames else "damaged"
    with path.open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        head = handle.read(16)
        if size == 0:
            return "damaged"
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            return "whole" if _png_whole(handle) else "damaged"
        if head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b"WAVE"):
            return "whole" if struct.unpack("<I", head[4:8])[0] + 8 <= size else "damaged"
        if head[4:8] == b"ftyp":
            return "whole" if _boxes_whole(handle, size) else "damaged"
        if head[:3] == b"\xff\xd8\xff":
            return "whole" if _jpeg_whole(handle) else "damaged"
        return "damaged" if size < 12 and _may_begin(head) else "other"


def judge(path: Path, key: str) -> tuple[Verdict, dict[str, object] | None]:
    """What stands under a planned name, and its settings where it is `ours` (whole, and made for the job `key`)."""
    try:
        if not path.exists() and not path.is_symlink():
            return "absent", None
        state = condition(path)
    except (FileNotFoundError, NotADirectoryError):
        return ("foreign" if path.is_symlink() else "absent"), None  # a link to nothing takes the name too
    settings = read_settings(path)
    if settings is not None and settings["key"] == key:
        return ("ours", settings) if state == "whole" else ("damaged", None)
    return ("damaged" if state == "damaged" else "foreign"), None


def _may_begin(head: bytes) -> bool:
    """Is this the first few bytes of a format batchgen writes, cut before it can be told?"""
    if head[:4] == b"RIFF":
        return True
    return any(start.startswith(head) for start in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"\0\0\0")) or head[:3] == b"\0\0\0"


def _png_whole(handle: BinaryIO) -> bool:
    """Every chunk there with its checksum, the last one IEND (PNG specification, 5.3)."""
    handle.seek(8)
    while True:
        head = handle.read(8)
        if len(head) < 8:
            return False
        length, kind = struct.unpack(">I4s", head)
        data = handle.read(length)
        check = handle.read(4)
        if len(data) < length or len(check) < 4 or zlib.crc32(data, zlib.crc32(kind)) != struct.unpack(">I", check)[0]:
            return False
        if kind == b"IEND":
            return True


def _boxes_whole(handle: BinaryIO, size: int) -> bool:
    try:
        kinds = {box[0] for box in boxes(handle, 0, size)}
    except ValueError:
        return False
    return {b"moov", b"mdat"} <= kinds or {b"meta", b"mdat"} <= kinds


def _jpeg_whole(handle: BinaryIO) -> bool:
    handle.seek(-2, 2)
    return handle.read(2) == b"\xff\xd9"
