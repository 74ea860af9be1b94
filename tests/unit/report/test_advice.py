"""Advice after a run: only what the measured peaks bear out, with the option that does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchgen.events import ComponentLoaded, ComponentMoved, DecisionMade, Event, MemorySample, StageBatchDone, WorkerReady
from batchgen.inventory.records import DeviceFacts
from batchgen.plan.records import Mode, Placement, Plan
from batchgen.plan.trail import Trail
from batchgen.report.advice import advice
from batchgen.report.summary import Summary
from batchgen.units import GIB

STAGES = (("text_encoder", ("text_encoder",)), ("denoise", ("transformer",)), ("decode", ("vae",)))
SIZES = {"text_encoder": 8 * GIB, "transformer": 12 * GIB, "vae": GIB // 4}


def plan(available_gb: int, **modes: Mode) -> Plan:
    placements = tuple(Placement(name, modes.get(name, "resident"), None, "default", "for a test", size) for name, size in SIZES.items())
    return Plan(
        "auto", "cuda", (DeviceFacts("card", "cuda:0", 48 * GIB, available_gb * GIB),), False, False, 1, 45.0, "task", placements, None, Trail(),
    )


def summary(given: Plan, peaks_gb: dict[str, float], *more: Event) -> Summary:
    found = Summary()
    found.listen(WorkerReady(0, 1, "cuda:0", tuple(name for name, _ in STAGES), STAGES, "stages", 1.0))
    for placement in given.placements:
        found.listen(ComponentLoaded(0, placement.component, placement.mode, placement.bytes or 0, 1.0))
        if placement.mode != "resident":
            found.listen(ComponentMoved(0, placement.component, "in", 3 * (placement.bytes or 0), 1.0))
    for stage, peak in peaks_gb.items():
        components = dict(STAGES)[stage]
        found.listen(StageBatchDone(0, 0, stage, "", ("a",), 1, 1.0, tuple((name, 40, 1.0) for name in components)))
        found.listen(MemorySample(0, stage, GIB, 0, int(peak * GIB)))
    for event in more:
        found.listen(event)
    return found


PEAKS = {"text_encoder": 9.0, "denoise": 16.0, "decode": 5.0}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, float], str | None]] = {
    "it fits beside the highest stage": (32, {"text_encoder": "component-offload"}, PEAKS, "text_encoder=resident"),
    "it does not": (24, {"text_encoder": "component-offload"}, PEAKS, None),
    "the margin is kept": (25, {"text_encoder": "component-offload"}, PEAKS, None),
    "nothing was offloaded": (32, {}, PEAKS, None),
    "two that fit together": (
        48, {"text_encoder": "component-offload", "transformer": "component-offload"}, PEAKS, "text_encoder=resident,transformer=resident"),
    "only one of two fits": (
        26, {"text_encoder": "component-offload", "transformer": "component-offload"}, PEAKS, "text_encoder=resident"),
    "a streamed one needs its whole size": (32, {"transformer": "layerwise-offload"}, PEAKS | {"denoise": 19.0}, None),
    "a streamed one that fits": (40, {"transformer": "layerwise-offload"}, PEAKS, "transformer=resident"),
    "no peak was measured": (32, {"text_encoder": "component-offload"}, dict.fromkeys(PEAKS, 0.0), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_advised(case: str) -> None:
    available, modes, peaks, want = CASES[case]
    given = plan(available, **modes)
    lines = advice(summary(given, peaks), given)
    assert (lines[-1] if lines else None) == (None if want is None else f"next time: --component-residency {want}")


def test_the_sentence_has_its_numbers() -> None:
    given = plan(32, text_encoder="component-offload")
    assert advice(summary(given, PEAKS), given)[0] == (
        "text_encoder could have stayed resident: with it the highest stage needs 24.00 GiB of 32.00 GiB available, "
        "and 24.00 GiB less would have moved"
    )


def test_a_run_that_ran_out_of_memory_is_advised_nothing() -> None:
    given = plan(32, text_encoder="component-offload")
    ladder = DecisionMade(0, "out-of-memory", "denoise", "halve", "a smaller batch")
    assert advice(summary(given, PEAKS, ladder), given) == []
    assert advice(summary(given, PEAKS, replace(ladder, rule="residency")), given) != []
