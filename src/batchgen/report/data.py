"""What a report shows, read from a run folder: run.json, the journal and the sums of its runs. Streams the jobs; holds only sums.

Knows no HTML and no tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.journal import FailureGroup, Journal
from batchgen.report.measured import read_measured
from batchgen.runfolder import RunFolder

# Points of a line over the night: more than a screen has pixels to tell apart is waste.
POINTS = 60
_JOB_FIELDS = (
    "id", "prompt", "negative_prompt", "seed", "width", "height", "num_frames", "steps", "guidance", "state", "output", "reason", "flags",
    "batch", "seconds", "row", "k", "key",
)


@dataclass(frozen=True, slots=True)
class Series:
    """A line over time: x in hours since the first run began."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """Sums and lines of one run folder. Times are seconds of the epoch."""

    folder: RunFolder
    run: Mapping[str, Any]
    counts: Mapping[str, int]
    runs: Sequence[Mapping[str, Any]]
    failures: Sequence[FailureGroup]
    skipped: Sequence[tuple[int, str | None, str]]
    rate: Series  # outputs a minute
    memory: tuple[Series, ...]  # GiB: host and device, per worker
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
    runs = journal.runs()
    begin = float(runs[0]["started"]) if runs else 0.0
    plan = run.get("plan")
    return ReportData(
        folder, run, journal.counts(), runs, journal.failures_by_reason(), journal.skipped(), _rate(journal.written_times(), begin),
        _memory(journal.memory_rows(), begin), plan if isinstance(plan, Mapping) else {}, read_measured(folder),
    )


def jobs(journal: Journal) -> Iterator[dict[str, Any]]:
    """Every job with the fields a gallery shows; None and empty ones are left out."""
    for row in journal.rows():
        yield {name: row[name] for name in _JOB_FIELDS if row.get(name) not in (None, "")}


def _rate(times: Iterable[float], begin: float) -> Series:
    """Outputs a minute, over equal slices of the time from the first run to the last output."""
    stamps = sorted(times)
    if len(stamps) < 2:
        return Series("outputs a minute", ())
    span = max(stamps[-1] - begin, 1e-3)
    slices = min(POINTS, max(1, len(stamps) // 2))
    counts = [0] * slices
    for stamp in stamps:
        counts[min(slices - 1, max(0, int((stamp - begin) / span * slices)))] += 1
    width = span / slices
    points = tuple(((number + 0.5) * width / 3600, count * 60 / width) for number, count in enumerate(counts))
    return Series("outputs a minute", points)


def _memory(rows: Iterable[tuple[float, int, int, int]], begin: float) -> tuple[Series, ...]:
    """Per worker the highest host and device memory in each slice of the night, in GiB. Rows: (when, worker, rss, device)."""
    samples = list(rows)
    if not samples:
        return ()
    span = max(samples[-1][0] - begin, 1e-3)
    highest: dict[str, dict[int, float]] = {}
    for when, worker, rss, device in samples:
        place = min(POINTS - 1, max(0, int((when - begin) / span * POINTS)))
        for name, size in ((f"host, worker {worker}", rss), (f"device, worker {worker}", device)):
            if size:
                slot = highest.setdefault(name, {})
                slot[place] = max(slot.get(place, 0.0), size / 2**30)
    width = span / POINTS / 3600
    return tuple(
        Series(name, tuple(((place + 0.5) * width, size) for place, size in sorted(slots.items()))) for name, slots in highest.items()
    )
