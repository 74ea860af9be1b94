"""What a report shows, read from a run folder: run.json, the journal and the sums of its runs. Streams the jobs; holds only sums.

Knows no HTML and no tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.journal import FailureGroup, Journal
from batchgen.report.measured import read_measured
from batchgen.report.timeline import Axis, Lane, Series, lanes, memory, rate
from batchgen.runfolder import RunFolder

_JOB_FIELDS = (
    "id", "prompt", "negative_prompt", "seed", "width", "height", "num_frames", "steps", "guidance", "state", "output", "reason", "flags",
    "batch", "seconds", "row", "k", "key",
)


@dataclass(frozen=True, slots=True)
class ReportData:
    """Sums and lines of one run folder. Times are seconds of the epoch."""

    folder: RunFolder
    run: Mapping[str, Any]
    counts: Mapping[str, int]
    runs: Sequence[Mapping[str, Any]]
    failures: Sequence[FailureGroup]
    skipped: Sequence[tuple[int, str | None, str]]
    axis: Axis  # time of rendering: the pauses between runs left out
    rate: Series  # outputs a minute
    memory: tuple[Series, ...]  # GiB: host and device, per worker
    lanes: tuple[Lane, ...] = ()  # what each worker did when
    plan: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        model = self.run.get("model")
        return str(model.get("source", "")) if isinstance(model, Mapping) else str(model or "")

    @property
    def total(self) -> int:
        return sum(count for state, count in self.counts.items() if state != "vanished")


def collect(folder: RunFolder, journal: Journal) -> ReportData:
    """Reads everything but the jobs. Raises RunStoppedError for an unreadable run.json."""
    run = folder.read_run() or {}
    axis = Axis.over(journal.run_spans())
    counts = journal.counts()
    plan = run.get("plan")
    return ReportData(
        folder, run, counts, journal.runs(), journal.failures_by_reason(), journal.skipped(), axis,
        rate(journal.written_times(), axis, journal.made_since(0.0)), memory(journal.memory_rows(), axis), lanes(journal.work_rows(), axis),
        plan if isinstance(plan, Mapping) else {}, read_measured(folder),
    )


def outcomes(journal: Journal) -> Iterator[dict[str, Any]]:
    """What became of the manifest, for tables: every job, then the rows that were invalid and became none, as failed."""
    yield from journal.rows()
    for line, name, reason in journal.skipped():
        yield {"row": line, "id": name, "state": "failed", "kind": "invalid row", "reason": reason}


def jobs(journal: Journal) -> Iterator[dict[str, Any]]:
    """Every job with the fields a gallery shows; None and empty ones are left out."""
    for row in journal.rows():
        yield {name: row[name] for name in _JOB_FIELDS if row.get(name) not in (None, "")}
