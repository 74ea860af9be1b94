"""Small models for fit tests: stages whose memory is known by hand, and the call that plans and fits them."""

from __future__ import annotations

from dataclasses import replace

from batchgen.inventory.records import ComponentFacts, DeviceFacts, DeviceRates, ModelFacts, Platform, Profile
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Overrides, Plan, PlanFacts, Rehearsed, RehearsedComponent, StageProfile, Workload

MIB = 2**20
GIB = 2**30
SHAPE = "1024x1024, 50 steps"
FAST = DeviceRates(dense_bf16_flops=200e12, memory_bytes=1e12, host_link_bytes=30e9)
IMAGE = Profile(name="image", task="image", uses_cfg=True)


def rehearsed(
    *,
    text: int = 15 * GIB,
    blocks: int = 60,
    block: int = 650 * MIB,
    outside: int = 100 * MIB,
    vae: int = 250 * MIB,
    denoise_row: int = 360 * MIB,
    decode_row: int = 3400 * MIB,
    encode_row: int = 50 * MIB,
    shape: str = SHAPE,
) -> Rehearsed:
    """A text encoder of 28 blocks, a transformer of equal blocks, a VAE without; rehearsed at 1, 2 and 4 rows."""
    text_blocks = (text // 30,) * 28
    components = (
        RehearsedComponent("text_encoder", text, text - sum(text_blocks), text_blocks),
        RehearsedComponent("transformer", outside + blocks * block, outside, (block,) * blocks),
        RehearsedComponent("vae", vae, vae),
    )
    profiles = []
    for batch in (1, 2, 4):
        profiles += [
            StageProfile("text_encoder", shape, batch, ("text_encoder",), text, encode_row * batch, MIB * batch, 2 * 10**12 * batch,
                         (("text_encoder", 2),)),
            StageProfile("denoise", shape, batch, ("transformer",), outside + blocks * block, denoise_row * batch, MIB * batch,
                         7 * 10**15 * batch, (("transformer", 100),)),
            StageProfile("decode", shape, batch, ("vae",), vae, decode_row * batch, 12 * MIB * batch, 11 * 10**12 * batch, (("vae", 1),)),
        ]  # fmt: skip
    return Rehearsed(components, tuple(profiles))


def tiles(found: Rehearsed, row: int) -> Rehearsed:
    """The same, with a decode in tiles that needs `row` bytes."""
    decode = next(profile for profile in found.profiles if profile.stage == "decode" and profile.batch == 1)
    return replace(found, profiles=(*found.profiles, replace(decode, activation_bytes=row, tiled=True)))


def facts(
    found: Rehearsed,
    available_gb: float,
    *,
    total_gb: float | None = None,
    count: int = 1,
    profile: Profile = IMAGE,
    platform: Platform = "cuda",
    **overrides: object,
) -> PlanFacts:
    model = ModelFacts(
        "model",
        "facts",
        None,
        "",
        None,
        tuple(ComponentFacts(part.name, "diffusers", "X", part.weights_bytes, None) for part in found.components),
    )
    available = int(available_gb * GIB)
    total = int((total_gb or available_gb) * GIB)
    devices = tuple(DeviceFacts(f"card {number}", f"cuda:{number}", total, available) for number in range(count))
    return PlanFacts(model, profile, platform, devices, Overrides(**overrides))  # type: ignore[arg-type]


def fitted(
    found: Rehearsed,
    available_gb: float,
    *,
    jobs: int = 100,
    options: FitOptions | None = None,
    rates: DeviceRates | None = FAST,
    **more: object,
) -> Plan:
    asked = facts(found, available_gb, **more)  # type: ignore[arg-type]
    shape = found.profiles[0].shape
    return fit_plan(make_plan(asked), asked, found, Workload(((shape, jobs),)), options or FitOptions(rates=rates))


def modes(plan: Plan) -> dict[str, str]:
    return {spot.component: spot.mode for spot in plan.placements}


def batches(plan: Plan) -> dict[str, int]:
    return {stage.name: stage.batch for stage in plan.stages}
