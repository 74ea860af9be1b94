"""Questions to the journal: what became of the jobs. For the run that writes it and for those that only look.

Knows how to wait for a turn beside a busy writer, and holds no lock longer than one answer takes.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from batchgen.jobs import Job
from batchgen.journalfile import patiently, sqlite_errors
from batchgen.outputs.names import name_key

STATES = ("pending", "running", "done", "failed", "filtered", "vanished")
_CHUNK = 500
_ROWS_NAMED = 20
_GROUPS_WITH_EXAMPLES = 200
# flags are joined by commas; adopted outputs were found on the disk and not made by the run that journalled them
_MADE = "state = 'done' AND ',' || coalesce(flags, '') || ',' NOT LIKE '%,adopted,%'"
_COUNTED = "CASE gone WHEN 1 THEN 'vanished' ELSE state END"


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Jobs that failed for one reason. `examples`: ids of up to three of them; `rows`: the manifest's lines of up to twenty."""

    state: str
    kind: str
    stage: str
    reason: str
    count: int
    examples: tuple[str, ...]
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """A job's row as a resume checks it."""

    key: str
    state: str
    output: str
    size_bytes: int | None
    sha256: str | None
    written_at: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """A worker's batch of a stage (`kind` "batch"), or a component's load or move onto the device ("load", "move")."""

    run: int
    at: float  # when it ended, epoch seconds
    worker: int
    kind: str
    name: str  # the stage, or the component
    shape: str | None
    window: int | None
    seconds: float
    computed: int  # rows of the batch
    jobs: int  # that it served


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

    def finished(self) -> Iterator[Known]:
        """As `known("done")`, then those that the last run's limit left out: what was rendered of the manifest. May be read slowly."""
        names = ("key", "state", "output", "size_bytes", "sha256", "written_at")
        yield from (Known(*(row[name] for name in names)) for row in self._pages("state = 'done' AND gone != 1"))

    def left_behind(self) -> Iterator[str]:
        """Paths below outputs/ that belong to rows no longer in the manifest: of vanished jobs, and of outputs that a new journal found
        by their own metadata and no job took over. Not of those that failed: they have no file."""
        yield from (row[0] for row in self._stream("SELECT output FROM jobs WHERE gone = 1 AND state NOT IN ('failed', 'filtered')", ()))
        if self._saw_all:
            yield from self._never_taken_over()

    def unlisted(self) -> Iterator[str]:
        """Paths of outputs that a new journal found and no job took over, while a limit keeps it from knowing whether their rows remain."""
        if not self._saw_all:
            yield from self._never_taken_over()

    def _never_taken_over(self) -> Iterator[str]:
        yield from (row[0] for row in self._stream("SELECT output FROM found WHERE key NOT IN (SELECT key FROM jobs)", ()))

    @property
    def _saw_all(self) -> bool:
        """Whether the last ingest read its manifest to the end."""
        rows = self._all("SELECT value FROM meta WHERE name = 'complete'")
        return not rows or rows[0][0] != "0"

    def state_under(self, output: str) -> str | None:
        """The state of the manifest's job whose output has this path, as file systems compare names; None where none has."""
        rows = self._all("SELECT state FROM jobs WHERE name_key = ? AND gone != 1", (name_key(output),))
        return rows[0][0] if rows else None

    def job(self, key: str) -> Job:
        """Raises KeyError."""
        rows = self._all("SELECT job FROM jobs WHERE key = ?", (key,))
        if not rows:
            raise KeyError(key)
        return Job.from_json(rows[0][0])

    def attempts(self, key: str) -> int:
        """How many attempts were counted against the job. Raises KeyError."""
        rows = self._all("SELECT attempts FROM jobs WHERE key = ?", (key,))
        if not rows:
            raise KeyError(key)
        return int(rows[0][0])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every job as a plain dict for tables, in the manifest's order: its fields, what became of it, then the manifest's other columns.

        A manifest column named like one of ours comes as `manifest_NAME`.
        """
        for row in self._pages("gone != 2"):
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

    def _pages(self, which: str) -> Iterator[sqlite3.Row]:
        """Rows of a condition, page by page: a reader that takes its time must not hold a lock that the run's writer waits for."""
        last: tuple[object, ...] = (-1, -1, -1, "")
        while True:
            rows = self._all(
                f"SELECT * FROM jobs WHERE (gone, idx, k, key) > (?, ?, ?, ?) AND {which} ORDER BY gone, idx, k, key LIMIT {_CHUNK}",  # noqa: S608
                last,
            )
            if not rows:
                return
            yield from rows
            last = tuple(rows[-1][name] for name in ("gone", "idx", "k", "key"))

    def raw_rows(self) -> Iterator[sqlite3.Row]:
        """Every job as its row stands, page by page, those left out by a limit too: for taking a journal over into another."""
        last = ""
        while rows := self._all(f"SELECT * FROM jobs WHERE key > ? ORDER BY key LIMIT {_CHUNK}", (last,)):  # noqa: S608 a constant
            yield from rows
            last = rows[-1]["key"]

    def rows_of_run(self, table: str, run: int) -> Iterator[dict[str, Any]]:
        """What a run left in a table of measurements (`memory`, `work`); nothing where the journal is older than the table."""
        if self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)):
            yield from (dict(row) for row in self._stream(f"SELECT * FROM {table} WHERE run = ?", (run,)))  # noqa: S608 our own names

    def failures_by_reason(self) -> list[FailureGroup]:
        """Failed and filtered jobs by reason, the commonest first."""
        groups = self._all(
            "SELECT state, kind, stage, reason, count(*) AS n, min(idx) FROM jobs WHERE state IN ('failed', 'filtered') AND gone = 0 "
            "GROUP BY state, kind, stage, reason ORDER BY n DESC, min(idx)"
        )
        found = []
        for number, row in enumerate(groups):
            # each answer is a look through all failed jobs: a night of as many reasons as jobs must not take the square of it
            examples = [] if number >= _GROUPS_WITH_EXAMPLES else self._all(
                "SELECT id, line FROM jobs WHERE state = ? AND gone = 0 AND kind IS ? AND stage IS ? AND reason IS ? ORDER BY idx, k "
                "LIMIT ?",
                (row["state"], row["kind"], row["stage"], row["reason"], _ROWS_NAMED),
            )
            texts = (row["state"], row["kind"] or "", row["stage"] or "", row["reason"] or "")
            lines = tuple(dict.fromkeys(example[1] for example in examples))
            found.append(FailureGroup(*texts, row["n"], tuple(example[0] for example in examples[:3]), lines))
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

    def run_spans(self) -> list[tuple[float, float]]:
        """Beginning and end of every run, oldest first; one without an end in good order ends with the last that is known."""
        found = []
        runs = self._all("SELECT id, started, ended FROM runs ORDER BY id")
        for number, row in enumerate(runs):
            later = runs[number + 1]["started"] if number + 1 < len(runs) else float("inf")
            end = row["ended"]
            if end is None:
                seen = (
                    self._one("SELECT max(written_at) FROM jobs WHERE state = 'done' AND written_at >= ? AND written_at < ?",
                              (row["started"], later)),
                    self._one("SELECT max(at) FROM memory WHERE run = ?", (row["id"],)),
                )
                end = max((float(when) for when in seen if when is not None), default=row["started"])
            found.append((float(row["started"]), max(float(row["started"]), float(end))))
        return found

    def written_times(self) -> Iterator[float]:
        """When each output that a run made was journalled, epoch seconds, oldest first. Adopted ones are left out."""
        last = (-1.0, -1)
        sql = f"SELECT written_at, rowid FROM jobs WHERE {_MADE} AND (written_at, rowid) > (?, ?) ORDER BY written_at, rowid LIMIT ?"  # noqa: S608
        while rows := self._all(sql, (*last, _CHUNK)):
            yield from (float(row[0]) for row in rows)
            last = (float(rows[-1][0]), int(rows[-1][1]))

    def work_rows(self) -> Iterator[Work]:
        """What workers did, by when it ended. Nothing in a journal of version 1, which a report reads as it is."""
        if self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'work'"):
            yield from (Work(*row) for row in self._by_rowid("run, at, worker, kind, name, shape, window, seconds, computed, jobs", "work"))

    def memory_rows(self) -> Iterator[tuple[float, int, int, int]]:
        """Memory over all runs: when, worker, resident bytes, device bytes, oldest first."""
        for row in self._by_rowid("at, worker, rss_bytes, device_bytes", "memory"):
            yield float(row[0]), int(row[1]), int(row[2]), int(row[3])

    def _by_rowid(self, columns: str, table: str) -> Iterator[tuple[Any, ...]]:
        """A table that only grows, in the order in which it was written, page by page as `_pages`."""
        last = 0
        sql = f"SELECT {columns}, rowid FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT {_CHUNK}"  # noqa: S608 our own names
        while rows := self._all(sql, (last,)):
            yield from (tuple(row)[:-1] for row in rows)
            last = rows[-1]["rowid"]

    def made_since(self, when: float, until: float = math.inf) -> int:
        """How many outputs were rendered since, up to `until` where the clock was set back; adopted ones are not counted."""
        return int(self._one(f"SELECT count(*) FROM jobs WHERE {_MADE} AND written_at BETWEEN ? AND ?", (when, until)))  # noqa: S608 a constant

    def mean_output_bytes(self) -> float | None:
        """Mean size of the outputs so far; None before the first."""
        value = self._one("SELECT avg(size_bytes) FROM jobs WHERE state = 'done'")
        return None if value is None else float(value)
