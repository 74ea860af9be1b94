"""The trail explains the plan: replayed from its numbers alone it gives the same placements, and no entry can be spared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from facts_strategy import all_facts
from hypothesis import HealthCheck, given, settings
from making import facts
from replay import Broken, Result, replay

from batchgen.errors import UsageError
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Plan, PlanFacts

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "cases" / "placement_cases.json").read_text(encoding="utf-8"))
# One of each kind of trail; the flags of these cases are few, so they are written as overrides here.
SITUATIONS: dict[str, PlanFacts] = {
    "small card": facts("qwen-image", 24),
    "kept by the task's threshold": facts("qwen-image", 80),
    "kept by the profile's threshold": facts("wan2.1-t2v-1.3b", 80),
    "never": facts("qwen-image", 141, keep_resident_min_available_gb="never"),
    "two experts stream": facts("wan2.2-a14b", 80),
    "overflowing dit": facts("wan2.1-t2v-14b", 24, sizes={"transformer": 32 * 10**9, "text_encoder": 11 * 10**9, "vae": 25 * 10**7}),
    "twice over": facts("z-image-turbo", 141, sizes={"transformer": 12 * 10**9, "text_encoder": 8 * 10**9, "vae": 10**8}),
    "sharded by the profile": facts("z-image", 80, 80),
    "sharded by the user": facts("ltx-2", 40, 40, fsdp=True),
    "sharding refused by the user": facts("z-image", 80, 80, fsdp=False),
    "nothing to shard": facts("qwen-image", 80, 80, fsdp=True, dit_cpu_offload=True),
    "helpers": facts("ltx-2", 40),
    "helpers kept": facts("ltx-2", 76),
    "memory mode": facts("mova", 80, performance_mode="memory"),
    "speed mode": facts("z-image", 24, 24, performance_mode="speed"),
    "manual mode": facts("qwen-image", 24, performance_mode="manual", vae_cpu_offload=True),
    "cpu": facts("qwen-image", 16, platform="cpu", component_residency="text_encoder=component-offload"),
    "mps": facts("qwen-image", 16, platform="mps"),
    "streaming chosen": facts("wan2.1-t2v-14b", 24, dit_layerwise_offload=True),
    "streaming off, enough memory": facts("qwen-image", 80, layerwise_offload_components="dit"),
    "an option that binds nothing": facts("qwen-image", 80, image_encoder_cpu_offload=True),
}


def replayed(made: PlanFacts, plan: Plan, *, without: int | None = None) -> Result:
    entries = [(d.rule, d.subject, dict(d.numbers)) for n, d in enumerate(plan.trail) if n != without]
    names = [part.name for part in made.model.components]
    return replay(entries, mode=plan.performance_mode, platform=plan.platform, components=names)


def told(plan: Plan) -> Result:
    """The plan as a replay's result."""
    names = set(plan.modes)
    return Result(
        modes=dict(plan.modes),
        by={placement.component: placement.by for placement in plan.placements},
        threshold=(plan.threshold_gb, plan.threshold_source),
        answers={(d.rule, d.subject): d.decision for d in plan.trail if d.subject not in names},
        replicas=plan.replicas,
        cfg_parallel=plan.cfg_parallel,
    )


def same(first: Result, second: Result) -> bool:
    return first == second and first.fsdp == second.fsdp


@pytest.mark.parametrize("made", SITUATIONS.values(), ids=SITUATIONS)
def test_replay_arrives_at_the_plan(made: PlanFacts) -> None:
    plan = make_plan(made)
    assert replayed(made, plan) == told(plan)


@pytest.mark.parametrize("made", SITUATIONS.values(), ids=SITUATIONS)
def test_no_entry_can_be_left_out(made: PlanFacts) -> None:
    plan = make_plan(made)
    for index, decision in enumerate(plan.trail):
        try:
            result = replayed(made, plan, without=index)
        except (Broken, KeyError):
            continue
        assert not same(result, told(plan)), f"{decision.rule} about {decision.subject} is not needed"


@pytest.mark.parametrize("made", SITUATIONS.values(), ids=SITUATIONS)
def test_numbers_are_the_facts(made: PlanFacts) -> None:
    least = min(made.devices, key=lambda device: device.available_bytes)
    known: dict[str, Any] = {
        "total_gb": made.total_gb, "available_gb": made.available_gb, "available_bytes": least.available_bytes,
        "devices": len(made.devices), "task": made.profile.task, "uses_cfg": made.profile.uses_cfg,
        "profile_min_available_gb": made.profile.fsdp_auto_min_available_memory_gb, "platform": made.platform,
        "performance_mode": made.overrides.performance_mode, "supports": made.profile.supports_cfg_parallel,
        "profile_modes": ",".join(made.profile.dit_layerwise_offload_modes), "small_card_gb": 30.0,
    }  # fmt: skip
    seen = [(name, value) for decision in make_plan(made).trail for name, value in decision.numbers if name in known]
    assert seen
    for name, value in seen:
        assert value == known[name], name


def test_a_changed_number_is_noticed() -> None:
    made = facts("qwen-image", 80)
    plan = make_plan(made)
    entries = [(d.rule, d.subject, {**dict(d.numbers)}) for d in plan.trail]
    for _rule, _subject, numbers in entries:
        if "available_gb" in numbers:
            numbers["available_gb"] = 44.0
    names = [part.name for part in made.model.components]
    with pytest.raises(Broken, match="vae was layerwise-offload, not resident"):
        replay(entries, mode="auto", platform="cuda", components=names)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_facts())
def test_any_plan_can_be_replayed_and_needs_every_entry(made: PlanFacts) -> None:
    try:
        plan = make_plan(made)
    except UsageError:
        return
    expected = told(plan)
    assert replayed(made, plan) == expected
    for index in range(len(plan.trail.decisions)):
        try:
            result = replayed(made, plan, without=index)
        except (Broken, KeyError):
            continue
        assert not same(result, expected), plan.trail.decisions[index]


def test_every_case_of_the_table_can_be_replayed() -> None:
    for case in CASES:
        if "error" in case["expect"] or case["flags"]:
            continue
        sizes = case["component_bytes"] or (dict.fromkeys(case["components"]) if case["components"] else None)
        memory = [(device["total_gb"], device["available_gb"]) for device in case["devices"]]
        made = facts(case["profile"], *memory, sizes=sizes, platform=case["platform"], performance_mode=case["performance_mode"])
        plan = make_plan(made)
        assert replayed(made, plan) == told(plan), case["name"]
