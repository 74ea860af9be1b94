"""The fit: what lives where once the rehearsal's numbers are known, how many rows a stage takes, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from fitting import FAST, GIB, MIB, SHAPE, batches, facts, fitted, modes, rehearsed, tiles
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchgen.errors import PlanRefusedError
from batchgen.plan.batching import Curve, Layout, largest_batch, stage_models
from batchgen.plan.fit import FitOptions, fit_plan
from batchgen.plan.planner import make_plan
from batchgen.plan.records import Plan, Rehearsed, RehearsedComponent, StageProfile, Workload
from batchgen.plan.traffic import layerwise_bytes

ALL_RESIDENT = {"text_encoder": "resident", "transformer": "resident", "vae": "resident"}

CURVES: dict[str, tuple[tuple[tuple[int, int], ...], int, int]] = {
    "a rehearsed size": (((1, 10), (2, 18), (4, 34)), 2, 18),
    "between two, on the line": (((1, 10), (2, 18), (4, 34)), 3, 26),
    "beyond, by the steepest slope": (((1, 10), (2, 30), (4, 40)), 6, 80),
    "beyond one point, by its share": (((2, 10),), 5, 25),
    "rounded up, never down": (((1, 1), (4, 3)), 2, 2),
    "a fall is not continued": (((1, 10), (2, 8)), 4, 8),
}


@pytest.mark.parametrize(("points", "batch", "value"), CURVES.values(), ids=CURVES.keys())
def test_a_curve_through_the_rehearsed_batches(points: tuple[tuple[int, int], ...], batch: int, value: int) -> None:
    assert Curve(points).at(batch) == value


CARDS: dict[str, tuple[float, dict[str, str]]] = {
    "24 GiB: the transformer streams, the encoder is whole in its own stage": (
        24,
        {"text_encoder": "component-offload", "transformer": "layerwise-offload", "vae": "resident"},
    ),
    "80 GiB: everything stays": (80, ALL_RESIDENT),
    "141 GiB: everything stays": (141, ALL_RESIDENT),
}


@pytest.mark.parametrize(("available", "expected"), CARDS.values(), ids=CARDS.keys())
def test_cards(available: float, expected: dict[str, str]) -> None:
    assert modes(fitted(rehearsed(), available)) == expected


def test_what_moves_once_a_window_beats_what_moves_once_a_forward() -> None:
    plan = fitted(rehearsed(), 44, component_residency="text_encoder=component-offload")
    assert modes(plan)["transformer"] in {"resident", "component-offload"}
    assert plan.predicted.bytes_moved is not None
    assert plan.predicted.bytes_moved < 100 * 54 * GIB


def test_every_change_is_told_with_the_rules_word_and_the_numbers() -> None:
    plan = fitted(rehearsed(), 24)
    spot = plan.placement("transformer")
    assert spot.by == "rehearsal"
    assert re.search(
        r"blocks stream: denoise at batch \d+ peaks at .* GiB of 24\.00 GiB; by the rules component-offload \(task: ", spot.reason
    )
    told = [decision for decision in plan.trail if decision.rule == "fit" and decision.subject == "transformer"]
    assert [decision.decision for decision in told] == ["layerwise-offload"]
    assert dict(told[0].numbers)["moved_bytes"] == plan.predicted.bytes_moved


def test_each_stage_is_told_with_what_one_row_more_would_need() -> None:
    plan = fitted(rehearsed(), 24)
    told = {decision.subject: dict(decision.numbers) for decision in plan.trail if decision.rule == "batch"}
    assert set(told) == {"text_encoder", "denoise", "decode"}
    assert all(int(numbers["next_peak_bytes"]) > int(numbers["peak_bytes"]) for numbers in told.values())  # type: ignore[arg-type]


def test_a_component_that_no_batch_calls_stays_where_there_is_room() -> None:
    """Keeping it out would move nothing as long as nobody calls it; that is no reason to stream anything else."""
    found = rehearsed()
    glyphs = RehearsedComponent("text_encoder_2", 400 * MIB, 100 * MIB, (25 * MIB,) * 12)
    profiles = tuple(
        replace(profile, components=(*profile.components, "text_encoder_2")) if profile.stage == "text_encoder" else profile
        for profile in found.profiles
    )
    plan = fitted(Rehearsed((*found.components, glyphs), profiles), 80)
    assert modes(plan) == ALL_RESIDENT | {"text_encoder_2": "resident"}


def test_an_explicit_placement_is_carried_out_though_more_moves() -> None:
    plan = fitted(rehearsed(), 141, component_residency="transformer=component-offload")
    assert modes(plan) == ALL_RESIDENT | {"transformer": "component-offload"}
    assert plan.placement("transformer").by == "user"


@pytest.mark.parametrize("mode", ["manual", "speed"])
def test_other_modes_only_check(mode: str) -> None:
    assert modes(fitted(rehearsed(), 80, performance_mode=mode)) == ALL_RESIDENT
    with pytest.raises(PlanRefusedError, match=r"denoise at 1024x1024, 50 steps, batch 1, needs|text_encoder at|decode at") as caught:
        fitted(rehearsed(), 40, performance_mode=mode)
    assert caught.value.needed_bytes is not None
    assert caught.value.available_bytes == 40 * GIB
    assert caught.value.needed_bytes > caught.value.available_bytes
    assert "--performance-mode auto" in str(caught.value)


def test_memory_mode_keeps_to_its_placements() -> None:
    plan = fitted(rehearsed(), 141, performance_mode="memory")
    assert plan.placement("text_encoder").mode == "layerwise-offload"
    assert plan.placement("transformer").mode == "component-offload"


def test_force_runs_what_does_not_fit() -> None:
    plan = fitted(rehearsed(), 40, performance_mode="speed", force=True)
    assert modes(plan) == ALL_RESIDENT
    assert [decision.decision for decision in plan.trail if decision.rule == "fit"][-1] == "forced"
    assert set(batches(plan).values()) == {1}


def test_a_fixed_batch_is_kept_or_refused_with_the_largest_that_fits() -> None:
    assert batches(fitted(rehearsed(), 141, batch_size=3)) == {"text_encoder": 3, "denoise": 3, "decode": 3}
    with pytest.raises(PlanRefusedError) as caught:
        fitted(rehearsed(), 24, batch_size=8)
    assert caught.value.largest_that_fits == "--batch-size 6"
    assert caught.value.option == "--batch-size"


def test_nothing_fits_names_the_stage_and_its_parts() -> None:
    with pytest.raises(PlanRefusedError, match=r"decode at 1024x1024, 50 steps, batch 1, needs .* \(weights .*, activations 3\.32 GiB"):
        fitted(rehearsed(), 4)


def test_a_decode_in_tiles_is_taken_only_where_a_whole_one_does_not_fit() -> None:
    found = tiles(rehearsed(denoise_row=50 * MIB, text=2 * GIB, block=50 * MIB), 300 * MIB)
    small = fitted(found, 4)
    assert small.vae_tiling
    assert [stage.name for stage in small.stages if stage.tiled] == ["decode"]
    assert [decision.subject for decision in small.trail if decision.decision == "tiling"] == ["decode"]
    assert not fitted(found, 12).vae_tiling


def test_decode_takes_fewer_rows_than_denoise_where_it_needs_more() -> None:
    plan = fitted(rehearsed(), 62)
    assert batches(plan)["decode"] < 4
    assert batches(plan)["denoise"] >= 2


def test_experts_of_one_kind_are_never_counted_together() -> None:
    one = rehearsed(blocks=10, block=GIB)
    second = replace(one.component("transformer"), name="transformer_2")
    profiles = tuple(
        replace(profile, components=("transformer", "transformer_2"), calls=(("transformer", 20), ("transformer_2", 30)))
        if profile.stage == "denoise"
        else profile
        for profile in one.profiles
    )
    found = replace(one, components=(*one.components, second), profiles=profiles)
    offloaded = "text_encoder=component-offload,transformer=component-offload,transformer_2=component-offload,vae=resident"
    plan = fitted(found, 60, performance_mode="manual", component_residency=offloaded)
    denoise = next(stage for stage in plan.stages if stage.name == "denoise")
    assert denoise.weights_bytes == one.component("transformer").weights_bytes + one.component("vae").weights_bytes


@pytest.mark.parametrize("ways", [
    {}, {"component_residency": "transformer_2=component-offload"}, {"component_residency": "transformer_2=resident"},
    {"count": 2, "fsdp": True}, {"count": 2},
], ids=["free", "offloaded", "resident", "sharded when asked", "several devices"])  # fmt: skip
@pytest.mark.parametrize("available", [30, 62])
def test_a_component_that_no_stage_brings_in_is_loaded_nowhere(available: int, ways: dict[str, Any]) -> None:
    """One of two experts whose part of the schedule no job reaches: the plan is that of the model without it."""
    one = rehearsed()
    both = replace(one, components=(*one.components, replace(one.component("transformer"), name="transformer_2")))
    without = {name: value for name, value in ways.items() if name != "component_residency"}
    alone, plan = fitted(one, available, **without), fitted(both, available, **ways)
    assert (plan.predicted, plan.stages, plan.window) == (alone.predicted, alone.stages, alone.window)
    assert {name: mode for name, mode in plan.modes.items() if name != "transformer_2"} == alone.modes
    assert [decision.subject for decision in plan.trail if decision.decision == "not loaded"] == ["transformer_2"]
    assert plan.placement("transformer_2").bytes == one.component("transformer").weights_bytes
    assert plan.placement("transformer_2").by != "rehearsal"


def test_a_whole_pipeline_brings_each_offloaded_component_in_for_every_batch() -> None:
    """FLUX.2 and others without stages: encoder, transformer and VAE take turns within one call."""
    found = rehearsed(blocks=2, block=GIB)
    names = ("text_encoder", "transformer", "vae")
    whole = tuple(
        StageProfile("pipeline", SHAPE, rows, names, 0, GIB * rows, MIB, 10**15 * rows, tuple((name, 1) for name in names))
        for rows in (1, 2)
    )
    found = replace(found, profiles=whole)
    layout = Layout(dict.fromkeys(names, "component-offload"), found)
    (stage,) = stage_models(whole)
    weights = sum(part.weights_bytes for part in found.components)
    assert layout.moved_per_opening(stage, 5) == 5 * weights
    assert layout.stage_weights(stage) == max(part.weights_bytes for part in found.components)


def test_the_reserve_is_kept_back() -> None:
    wide = fitted(rehearsed(), 60, options=FitOptions(reserve_bytes=0, rates=FAST))
    tight = fitted(rehearsed(), 60, options=FitOptions(reserve_bytes=5 * GIB, rates=FAST))
    assert batches(tight)["decode"] == batches(wide)["decode"] - 1 or modes(tight) != modes(wide)


HOST: dict[str, tuple[int | None, str]] = {"unknown": (None, "unknown"), "enough": (400 * GIB, "fits"), "short": (8 * GIB, "short")}


@pytest.mark.parametrize(("there", "word"), HOST.values(), ids=HOST.keys())
def test_host_memory_is_told(there: int | None, word: str) -> None:
    plan = fitted(rehearsed(), 24, options=FitOptions(host_available_bytes=there, rates=FAST))
    assert [decision.decision for decision in plan.trail if decision.rule == "host"] == [word]
    offloaded = sum(spot.bytes or 0 for spot in plan.placements if spot.mode != "resident")
    assert plan.predicted.host_bytes is not None
    assert plan.predicted.host_bytes > offloaded


def test_automatic_sharding_is_given_up_where_a_replica_fits_without_streaming() -> None:
    found = rehearsed()
    # a headroom rule of the profile would shard; a replica fits on each card
    from batchgen.inventory.records import Profile

    sharding = Profile(name="p", task="image", uses_cfg=True, fsdp_auto_min_available_memory_gb=40.0)
    asked = facts(found, 60, count=2, profile=sharding)
    ruled = make_plan(asked)
    assert ruled.fsdp
    plan = fit_plan(ruled, asked, found, Workload(((SHAPE, 100),)), FitOptions(rates=FAST))
    assert not plan.fsdp
    assert plan.replicas == 2
    kept = facts(found, 60, count=2, profile=sharding, fsdp=True)
    assert fit_plan(make_plan(kept), kept, found, Workload(((SHAPE, 100),)), FitOptions(rates=FAST)).fsdp


def test_time_is_predicted_only_with_rates() -> None:
    assert fitted(rehearsed(), 80, rates=None).predicted.seconds is None
    one, many = fitted(rehearsed(), 80, jobs=40), fitted(rehearsed(), 80, jobs=4000)
    assert one.predicted.seconds is not None
    assert many.predicted.seconds == pytest.approx(100 * one.predicted.seconds, rel=0.05)


def test_a_learned_efficiency_replaces_the_stated_one() -> None:
    slow = fitted(rehearsed(), 80, options=FitOptions(rates=FAST, learned=(("denoise", 0.1),)))
    fast = fitted(rehearsed(), 80, options=FitOptions(rates=FAST, learned=(("denoise", 0.9),)))
    assert slow.predicted.seconds is not None
    assert fast.predicted.seconds is not None
    assert slow.predicted.seconds > 8 * fast.predicted.seconds


def test_a_cpu_plan_places_nothing_and_chooses_batches() -> None:
    plan = fitted(rehearsed(), 200, platform="cpu", rates=None)
    assert modes(plan) == ALL_RESIDENT
    assert all(stage.peak_bytes <= 200 * GIB for stage in plan.stages)


# -- properties ---------------------------------------------------------------------------------------------------------

MODELS = st.builds(
    rehearsed,
    text=st.integers(1, 30).map(lambda size: size * GIB), blocks=st.integers(2, 60),
    block=st.integers(10, 900).map(lambda size: size * MIB), vae=st.integers(50, 3000).map(lambda size: size * MIB),
    denoise_row=st.integers(10, 4000).map(lambda size: size * MIB), decode_row=st.integers(10, 9000).map(lambda size: size * MIB),
    encode_row=st.integers(5, 500).map(lambda size: size * MIB),
)  # fmt: skip
RATES = st.sampled_from([None, FAST, replace(FAST, host_link_bytes=4e9)])


def attempt(found: Rehearsed, available: float, **more: object) -> Plan | None:
    try:
        return fitted(found, available, **more)  # type: ignore[arg-type]
    except PlanRefusedError:
        return None


@settings(max_examples=60, deadline=None)
@given(found=MODELS, available=st.floats(2, 200), rates=RATES, jobs=st.integers(1, 3000))
def test_a_plan_never_goes_over_the_budget_and_its_totals_add_up(found: Rehearsed, available: float, rates: object, jobs: int) -> None:
    plan = attempt(found, available, rates=rates, jobs=jobs)
    assume(plan is not None)
    assert plan is not None
    assert all(stage.peak_bytes <= plan.devices[0].available_bytes for stage in plan.stages)
    assert plan.predicted.peak_device_bytes == max(stage.peak_bytes for stage in plan.stages)
    if plan.predicted.seconds is not None:
        assert plan.predicted.seconds == pytest.approx(sum(stage.seconds or 0 for stage in plan.stages))
    layout = Layout(plan.modes, found, plan.prefetch, dict(plan.keep_bytes))
    assert plan.predicted.bytes_moved == _moved_by_hand(plan, layout, jobs)


def _moved_by_hand(plan: Plan, layout: Layout, jobs: int) -> int:
    """As the executor would: what stays in once, then every window's openings."""
    total = 0
    rows, size, left = [], batches(plan)["denoise"], jobs
    assert plan.window is not None
    size = min(size, plan.window)
    while left > 0:
        rows.append(min(left, size))
        left -= rows[-1]
        size = plan.window
    models = {stage.name: stage for stage in stage_models(layout.rehearsed.profiles)}
    for name, stage in (("text_encoder", "text_encoder"), ("transformer", "denoise"), ("vae", "decode")):
        part, mode = layout.part(name), layout.mode(name)
        if mode == "resident":
            total += part.weights_bytes
        elif mode == "component-offload":
            total += part.weights_bytes * len(rows)
        else:
            visits = [-(-count // batches(plan)[stage]) * models[stage].calls[name] for count in rows]
            total += layerwise_bytes(part.outside_bytes, part.block_bytes, kept=layout.kept(name), depth=2, visits=visits)
    return total


@settings(max_examples=60, deadline=None)
@given(found=MODELS, available=st.floats(2, 160), more=st.one_of(st.floats(0, 2), st.floats(0, 60)), rates=RATES, jobs=st.integers(1, 500))
def test_a_bigger_card_never_moves_more_and_never_takes_fewer_rows(
    found: Rehearsed,
    available: float,
    more: float,
    rates: object,
    jobs: int,
) -> None:
    small, big = (attempt(found, size, rates=rates, jobs=jobs) for size in (available, available + more))
    assume(small is not None)
    assert small is not None
    assert big is not None, "what fits a card fits a bigger one"
    assert small.predicted.bytes_moved is not None
    assert big.predicted.bytes_moved is not None
    assert big.predicted.bytes_moved <= small.predicted.bytes_moved
    if modes(small) == modes(big):
        assert all(batches(big)[name] >= rows for name, rows in batches(small).items())


@settings(max_examples=30, deadline=None)
@given(found=MODELS, available=st.floats(2, 160), limit=st.integers(1, 40))
def test_the_largest_batch_is_the_largest_that_fits(found: Rehearsed, available: float, limit: int) -> None:
    layout = Layout(ALL_RESIDENT, found)  # type: ignore[arg-type]
    for stage in stage_models(found.profiles):
        budget = int(available * GIB)
        batch = largest_batch(layout, stage, budget, 0, limit=limit)
        assert batch == sum(layout.peak(stage, rows, 0) <= budget for rows in range(1, limit + 1))


def test_rows_that_come_one_at_a_time_stay_alone() -> None:
    found = rehearsed()
    single = StageProfile("image_encoder", SHAPE, 1, ("image_encoder",), GIB, MIB, MIB, 10**9, (("image_encoder", 1),))
    found = Rehearsed((*found.components, RehearsedComponent("image_encoder", GIB, GIB)), (*found.profiles, single))
    plan = fitted(found, 141)
    assert batches(plan)["image_encoder"] == 1
