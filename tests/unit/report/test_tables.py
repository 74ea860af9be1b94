"""The tables of a run, held to whole literal texts at two widths."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from batchgen.events import (
    ComponentLoaded,
    ComponentMoved,
    DecisionMade,
    Event,
    JobFailed,
    MemorySample,
    OutputDone,
    StageBatchDone,
    WorkerReady,
)
from batchgen.inventory.records import DeviceFacts
from batchgen.plan.records import Placement, Plan, StagePlan
from batchgen.plan.trail import Decision, Trail
from batchgen.report import tables
from batchgen.report.summary import Summary
from batchgen.units import GIB, MIB

CASES = Path(__file__).parents[2] / "cases" / "tables"


def plan() -> Plan:
    return Plan(
        performance_mode="auto", platform="cuda", devices=(DeviceFacts("RTX 4090", "cuda:0", 24 * GIB, 22 * GIB),), fsdp=False,
        cfg_parallel=False, replicas=1, threshold_gb=30.0, threshold_source="task", batch_size=None, trail=Trail(),
        placements=(
            Placement("transformer", "layerwise-offload", "dit", "model", "the profile streams it in auto mode", 38 * GIB),
            Placement("text_encoder", "component-offload", "text_encoder", "default", "offloaded by default on CUDA", 15 * GIB),
            Placement("vae", "resident", "vae", "global", "22.0 GiB available", 250 * MIB),
        ),
    )


EVENTS: list[Event] = [
    WorkerReady(0, 11, "cuda:0", ("text_encoder", "denoise", "decode"), (), "stages", 6.5, (("torch", "2.13.0"),)),
    ComponentLoaded(0, "text_encoder", "component-offload", 15 * GIB, 31.0),
    ComponentLoaded(0, "transformer", "layerwise-offload", 38 * GIB, 75.0),
    ComponentLoaded(0, "vae", "component-offload", 250 * MIB, 0.5),
    ComponentMoved(0, "text_encoder", "in", 15 * GIB, 0.8),
    StageBatchDone(0, 0, "text_encoder", "1024x1024", ("a", "b", "c", "d"), 3, 1.2, (("text_encoder", 1, 1.1),)),
    ComponentMoved(0, "text_encoder", "out", 0, 0.0),
    StageBatchDone(0, 0, "denoise", "1024x1024", ("a", "b", "c"), 3, 90.0, (("transformer", 50, 88.0),), 40 * GIB),
    StageBatchDone(0, 0, "denoise", "1024x1024", ("d",), 1, 45.0, (("transformer", 50, 44.0),), 40 * GIB),
    DecisionMade(0, "ladder", "decode 1024x1024", "batch 2", "out of memory at batch 4 [24 GiB]; trying 2", (("batch", 4),)),
    StageBatchDone(0, 0, "decode", "1024x1024", ("a", "b"), 2, 2.5, (("vae", 1, 2.4),)),
    StageBatchDone(0, 0, "decode", "1024x1024", ("c",), 1, 1.5, (("vae", 1, 1.4),)),
    MemorySample(0, "decode", 3 * GIB, 12 * GIB, 21 * GIB),
    OutputDone(0, "a", "000000-a.png", 1_500_000, "0" * 64, 3, 33.0, "{}"),
    OutputDone(0, "b", "000001-b.png", 1_500_000, "0" * 64, 3, 33.0, "{}", ("tiled",)),
    OutputDone(0, "c", "000002-c.png", 1_500_000, "0" * 64, 3, 33.0, "{}", ("tiled", "flat")),
    JobFailed(0, "d", "non-finite", "decode", "the picture holds NaN", retry=True),
    JobFailed(0, "d", "non-finite", "decode", "the picture holds NaN\x1b[2J"),
]


def summary() -> Summary:
    found = Summary()
    for event in EVENTS:
        found.listen(event)
    return found


def parts() -> dict[str, RenderableType | None]:
    counted = summary()
    return {
        "components": tables.component_table(counted, plan()),
        "stages": tables.stage_table(counted, plan()),
        "decisions": tables.decision_table(counted),
        "failures": tables.failure_table(tables.summary_failures(counted)),
    }


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("name", ["components", "stages", "decisions", "failures"])
def test_a_table_is_exactly_its_golden_text(name: str, width: int) -> None:
    assert tables.as_text([parts()[name]], width=width) == (CASES / f"{name}-{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(len(line) <= width for line in tables.as_text(parts().values(), width=width).splitlines())


def test_colour_changes_nothing_but_colour() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=True, color_system="truecolor")
    console.print(parts()["failures"])
    assert "\x1b[" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()  # the reason's own escape is not passed on


def test_sums_count_every_worker_and_only_final_failures() -> None:
    counted = summary()
    assert counted.failed == 1
    assert counted.done == 3
    assert counted.flags == {"tiled": 2, "flat": 1}
    assert (counted.components["transformer"].calls, counted.components["text_encoder"].moves_in) == (100, 1)
    assert (counted.stages["text_encoder"].rows, counted.stages["text_encoder"].jobs) == (3, 4)
    assert counted.stages["denoise"].streamed_bytes == 80 * GIB


def test_predicted_stands_beside_measured() -> None:
    night = Decision.of("predict", "plan", "100 jobs", "text", {"jobs": 100})
    stages = tuple(StagePlan("denoise", shape, ("transformer",), 4, 1, 1, 1, 1, 1, seconds=seconds) for shape, seconds in (("a", 1500.0), ("b", 500.0)))
    planned = replace(plan(), stages=stages, trail=Trail((night,)))
    assert tables.predicted_per_job(planned) == {"denoise": pytest.approx(20.0)}
    text = tables.as_text([tables.stage_table(summary(), planned)], width=80)
    assert "predicted" in text
    assert "20.00 s" in text
    assert tables.predicted_per_job(plan()) == {}


def test_no_failures_and_no_decisions_make_no_table() -> None:
    assert tables.failure_table([]) is None
    assert tables.decision_table(Summary()) is None


def test_totals_line_names_what_people_look_for() -> None:
    line = tables.totals_line(summary(), seconds=120.0)
    assert line == "3 done in 2 min 00 s; 1.5 a minute; 1 failed; device peak 21.00 GiB; worker memory 3.00 GiB; 1 flat; 2 tiled"
