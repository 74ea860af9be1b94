"""A text file as decoded blocks of whole lines. Strict: a byte that is not text is a fault with its line and place, never a `?`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from batchgen.errors import Fault, UsageError
from batchgen.manifest.rows import FileFaultError

BLOCK_BYTES = 1 << 17  # larger ones leave the processor's caches
RECORD_LIMIT = 1 << 24  # characters; what has no end by then is a fault, not a row
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class Block:
    """Decoded text that ends with a line end, the last one of a file perhaps without."""

    text: str
    first_line: int  # of the file, from 1
    last: bool
    nuls: dict[int, int] = field(default_factory=dict)  # line -> byte in that line, from 1, of its first NUL


def find_encoding(head: bytes, asked: str | None) -> tuple[str, int]:
    """(codec, bytes of its mark to skip). Raises UsageError for an unknown encoding."""
    mark = next(((name, len(mark)) for mark, name in _MARKS if head.startswith(mark)), None)
    if asked is None:
        return mark or ("utf-8", 0)
    try:
        codec = codecs.lookup(asked)
        codecs.getincrementaldecoder(asked)
        with suppress(UnicodeError):
            bytes(4).decode(asked)  # base64 and its like are codecs too, but give no text
    except LookupError:
        hint = "Usual ones: utf-8, cp1252."
        raise UsageError(f"--encoding: there is no text encoding {asked!r}", option="--encoding", hint=hint) from None
    if mark is not None and codec.name in (mark[0], mark[0][:6], "utf-8-sig"):
        return mark
    return codec.name, 0


def count_lines(text: str) -> int:
    """Line ends in a text, as an editor counts them: CRLF, LF or a lone CR."""
    ends = text.count("\n")
    if "\r" in text:
        ends += text.count("\r") - text.count("\r\n")
    return ends


def blocks(file: BinaryIO, *, name: str, encoding: str | None, lf_only: bool = False) -> Iterator[Block]:
    """The file's text from its beginning. `lf_only`: lines end at LF alone. Raises FileFaultError at bytes that are no text."""
    codec, skip = find_encoding(file.read(4), encoding)
    file.seek(skip)
    decoder = codecs.getincrementaldecoder(codec)()
    fed, line, pending, broken = skip, 1, "", None
    while True:
        data = file.read(BLOCK_BYTES)
        fed += len(data)
        try:
            text = pending + decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            good = error.object[: error.start].decode(codec, "replace")
            offset = fed - len(error.object) + error.start
            text = pending + good
            broken = _not_text(name, line + count_lines(text), offset, error, file, codec, asked=encoding is not None)
        except UnicodeError as error:  # UTF-16 that was asked for, without a mark to say which of the two
            fix = "name the file's own encoding, for example --encoding utf-16-le"
            raise FileFaultError(Fault(name, line, None, None, f"not {codec}: {error}", fix, "encoding")) from None
        cut = len(text) if not data and broken is None else _line_end(text, lf_only)
        whole, pending = text[:cut], text[cut:]
        if whole or (not data and broken is None):
            yield Block(whole, line, not data and broken is None, _nuls(whole, line, codec))
        if broken is not None:
            raise FileFaultError(broken)
        if not data:
            return
        line += whole.count("\n") if lf_only else count_lines(whole)
        if len(pending) > RECORD_LIMIT:
            fix = "check that it is a text file, and that its lines end"
            raise FileFaultError(Fault(name, line, None, None, f"a line of more than {RECORD_LIMIT} characters", fix, "too-long"))


def _line_end(text: str, lf_only: bool) -> int:
    """Where the last whole line ends. A CR at the very end waits: an LF may follow."""
    cut = text.rfind("\n") + 1
    if cut == 0 and not lf_only:
        cut = text.rfind("\r", 0, len(text) - 1) + 1
    return cut


def _nuls(text: str, first_line: int, codec: str) -> dict[int, int]:
    found: dict[int, int] = {}
    place = text.find("\0")
    line, counted = first_line, 0
    while place >= 0 and len(found) < 10_000:
        line += count_lines(text[counted:place])
        counted = place
        begin = max(text.rfind("\n", 0, place), text.rfind("\r", 0, place)) + 1
        found.setdefault(line, len(text[begin:place].encode(codec)) + 1)
        place = text.find("\0", place + 1)
    return found


def nul_fault(name: str, line: int, byte: int) -> Fault:
    fix = "remove it; if the file is UTF-16, name --encoding"
    return Fault(name, line, None, None, f"a NUL byte (byte {byte} of the line)", fix, "nul")


def _not_text(name: str, line: int, offset: int, error: UnicodeDecodeError, file: BinaryIO, codec: str, *, asked: bool) -> Fault:
    bad = error.object[error.start] if error.start < len(error.object) else 0
    shown = {"utf-8": "UTF-8"}.get(codec, codec)
    fix = "name the file's own encoding with --encoding" if asked else f"save it as UTF-8, or name its encoding{_guess(file)}"
    return Fault(name, line, None, f"0x{bad:02X}", f"byte {offset} of the file is not {shown}", fix, "encoding")


def _guess(file: BinaryIO) -> str:
    file.seek(0)
    head = file.read(1 << 16)
    if head.count(0) > len(head) // 4:
        return f", --encoding {'utf-16-le' if head[1:2] == bytes(1) else 'utf-16-be'}"
    try:
        head.decode("cp1252")
    except UnicodeDecodeError:
        return " with --encoding"
    return ", for example --encoding cp1252"
