"""The settings inside every file: what is written there, how it is capped, and how it is read back.

A picture must say how it was made without batchgen, and a lost journal must be found again in the pictures. Texts are kept
uncompressed and short: Pillow refuses to open a PNG whose compressed text unpacks to more than 1 MiB, and some readers skip
compressed chunks altogether.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from PIL import ExifTags, Image

from batchgen import __version__
from batchgen.jobs import Job

RECORD = "batchgen"  # the key of the one JSON object with everything
MAX_TEXT_BYTES = 64 * 1024  # of one text, as UTF-8
MAX_EXIF_BYTES = 60_000  # a JPEG's EXIF segment ends at 65,533 bytes
PLAIN_KEYS = ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "model", "revision")
_NOTE = " [... cut: {total} bytes in all]"
_JOB_FIELDS = (
    "key", "index", "row", "k", "id", "prompt", "negative_prompt", "seed", "seed_source", "width", "height", "steps", "guidance",
    "true_cfg_scale", "num_frames", "fps", "image", "last_image", "mask", "strength", "lora",
)


def settings_for(
    job: Job, run: Mapping[str, str], batch: int, flags: Sequence[str] = (), resolved: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """All texts of one picture's file, key -> text.

    `run` is the same for every file (model, revision, ...); `batch` the rows the picture was denoised with; `resolved` holds
    the values that the job left to the model (width, steps, ...). The text under "batchgen" is a JSON object with everything.
    """
    record: dict[str, Any] = {name: getattr(job, name) for name in _JOB_FIELDS}
    record = {name: value for name, value in record.items() if value is not None}
    for name, value in (resolved or {}).items():
        if value is not None:
            record.setdefault(name, value)
    record.update({name: text for name, text in run.items() if name not in record})
    if job.snapped:
        record["asked"] = dict(job.snapped)  # before --snap took the nearest that the model can make
    record["batch"] = batch
    record["flags"] = list(flags)
    record["batchgen_version"] = __version__
    texts = {name: _cut(_text(record.get(name, "")), MAX_TEXT_BYTES) for name in PLAIN_KEYS}
    texts["batchgen_version"] = __version__
    texts[RECORD] = record_text(record, MAX_TEXT_BYTES)
    return texts


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str, limit: int, total: int | None = None) -> str:
    """`text` within `limit` UTF-8 bytes, cut on a character and with a note of the whole length (`total`, if it was cut before)."""
    # No PNG text may hold a NUL; a lone surrogate has no UTF-8 form.
    data = text.replace("\0", "\ufffd").encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    note = _NOTE.format(total=len(data) if total is None else total)
    return data[: limit - len(note)].decode("utf-8", "ignore") + note


def record_text(record: Mapping[str, Any], limit: int, *, ascii_only: bool = False) -> str:
    """The JSON object within `limit` bytes: the longest texts are cut, and "cut" names them with the bytes they had."""
    fields = dict(record)
    before: dict[str, int] = dict(record.get("cut", {}))
    budget = limit
    while True:
        text = json.dumps(fields, ensure_ascii=ascii_only, separators=(",", ":"))
        if len(text.encode("utf-8", "replace")) <= limit:
            return text.encode("utf-8", "replace").decode()
        budget //= 2
        for name, value in record.items():
            if isinstance(value, str) and (size := len(value.encode("utf-8", "replace"))) > budget:
                fields[name] = _cut(value, budget, before.get(name))
                fields["cut"] = fields.get("cut", {}) | {name: before.get(name, size)}


def exif_for(settings: Mapping[str, str]) -> bytes:
    """EXIF with the JSON object as UserComment: for formats without text chunks of their own."""
    record: dict[str, Any] = json.loads(settings[RECORD])
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = f"batchgen {__version__}"
    text = record_text(record, MAX_EXIF_BYTES, ascii_only=True)
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"ASCII\0\0\0" + text.encode("ascii")
    return exif.tobytes()


def read_settings(path: Path) -> dict[str, Any] | None:
    """The JSON object inside a file (or a folder of frames) that batchgen wrote; None for any other or unreadable file."""
    try:
        if path.is_dir():
            first = min((frame for frame in path.iterdir() if frame.suffix == ".png"), default=None)
            return read_settings(first) if first is not None else None
        with path.open("rb") as handle:
            head = handle.read(12)
            handle.seek(0)
            text = _mp4_text(handle) if _is_mp4(head) else _image_text(handle)
        record = json.loads(text) if text else None
    except Exception:  # noqa: BLE001 what readers of pictures raise on a stranger's bytes has no end
        return None
    return record if isinstance(record, dict) and isinstance(record.get("key"), str) else None


def _is_mp4(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] not in (b"avif", b"avis")


def _image_text(handle: BinaryIO) -> str | None:
    with Image.open(handle) as image:
        text = image.info.get(RECORD)
        if isinstance(text, str):
            return text
        comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    if isinstance(comment, str):
        comment = comment.encode("latin-1")
    if isinstance(comment, bytes) and comment.startswith(b"ASCII\0\0\0"):
        return comment[8:].rstrip(b"\0").decode("ascii")
    return None


Box = tuple[bytes, int, int]  # type, start of the content, end


def boxes(handle: BinaryIO, start: int, end: int) -> list[Box]:
    """The boxes of an ISO media file (ISO/IEC 14496-12, 4.2) in a range. Raises ValueError if cut."""
    found = list(_boxes(handle, start, end))
    if found and found[-1][2] > end:
        raise ValueError("cut inside a box")
    return found


def _boxes(handle: BinaryIO, start: int, end: int) -> Iterator[Box]:
    """As `boxes`, but what comes before a cut is given; the last one may say that it ends behind it."""
    position = start
    while position < end:
        handle.seek(position)
        head = handle.read(16)
        if len(head) < 8:
            raise ValueError("cut inside a box header")
        size, header = struct.unpack(">I", head[:4])[0], 8
        if size == 1 and len(head) == 16:
            size, header = struct.unpack(">Q", head[8:])[0], 16
        elif size == 0:
            size = end - position
        if size < header:
            raise ValueError("cut inside a box")
        yield head[4:8], position + header, position + size
        position += size


def _mp4_text(handle: BinaryIO) -> str | None:
    """The comment of an MP4's user data (moov/udta/meta/ilst/(c)cmt/data), read without a video library."""
    start, end = 0, handle.seek(0, 2)
    for name in (b"moov", b"udta", b"meta", b"ilst", b"\xa9cmt", b"data"):
        start, end = {kind: (inside, after) for kind, inside, after in _readable(handle, start, end)}[name]
        if name == b"meta":
            start += 4  # version and flags
    handle.seek(start + 8)  # type and locale
    return handle.read(end - start - 8).decode()


def _readable(handle: BinaryIO, start: int, end: int) -> list[Box]:
    """Boxes up to where a cut file ends."""
    found: list[Box] = []
    with suppress(ValueError):
        found.extend((kind, inside, min(after, end)) for kind, inside, after in _boxes(handle, start, end))
    return found
