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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from batchgen.events import ComponentLoaded, ComponentMoved, Event, JobFailed, LatentsSpooled, MemorySample, OutputDone, StageBatchDone
from batchgen.jobs import Job
from batchgen.journalfile import JournalDamagedError, JournalMode, connect, connect_to_read, journal_mode, set_aside, sqlite_errors
from batchgen.journalreader import STATES, FailureGroup, JournalReader, Known
from batchgen.outputs.names import name_key, unique

__all__ = ["MAX_ATTEMPTS", "STATES", "FailureGroup", "Ingested", "Journal", "Known"]

MAX_ATTEMPTS = 2
Choose = Callable[[Sequence[Job], bool], list[Job]]  # of jobs in their order, and whether the first has spooled latents
_CHUNK = 500
_GAP_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Ingested:
    """What a manifest changed: jobs new to the journal, known ones still there, and known ones that the manifest no longer has."""

    added: int
    kept: int
    vanished: int
    returned: int = 0  # had vanished and are back
    recovered: int = 0  # new to this journal, their file found by its own metadata


class Journal(JournalReader):
    """Mutable; belongs to one thread of one process. `open` to write (holding the run's lock), `read` for everybody else."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, reader: bool = False) -> None:
        super().__init__(connection, path, reader=reader)
        # With a rollback journal a commit shuts readers out for as long as it lasts. One commit after the other would shut them out for
        # good, so the writer leaves gaps, longer than a waiting reader's naps.
        self._gap_seconds = 0.0 if reader or journal_mode(connection) == "wal" else _GAP_SECONDS
        self._free_at = 0.0
        self.damaged: Path | None = None  # the file set aside because it was damaged
        self.run_id = 0

    @classmethod
    def open(cls, path: Path, *, mode: JournalMode | None = None) -> Self:
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
        """The writer leaves one file: a journal that only readers open would keep SQLite's other two beside it for good."""
        if not self._reader:
            with suppress(sqlite3.Error):  # somebody is reading: the files stay, and the next run clears them away
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA journal_mode = DELETE")
        super().close()

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

    # --- the manifest's jobs ------------------------------------------------------------------------------------------

    def ingest(self, jobs: Iterable[Job], *, complete: bool = True, mark: str | None = None) -> Ingested:
        """Takes over the manifest's jobs, streamed, in one transaction.

        `mark` stands for the manifest's content and all that jobs are made from: where the last ingest had the same one, `jobs` is not
        looked at, so that a resume costs what is left and not what there was.

        A known job keeps its state, its path and a seed that was drawn for it; a new one never takes a path that any known job
        has; known jobs that do not come are vanished (with `complete` False, for a limited run, only left out). Raises
        ValueError for two jobs of one key.
        """
        if mark is not None and mark == self.mark:
            return Ingested(0, int(self._one("SELECT count(*) FROM jobs WHERE gone = 0")), 0)
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
            missed = "gone != 1" if complete else "gone = 0"  # what had vanished is not back because it was not looked for
            vanished = db.execute(
                f"UPDATE jobs SET gone = ? WHERE {missed} AND key NOT IN (SELECT key FROM seen)", (1 if complete else 2,)  # noqa: S608
            ).rowcount
            db.execute("DELETE FROM seen")
            db.execute("INSERT OR REPLACE INTO meta VALUES ('complete', ?)", (str(int(complete)),))
            db.execute("INSERT OR REPLACE INTO meta VALUES ('mark', ?)", (mark or "",))
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

    def set_found(self, outputs: Iterable[tuple[str, str, str | None]]) -> None:
        """Outputs found on disk by their own metadata: key, path below outputs/, seed. The next `ingest` goes by them."""
        with self._writing() as db:
            db.executemany(
                "INSERT OR IGNORE INTO found VALUES (?, ?, ?, ?)", [(key, output, name_key(output), seed) for key, output, seed in outputs]
            )

    # --- work ---------------------------------------------------------------------------------------------------------

    def take(self, count: int, worker: int, *, choose: Choose | None = None) -> tuple[int, list[Job], dict[str, str]]:
        """Marks up to `count` pending jobs as running and returns a window's number, the jobs, and the spooled latents of those that
        have some. Numbers go on from run to run: files of the spool are named by them. `choose` takes some of those `count`, given
        them and whether the first has latents.

        A job whose last attempt ended with its worker's death comes alone: dying twice, it is the cause.
        """
        with self._writing() as db:
            rows = db.execute(
                "SELECT key, job, attempts, spool FROM jobs WHERE state = 'pending' AND gone = 0 ORDER BY attempts, spool IS NULL, idx, k "
                "LIMIT ?", (count,),
            ).fetchall()
            fresh = [row for row in rows if row["attempts"] == 0]
            rows = fresh or rows[:1]
            jobs = [Job.from_json(row["job"]) for row in rows]
            if choose is not None and rows:
                jobs = choose(jobs, rows[0]["spool"] is not None)
            db.executemany("UPDATE jobs SET state = 'running', worker = ? WHERE key = ?", [(worker, job.key) for job in jobs])
            db.execute("INSERT INTO meta VALUES ('window', '0') ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1")
            number = int(db.execute("SELECT value FROM meta WHERE name = 'window'").fetchone()[0])
        spooled = {row["key"]: row["spool"] for row in rows if row["spool"]}
        return number, jobs, {job.key: spooled[job.key] for job in jobs if job.key in spooled}

    def record(self, events: Event | Iterable[Event]) -> None:
        """Writes what events say about jobs, in one transaction. Raises DiskError; then none of them is written."""
        batch = [event for event in ([events] if not isinstance(events, Iterable) else events) if _tells(event)]
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
                    case StageBatchDone() | ComponentLoaded() | ComponentMoved():
                        db.execute("INSERT INTO work VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (self.run_id, now, *_work(event)))

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

    def forgive(self, keys: Iterable[str]) -> None:
        """Like `absolve` for jobs that were blamed on workers' deaths; one that a worker has in hand stays with it."""
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET attempts = 0, state = CASE state WHEN 'failed' THEN 'pending' ELSE state END WHERE key = ? "
                "AND (state IN ('pending', 'running') OR (state = 'failed' AND kind IN ('worker-died', 'timeout')))",
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


_RECORDED = (OutputDone, JobFailed, LatentsSpooled, MemorySample, StageBatchDone, ComponentLoaded, ComponentMoved)
_Work = StageBatchDone | ComponentLoaded | ComponentMoved


def _tells(event: Event) -> bool:
    """Whether the event leaves something in the journal. Weights that go out copy nothing and take no time."""
    return type(event) in _RECORDED and not (isinstance(event, ComponentMoved) and event.direction == "out")


def _work(event: _Work) -> tuple[object, ...]:
    """The columns of `work` from `worker` on."""
    match event:
        case StageBatchDone():
            return (event.worker, "batch", event.stage, event.shape, event.window, event.seconds, event.size, len(event.keys))
        case ComponentLoaded():
            return (event.worker, "load", event.component, None, None, event.seconds, 0, 0)
        case ComponentMoved():
            return (event.worker, "move", event.component, None, None, event.seconds, 0, 0)


def _beyond_job(settings: str) -> str | None:
    """The settings text without what the job's own row holds, so that a long prompt is not kept twice."""
    try:
        record: Mapping[str, Any] = json.loads(settings) if settings else {}
    except ValueError:
        return None
    own = {"prompt", "negative_prompt", "key", "id", "index", "row", "k", "image", "mask", "last_image", "batch", "flags"}
    kept = {name: value for name, value in record.items() if name not in own}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")) if kept else None
