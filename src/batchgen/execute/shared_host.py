"""Weights that several worker processes of one machine look at together: one file a component, mapped by all of them.

A weight as it lies in a safetensors file starts where its header happens to end, and CPU kernels sum unaligned weights in another order;
so workers on the CPU need copies. Made once, aligned, in a file, such a copy is held once for all: its pages are the system's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from batchgen.execute.memory import host_memory
from batchgen.execute.moving import Chunk, aligned, chunks_of, pieces_of
from batchgen.outputs.files import temp_path

SUFFIX = ".weights"
_LEAST_BYTES = 2**20  # below it, a file is more trouble than a copy


def share_weights(name: str, module: nn.Module, folder: Path) -> int:
    """Puts a freshly loaded component's weights over a file in `folder` that other workers of this model map too. Returns its bytes.

    0, and nothing changed, where it cannot be: no room on the disk, weights that are no plain tensors of the host. The mapping is
    private: whoever writes to a weight gets a page of their own.
    """
    chunks = chunks_of(pieces_of(name, module))
    if any(chunk.opaque or chunk.fake or chunk.host is None or chunk.host.device.type != "cpu" for chunk in chunks):
        return 0
    starts, size = _layout(chunks)
    if size < _LEAST_BYTES:
        return 0
    path = folder / f"{name}-{_digest(chunks, starts)}{SUFFIX}"
    try:
        if not path.exists():
            _write(path, chunks, starts, size)
        flat = _mapped(path, size)
    except (OSError, RuntimeError):  # a full or odd disk: every worker keeps a copy of its own
        return 0
    with host_memory(), torch.no_grad():
        for chunk, start in zip(chunks, starts, strict=True):
            chunk.put_views(flat, start)
    return size


def _layout(chunks: Sequence[Chunk]) -> tuple[list[int], int]:
    starts, size = [], 0
    for chunk in chunks:
        starts.append(size)
        size += aligned(chunk.size_bytes)
    return starts, size


def _digest(chunks: Sequence[Chunk], starts: Sequence[int]) -> str:
    """Of the layout and of a sample of the bytes: a file that another model or dtype left is not taken for this one's."""
    digest = hashlib.sha256()
    for chunk, start in zip(chunks, starts, strict=True):
        for piece in chunk.pieces:
            told = (piece.name, str(piece.tensor.dtype), tuple(piece.tensor.shape), piece.tensor.stride(), start + piece.offset_bytes)
            digest.update(repr(told).encode())
        if chunk.host is not None:
            digest.update(chunk.host[:64].numpy().tobytes())
            digest.update(chunk.host[-64:].numpy().tobytes())
    return digest.hexdigest()[:20]


def _write(path: Path, chunks: Sequence[Chunk], starts: Sequence[int], size: int) -> None:
    """Makes the file whole before it has its name. Whoever comes second throws their own away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < 2 * size:
        raise OSError("too little room for a shared copy")
    temp = temp_path(path.parent)
    try:
        with temp.open("wb") as handle:
            handle.truncate(size)
            for chunk, start in zip(chunks, starts, strict=True):
                if chunk.host is not None:
                    handle.seek(start)
                    handle.write(chunk.host.numpy().data)
        with suppress(FileExistsError):
            os.link(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def _mapped(path: Path, size: int) -> torch.Tensor:
    """uint8 [size] over the file's pages, shared with all that map it until one is written to."""
    if path.stat().st_size != size:
        raise OSError(f"{path} is not whole")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
