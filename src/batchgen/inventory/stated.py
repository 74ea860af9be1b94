"""Models that are known by numbers only: a `--model-facts` file, or a profile's usual components. No files, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.inventory.profiles import nearest_text
from batchgen.inventory.records import ComponentFacts, ModelFacts, Profile

KEYS = ("profile", "components")


def profile_facts(profile: Profile, source: str | None = None) -> ModelFacts:
    """A profile's usual components, sizes unknown. `source` is what the plan calls the model."""
    name = source or (profile.models[0] if profile.models else profile.name)
    return _facts(name, dict.fromkeys(profile.components))


def read_model_facts(path: Path) -> tuple[ModelFacts, str | None]:
    """(facts, profile name) of `{"profile": NAME, "components": {NAME: BYTES_AS_LOADED or null}}`. Raises ModelError."""
    hint = '{"profile": "qwen-image", "components": {"transformer": 40861031488, "vae": null}}'
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"--model-facts {path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"--model-facts {path}: not JSON: {error}", hint=f"Write it like {hint}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"--model-facts {path}: not an object", hint=f"Write it like {hint}")
    for key in raw:
        if key not in KEYS:
            raise ModelError(f"--model-facts {path}: unknown key {key!r}{nearest_text(key, KEYS)}", hint=f"Write it like {hint}")
    profile, components = raw.get("profile"), raw.get("components")
    if profile is not None and not isinstance(profile, str):
        raise ModelError(f"--model-facts {path}: profile must be a text, not {profile!r}")
    if not isinstance(components, dict) or not components:
        raise ModelError(f"--model-facts {path}: components must be an object of names and bytes", hint=f"Write it like {hint}")
    for name, size in components.items():
        if not name.strip() or "," in name or "=" in name:
            raise ModelError(f"--model-facts {path}: {name!r} is no component name")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise ModelError(f"--model-facts {path}: {name} must be a whole number of bytes or null, not {size!r}")
    return _facts(profile or path.stem, components), profile


def _facts(source: str, sizes: dict[str, int | None]) -> ModelFacts:
    parts = tuple(
        ComponentFacts(name=name, library="unknown", class_name="unknown", bytes_as_loaded=size, parameters=None)
        for name, size in sizes.items()
    )
    return ModelFacts(source=source, kind="facts", folder=None, revision="", pipeline_class=None, components=parts)
