"""Brings finished files from the state folder to the store, and says what stands in the store under a job's name.

The file is written whole on the disk first, put, and removed here when the store has answered: only then may the job be called done.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from batchgen.events import JobFailed, OutputDone
from batchgen.outputs.files import measure
from batchgen.outputs.store import Store
from batchgen.outputs.thumbnails import Thumbnails
from batchgen.outputs.whole import Verdict, judge

OUTPUTS = "outputs"  # below the place, as in a run folder


def remote_name(output: str) -> str:
    """Where the output `output` (a path below outputs/) lies below the store's place."""
    return f"{OUTPUTS}/{output}"


class Delivery:
    """Of one run. Safe to use from several threads."""

    def __init__(self, store: Store, folder: Path, *, overwrite: bool = False) -> None:
        """`folder`: where files are written before they go, RUN/outputs."""
        self.store = store
        self.folder = folder
        self._overwrite = overwrite
        # a worker on another machine writes its files into a folder of the same name that is not the run's state
        self._thumbnails = Thumbnails(folder.parent / "thumbs") if (folder.parent / "run.lock").exists() else None

    def staged(self, event: OutputDone) -> bool:
        """Is the file still here?"""
        return (self.folder / event.path).is_file()

    def send(self, event: OutputDone) -> OutputDone | JobFailed:
        """Puts a job's finished file and removes it here; what became of the job is returned. Raises StoreError; then the file stays.

        What stands under its name already is adopted where it is this job's, and never written over where it is not.
        """
        local, name = self.folder / event.path, remote_name(event.path)
        if self._thumbnails is not None:
            self._thumbnails.keep(local, event.key)
        verdict, there = self.judge(event.path, event.key)
        if verdict == "ours" and there is not None:
            local.unlink(missing_ok=True)
            return event if there.sha256 == event.sha256 else replace(there, worker=event.worker)
        if verdict == "foreign" and not self._overwrite:
            reason = f"{self.store.shown}/{name} exists and is not this job's output"
            return JobFailed(event.worker, event.key, "error", "write", reason)
        self.store.put(name, local, key=event.key, sha256=event.sha256)
        local.unlink(missing_ok=True)
        return event

    def judge(self, output: str, key: str) -> tuple[Verdict, OutputDone | None]:
        """What stands in the store under an output's name, and its event where it is this job's. Raises StoreError.

        The uploader's notes beside the object answer where the store keeps them; else the object is fetched and looked into.
        """
        found = self.store.stat(remote_name(output))
        if found is None:
            return "absent", None
        if found.key is not None and found.sha256 is not None:
            if found.key != key:
                return "foreign", None
            return "ours", OutputDone(-1, key, output, found.size_bytes, found.sha256, 0, 0.0, json.dumps({"key": key}), ("adopted",))
        with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
            copy = Path(folder) / Path(output).name
            if not self.store.get(remote_name(output), copy):
                return "absent", None
            verdict, settings = judge(copy, key)
            if verdict != "ours" or settings is None:
                return verdict, None
            size, digest = measure(copy)
        return "ours", OutputDone(-1, key, output, size, digest, 0, 0.0, json.dumps(settings, ensure_ascii=False), ("adopted",))
