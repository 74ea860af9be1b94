"""Hypothesis strategies for everything a planner may be asked: any model, profile, devices and options."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from making import GIB, devices, model

from batchgen.inventory.profiles import all_profiles
from batchgen.inventory.records import Platform, Profile
from batchgen.plan.records import Overrides, PlanFacts

NAMES = (
    "transformer", "transformer_2", "unet", "audio_dit", "text_encoder", "text_encoder_2", "clip_text_encoder", "image_encoder", "vae",
    "video_vae", "audio_vae", "vocoder", "condition_image_encoder", "connectors", "vision_language_encoder", "brand_new_part",
)
GROUPS = ("dit", "text_encoder", "image_encoder", "vae")
# Round numbers, the thresholds themselves, and their neighbours.
MEMORY = st.sampled_from([8, 12, 16, 24, 29.99, 30, 31, 40, 44.99, 45, 48, 60, 70, 80, 95, 119.99, 120, 141, 192]) | st.floats(4, 200)
SIZES = st.sampled_from([None, GIB // 4, GIB, 5 * GIB, 14 * GIB, 24 * GIB, 40 * GIB]) | st.integers(0, 60 * GIB)
FLAG = st.sampled_from([None, None, None, True, False])


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    if draw(st.booleans()):
        return draw(st.sampled_from([entry.profile for entry in all_profiles().values()]))
    return Profile(
        name="drawn", task=draw(st.sampled_from(["image", "video"])), uses_cfg=draw(st.booleans()),
        dit_layerwise_offload_modes=draw(st.sampled_from([(), ("memory",), ("auto", "memory")])),
        keep_resident_min_available_gb=draw(st.sampled_from([None, "never", 0.0, 30.0, 60.0, 130.0])),
        keep_resident_components=tuple(draw(st.lists(st.sampled_from(GROUPS), unique=True))),
        fsdp_auto_min_available_memory_gb=draw(st.sampled_from([None, 0.0, 40.0, 60.0])),
        fsdp_auto_requires_cfg=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int | None]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=7, unique=True))
    if draw(st.booleans()):
        return {name: draw(SIZES.filter(lambda size: size is not None)) for name in names}
    return {name: draw(SIZES) for name in names}


@st.composite
def overrides(draw: st.DrawFn, names: tuple[str, ...], *, modes: tuple[str, ...] = ("auto", "manual", "speed", "memory")) -> Overrides:
    some = st.lists(st.sampled_from((*names, *GROUPS)), max_size=2)
    chosen: dict[str, Any] = {"performance_mode": draw(st.sampled_from(modes)), "fsdp": draw(FLAG)}
    if draw(st.integers(0, 2)) == 0:
        kinds = st.sampled_from(["resident", "component-offload", "layerwise-offload"])
        chosen["component_residency"] = ",".join(f"{name}={draw(kinds)}" for name in draw(some))
    if draw(st.integers(0, 2)) == 0:
        chosen["layerwise_offload_components"] = draw(some.map(",".join) | st.sampled_from(["none", "all", "default"]))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        chosen["cpu_offload_components"] = draw(some.map(",".join) | st.sampled_from(["none", "all"]))
    elif kind == 1:
        for group in GROUPS:
            chosen[f"{group}_cpu_offload"] = draw(FLAG)
    chosen["dit_layerwise_offload"] = draw(FLAG)
    chosen["keep_resident_min_available_gb"] = draw(st.sampled_from([None, None, "never", 0.0, 40.0, 100.0]))
    return Overrides(**chosen)


@st.composite
def all_facts(draw: st.DrawFn, *, platforms: tuple[Platform, ...] = ("cuda", "cuda", "cuda", "cpu", "mps"), **kinds: Any) -> PlanFacts:
    parts = draw(sizes())
    memory = draw(st.lists(MEMORY, min_size=1, max_size=3))
    # Free memory is up to the total; a card in use has less.
    pairs = [(total, total * draw(st.sampled_from([1.0, 1.0, 0.9]))) for total in memory]
    return PlanFacts(model(parts), draw(profiles()), draw(st.sampled_from(platforms)), devices(pairs), draw(overrides(tuple(parts), **kinds)))
