"""The journal's SQLite file: how it is opened, which journal mode it takes, its schema, and whether it is damaged.

Knows no jobs. One process writes (the run's supervisor, which holds the run's lock); any number read meanwhile.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from batchgen.errors import RefusedError, RunStoppedError
from batchgen.outputs.files import disk_error

JournalMode = Literal["wal", "rollback"]
T = TypeVar("T")

SCHEMA_VERSION = 2
BUSY_SECONDS = 60.0
_APPLICATION_ID = 0x62676A31  # "bgj1"
# WAL keeps an index in shared memory, which two machines cannot share; POSIX locks are all that these file systems offer.
_NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "smb2", "ncpfs", "afs", "auristorfs", "lustre", "gpfs", "mmfs", "beegfs", "ceph", "pvfs2",
    "orangefs", "panfs", "9p", "glusterfs", "gfs", "gfs2", "ocfs2", "coda", "davfs", "vboxsf", "vmhgfs", "prl_fs", "virtiofs", "fuse",
})  # fmt: skip

# What workers did and when, one row a stage's batch, a component's load or its move in: the report's timeline. Since version 2.
_WORK = """
CREATE TABLE work (
    run INTEGER NOT NULL, at REAL NOT NULL,     -- when it ended
    worker INTEGER NOT NULL,
    kind TEXT NOT NULL,                         -- batch, load, move
    name TEXT NOT NULL,                         -- the stage, or the component
    shape TEXT, window INTEGER,                 -- of a batch
    seconds REAL NOT NULL,
    computed INTEGER NOT NULL DEFAULT 0,        -- rows of a batch
    jobs INTEGER NOT NULL DEFAULT 0             -- that it served
);
"""
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (
    key TEXT PRIMARY KEY,
    idx INTEGER NOT NULL, k INTEGER NOT NULL, line INTEGER NOT NULL, id TEXT NOT NULL,
    state TEXT NOT NULL,                -- pending, running, done, failed, filtered
    gone INTEGER NOT NULL DEFAULT 0,    -- 0 in the manifest, 1 vanished from it, 2 left out by a limit
    attempts INTEGER NOT NULL DEFAULT 0,
    seed TEXT NOT NULL,                 -- decimal: 2^64-1 fits no SQLite integer
    output TEXT NOT NULL, name_key TEXT NOT NULL,
    job TEXT NOT NULL,                  -- the whole job as JSON
    size_bytes INTEGER, sha256 TEXT, batch INTEGER, seconds REAL, flags TEXT, written_at REAL,
    settings TEXT,                      -- what the file's metadata says beyond the job, as JSON
    kind TEXT, stage TEXT, reason TEXT, -- of the last failure
    spool TEXT,                         -- denoised latents below the run folder
    worker INTEGER
);
CREATE UNIQUE INDEX jobs_name ON jobs (name_key);
CREATE INDEX jobs_pending ON jobs (attempts, spool IS NULL, idx, k) WHERE state = 'pending' AND gone = 0;
CREATE INDEX jobs_order ON jobs (gone, idx, k, key);
CREATE INDEX jobs_state ON jobs (gone, state);
CREATE INDEX jobs_written ON jobs (written_at) WHERE state = 'done';
CREATE INDEX jobs_spool ON jobs (spool) WHERE spool IS NOT NULL;
CREATE TABLE skipped (line INTEGER NOT NULL, id TEXT, reason TEXT NOT NULL);
CREATE TABLE found (key TEXT PRIMARY KEY, output TEXT NOT NULL, name_key TEXT NOT NULL, seed TEXT) WITHOUT ROWID;
CREATE INDEX found_name ON found (name_key);
CREATE TABLE workers (
    worker INTEGER PRIMARY KEY, pid INTEGER, device TEXT, state TEXT NOT NULL, since REAL NOT NULL, window INTEGER, stage TEXT,
    jobs INTEGER NOT NULL DEFAULT 0, rss_bytes INTEGER, device_bytes INTEGER, device_peak_bytes INTEGER,
    slope_bytes_per_hour REAL, deaths INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, started REAL NOT NULL, ended REAL, stopped_by TEXT, host TEXT, pid INTEGER, done_before INTEGER NOT NULL
);
CREATE TABLE memory (
    run INTEGER NOT NULL, at REAL NOT NULL, worker INTEGER NOT NULL, pid INTEGER, stage TEXT NOT NULL,
    rss_bytes INTEGER NOT NULL, device_bytes INTEGER NOT NULL, device_peak_bytes INTEGER NOT NULL
);
""" + _WORK

# SQL from version N to N+1. A journal is moved on inside one transaction, so a kill leaves the old version.
_MIGRATIONS: dict[int, str] = {1: _WORK}


class JournalDamagedError(RunStoppedError):
    """The file is no whole SQLite database. What it held is in the outputs' own metadata."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="Run the same command again: the journal is set aside, finished outputs are found by themselves.")


def filesystem_type(path: Path) -> str | None:
    """Type of the file system that holds `path` ("ext4", "nfs4", "fuse.sshfs"), from Linux's mount table; None if unknown."""
    best, kind = "", None
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            mount = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, fields[fields.index("-") + 1]
    return kind


def mode_for(kind: str | None, *, platform: str = sys.platform) -> JournalMode:
    """WAL where all processes share one machine's memory; the rollback journal on network file systems and where nothing is known."""
    if kind is None:
        return "wal" if platform == "darwin" else "rollback"
    return "rollback" if kind in _NETWORK or kind.split(".")[0] in _NETWORK else "wal"


