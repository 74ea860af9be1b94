"""Every table the product prints, held to whole literal texts: 140, 80 and 40 columns wide, and in colour.

After a change that is meant: `PYTHONPATH=tests python tests/unit/report/test_golden_tables.py` writes tests/cases/tables anew, and the diff says what
changed. In the files an escape of a colour stands as ␛.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console, Group, RenderableType
from rich.text import Text

from batchgen import doctor
from batchgen.cli.check import job_table, shape_table
from batchgen.cli.doctor import checks_table
from batchgen.inventory import catalogue
from batchgen.jobs import Job, ShapeKey
from batchgen.manifest.survey import ManifestSummary, ShapeCount
from batchgen.report import fit_tables, plan_tables, status, tables
from batchgen.report.sheet import Column, Sheet
from tablekit import plan, planned, summary

CASES = Path(__file__).parents[2] / "cases" / "tables"
WIDTHS = (140, 80, 40)


def failures() -> Sheet:
    many = [("non-finite", "decode: the picture holds NaN", 3), ("out-of-memory", "denoise: 24.10 GiB wanted, 22.00 GiB there", 1)]
    return one_of(tables.failure_table([*many, *(("error", f"reason number {number}", 1) for number in range(tables.FAILURES_SHOWN - 1))]))


def one_of(table: Sheet | None) -> Sheet:
    assert table is not None
    return table


def compared() -> Sheet:
    refused = "nothing fits: decode needs 30.54 GiB, and the card has 11.76 GiB"
    return fit_tables.compare_table([
        fit_tables.Compared("RTX 4090", planned()), fit_tables.Compared("H100 80GBx8", planned()),
        fit_tables.Compared("RTX 3060", None, refused),
    ])


def run_status() -> RenderableType:
    worker = {"worker": 0, "pid": 4242, "device": "cuda:0", "state": "working", "stage": "text_encoder", "jobs": 812, "rss_bytes": 3 * 2**30,
              "device_bytes": 0, "device_peak_bytes": 0, "slope_bytes_per_hour": 12.4 * 2**20, "deaths": 0, "window": 3, "seconds": 2.0}
    reasons = [
        {"state": "failed", "kind": "out-of-memory", "stage": "denoise", "reason": "24.10 GiB wanted, 22.00 GiB there", "count": 3,
         "examples": ("castle-07", "castle-08", "castle-09")},
        {"state": "filtered", "kind": "filtered", "stage": "decode", "reason": "the model's safety checker", "count": 1, "examples": ("x[1]",)},
    ]
    return status.render({
        "state": "running", "stopped_by": None, "counts": {"pending": 9100, "running": 64, "done": 812, "failed": 3, "filtered": 1, "vanished": 0},
        "jobs": 9980, "rate_per_minute": 42.34, "eta_seconds": 12_960.0, "holder": "process 4200 on here since 21:04", "failures": reasons,
        "skipped_rows": 1, "limit": None, "shard": None, "workers": [worker, worker | {"worker": 1, "device": "cuda:1", "stage": "denoise"}],
    })


def manifest_summary() -> ManifestSummary:
    def shape(width: int | None, steps: int | None) -> ShapeKey:
        return ShapeKey(width, width, None, None, steps, None, None, None, None, ())

    shapes = (ShapeCount(shape(1024, 30), 12_000), ShapeCount(shape(None, None), 41), *(ShapeCount(shape(64 * n, 4), 1) for n in range(1, 14)))
    return ManifestSummary("prompts.csv", "csv", 12_054, 12_054, shapes, (), (), (), 0, (), False, (), ",")


def first_jobs() -> list[Job]:
    texts = ("a large red star in the center on a white background", "猫 and a dog " * 9)
    return [
        Job(key="0" * 32, index=number, row=number + 2, k=0, id=("44f6bf641a37", "a name as people give them, long")[number], prompt=text,
            negative_prompt=None, seed=2**64 - 1, seed_source=("row", "drawn")[number], output=f"00000{number}-a-large-red-star-in-the-center.png")
        for number, text in enumerate(texts)
    ]  # fmt: skip


CHECKS = [
    doctor.Check("python", "ok", "Python 3.11.9"), doctor.Check("torch on cuda", "failure", "built for CUDA None, sees no device",
                                                                "install a torch build with CUDA for this driver"),
    doctor.Check("output folder", "warning", "/data/a-folder-with-a-rather-long-name/results takes 12.0 MiB a second, synced",
                 "slow for large pictures; a local disk is better"),
]  # fmt: skip
TABLES: dict[str, Callable[[], RenderableType]] = {
    "plan-residency": lambda: plan_tables.residency_table(planned()),
    "plan-stages": lambda: fit_tables.stages_table(planned()),
    "plan-stages-of-two-shapes": lambda: fit_tables.stages_table(planned(shapes=2)),
    "plan-compare": compared,
    "plan-trail": lambda: plan_tables.trail_table(planned()),
    "run-components": lambda: tables.component_table(summary(), plan()),
    "run-stages": lambda: tables.stage_table(summary(), planned()),
    "run-decisions": lambda: one_of(tables.decision_table(summary())),
    "run-failures": failures,
    "run-totals": lambda: Text(tables.totals_line(summary(), seconds=120.0)),
    "status": run_status,
    "check-shapes": lambda: shape_table(manifest_summary()),
    "check-jobs": lambda: job_table(first_jobs()),
    "doctor": lambda: checks_table(CHECKS),
}


def printed(table: RenderableType, width: int, *, colour: bool = False) -> str:
    file = io.StringIO()
    Console(
        file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None, highlight=False, markup=False, emoji=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().replace("\x1b", "␛").splitlines()) + "\n"


def golden(name: str) -> str:
    """The table in every width, then in colour at 80."""
    parts = [f"# {width} columns\n{printed(TABLES[name](), width)}" for width in WIDTHS]
    return "\n".join([*parts, f"# 80 columns, in colour\n{printed(TABLES[name](), 80, colour=True)}"])


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_exactly_its_golden_text(name):
    assert golden(name) == (CASES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [140, 80, 40])
def test_no_line_is_wider_than_the_terminal_and_colour_changes_nothing_but_colour(name, width):
    plain = printed(TABLES[name](), width)
    assert max(Text(line).cell_len for line in plain.splitlines()) <= width
    coloured = printed(TABLES[name](), width, colour=True).replace("␛", "\x1b")
    assert [line.rstrip() for line in Text.from_ansi(coloured).plain.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("width", [140, 80])
@pytest.mark.parametrize("name", ["text_encoder", "component-offload", "layerwise-offload", "transformer"])
def test_names_are_whole_down_to_eighty_columns(name, width):
    assert name in printed(Group(*(TABLES[table]() for table in ("plan-residency", "plan-compare"))), width).replace(" \n", "\n")


def test_every_card_of_the_catalogue_stays_whole_in_forty_columns():
    names = [card.name for card in catalogue.catalogue()]
    table = fit_tables.compare_table([fit_tables.Compared(name, planned()) for name in names])
    lines = printed(table, 40).splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in names)


def test_a_cell_is_data_and_a_name_longer_than_the_terminal_is_wrapped_and_whole():
    table = Sheet("", (Column("name"), Column("why", "text", label="")))
    table.add("x" * 100, "[red]brackets[/red] \x1b[2J stay")
    text = printed(table, 40)
    assert text.replace("\n", "").count("x") == 100
    assert "[red]brackets[/red]" in text
    assert "␛" not in text


if __name__ == "__main__":
    for chosen in sys.argv[1:] or TABLES:
        CASES.mkdir(exist_ok=True)
        (CASES / f"{chosen}.txt").write_text(golden(chosen), encoding="utf-8")
