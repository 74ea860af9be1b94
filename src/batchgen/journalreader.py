"""Questions to the journal: what became of the jobs. For the run that writes it and for those that only look.

Knows how to wait for a turn beside a busy writer, and holds no lock longer than one answer takes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from batchgen.jobs import Job
from batchgen.journalfile import patiently, sqlite_errors

STATES = ("pending", "running", "done", "failed", "filtered", "vanished")
_CHUNK = 500
_COUNTED = "CASE gone WHEN 1 THEN 'vanished' ELSE state END"


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Jobs that failed for one reason. `examples`: ids of up to three of them."""

    state: str
    kind: str
    stage: str
    reason: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A job's row as a resume checks it."""

    key: str
    state: str
    output: str
    size_bytes: int | None
    sha256: str | None
    written_at: float | None


class JournalReader:
    """The reading half of `Journal`."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, reader: bool) -> None:
        self._db = connection
        self._reader = reader
        self.path = path

    def close(self) -> None:
        with sqlite_errors(self.path):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All questions inside are answered from one state of the journal. For readers; short, since a writer may be waiting."""
        with sqlite_errors(self.path):
            self._db.execute("BEGIN")
        try:
            yield
        finally:
            with sqlite_errors(self.path):
                self._db.execute("ROLLBACK")

    def _all(self, sql: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        with sqlite_errors(self.path):
            if self._reader:
                return patiently(lambda: self._db.execute(sql, values).fetchall())
            return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, values: Sequence[object] = ()) -> Any:
        return self._all(sql, values)[0][0]

    @property
    def mark(self) -> str | None:
        """Of the last manifest that was taken over; None where there was none or it had none."""
        rows = self._all("SELECT value FROM meta WHERE name = 'mark'")
        return rows[0][0] or None if rows else None

    def counts(self) -> dict[str, int]:
        """Jobs per state, every state named. Jobs left out by a limit are not counted."""
        rows = self._all(f"SELECT {_COUNTED} AS label, count(*) FROM jobs WHERE gone != 2 GROUP BY label")  # noqa: S608 a constant
        return dict.fromkeys(STATES, 0) | {row[0]: row[1] for row in rows}

    def pending(self) -> int:
        """How many jobs wait for a worker."""
        return int(self._one("SELECT count(*) FROM jobs WHERE state = 'pending' AND gone = 0"))

    def known(self, state: str) -> Iterator[Known]:
        """The manifest's jobs of one state, in its order."""
        sql = "SELECT key, state, output, size_bytes, sha256, written_at FROM jobs WHERE state = ? AND gone = 0 ORDER BY idx, k"
        yield from (Known(*row) for row in self._stream(sql, (state,)))

    def job(self, key: str) -> Job:
        """Raises KeyError."""
        rows = self._all("SELECT job FROM jobs WHERE key = ?", (key,))
        if not rows:
            raise KeyError(key)
        return Job.from_json(rows[0][0])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every job as a plain dict for tables, in the manifest's order: its fields, what became of it, then the manifest's other columns.

        A manifest column named like one of ours comes as `manifest_NAME`.
        """
        for row in self._pages():
            job = Job.from_json(row["job"])
            fields: dict[str, Any] = {name: value for name, value in asdict(job).items() if name != "extra"}
            fields["snapped"] = ", ".join(f"{field} {asked}" for field, asked in job.snapped)  # what was asked for
            fields["output"] = row["output"]
            beyond = json.loads(row["settings"] or "{}")
            fields.update({name: value for name, value in beyond.items() if fields.get(name, ...) is None})
            fields["state"] = "vanished" if row["gone"] == 1 else row["state"]
            for name in ("attempts", "size_bytes", "sha256", "batch", "seconds", "flags", "written_at", "kind", "stage", "reason"):
                fields[name] = row[name]
            for name, value in job.extra:
                fields[f"manifest_{name}" if name in fields else name] = value
            yield fields

    def _stream(self, sql: str, values: Sequence[object]) -> Iterator[sqlite3.Row]:
        with sqlite_errors(self.path):
            cursor = patiently(lambda: self._db.execute(sql, values))
        while True:
            with sqlite_errors(self.path):
                chunk = cursor.fetchmany(_CHUNK)
            if not chunk:
                return
            yield from chunk

    def _pages(self) -> Iterator[sqlite3.Row]:
        """All rows, page by page: a reader that takes its time must not hold a lock that the run's writer waits for."""
        last: tuple[object, ...] = (-1, -1, -1, "")
        while True:
            rows = self._all(
                f"SELECT * FROM jobs WHERE (gone, idx, k, key) > (?, ?, ?, ?) AND gone != 2 ORDER BY gone, idx, k, key LIMIT {_CHUNK}",  # noqa: S608
                last,
            )
            if not rows:
                return
            yield from rows
            last = tuple(rows[-1][name] for name in ("gone", "idx", "k", "key"))

    def failures_by_reason(self) -> list[FailureGroup]:
        """Failed and filtered jobs by reason, the commonest first."""
        groups = self._all(
            "SELECT state, kind, stage, reason, count(*) AS n, min(idx) FROM jobs WHERE state IN ('failed', 'filtered') AND gone = 0 "
            "GROUP BY state, kind, stage, reason ORDER BY n DESC, min(idx)"
        )
        found = []
        for row in groups:
            examples = self._all(
                "SELECT id FROM jobs WHERE state = ? AND gone = 0 AND kind IS ? AND stage IS ? AND reason IS ? ORDER BY idx, k LIMIT 3",
                (row["state"], row["kind"], row["stage"], row["reason"]),
            )
            texts = (row["state"], row["kind"] or "", row["stage"] or "", row["reason"] or "")
            found.append(FailureGroup(*texts, row["n"], tuple(example[0] for example in examples)))
        return found

    def skipped(self) -> list[tuple[int, str | None, str]]:
        return [(row[0], row[1], row[2]) for row in self._all("SELECT line, id, reason FROM skipped ORDER BY line")]

    def spool_in_use(self) -> set[str]:
        rows = self._all("SELECT DISTINCT spool FROM jobs WHERE spool IS NOT NULL AND state IN ('pending', 'running')")
        return {row[0] for row in rows}

    def last_written(self) -> float | None:
        """When the last output was journalled, epoch seconds."""
        value = self._one("SELECT max(written_at) FROM jobs WHERE state = 'done'")
        return None if value is None else float(value)

    def workers(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._all("SELECT * FROM workers ORDER BY worker")]

    def runs(self) -> list[dict[str, Any]]:
        """Every run of this folder, oldest first."""
        return [dict(row) for row in self._all("SELECT * FROM runs ORDER BY id")]

    def written_times(self) -> Iterator[float]:
        """When each output was journalled, epoch seconds, oldest first."""
        for row in self._stream("SELECT written_at FROM jobs WHERE state = 'done' AND written_at IS NOT NULL ORDER BY written_at", ()):
            yield float(row[0])

    def memory_rows(self) -> Iterator[tuple[float, int, int, int]]:
        """Memory over all runs: when, worker, resident bytes, device bytes, oldest first."""
        yield from (
            (float(row[0]), int(row[1]), int(row[2]), int(row[3]))
            for row in self._stream("SELECT at, worker, rss_bytes, device_bytes FROM memory ORDER BY at", ())
        )

    def done_since(self, when: float) -> int:
        return int(self._one("SELECT count(*) FROM jobs WHERE state = 'done' AND written_at >= ?", (when,)))

    def mean_output_bytes(self) -> float | None:
        """Mean size of the outputs so far; None before the first."""
        value = self._one("SELECT avg(size_bytes) FROM jobs WHERE state = 'done'")
        return None if value is None else float(value)
