"""Equality of what stages pass on, over ranks that cannot see each other's memory: short hashes, and how far apart two values are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from batchgen.execute.stages import Item


def fingerprint(value: Any) -> int:
    """63 bits of a hash over tensors (bytes, dtype, shape), numbers, texts and what holds them."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return int.from_bytes(digest.digest(), "big") >> 1


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    elif isinstance(value, Item):
        _feed(digest, value.value)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(f"{key}=".encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for element in value:
            _feed(digest, element)
    else:
        digest.update(repr(value).encode())


def difference(mine: Any, theirs: Any) -> float:
    """The largest difference of two values of one form, relative to the largest value; infinite where the forms differ."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return float("inf")
        if not mine.is_floating_point() or not mine.numel():
            return 0.0 if torch.equal(mine, theirs) else float("inf")
        one, other = mine.float(), theirs.float()
        if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):
            return 0.0  # a failed job, whichever rank's it is
        return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
    if isinstance(mine, Item) and isinstance(theirs, Item):
        return difference(mine.value, theirs.value)
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping) and mine.keys() == theirs.keys():
        return max((difference(mine[key], theirs[key]) for key in mine), default=0.0)
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(mine) == len(theirs):
        return max((difference(one, other) for one, other in zip(mine, theirs, strict=True)), default=0.0)
    return 0.0 if repr(mine) == repr(theirs) else float("inf")
