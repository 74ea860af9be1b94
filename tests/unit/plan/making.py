"""Facts for planner tests: models by their component names, devices by their memory, everything else unset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.inventory.profiles import named_profile
from batchgen.inventory.records import ComponentFacts, DeviceFacts, ModelFacts, Platform, Profile
from batchgen.plan.records import Overrides, PlanFacts

GIB = 2**30


def model(sizes: Mapping[str, int | None]) -> ModelFacts:
    parts = tuple(ComponentFacts(name, "diffusers", "Part", size, None) for name, size in sizes.items())
    return ModelFacts(source="a-model", kind="facts", folder=None, revision="", pipeline_class=None, components=parts)


def devices(memory_gb: Sequence[float | tuple[float, float]]) -> tuple[DeviceFacts, ...]:
    """One device an entry: total, or (total, available), in GiB."""
    pairs = [entry if isinstance(entry, tuple) else (entry, entry) for entry in memory_gb]
    return tuple(DeviceFacts("a card", f"cuda:{n}", round(total * GIB), round(free * GIB)) for n, (total, free) in enumerate(pairs))


def facts(
    profile: str | Profile = "qwen-image", *memory_gb: float | tuple[float, float], sizes: Mapping[str, int | None] | None = None,
    names: Sequence[str] | None = None, platform: Platform = "cuda", **overrides: Any,
) -> PlanFacts:
    found = named_profile(profile).profile if isinstance(profile, str) else profile
    wanted = sizes if sizes is not None else dict.fromkeys(names if names is not None else found.components)
    return PlanFacts(model(wanted), found, platform, devices(memory_gb or (80,)), Overrides(**overrides))
