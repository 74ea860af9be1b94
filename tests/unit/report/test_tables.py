"""The tables of a run: what they count and say. How they look is held by test_golden_tables.py."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from batchgen.plan.records import StagePlan
from batchgen.plan.trail import Decision, Trail
from batchgen.report import tables
from batchgen.report.summary import Summary
from batchgen.units import GIB
from tablekit import plan, summary


def test_colour_changes_nothing_but_colour() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=True, color_system="truecolor")
    console.print(tables.failure_table(tables.summary_failures(summary())))
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


@pytest.mark.parametrize("width", range(30, 80))
def test_no_line_breaks_between_a_number_and_its_unit(width: int) -> None:
    lines = tables.as_text([tables.stage_table(summary(), plan())], width=width).splitlines()
    assert [line for line in lines if line.split() and line.split()[0] in ("%", "s", "GiB", "MiB")] == []
    assert any("%" in line for line in lines)


def test_no_failures_and_no_decisions_make_no_table() -> None:
    assert tables.failure_table([]) is None
    assert tables.decision_table(Summary()) is None


def test_totals_line_names_what_people_look_for() -> None:
    line = tables.totals_line(summary(), seconds=120.0)
    assert line == "3 done in 2 min 00 s; 1.5 a minute; 1 failed; device peak 21.00 GiB; worker memory 3.00 GiB; 1 flat; 2 tiled"


@pytest.mark.parametrize(("skipped", "words"), [(0, None), (1, "; 1 invalid row skipped"), (3, "; 3 invalid rows skipped")])
def test_totals_line_counts_the_rows_that_were_skipped(skipped: int, words: str | None) -> None:
    line = tables.totals_line(summary(), seconds=120.0, skipped=skipped)
    assert line.count("skipped") == (words is not None)
    assert words is None or words in line
