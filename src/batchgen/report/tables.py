"""The tables at the end of a run, and the same as plain text for the run folder.

Knows summaries and plans, not how they came about.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType

from batchgen.plan.records import Plan
from batchgen.report.plan_text import plain
from batchgen.report.sheet import Column, Sheet
from batchgen.report.summary import Summary
from batchgen.units import counted, duration_text, size_text

TEXT_WIDTH = 140  # of tables kept as files
FAILURES_SHOWN = 20
DECISIONS_SHOWN = 40


def _seconds(value: float) -> str:
    if not value:
        return "–"
    return f"{value:.1f} s" if value < 1000 else duration_text(value)


def _bytes(value: int) -> str:
    return size_text(value) if value else "–"


def component_table(summary: Summary, plan: Plan) -> Sheet:
    """Per component: loads, moves, calls and times, beside the residency table, which says where it lives and why.

    Order of the plan; what the plan does not know comes last. A placement that was not carried out as planned is named below.
    """
    table = Sheet("Components", (
        Column("component", keep=0), Column("loaded", "number", 2), Column("load", "number", 6), Column("moves", "number", 4),
        Column("moved", "number", 3), Column("move", "number", 7), Column("calls", "number", 5), Column("compute", "number", 1),
    ))
    changed = []
    modes = plan.modes
    for name in [*modes, *(name for name in summary.components if name not in modes)]:
        use = summary.components.get(name)
        if use is None:
            table.add(name, *["–"] * 7)
            continue
        if use.placement is not None and name in modes and use.placement != modes[name]:
            changed.append(f"{name} ran as {use.placement}, planned {modes[name]}")
        table.add(
            name, _bytes(use.loaded_bytes), _seconds(use.load_seconds), use.moves_in or "–", _bytes(use.moved_bytes),
            _seconds(use.move_seconds), use.calls or "–", _seconds(use.compute_seconds),
        )
    table.caption = plain("; ".join(changed))
    return table


def predicted_per_job(plan: Plan) -> dict[str, float]:
    """Stage -> predicted seconds a job, over all shapes of the list. Empty where nothing was rehearsed or no rates are known."""
    night = next((dict(decision.numbers) for decision in plan.trail if decision.rule == "predict"), {})
    jobs = night.get("jobs")
    found: dict[str, float] = {}
    if isinstance(jobs, int) and jobs > 0:
        for stage in plan.stages:
            if stage.seconds is not None:
                found[stage.name] = found.get(stage.name, 0.0) + stage.seconds / jobs
    return found


def stage_table(summary: Summary, plan: Plan) -> Sheet:
    """Per stage: batches, rows computed, jobs served, seconds, measured beside predicted, and its share of all stages' time."""
    predicted = predicted_per_job(plan)
    streamed = any(stage.streamed_bytes for stage in summary.stages.values())
    table = Sheet("Stages", (
        Column("stage", keep=0), Column("batches", "number", 6), Column("largest", "number", 7), Column("rows", "number", 8),
        Column("jobs", "number", 3), Column("time", "number", 1), Column("per job", "number", 2),
        *([Column("predicted", "number", 4)] if predicted else []), Column("share", "number", 5),
        *([Column("streamed", "number", 9)] if streamed else []),
    ))
    total = summary.stage_seconds
    for name, stage in summary.stages.items():
        share = f"{100 * stage.seconds / total:.0f} %" if total else "–"
        each = f"{stage.seconds / stage.jobs:.2f} s" if stage.jobs else "–"
        cells = [name, stage.batches, stage.largest_batch, stage.rows, stage.jobs, _seconds(stage.seconds), each]
        if predicted:
            cells.append(f"{predicted[name]:.2f} s" if name in predicted else "–")
        cells.append(share)
        table.add(*cells, *([_bytes(stage.streamed_bytes)] if streamed else []))
    return table


def decision_table(summary: Summary) -> Sheet | None:
    """Steps taken while running: smaller batches, tiling, leaner placements. None if there were none."""
    if not summary.decisions:
        return None
    table = Sheet("Decisions while running", (Column("rule"), Column("subject"), Column("decision"), Column("why", "text", label="")))
    for step in summary.decisions[:DECISIONS_SHOWN]:
        table.add(step.rule, step.subject, step.decision, step.text)
    left = len(summary.decisions) - DECISIONS_SHOWN
    if left > 0:
        table.add("…", "", "", f"and {left} more; the events file and run.json have all")
    return table


def failure_table(failures: Iterable[tuple[str, str, int]]) -> Sheet | None:
    """Failures by reason, most frequent first, from (kind, reason, jobs). None if there are none."""
    found = sorted(failures, key=lambda item: (-item[2], item[0], item[1]))
    if not found:
        return None
    table = Sheet("Failures", (Column("jobs", "number"), Column("kind"), Column("reason", "text", label="")))
    for kind, reason, jobs in found[:FAILURES_SHOWN]:
        table.add(jobs, kind, reason)
    if len(found) > FAILURES_SHOWN:
        rest = found[FAILURES_SHOWN:]
        more = counted(len(rest), "more reason")
        table.add(sum(jobs for _, _, jobs in rest), "…", f"{more}; tables/jobs.csv has all")
    return table


def summary_failures(summary: Summary) -> list[tuple[str, str, int]]:
    """The summary's failures as `failure_table` takes them."""
    return [(kind, f"{stage}: {reason}" if stage else reason, jobs) for (kind, stage, reason), jobs in summary.failures.items()]


def totals_line(summary: Summary, *, seconds: float, skipped: int = 0) -> str:
    """One line: pictures, time, rate, peaks; `skipped` rows of the manifest were invalid."""
    parts = [f"{summary.done} done in {duration_text(seconds)}"]
    if summary.done and seconds > 0:
        parts.append(f"{60 * summary.done / seconds:.1f} a minute")
    if summary.failed:
        parts.append(f"{summary.failed} failed")
    if skipped:
        parts.append(f"{counted(skipped, 'invalid row')} skipped")
    if summary.peak_device_bytes:
        parts.append(f"device peak {size_text(summary.peak_device_bytes)}")
    if summary.peak_host_bytes:
        parts.append(f"worker memory {size_text(summary.peak_host_bytes)}")
    parts.extend(f"{count} {flag}" for flag, count in sorted(summary.flags.items()))
    return "; ".join(parts)


def print_parts(parts: Iterable[RenderableType | None], console: Console) -> None:
    """Prints what is there, a blank line between two."""
    for number, part in enumerate(part for part in parts if part is not None):
        if number:
            console.print()
        # A path is one word to whoever copies it, however narrow the place.
        console.print(part, soft_wrap=isinstance(part, str) and (part.startswith("/") or "://" in part))


def as_text(parts: Iterable[RenderableType | None], *, width: int = TEXT_WIDTH) -> str:
    """The parts as plain text, a blank line between two; no colour, no trailing blanks."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None, highlight=False, markup=False, emoji=False,
                      _environ={})  # its width is given: COLUMNS has no say
    print_parts(parts, console)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"
