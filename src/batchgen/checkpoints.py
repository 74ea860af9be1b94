"""Copies of a run's own records beside its outputs in a store: run.json, the journal, tables, report. From time to time and at the end.

The state folder stays the truth; the copies let a lost one be taken up again, on another machine too.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

from batchgen.errors import BatchgenError
from batchgen.outputs.files import make_folders
from batchgen.outputs.store import Store
from batchgen.runfolder import RunFolder
from batchgen.shards import Shard

EVERY_SECONDS = 300.0


def records_below(shard: Shard | None) -> str:
    """Where the records of a run lie below the address, a prefix of names. Shards share an address and keep theirs apart."""
    return "" if shard is None else f"shards/{shard.label}/"


class Checkpoints:
    """Mutable; of one run. `maybe` is cheap and may be called at every event of a window's end."""

    def __init__(self, folder: RunFolder, store: Store, *, below: str = "", every_seconds: float = EVERY_SECONDS) -> None:
        """`below`: see `records_below`."""
        self._folder, self._store, self._below = folder, store, below
        self._every = every_seconds
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self.failed: str | None = None  # why the last one did not come through

    def maybe(self) -> None:
        """Begins one beside the run's work, if it is time and none is under way. What fails is tried again next time."""
        if time.monotonic() - self._last < self._every or (self._thread is not None and self._thread.is_alive()):
            return
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._quietly, name="checkpoint", daemon=True)
        self._thread.start()

    def _quietly(self) -> None:
        try:
            self.upload()
            self.failed = None
        except (BatchgenError, OSError, sqlite3.Error) as error:
            self.failed = str(error)

    def finish(self) -> None:
        """The last one, with the tables. Raises StoreError."""
        if self._thread is not None:
            self._thread.join()
        self.upload()

    def upload(self) -> None:
        """Puts every record once. Raises StoreError."""
        folder = self._folder
        with tempfile.TemporaryDirectory(prefix="batchgen-") as temp:
            copy = Path(temp) / folder.journal.name
            if folder.journal.exists():
                with (
                    closing(sqlite3.connect(f"{folder.journal.as_uri()}?mode=ro", uri=True, timeout=60)) as source,
                    closing(sqlite3.connect(copy)) as goal,
                ):
                    source.backup(goal)
                self._store.put(self._below + folder.journal.name, copy)
        for path in (folder.run_json, folder.report, *sorted(folder.tables.glob("*"))):
            if path.is_file() and not path.name.startswith("."):
                self._store.put(self._below + path.relative_to(folder.path).as_posix(), path)


def take_up(folder: RunFolder, store: Store, below: str = "") -> bool:
    """Fetches the records of a run that another state folder began, into one that is new. True if there were any. Raises StoreError.

    `below`: see `records_below`.
    """
    if folder.run_json.exists() or folder.journal.exists():
        return False
    make_folders(folder.path)
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".batchgen-") as temp:
        record, journal = Path(temp) / "run.json", Path(temp) / "journal.sqlite"
        if not store.get(below + folder.run_json.name, record):
            return False
        if store.get(below + folder.journal.name, journal):
            journal.rename(folder.journal)
        record.rename(folder.run_json)  # last: its presence says that all is here
    return True
