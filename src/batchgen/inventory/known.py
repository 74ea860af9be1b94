"""Models known by their component configs alone: configs/models/FAMILY/NAME/, so that a plan needs neither their files nor a network.

Each folder is a model folder without weights and tokenizers. Its known.json says which model it is; for each folder of configs, for
model_index.json (`index`) and for the stored dtypes (`stored`) what confirms them; in which dtype the weights are stored; how many
numbers each component's weight files hold (buffers that are stored among them); and, where it is known, how large those files are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from batchgen.inventory.index import read_index
from batchgen.inventory.model import component_config, loaded_dtype
from batchgen.inventory.options import ModelOptions
from batchgen.inventory.profiles import config_dir
from batchgen.inventory.records import ComponentFacts, ModelFacts, Platform
from batchgen.inventory.safetensors import TORCH_BYTES

_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Known:
    """One known model."""

    model: str
    folder: Path
    sources: Mapping[str, tuple[str, ...]]  # folder of configs, "index" or "stored" -> addresses of what confirms it
    stored: Mapping[str, str]  # component -> dtype of its weight files
    parameters: Mapping[str, int]  # component -> numbers in its weight files
    published: Mapping[str, int]  # component -> bytes of its weight files, headers of a file included where the index does not count them


@cache
def known_models() -> Mapping[str, Known]:
    """All of them, by hub id in lower case."""
    found = {}
    for path in sorted((config_dir() / "models").glob("*/*/known.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        sources = {fact: tuple(addresses) for fact, addresses in raw["sources"].items()}
        found[raw["model"].lower()] = Known(
            raw["model"], path.parent, sources, raw["stored"], raw["parameters"], raw.get("published", {}))
    return found


def known_facts(model: str, options: ModelOptions, *, platform: Platform) -> ModelFacts | None:
    """Facts of a known hub model without its files; None for one that is not known. `folder` holds its configs."""
    known = known_models().get(model.lower())
    if known is None:
        return None
    index = read_index(known.folder, trust_remote_code=False)
    parts, other = [], []
    for entry in index.entries:
        if entry.weightless:
            other.append(entry.name)
            continue
        count = known.parameters.get(entry.name)
        stored = {_STORED[known.stored[entry.name]]: count or 1}
        dtype = loaded_dtype(entry, component_config(known.folder, entry.name), stored, options, platform)
        size = count * TORCH_BYTES[dtype] if count is not None else None
        parts.append(ComponentFacts(
            entry.name, entry.library, entry.class_name, size, count, stored_dtypes=tuple(stored.items()) if count else (), dtype=dtype))
    return ModelFacts(
        source=model, kind="facts", folder=str(known.folder), revision="", pipeline_class=index.pipeline_class, components=tuple(parts),
        other=tuple(other), absent=index.absent, index=index.settings, notes=(f"{model} is planned from its published configs",),
    )
