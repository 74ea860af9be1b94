"""Rehearsals on disk: a second plan of the same model, shapes and dtypes needs neither torch nor a rehearsal.

The key holds all that could change the numbers: component configs, shapes, dtypes, batch sizes, library versions and batchgen's own.
A damaged entry is a missing one. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from batchgen import __version__
from batchgen.plan.records import Rehearsed, RehearsedComponent, StageProfile

FORMAT = 6  # of the entries, and of what the numbers mean: raise it when either changes
LIBRARIES = ("torch", "diffusers", "transformers")


def cache_dir(environment: Mapping[str, str]) -> Path:
    """BATCHGEN_CACHE, else the user's cache folder."""
    if own := environment.get("BATCHGEN_CACHE"):
        return Path(own).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "batchgen"


def library_versions() -> dict[str, str]:
    """Versions as installed; nothing is imported."""
    found = {"batchgen": __version__}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def key(folder: Path, request: Mapping[str, Any]) -> str:
    """64 hex digits over the model's configs (content, not place) and the request."""
    digest = hashlib.sha256(json.dumps([FORMAT, library_versions(), request], sort_keys=True).encode())
    for path in sorted((*folder.glob("*.json"), *folder.glob("*/*.json"), *folder.glob("*/*.txt"), *folder.glob("*/*.model"))):
        if not path.name.endswith(".index.json") and path.name != "known.json":
            digest.update(f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def load(cache: Path, entry: str) -> Rehearsed | None:
    """The rehearsal under that key, or None."""
    try:
        return from_json(json.loads((cache / "rehearsals" / f"{entry}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(cache: Path, entry: str, rehearsed: Rehearsed) -> None:
    """Writes an entry whole. A cache that cannot be written costs only the next rehearsal."""
    folder = cache / "rehearsals"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(to_json(rehearsed), file)
        Path(name).replace(folder / f"{entry}.json")


def to_json(rehearsed: Rehearsed) -> dict[str, Any]:
    return asdict(rehearsed)


def from_json(value: Mapping[str, Any]) -> Rehearsed:
    """Raises KeyError, TypeError or ValueError for what is no rehearsal."""
    components = tuple(
        RehearsedComponent(**{**part, "block_bytes": tuple(int(size) for size in part["block_bytes"])}) for part in value["components"]
    )
    profiles = tuple(
        StageProfile(**{
            **profile, "components": tuple(profile["components"]), "calls": _pairs(profile["calls"]),
            "order": tuple(map(str, profile.get("order", ()))),
        })
        for profile in value["profiles"]
    )
    return Rehearsed(components, profiles, tuple(map(str, value["notes"])))


def _pairs(items: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(count)) for name, count in items)