def connect(path: Path, *, mode: JournalMode | None = None) -> sqlite3.Connection:
    """Opens the journal to write, making or migrating it. Raises JournalDamagedError, RefusedError (a newer schema) or DiskError."""
    fresh = not path.exists() or path.stat().st_size == 0
    with sqlite_errors(path):
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            if not fresh:
                _check(connection, path)
            _set_mode(connection, mode or mode_for(filesystem_type(path)))
            _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    connection.row_factory = sqlite3.Row
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Opens the journal to read, also while a run writes it. Raises RefusedError where there is none, JournalDamagedError."""
    if not path.exists():
        raise RefusedError(f"no journal at {path}", hint="Name a folder that `batchgen run` has begun.")
    with sqlite_errors(path):
        for way in ("mode=ro", "mode=rw", *_unchanging(path)):
            attempt = f"{path.absolute().as_uri()}?{way}"
            connection = sqlite3.connect(attempt, uri=True, timeout=0, isolation_level=None)
            try:
                version = int(patiently(lambda: connection.execute("PRAGMA user_version").fetchone()[0]))  # noqa: B023 called at once
            except sqlite3.OperationalError:
                # A read-only connection cannot roll back what a killed writer left: the second way can. Read-only media need the third.
                connection.close()
                continue
            if version > SCHEMA_VERSION:
                connection.close()
                raise _newer(path, version)
            if version == 0:
                connection.close()
                raise RefusedError(f"the journal {path} is only being made", hint="The run has just begun: look again in a moment.")
            connection.row_factory = sqlite3.Row
            return connection
    raise RefusedError(f"the journal {path} cannot be opened", hint="Check that you may read the folder and its files.")


def _unchanging(path: Path) -> tuple[str, ...]:
    """The way to read a journal where nothing can be written beside it: only if nothing beside it is waiting to be merged."""
    waiting = any(path.with_name(path.name + tail).exists() for tail in ("-wal", "-journal"))
    return () if waiting else ("mode=ro&immutable=1",)


def patiently(ask: Callable[[], T], seconds: float = BUSY_SECONDS) -> T:
    """A reader's way to wait for its turn: often and shortly.

    SQLite's own waiting grows to a tenth of a second between tries, and misses the gaps between the commits of a busy writer with a
    rollback journal again and again.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except sqlite3.OperationalError as error:
            if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise JournalDamagedError(f"{path}: {verdict}")
    # A last page that is cut is read as if zeros followed, and found whole: only the file's length tells.
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    pages, page_bytes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    if path.stat().st_size < pages * page_bytes:
        raise JournalDamagedError(f"{path}: cut off")
    kind = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if kind != _APPLICATION_ID and tables:
        raise JournalDamagedError(f"{path}: not a journal of batchgen")


def _set_mode(connection: sqlite3.Connection, mode: JournalMode) -> None:
    if mode == "wal":
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit lost to a power cut costs nothing: its picture is adopted again from its own metadata.
        connection.execute("PRAGMA synchronous = NORMAL")
    else:
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")


def journal_mode(connection: sqlite3.Connection) -> JournalMode:
    """The mode in use, which is not always the one asked for."""
    return "wal" if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal" else "rollback"


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _newer(path: Path, version: int) -> RefusedError:
    return RefusedError(
        f"the journal {path} has schema version {version}; this batchgen knows {SCHEMA_VERSION}",
        hint="Use the newer batchgen that began the run, or start another folder with --new.",
    )


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection)
    if version > SCHEMA_VERSION:
        raise _newer(path, version)
    if version == SCHEMA_VERSION:
        return
    statements = [_SCHEMA] if version == 0 else [_MIGRATIONS[step] for step in range(version, SCHEMA_VERSION)]
    script = "\n".join(statements)
    connection.executescript(
        f"BEGIN IMMEDIATE;\n{script}\nPRAGMA application_id = {_APPLICATION_ID};\nPRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;"
    )


def set_aside(path: Path) -> Path:
    """Renames a damaged journal (and what belongs to it) so that a new one can be made. Returns the new name."""
    stem = f"{path.stem}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    target = path.with_name(f"{stem}{path.suffix}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{stem}-{number}{path.suffix}")
    path.rename(target)
    for tail in ("-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + tail).rename(target.with_name(target.name + tail))
    return target


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ours: a full or read-only disk stops the run, a damaged file can be recovered."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise JournalDamagedError(f"{path}: {error}") from error
        cause = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS, sqlite3.SQLITE_IOERR: errno.EIO}.get(code)
        if cause is None and code == sqlite3.SQLITE_CANTOPEN:
            cause = _why_not_open(path)
        if cause is None and code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RunStoppedError(f"the journal {path} cannot be used: {error}", hint="Is another program holding it open?") from error
        if cause is None:
            raise
        stopping = disk_error(OSError(cause, str(error)), path)
        if stopping is None:
            raise
        raise stopping from error
    except OSError as error:
        stopping = disk_error(error, path)
        if stopping is None:
            raise
        raise stopping from error


def _why_not_open(path: Path) -> int | None:
    try:
        facts = os.statvfs(path.parent)
    except OSError:
        return None
    if facts.f_flag & os.ST_RDONLY:
        return errno.EROFS
    if not os.access(path.parent, os.W_OK):
        return errno.EACCES
    return errno.ENOSPC if facts.f_bavail == 0 or (facts.f_files and not facts.f_favail) else None
