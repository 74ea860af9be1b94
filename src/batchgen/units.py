"""Sizes, times and counts as people read them. Imports nothing from the package."""

from __future__ import annotations

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_BYTES_PER_UNIT = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}


def gib(size_bytes: float) -> float:
    """Bytes in GiB (2^30)."""
    return size_bytes / GIB


def size_text(size_bytes: int | None) -> str:
    """`1.50 GiB`, `12.0 MiB`, `900 B`, `98.18 TiB`; `unknown` for None."""
    if size_bytes is None:
        return "unknown"
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    for unit, scale, digits in (("TiB", TIB, 2), ("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if size >= scale:
            return f"{sign}{size / scale:.{digits}f} {unit}"
    return f"{sign}{size} B"


def duration_text(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 05 s`, `7 h 12 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """`1 row`, `12,000 rows`; `nouns` where an s does not make the plural."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def parse_size(text: str, *, default_unit: str = "GiB") -> int:
    """Bytes from `24`, `24GiB`, `500 MB`. A bare number counts in `default_unit`. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = (match.group(2) or default_unit).lower() if match else ""
    if match is None or unit not in _BYTES_PER_UNIT:
        raise ValueError(f"not a size: {text!r} (write it like 24, 24GiB or 500MB)")
    return round(float(match.group(1)) * _BYTES_PER_UNIT[unit])
