"""Several devices: replicas, groups or streams, by what fits, what moves and how long it takes; and what more devices bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fitting import FAST, GIB, MIB, SHAPE, facts, fitted, modes, rehearsed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchgen.errors import PlanRefusedError, UsageError
from batchgen.inventory.records import Profile
from batchgen.plan.batching import Layout, stage_models
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.groups import ruled_size
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Plan, Workload
from batchgen.plan.timing import Speeds

SHARDING = Profile(name="p", task="image", uses_cfg=True, fsdp_auto_min_available_memory_gb=20.0)
SLOW_HOST = replace(FAST, host_link_bytes=1e9, device_link_bytes=450e9)


def told(plan: Plan, rule: str, subject: str) -> tuple[str, str]:
    """Decision and text that a rule gave last about a subject."""
    found = [decision for decision in plan.trail if (decision.rule, decision.subject) == (rule, subject)]
    return found[-1].decision, found[-1].text


# --- group sizes ------------------------------------------------------------------------------------------------------

SMALLEST = {
    "two hold it: four groups of eight devices": (40, 8, {}, (4, 2)),
    "two do not hold it, four do": (20, 8, {}, (2, 4)),
    "only all together hold it": (10, 8, {}, (1, 8)),
    "three hold it, and two of six do not": (17, 6, {}, (2, 3)),
    "halves for guidance's branches leave three out": (17, 12, {"cfg_parallel": True}, (3, 4)),
    "the size asked for, though fewer would hold it": (40, 8, {"group_size": 4}, (2, 4)),
}


@pytest.mark.parametrize(("available", "count", "asked", "expected"), SMALLEST.values(), ids=SMALLEST)
def test_groups_are_as_small_as_hold_the_model(available: int, count: int, asked: dict[str, object], expected: tuple[int, int]) -> None:
    found = rehearsed(text=2 * GIB, decode_row=300 * MIB)
    plan = fitted(found, available, count=count, fsdp=True, **asked)
    assert (plan.replicas, plan.group_size) == expected
    assert modes(plan)["transformer"] == "fsdp"
    assert len({name for group in plan.groups for name in group}) == expected[0] * expected[1]
    assert f"over {expected[1]} devices" in plan.placement("transformer").reason


@pytest.mark.parametrize(
    ("count", "words"),
    [(2, "2 devices are selected\nUse 2, or leave it out"), (3, "3 devices are selected\nUse 2 to 3, or"), (1, "1 device is selected\nLeave it out")],
)
def test_a_group_of_more_devices_than_there_are_is_refused_with_those_that_can_be(count: int, words: str) -> None:
    with pytest.raises(UsageError, match=f"--fsdp-group-size 4: {words}"):
        ruled_size(facts(rehearsed(text=2 * GIB), 20, count=count, fsdp=True, group_size=4))


def test_a_group_never_reaches_beyond_one_machine() -> None:
    found = rehearsed(text=2 * GIB, decode_row=300 * MIB)
    asked = replace(facts(found, 20, count=8, fsdp=True), largest_group=2)
    with pytest.raises(PlanRefusedError, match=r"needs .* on the device"):
        fit_plan(make_plan(asked), asked, found, Workload(((SHAPE, 100),)), FitOptions(rates=FAST))


def test_what_no_group_holds_is_refused_with_the_shares_of_the_largest() -> None:
    with pytest.raises(PlanRefusedError, match="are available") as caught:
        fitted(rehearsed(), 9, count=2, fsdp=True)
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > 9 * GIB
    assert "Leave out --fsdp" in str(caught.value)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(6, 80), st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([None, True]), st.booleans())
def test_no_device_of_a_plan_is_ever_over_its_memory(available: int, count: int, fsdp: bool | None, branches: bool) -> None:
    assume(count > 1 or not fsdp)
    assume(not branches or (fsdp and count % 2 == 0))
    found = rehearsed()
    try:
        plan = fitted(found, available, count=count, fsdp=fsdp, cfg_parallel=branches or None)
    except PlanRefusedError:
        return
    layout = Layout(plan.modes, found, plan.prefetch, dict(plan.keep_bytes), plan.group_size)
    batches = {stage.name: stage.batch for stage in plan.stages}
    for stage in stage_models(found.profiles):
        assert layout.peak(stage, batches[stage.name], 0) <= available * GIB
    assert plan.replicas * plan.group_size <= count
    assert [point.replicas for point in plan.scaling] == list(range(1, plan.replicas + 1))


# --- replicas, groups or streams --------------------------------------------------------------------------------------


def test_replicas_that_stream_beat_groups_where_compute_covers_the_stream() -> None:
    plan = fitted(rehearsed(), 40, count=2, component_residency="text_encoder=resident")
    assert (plan.fsdp, plan.replicas) == (False, 2)
    decision, text = told(plan, "several-devices", "fsdp")
    assert decision == "no"
    assert "2 replicas that stream the dit" in text
    assert "1 group of 2 that shard it" in text


def test_groups_beat_replicas_whose_streams_take_longer_than_their_compute() -> None:
    plan = fitted(rehearsed(), 40, count=2, component_residency="text_encoder=resident", rates=SLOW_HOST, batch_size=1)
    assert (plan.fsdp, plan.replicas, plan.group_size) == (True, 1, 2)
    assert told(plan, "several-devices", "fsdp")[0] == "yes"
    assert plan.placement("transformer").by == "rehearsal"


def test_without_rates_the_bytes_decide() -> None:
    plan = fitted(rehearsed(), 40, count=2, component_residency="text_encoder=resident", rates=None)
    decision, text = told(plan, "several-devices", "fsdp")
    numbers = dict(next(decision.numbers for decision in plan.trail if decision.rule == "several-devices"))
    fewer = int(numbers["group_traffic_bytes"] or 0) < 0.9 * int(numbers["replica_traffic_bytes"] or 0)
    assert (decision, plan.fsdp) == ("yes" if fewer else "no", fewer)
    assert numbers["replica_seconds"] is None
    assert " move " in text
    assert plan.scaling == ()


def test_a_replica_without_streams_is_never_weighed_against_groups() -> None:
    plan = fitted(rehearsed(), 80, count=4)
    assert (plan.fsdp, plan.replicas) == (False, 4)
    assert "jobs share nothing" in told(plan, "several-devices", "replicas")[1]


@pytest.mark.parametrize("more", [{"fsdp": False}, {"component_residency": "transformer=layerwise-offload"}], ids=["--no-fsdp", "a placed dit"])
def test_what_the_user_said_of_the_dit_is_kept(more: dict[str, object]) -> None:
    plan = fitted(rehearsed(), 40, count=2, rates=SLOW_HOST, batch_size=1, **more)
    assert not plan.fsdp


def test_a_dit_that_cannot_be_cut_streams_on_every_device_and_the_reason_is_told() -> None:
    whole = FitOptions(rates=SLOW_HOST, whole="adapters (--lora) change its blocks")
    plan = fitted(rehearsed(), 40, count=2, batch_size=1, options=whole, component_residency="text_encoder=resident")
    assert (plan.fsdp, plan.replicas) == (False, 2)
    assert "adapters (--lora) change its blocks" in told(plan, "several-devices", "replicas")[1]
    ruled = fitted(rehearsed(), 30, count=2, batch_size=1, options=whole, profile=SHARDING)
    assert (ruled.fsdp, ruled.replicas) == (False, 2)
    assert "adapters (--lora) change its blocks" in told(ruled, "fit", "fsdp")[1]


def test_automatic_sharding_stays_where_cfg_parallel_is_asked_for() -> None:
    plain = fitted(rehearsed(), 60, count=2, profile=SHARDING)
    assert not plain.fsdp
    plan = fitted(rehearsed(), 60, count=2, profile=SHARDING, cfg_parallel=True)
    assert (plan.fsdp, plan.cfg_parallel, plan.group_size) == (True, True, 2)
    assert told(plan, "cfg-parallel", "cfg-parallel")[0] == "yes"


# --- time and bytes ---------------------------------------------------------------------------------------------------


def test_branches_in_parallel_halve_the_denoiser_and_nothing_else() -> None:
    one = {stage.name: stage.seconds or 0.0 for stage in fitted(rehearsed(), 60, count=2, fsdp=True).stages}
    two = {stage.name: stage.seconds or 0.0 for stage in fitted(rehearsed(), 60, count=2, fsdp=True, cfg_parallel=True).stages}
    assert two["denoise"] == pytest.approx(one["denoise"] / 2)
    assert (two["text_encoder"], two["decode"]) == (one["text_encoder"], one["decode"])


def test_outside_its_blocks_a_sharded_component_is_whole_on_every_device() -> None:
    found = rehearsed(blocks=8, block=GIB, outside=3 * GIB)
    layout = Layout({"text_encoder": "resident", "transformer": "fsdp", "vae": "resident"}, found, shards=4)
    assert layout.held_bytes("transformer") == 3 * GIB + 2 * GIB
    assert layout.entering_bytes("transformer") == 2 * GIB


def test_each_device_gathers_what_it_does_not_hold_at_every_forward() -> None:
    found = rehearsed(blocks=8, block=GIB)
    (denoise,) = [stage for stage in stage_models(found.profiles) if stage.name == "denoise"]
    layout = Layout({"text_encoder": "resident", "transformer": "fsdp", "vae": "resident"}, found, shards=4)
    assert layout.gathered(denoise, 3) == 6 * GIB * 100 * 3
    assert replace(layout, branches=2).gathered(denoise, 3) == 6 * GIB * 50 * 3
    speeds = Speeds(replace(FAST, device_link_bytes=300e9), {})
    assert speeds.exchange_seconds(240 * 10**9) == pytest.approx(1.0)
    assert Speeds(FAST, {}).exchange_seconds(24 * 10**9) == pytest.approx(1.0)


def test_scaling_shares_the_jobs_out_and_the_last_ones_are_seen() -> None:
    plan = fitted(rehearsed(), 80, count=8, jobs=80)
    rates = [point.jobs_per_hour for point in plan.scaling]
    assert [point.devices for point in plan.scaling] == list(range(1, 9))
    assert rates == sorted(rates)
    assert rates[-1] <= 8 * rates[0] * 1.001
    assert plan.predicted.seconds == pytest.approx(plan.scaling[-1].seconds)
    few = fitted(rehearsed(), 80, count=8, jobs=9)
    assert few.scaling[-1].jobs_per_hour < 6 * few.scaling[0].jobs_per_hour, "nine jobs on eight devices take two turns"


def test_of_many_replicas_the_doublings_are_told() -> None:
    plan = fitted(rehearsed(), 80, count=24, jobs=4800)
    assert [point.devices for point in plan.scaling] == [1, 2, 4, 8, 16, 24]


def test_every_replica_loads_the_model_once() -> None:
    one, four = fitted(rehearsed(), 80), fitted(rehearsed(), 80, count=4)
    assert four.predicted.bytes_moved == 4 * (one.predicted.bytes_moved or 0)
