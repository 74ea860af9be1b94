"""The journal: one row a job, what became of it, and what a resume needs. SQLite, one writer, readable while it is written.

Knows no processes and no devices. It is told what happened as event records. Order of truth: a picture's file is synced under
its name before its row says done, so a row never promises more than the disk holds.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.events import Event, JobFailed, LatentsSpooled, MemorySample, OutputDone
from batchgen.jobs import Job
from batchgen.journalfile import JournalDamagedError, JournalMode, connect, connect_to_read, journal_mode, patiently, set_aside, sqlite_errors
from batchgen.outputs.names import name_key, unique

STATES = ("pending", "running", "done", "failed", "filtered", "vanished")
MAX_ATTEMPTS = 2
_CHUNK = 500
_GAP_SECONDS = 0.005
_COUNTED = "CASE gone WHEN 1 THEN 'vanished' ELSE state END"


@dataclass(frozen=True, slots=True)
class Ingested:
    """What a manifest changed: jobs new to the journal, known ones still there, and known ones that the manifest no longer has."""

    added: int
    kept: int
    vanished: int
    returned: int = 0  # had vanished and are back
    recovered: int = 0  # new to this journal, their file found by its own metadata


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


class Journal:
    """Mutable; belongs to one thread of one process. `open` to write (holding the run's lock), `read` for everybody else."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, reader: bool = False) -> None:
        self._db = connection
        self._reader = reader
        # With a rollback journal a commit shuts readers out for as long as it lasts. One commit after the other would shut them out for
        # good, so the writer leaves gaps, longer than a waiting reader's naps.
        self._gap_seconds = 0.0 if reader or journal_mode(connection) == "wal" else _GAP_SECONDS
        self._free_at = 0.0
        self.path = path
        self.damaged: Path | None = None  # the file set aside because it was damaged
        self.run_id = 0

    @classmethod
    def open(cls, path: Path, *, mode: JournalMode | None = None) -> Journal:
        """To write. A damaged file is set aside (`damaged` names it) and an empty journal begun: fill it by `reconcile.recover`.

        Raises RefusedError for a newer schema, DiskError.
        """
        damaged = None
        try:
            connection = connect(path, mode=mode)
        except JournalDamagedError:
            damaged = set_aside(path)
            connection = connect(path, mode=mode)
        journal = cls(connection, path)
        journal.damaged = damaged
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """To read only, while a run may write. Raises RefusedError where there is none, JournalDamagedError."""
        return cls(connect_to_read(path), path, reader=True)

    def close(self) -> None:
        with sqlite_errors(self.path):
            self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with sqlite_errors(self.path):
            if (early := self._free_at - time.monotonic()) > 0:
                time.sleep(early)
            # IMMEDIATE: a reader that turns writer late cannot wait its turn and would fail at once.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._free_at = time.monotonic() + self._gap_seconds

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

    # --- the manifest's jobs ------------------------------------------------------------------------------------------

    def ingest(self, jobs: Iterable[Job], *, complete: bool = True) -> Ingested:
        """Takes over the manifest's jobs, streamed, in one transaction.

        A known job keeps its state, its path and a seed that was drawn for it; a new one never takes a path that any known job
        has; known jobs that do not come are vanished (with `complete` False, for a limited run, only left out). Raises
        ValueError for two jobs of one key.
        """
        added = kept = returned = recovered = 0
        stream = iter(jobs)
        with self._writing() as db:
            db.execute("CREATE TEMP TABLE IF NOT EXISTS seen (key TEXT PRIMARY KEY) WITHOUT ROWID")
            db.execute("DELETE FROM seen")
            while chunk := list(islice(stream, _CHUNK)):
                try:
                    db.executemany("INSERT INTO seen VALUES (?)", [(job.key,) for job in chunk])
                except sqlite3.IntegrityError as error:
                    raise ValueError("two jobs of the manifest have one identity") from error
                known = self._known_rows([job.key for job in chunk])
                for job in chunk:
                    row = known.get(job.key)
                    if row is None:
                        recovered += self._add(db, job)
                        added += 1
                    else:
                        self._keep(db, job, row)
                        kept += 1
                        returned += row["gone"] == 1
            mark = 1 if complete else 2
            vanished = db.execute(
                "UPDATE jobs SET gone = ? WHERE gone != ? AND key NOT IN (SELECT key FROM seen)", (mark, mark)
            ).rowcount
            db.execute("DELETE FROM seen")
        return Ingested(added, kept, vanished if complete else 0, returned, recovered)

    def _known_rows(self, keys: Sequence[str]) -> dict[str, sqlite3.Row]:
        marks = ",".join("?" * len(keys))
        rows = self._all(f"SELECT key, gone, output, seed, job FROM jobs WHERE key IN ({marks})", keys)  # noqa: S608 only question marks
        return {row["key"]: row for row in rows}

    def _add(self, db: sqlite3.Connection, job: Job) -> bool:
        found = db.execute("SELECT output, seed FROM found WHERE key = ?", (job.key,)).fetchone()
        if found is not None:
            # Made before this journal was begun: it keeps its path, and the noise it was drawn with.
            job = replace(job, output=found["output"])
            if job.seed_source == "drawn" and found["seed"] is not None:
                job = replace(job, seed=int(found["seed"]))
        else:
            job = replace(job, output=unique(job.output, self._taken))
        db.execute(
            "INSERT INTO jobs (key, idx, k, line, id, state, seed, output, name_key, job) VALUES (?, ?, ?, ?, ?, 'pending', ?, ?, ?, ?)",
            (job.key, job.index, job.k, job.row, job.id, str(job.seed), job.output, name_key(job.output), job.as_json()),
        )
        return found is not None

    def _taken(self, output: str) -> bool:
        """Is the path, as file systems compare names, another job's here or the place of a file found on disk?"""
        name = name_key(output)
        return bool(
            self._all("SELECT 1 FROM jobs WHERE name_key = ? UNION ALL SELECT 1 FROM found WHERE name_key = ? LIMIT 1", (name, name))
        )

    @staticmethod
    def _keep(db: sqlite3.Connection, job: Job, row: sqlite3.Row) -> None:
        seed = int(row["seed"]) if job.seed_source == "drawn" else job.seed
        text = replace(job, output=row["output"], seed=seed).as_json()
        if text != row["job"]:
            db.execute(
                "UPDATE jobs SET idx = ?, k = ?, line = ?, id = ?, job = ?, gone = 0 WHERE key = ?",
                (job.index, job.k, job.row, job.id, text, job.key),
            )
        elif row["gone"]:
            db.execute("UPDATE jobs SET gone = 0 WHERE key = ?", (job.key,))

    def set_skipped(self, rows: Iterable[tuple[int, str | None, str]]) -> None:
        """Rows that were not made into jobs (`--skip-invalid`): line, id, reason. Replaces what was there."""
        with self._writing() as db:
            db.execute("DELETE FROM skipped")
            db.executemany("INSERT INTO skipped VALUES (?, ?, ?)", rows)

    def skipped(self) -> list[tuple[int, str | None, str]]:
        return [(row[0], row[1], row[2]) for row in self._all("SELECT line, id, reason FROM skipped ORDER BY line")]

    def set_found(self, outputs: Iterable[tuple[str, str, str | None]]) -> None:
        """Outputs found on disk by their own metadata: key, path below outputs/, seed. The next `ingest` goes by them."""
        with self._writing() as db:
            db.executemany(
                "INSERT OR IGNORE INTO found VALUES (?, ?, ?, ?)", [(key, output, name_key(output), seed) for key, output, seed in outputs]
            )

    # --- work ---------------------------------------------------------------------------------------------------------

    def take(self, count: int, worker: int) -> tuple[int, list[Job], dict[str, str]]:
        """Marks up to `count` pending jobs as running and returns a window's number, the jobs, and the spooled latents of those that
        have some. Numbers go on from run to run: files of the spool are named by them.

        A job whose last attempt ended with its worker's death comes alone: dying twice, it is the cause.
        """
        with self._writing() as db:
            rows = db.execute(
                "SELECT key, job, attempts, spool FROM jobs WHERE state = 'pending' AND gone = 0 ORDER BY attempts, spool IS NULL, idx, k "
                "LIMIT ?", (count,),
            ).fetchall()
            fresh = [row for row in rows if row["attempts"] == 0]
            rows = fresh or rows[:1]
            db.executemany("UPDATE jobs SET state = 'running', worker = ? WHERE key = ?", [(worker, row["key"]) for row in rows])
            db.execute("INSERT INTO meta VALUES ('window', '0') ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1")
            number = int(db.execute("SELECT value FROM meta WHERE name = 'window'").fetchone()[0])
        return number, [Job.from_json(row["job"]) for row in rows], {row["key"]: row["spool"] for row in rows if row["spool"]}

    def record(self, events: Event | Iterable[Event]) -> None:
        """Writes what events say about jobs, in one transaction. Raises DiskError; then none of them is written."""
        batch = [event for event in ([events] if not isinstance(events, Iterable) else events) if type(event) in _RECORDED]
        if not batch:
            return
        now = time.time()
        with self._writing() as db:
            for event in batch:
                match event:
                    case OutputDone():
                        self._done(db, event, now)
                    case JobFailed():
                        self._failed(db, event)
                    case LatentsSpooled():
                        db.executemany(
                            "UPDATE jobs SET spool = ? WHERE key = ? AND state != 'done'", [(event.path, key) for key in event.keys]
                        )
                    case MemorySample():
                        db.execute(
                            "INSERT INTO memory SELECT ?, ?, ?, (SELECT pid FROM workers WHERE worker = ?), ?, ?, ?, ?",
                            (self.run_id, now, event.worker, event.worker, event.when, event.rss_bytes, event.device_bytes,
                             event.device_peak_bytes),
                        )

    @staticmethod
    def _done(db: sqlite3.Connection, event: OutputDone, now: float) -> None:
        db.execute(
            "UPDATE jobs SET state = 'done', output = ?, name_key = ?, size_bytes = ?, sha256 = ?, batch = ?, seconds = ?, flags = ?, "
            "settings = ?, written_at = ?, worker = ?, kind = NULL, stage = NULL, reason = NULL, spool = NULL WHERE key = ?",
            (event.path, name_key(event.path), event.size_bytes, event.sha256, event.batch, event.seconds, ",".join(event.flags),
             _beyond_job(event.settings), now, event.worker, event.key),
        )

    @staticmethod
    def _failed(db: sqlite3.Connection, event: JobFailed) -> None:
        state = "filtered" if event.kind == "filtered" else "failed"
        db.execute(
            "UPDATE jobs SET attempts = attempts + 1, kind = ?, stage = ?, reason = ?, worker = ?, "
            "state = CASE WHEN ? AND attempts + 1 < ? THEN 'pending' ELSE ? END WHERE key = ? AND state != 'done'",
            (event.kind, event.stage, event.reason, event.worker, event.retry, MAX_ATTEMPTS, state, event.key),
        )

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Running jobs go back to pending with no attempt counted: these, or all of them."""
        with self._writing() as db:
            if keys is None:
                db.execute("UPDATE jobs SET state = 'pending' WHERE state = 'running'")
            else:
                db.executemany("UPDATE jobs SET state = 'pending' WHERE state = 'running' AND key = ?", [(key,) for key in keys])

    def redo(self, keys: Iterable[str]) -> None:
        """Done jobs whose files are not what the journal says become pending again."""
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET state = 'pending', attempts = 0, size_bytes = NULL, sha256 = NULL, written_at = NULL WHERE key = ?",
                [(key,) for key in keys],
            )

    def absolve(self, keys: Iterable[str]) -> None:
        """Takes back the attempts counted against jobs that turned out not to be the cause."""
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET state = 'pending', attempts = 0 WHERE key = ? AND state IN ('pending', 'running', 'failed')",
                [(key,) for key in keys],
            )

    def retry_failed(self) -> int:
        """Failed jobs get their attempts back. Filtered ones do not: the same seed would be filtered again."""
        with self._writing() as db:
            return db.execute("UPDATE jobs SET state = 'pending', attempts = 0 WHERE state = 'failed' AND gone = 0").rowcount

    def drop_spool(self, paths: Iterable[str]) -> None:
        """These latents are gone or unreadable; their jobs are rendered from the start."""
        with self._writing() as db:
            db.executemany("UPDATE jobs SET spool = NULL WHERE spool = ?", [(path,) for path in paths])

    def spool_in_use(self) -> set[str]:
        rows = self._all("SELECT DISTINCT spool FROM jobs WHERE spool IS NOT NULL AND state IN ('pending', 'running')")
        return {row[0] for row in rows}

    # --- questions ----------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Jobs per state, every state named. Jobs left out by a limit are not counted."""
        rows = self._all(f"SELECT {_COUNTED} AS label, count(*) FROM jobs WHERE gone != 2 GROUP BY label")  # noqa: S608 a constant
        return dict.fromkeys(STATES, 0) | {row[0]: row[1] for row in rows}

    def pending(self) -> int:
        """How many jobs wait for a worker."""
        return int(self._one("SELECT count(*) FROM jobs WHERE state = 'pending' AND gone = 0"))

    def known(self, state: str, *, since: float | None = None) -> Iterator[Known]:
        """The manifest's jobs of one state, in its order; `since`: written at that time (epoch seconds) or later."""
        sql = "SELECT key, state, output, size_bytes, sha256, written_at FROM jobs WHERE state = ? AND gone = 0"
        values: list[object] = [state]
        if since is not None:
            sql += " AND written_at >= ?"
            values.append(since)
        yield from (Known(*row) for row in self._stream(f"{sql} ORDER BY idx, k", values))

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

    # --- the run ------------------------------------------------------------------------------------------------------

    def begin_run(self) -> bool:
        """Notes that a run begins. True if the one before ended in good order (or there was none)."""
        with self._writing() as db:
            last = db.execute("SELECT ended FROM runs ORDER BY id DESC LIMIT 1").fetchone()
            done = db.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone()[0]
            db.execute("DELETE FROM workers")
            self.run_id = int(
                db.execute(
                    "INSERT INTO runs (started, host, pid, done_before) VALUES (?, ?, ?, ?)",
                    (time.time(), socket.gethostname(), os.getpid(), done),
                ).lastrowid or 0
            )
        return last is None or last["ended"] is not None

    def end_run(self, stopped_by: str | None) -> None:
        with self._writing() as db:
            db.execute("UPDATE runs SET ended = ?, stopped_by = ? WHERE id = ?", (time.time(), stopped_by, self.run_id))

    def last_written(self) -> float | None:
        """When the last output was journalled, epoch seconds."""
        value = self._one("SELECT max(written_at) FROM jobs WHERE state = 'done'")
        return None if value is None else float(value)

    def set_worker(self, worker: int, **fields: object) -> None:
        """Notes what a worker is doing, for `status`. Fields are the columns of the table `workers`."""
        names = list(fields)
        updates = ", ".join(f"{name} = excluded.{name}" for name in names)
        columns, marks = ", ".join(["worker", *names]), ", ".join("?" * (len(names) + 1))
        with self._writing() as db:
            db.execute(
                f"INSERT INTO workers ({columns}) VALUES ({marks}) ON CONFLICT (worker) DO UPDATE SET {updates}",  # noqa: S608 our own names
                (worker, *fields.values()),
            )

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
        """Memory samples of all runs in order: when (epoch seconds), worker, resident bytes, device bytes."""
        yield from (tuple(row) for row in self._stream("SELECT at, worker, rss_bytes, device_bytes FROM memory ORDER BY rowid", ()))

    def done_since(self, when: float) -> int:
        return int(self._one("SELECT count(*) FROM jobs WHERE state = 'done' AND written_at >= ?", (when,)))

    def written_times(self) -> Iterator[float]:
        """When each output was journalled, epoch seconds, oldest first."""
        yield from (float(row[0]) for row in self._stream("SELECT written_at FROM jobs WHERE state = 'done' ORDER BY written_at", ()))

    def memory_rows(self) -> Iterator[tuple[float, int, int, int]]:
        """Memory over all runs: when, worker, resident bytes, device bytes, oldest first."""
        yield from (
            (float(row[0]), int(row[1]), int(row[2]), int(row[3]))
            for row in self._stream("SELECT at, worker, rss_bytes, device_bytes FROM memory ORDER BY at", ())
        )

    def mean_output_bytes(self) -> float | None:
        """Mean size of the outputs so far; None before the first."""
        value = self._one("SELECT avg(size_bytes) FROM jobs WHERE state = 'done'")
        return None if value is None else float(value)


_RECORDED = (OutputDone, JobFailed, LatentsSpooled, MemorySample)


def _beyond_job(settings: str) -> str | None:
    """The settings text without what the job's own row holds, so that a long prompt is not kept twice."""
    try:
        record: Mapping[str, Any] = json.loads(settings) if settings else {}
    except ValueError:
        return None
    own = {"prompt", "negative_prompt", "key", "id", "index", "row", "k", "image", "mask", "last_image", "batch", "flags"}
    kept = {name: value for name, value in record.items() if name not in own}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) if kept else None
