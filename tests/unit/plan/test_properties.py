"""What holds for every model, profile, device list and option, whatever the rules say in detail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts_strategy import NAMES, all_facts
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.plan import selectors
from batchgen.plan.keep_resident import find_threshold
from batchgen.plan.planner import make_plan
from batchgen.plan.records import PERFORMANCE_MODES, Overrides, Plan, PlanFacts

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# How much of a component stays on the device: sharded counts as resident.
RANK = {"layerwise-offload": 0, "component-offload": 1, "resident": 2, "fsdp": 2}
CUDA = ("cuda",)


def planned(facts: PlanFacts) -> Plan:
    try:
        return make_plan(facts)
    except UsageError:
        assume(False)
        raise


def with_overrides(facts: PlanFacts, **changed: object) -> PlanFacts:
    return replace(facts, overrides=replace(facts.overrides, **changed))  # type: ignore[arg-type]


@EXAMPLES
@given(all_facts())
def test_every_component_has_one_placement_and_a_reason(facts: PlanFacts) -> None:
    plan = planned(facts)
    assert [placement.component for placement in plan.placements] == [part.name for part in facts.model.components]
    assert all(placement.reason and placement.by for placement in plan.placements)
    assert all(any(d.subject == placement.component for d in plan.trail) for placement in plan.placements)


@EXAMPLES
@given(all_facts(platforms=CUDA), st.sampled_from(PERFORMANCE_MODES), st.integers(1, 3), all_facts(platforms=CUDA))
def test_an_explicit_placement_survives_every_mode_device_list_and_profile(
    facts: PlanFacts, mode: str, count: int, other: PlanFacts
) -> None:
    first = planned(facts)
    chosen = {placement.component: placement for placement in first.placements if placement.by == "user" and "asked for" in placement.reason}
    changed = replace(
        with_overrides(facts, performance_mode=mode, fsdp=None), profile=other.profile, devices=tuple((facts.devices * count)[:count])
    )
    second = planned(changed)
    for name, placement in chosen.items():
        assert second.placement(name).mode == placement.mode
        assert second.placement(name).by == "user"


@EXAMPLES
@given(all_facts(platforms=CUDA), st.floats(1.0, 8.0))
def test_more_memory_never_makes_a_component_less_resident(facts: PlanFacts, factor: float) -> None:
    grown = tuple(
        replace(device, total_bytes=round(device.total_bytes * factor), available_bytes=round(device.available_bytes * factor))
        for device in facts.devices
    )
    small, big = planned(facts), planned(replace(facts, devices=grown))
    for name, mode in small.modes.items():
        assert RANK[big.modes[name]] >= RANK[mode], name


@EXAMPLES
@given(all_facts(platforms=CUDA, modes=("auto",)), st.sampled_from(PERFORMANCE_MODES))
def test_memory_mode_saves_at_least_what_any_mode_saves(facts: PlanFacts, mode: str) -> None:
    memory, other = planned(with_overrides(facts, performance_mode="memory")), planned(with_overrides(facts, performance_mode=mode))
    for name, placed in other.modes.items():
        assert RANK[memory.modes[name]] <= RANK[placed], name


@EXAMPLES
@given(all_facts(platforms=CUDA, modes=("auto",)), st.floats(0, 200))
def test_a_higher_threshold_never_saves_less(facts: PlanFacts, threshold: float) -> None:
    now = find_threshold(facts).gb
    assume(now is not None and threshold >= now)
    low = planned(facts)
    for raised in (threshold, "never"):
        high = planned(with_overrides(facts, keep_resident_min_available_gb=raised))
        for name, placed in low.modes.items():
            assert RANK[high.modes[name]] <= RANK[placed], name


@EXAMPLES
@given(all_facts(platforms=CUDA), st.sampled_from(selectors.GROUPS))
def test_one_more_offloaded_group_never_saves_less(facts: PlanFacts, group: str) -> None:
    assume(not selectors.items(facts.overrides.cpu_offload_components))
    assume(getattr(facts.overrides, f"{group}_cpu_offload") is None)
    before, after = planned(facts), planned(with_overrides(facts, **{f"{group}_cpu_offload": True}))
    for name, placed in before.modes.items():
        if RANK[placed] < 2:
            assert RANK[after.modes[name]] < 2, name


@EXAMPLES
@given(all_facts(platforms=CUDA, modes=("auto", "memory")), st.sampled_from(["dit", "text_encoder", "vae", "all", "default"]))
def test_choosing_what_streams_never_saves_less(facts: PlanFacts, item: str) -> None:
    assume(not selectors.items(facts.overrides.layerwise_offload_components) and facts.overrides.dit_layerwise_offload is None)
    before, after = planned(facts), planned(with_overrides(facts, layerwise_offload_components=item))
    for name, placed in before.modes.items():
        if RANK[placed] < 2:
            assert RANK[after.modes[name]] < 2, name


@EXAMPLES
@given(all_facts(platforms=CUDA), st.randoms(use_true_random=False))
def test_the_order_of_selector_items_never_matters(facts: PlanFacts, random: object) -> None:
    shuffled = {}
    for field in ("cpu_offload_components", "layerwise_offload_components"):
        items = (getattr(facts.overrides, field) or "").split(",")
        random.shuffle(items)  # type: ignore[attr-defined]
        shuffled[field] = ",".join(items)
    first, second = planned(facts), planned(with_overrides(facts, **shuffled))
    assert [(p.component, p.mode, p.by, p.reason) for p in first.placements] == [
        (p.component, p.mode, p.by, p.reason) for p in second.placements
    ]


@EXAMPLES
@given(st.text(alphabet="aZ_-, 0\tÄß", max_size=30))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = selectors.items(text)
    assert selectors.items(",".join(once)) == once
    assert len(set(once)) == len(once)
    assert all(selectors.normal(item) == item and item for item in once)


@pytest.mark.parametrize("name", NAMES)
def test_a_base_name_is_its_own_base_name(name: str) -> None:
    assert selectors.base_name(selectors.base_name(name)) == selectors.base_name(name)


@EXAMPLES
@given(all_facts(platforms=("cpu",)))
def test_the_cpu_moves_only_what_the_user_named(facts: PlanFacts) -> None:
    plan = planned(facts)
    assert all(placement.by == "user" or placement.mode == "resident" for placement in plan.placements)


@EXAMPLES
@given(all_facts(platforms=("mps",)))
def test_mps_keeps_everything(facts: PlanFacts) -> None:
    assert set(planned(facts).modes.values()) <= {"resident"}


@EXAMPLES
@given(all_facts())
def test_planning_is_a_function(facts: PlanFacts) -> None:
    assert planned(facts) == make_plan(facts)


def test_overrides_at_rest_ask_for_nothing() -> None:
    assert {value for name, value in ((n, getattr(Overrides(), n)) for n in Overrides.__dataclass_fields__) if name != "performance_mode"} == {
        None, False,
    }  # fmt: skip
