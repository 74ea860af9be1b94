"""Every threshold at its edge: at it, one byte under, one byte over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from making import GIB, facts

from batchgen.inventory.profiles import all_profiles, named_profile
from batchgen.inventory.records import DeviceFacts
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Plan, PlanFacts

VIDEO = replace(named_profile("generic-video").profile, keep_resident_components=("dit", "vae"))
OWN = {name: entry.profile.keep_resident_min_available_gb for name, entry in all_profiles().items()}


def with_bytes(made: PlanFacts, total: int, available: int | None = None) -> PlanFacts:
    return replace(made, devices=(DeviceFacts("a card", "cuda:0", total, total if available is None else available),))


def plan_at(made: PlanFacts, threshold_gb: float, extra_bytes: int) -> Plan:
    return make_plan(with_bytes(made, round(threshold_gb * GIB) + extra_bytes))


SIDES = [("just under", -1, False), ("at", 0, True), ("just above", 1, True)]


@pytest.mark.parametrize(("side", "extra", "reached"), SIDES, ids=[side for side, *_rest in SIDES])
class TestEdges:
    def test_image_task_45(self, side: str, extra: int, reached: bool) -> None:
        plan = plan_at(facts("qwen-image"), 45, extra)
        assert plan.modes == {
            "text_encoder": "layerwise-offload",
            "transformer": "resident" if reached else "component-offload",
            "vae": "resident" if reached else "layerwise-offload",
        }
        assert {plan.placement(name).by for name in ("transformer", "vae")} == {"task"}

    def test_global_120(self, side: str, extra: int, reached: bool) -> None:
        plan = plan_at(facts(VIDEO), 120, extra)
        assert plan.modes["transformer"] == ("resident" if reached else "component-offload")
        assert plan.modes["vae"] == ("resident" if reached else "layerwise-offload")
        assert plan.placement("transformer").by == "global"

    @pytest.mark.parametrize("name", [name for name, own in OWN.items() if isinstance(own, float) and own > 0])
    def test_a_profile_s_own(self, side: str, extra: int, reached: bool, name: str) -> None:
        made, own = facts(name), OWN[name]
        assert isinstance(own, float)
        plan = plan_at(made, own, extra)
        assert (plan.threshold_gb, plan.threshold_source) == (own, "model")
        kept = "dit" in made.profile.keep_resident_components or made.profile.task == "image"
        dit = next(placement for placement in plan.placements if placement.group == "dit")
        assert (dit.mode == "resident") == (reached and kept)

    def test_the_user_s(self, side: str, extra: int, reached: bool) -> None:
        plan = plan_at(facts("qwen-image", keep_resident_min_available_gb=33.3), 33.3, extra)
        assert (plan.modes["transformer"] == "resident") == reached
        assert plan.threshold_source == "user"

    def test_small_card_30(self, side: str, extra: int, reached: bool) -> None:
        # Only below 30 does base offload take the image encoder of a picture model; without the streaming default it shows.
        made = facts("qwen-image", names=["image_encoder", "transformer", "vae"], layerwise_offload_components="none")
        assert plan_at(made, 30, extra).modes["image_encoder"] == ("resident" if reached else "component-offload")

    def test_fsdp_headroom(self, side: str, extra: int, reached: bool) -> None:
        size = 40 * GIB + extra
        made = replace(facts("z-image"), devices=tuple(DeviceFacts("a card", f"cuda:{n}", 80 * GIB, size) for n in range(2)))
        assert make_plan(made).fsdp is reached


# 25 GiB: 0.8 of it is exactly 20 GiB.
@pytest.mark.parametrize(
    ("dit_bytes", "streams"),
    [(20 * GIB - 1, False), (20 * GIB, False), (20 * GIB + 1, True)],
    ids=["just under", "at", "just above"],
)  # fmt: skip
def test_dit_of_four_fifths_of_available(dit_bytes: int, streams: bool) -> None:
    made = facts("wan2.1-t2v-14b", sizes={"text_encoder": GIB, "transformer": dit_bytes, "vae": GIB})
    plan = make_plan(with_bytes(made, 48 * GIB, 25 * GIB))
    assert plan.modes["transformer"] == ("layerwise-offload" if streams else "component-offload")
    assert plan.placement("transformer").by == ("size" if streams else "model")


@pytest.mark.parametrize(
    ("extra", "fits"), [(-1, True), (0, True), (1, False)], ids=["just under", "at", "just above"],
)  # fmt: skip
def test_weights_twice_over(extra: int, fits: bool) -> None:
    made = facts("hunyuan-video", sizes={"text_encoder": 5 * GIB, "transformer": 10 * GIB + extra, "vae": GIB})
    plan = make_plan(with_bytes(made, 32 * GIB))
    assert (set(plan.modes.values()) == {"resident"}) is fits
    assert (plan.placement("transformer").by == "size") is fits


@pytest.mark.parametrize("available", [31.0, 80.0, 500.0])
def test_never_is_below_any_memory(available: float) -> None:
    profile = replace(named_profile("wan2.1-t2v-14b").profile, keep_resident_min_available_gb="never")
    plan = make_plan(facts(profile, available))
    assert (plan.threshold_gb, plan.threshold_source) == (None, "model")
    assert plan.modes["transformer"] == "component-offload"


def test_the_least_of_several_devices_decides() -> None:
    total_and_free = [(80.0, 80.0), (48.0, 44.0), (24.0, 24.0)]
    assert make_plan(facts("qwen-image", *total_and_free)).modes["transformer"] == "component-offload"
    assert make_plan(facts("qwen-image", *total_and_free[:1])).modes["transformer"] == "resident"


@pytest.mark.parametrize(
    ("profile", "user", "expected"),
    [
        ("qwen-image", None, (45.0, "task")),
        ("z-image", None, (30.0, "model")),
        ("hunyuan-video", None, (120.0, "global")),
        ("z-image", 70.0, (70.0, "user")),
        ("z-image", "never", (None, "user")),
        ("qwen-image", 0.0, (0.0, "user")),
    ],
)
def test_the_first_threshold_that_is_set_holds(profile: str, user: object, expected: tuple[float | None, str]) -> None:
    plan = make_plan(facts(profile, 80, keep_resident_min_available_gb=user))
    assert (plan.threshold_gb, plan.threshold_source) == expected
