"""A run's report as Markdown, JSON or CSV, line by line. Text from manifests is data: Markdown's own marks are escaped."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from batchgen.journal import Journal
from batchgen.report.data import ReportData, collect, outcomes
from batchgen.runfolder import RunFolder
from batchgen.units import counted, size_text

_CHUNK = 5000
_SKIPPED_SHOWN = 200


def lines(run: RunFolder, kind: str) -> Iterator[str]:
    """The report in pieces of text, ends of lines included. `kind`: "md", "json" or "csv"."""
    with Journal.read(run.journal) as journal:
        if kind == "csv":
            yield from _csv(journal)
            return
        data = collect(run, journal)
        yield from _markdown(data) if kind == "md" else [json.dumps(_object(data), ensure_ascii=False, indent=2), "\n"]


def _csv(journal: Journal) -> Iterator[str]:
    """Every job and every row that was left out; the columns are those of all, in the order they first come."""
    import pandas as pd

    columns: dict[str, None] = {}
    for row in outcomes(journal):
        columns.update(dict.fromkeys(row))
    rows = outcomes(journal)
    first = True
    while (chunk := list(islice(rows, _CHUNK))) or first:
        # object: pandas must not guess types, or seeds beyond 2^53 lose their last digits
        frame = pd.DataFrame(chunk, columns=list(columns), dtype=object)
        buffer = io.StringIO()
        frame.to_csv(buffer, index=False, header=first, lineterminator="\n")
        yield buffer.getvalue()
        first = False


def _object(data: ReportData) -> dict[str, Any]:
    return {
        "schema": 1, "folder": str(data.folder.path), "model": data.model, "counts": dict(data.counts),
        "failures": [asdict(group) for group in data.failures],
        "skipped": [{"row": line, "id": name, "reason": reason} for line, name, reason in data.skipped],
        "runs": [dict(run) for run in data.runs], "plan": dict(data.plan), "measured": dict(data.measured),
        "outputs_a_minute": [list(point) for point in data.rate.points],
        "rendering_seconds": data.axis.seconds,
        "timeline": [
            {"worker": lane.worker, "slice_hours": lane.slice_hours, "shares": {name: list(shares) for name, shares in lane.shares}}
            for lane in data.lanes
        ],
        "memory_gib": {series.name: [list(point) for point in series.points] for series in data.memory},
    }


def _markdown(data: ReportData) -> Iterator[str]:
    yield f"# {_plain(data.folder.path.name)}\n\n"
    counts = ", ".join(f"{count} {state}" for state, count in data.counts.items() if count)
    skipped = f"; {counted(len(data.skipped), 'invalid row')} skipped" if data.skipped else ""
    yield f"{_plain(data.model)}, {counted(data.total, 'job')}: {counts}{skipped}\n"
    if data.failures:
        yield "\n## Failures\n\n| jobs | kind | stage | reason |\n|---:|---|---|---|\n"
        for group in data.failures:
            yield f"| {group.count} | {_plain(group.kind)} | {_plain(group.stage)} | {_plain(group.reason)} |\n"
    if data.skipped:
        yield "\n## Rows that were skipped\n\n| line | id | reason |\n|---:|---|---|\n"
        for line, name, reason in data.skipped[:_SKIPPED_SHOWN]:
            yield f"| {line} | {_plain(name or '')} | {_plain(reason)} |\n"
        if len(data.skipped) > _SKIPPED_SHOWN:
            yield f"| | | and {len(data.skipped) - _SKIPPED_SHOWN} more |\n"
    placements = data.plan.get("placements", {})
    if placements:
        yield "\n## Components\n\n| component | placement | by | weights | why |\n|---|---|---|---:|---|\n"
        for name, part in placements.items():
            size = size_text(part.get("bytes"))
            yield f"| {_plain(name)} | {part.get('mode', '')} | {part.get('by', '')} | {size} | {_plain(part.get('reason', ''))} |\n"
    stages = data.measured.get("stages", {})
    if stages:
        yield "\n## Stages\n\n| stage | batches | jobs | seconds |\n|---|---:|---:|---:|\n"
        for name, stage in stages.items():
            yield f"| {_plain(name)} | {stage.get('batches', 0)} | {stage.get('jobs', 0)} | {stage.get('seconds', 0.0):.1f} |\n"


def _plain(text: object) -> str:
    """One line in which Markdown and HTML find nothing to act on."""
    marked = re.sub(r"([\\`*_{}\[\]()#+|!~-])", r"\\\1", " ".join(str(text).split()))
    return html.escape(marked, quote=False)
