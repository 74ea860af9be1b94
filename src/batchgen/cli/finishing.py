"""The end of a run: its tables, on stdout and in the run folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from rich.console import RenderableType

from batchgen.cli import streams
from batchgen.cli.request import Facts
from batchgen.errors import BatchgenError, DiskError
from batchgen.inventory import catalogue
from batchgen.journal import Journal
from batchgen.outputs.files import atomic_write
from batchgen.plan.records import Plan
from batchgen.rehearsal import cache, learned
from batchgen.report import tables
from batchgen.report.advice import advice
from batchgen.report.console import columns, console
from batchgen.report.data import outcomes
from batchgen.report.devices_table import devices_table
from batchgen.report.fit_tables import stages_table
from batchgen.report.jobs_csv import write_jobs_csv
from batchgen.report.measured import add_measured
from batchgen.report.plan_tables import residency_table, trail_table
from batchgen.report.safe import printable
from batchgen.report.summary import Summary
from batchgen.runfolder import RunFolder
from batchgen.units import counted


def finish(
    folder: RunFolder, journal: Journal, plan: Plan, summary: Summary, *, seconds: float, stream: TextIO, place: str | None = None
) -> None:
    """Writes the tables to the run folder and prints them, with the place where the outputs are.

    A run that found nothing left to do leaves the tables of the one before it.
    """
    failures = [
        (group.kind or group.state, f"{group.stage}: {group.reason}" if group.stage else group.reason, group.count)
        for group in journal.failures_by_reason()
    ]
    skipped = journal.skipped()
    failures += [("invalid row", reason, count) for reason, count in Counter(reason for _, _, reason in skipped).items()]
    if not (summary.stages or summary.components or summary.done or summary.failures):
        write_jobs_table(folder, journal)
        idle = _idle(journal.counts(), len(skipped))
        print_tables([tables.failure_table(failures), idle, place or str(folder.outputs), _report(folder)], stream, kept=folder.tables)
        return
    residency: list[RenderableType | None] = [
        residency_table(plan), devices_table(plan) if len(plan.devices) > 1 else None, stages_table(plan) if plan.stages else None,
    ]  # fmt: skip
    timings: list[RenderableType | None] = [
        tables.component_table(summary, plan), tables.stage_table(summary, plan), tables.decision_table(summary),
        tables.failure_table(failures), tables.totals_line(summary, seconds=seconds, skipped=len(skipped)),
        "\n".join(advice(summary, plan)) or None,
    ]
    _write(folder.tables / "residency.txt", tables.as_text([*residency, trail_table(plan)]))
    _write(folder.tables / "timings.txt", tables.as_text(timings))
    write_jobs_table(folder, journal)
    add_measured(folder, plan, summary)
    print_tables([*residency, *timings, place or str(folder.outputs), _report(folder)], stream, kept=folder.tables)


def _idle(counts: Mapping[str, int], skipped: int) -> str:
    jobs = sum(counts[state] for state in ("pending", "running", "done", "failed", "filtered"))
    left = counts["pending"] + counts["running"]
    line = f"nothing was rendered: {counts['done']:,} of {counted(jobs, 'job')} done" + (f", {left:,} left" if left else "")
    return f"{line}; {counted(skipped, 'invalid row')} skipped" if skipped else line


def write_jobs_table(folder: RunFolder, journal: Journal) -> None:
    """Writes tables/jobs.csv. Raises DiskError."""
    atomic_write(folder.tables / "jobs.csv", lambda handle: _discard(write_jobs_csv(lambda: outcomes(journal), handle)), overwrite=True)


def _report(folder: RunFolder) -> str | None:
    """Writes the page of the run; a page that cannot be made is no reason to call a good run bad."""
    # Its libraries are loaded when all pictures are safe, and not by a run that is refused.
    from batchgen.report.html import write_report

    try:
        return str(write_report(folder))
    except DiskError:
        raise
    except (BatchgenError, OSError, ValueError) as error:
        return f"no report: {printable(str(error))}"


def learn_from(facts: Facts, summary: Summary) -> None:
    """Keeps the share of the card's rate that each stage reached, for the next plan's times. Where no rates are known: nothing."""
    if facts.platform != "cuda" or not facts.plan.stages:
        return
    name = facts.devices[0].name
    rates = catalogue.rates_of(name)
    if rates is None:
        return
    seconds = {stage: use.seconds for stage, use in summary.stages.items()}
    rows = {stage: use.rows for stage, use in summary.stages.items()}
    shown = learned.shown_by(facts.plan, rates.dense_bf16_flops, seconds, rows)
    learned.learn(cache.cache_dir(os.environ), name, facts.model.pipeline_class or "", shown)


def _discard(_: object) -> None:
    return None


def _write(path: Path, text: str) -> None:
    atomic_write(path, text.encode("utf-8"), overwrite=True)


def print_tables(parts: Sequence[RenderableType | None], stream: TextIO, *, kept: Path | None = None) -> None:
    """The parts to a terminal in its width and colours, or as plain text of TEXT_WIDTH columns.

    `kept`: where they are besides; then a stream that is full is no error, but a line on stderr. Raises BrokenPipeError.
    """
    with streams.kept_besides(stream, "the tables", f"they are in {kept}") if kept is not None else nullcontext():
        if stream.isatty():
            tables.print_parts(parts, console(stream))
        else:
            stream.write(tables.as_text(parts, width=columns() or tables.TEXT_WIDTH))
            stream.flush()
