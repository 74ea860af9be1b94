"""Safetensors files read by their headers alone: names, dtypes, shapes and sizes, never the weights.

Format: 8 bytes little-endian header length, a JSON header, then the data (https://huggingface.co/docs/safetensors).
Knows nothing of models or components; standard library only.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import ModelError

# The library's own limit: a longer header is a damaged file or an attack.
HEADER_LIMIT_BYTES = 100_000_000

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}
FLOATING = frozenset(name for name in BITS if name[0] == "F" or name.startswith("BF"))
TORCH_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file. `dtype` is the format's own name ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return (self.elements * BITS[self.dtype] + 7) // 8

    def bytes_as(self, torch_dtype: str | None) -> int:
        """Size when loaded as `torch_dtype`: floating tensors are cast, the others stay. None: as stored."""
        if torch_dtype is None or self.dtype not in FLOATING:
            return self.stored_bytes
        return self.elements * TORCH_BYTES[torch_dtype]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A file's tensors in file order, and the raw header bytes (for the model's revision hash)."""

    tensors: tuple[TensorHeader, ...]
    metadata: tuple[tuple[str, str], ...]
    raw: bytes


def read_header(path: Path) -> FileHeader:
    """The header of a safetensors file. Raises ModelError: missing, empty, a Git LFS pointer, damaged, cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if size == 0:
                raise _damaged(path, "the file is empty: an interrupted download or a copy without its data")
            if start == b"version ":
                raise _damaged(path, "this is a Git LFS pointer, not the weights; run `git lfs pull` in the repository")
            if len(start) < 8:
                raise _damaged(path, f"only {size} bytes: not a safetensors file")
            (length,) = struct.unpack("<Q", start)
            if length > HEADER_LIMIT_BYTES:
                raise _damaged(path, "its first bytes give no sensible header length: not a safetensors file, or damaged")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    if len(raw) < length:
        raise _damaged(path, f"cut short inside its header ({size} bytes of at least {8 + length})")
    header = parse_header(raw, str(path))
    _check_data(path, raw, size - 8 - length)
    return header


def parse_header(raw: bytes, where: str) -> FileHeader:
    """The JSON header's tensors. Raises ModelError."""
    try:
        entries = dict(json.loads(raw))
        metadata = dict(entries.pop("__metadata__", None) or {})
        tensors = tuple(_tensor(name, entry) for name, entry in entries.items())
        return FileHeader(tensors, tuple((str(key), str(value)) for key, value in metadata.items()), raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{where}: its header is damaged ({error})", hint="Fetch the file again.") from error


def _tensor(name: str, entry: Mapping[str, object]) -> TensorHeader:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"tensor {name!r} has no sensible shape")
    return TensorHeader(name, dtype, tuple(shape))


def _check_data(path: Path, raw: bytes, data_bytes: int) -> None:
    """The data must be as long as the header's offsets say: an interrupted download has a good header and half its data."""
    entries = json.loads(raw)
    try:
        needed = max((int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ModelError(f"{path}: its header gives no data offsets", hint="Fetch the file again.") from error
    if data_bytes < needed:
        raise _damaged(path, f"cut short: {data_bytes} bytes of data where its header promises {needed}; an interrupted download")


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: {why}", hint="Fetch the file again.")


# Names under which the same table is saved twice, though the loaded module holds it once: T5 and its kin always share the
# token table with the encoder; language models share it with the output head where their config says so.
_ALWAYS_TIED = (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),)
_HEADS = ("lm_head.weight",)
_TABLES = (
    "model.embed_tokens.weight", "embed_tokens.weight",
    "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight",
)


def without_ties(tensors: Iterable[TensorHeader], *, head_tied: bool = False) -> tuple[TensorHeader, ...]:
    """The tensors a loaded module holds: tied tables once, equal names once. `head_tied`: the config ties head and token table."""
    kept: dict[str, TensorHeader] = {}
    for tensor in tensors:
        kept.setdefault(tensor.name, tensor)
    groups: list[tuple[str, ...]] = list(_ALWAYS_TIED)
    if head_tied:
        groups += [(table, head) for table in _TABLES for head in _HEADS]
    for first, *others in groups:
        for other in others:
            if first in kept and other in kept and kept[first].shape == kept[other].shape:
                del kept[other]
    return tuple(kept.values())
