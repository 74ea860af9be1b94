"""The run folder: where things lie in it, whose it is, and whether a run may go on in it.

Knows the folder's own files only; what run.json says beyond `manifest` and `pixel_settings` is the caller's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import RefusedError, RunStoppedError
from batchgen.outputs.files import atomic_write, disk_errors, make_folders
from batchgen.runlock import RunLock

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. `path` is absolute. Nothing is made until `lock` or `prepare`."""

    path: Path
    manifest: Path | None = None

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def outputs(self) -> Path:
        return self.path / "outputs"

    @property
    def tables(self) -> Path:
        return self.path / "tables"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def logs(self) -> Path:
        """What the workers' libraries print, one file a worker."""
        return self.path / "logs"

    @property
    def thumbs(self) -> Path:
        """Small pictures of outputs that went to a store, for the page."""
        return self.path / "thumbs"

    @property
    def aside(self) -> Path:
        """Files that stood where a picture had to go and were not batchgen's own or not whole."""
        return self.path / "aside"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def lock_path(self) -> Path:
        return self.path / "run.lock"

    @classmethod
    def open(cls, path: Path | str, *, manifest_path: Path | str | None = None, new: bool = False) -> RunFolder:
        """The folder for a run of that manifest; nothing is written yet.

        Raises RefusedError where another manifest began the folder, or where it holds things and no run; with `new`, the next
        free name beside it (`NAME-2`) is taken instead. Without a manifest: an existing run's folder, to look at.
        """
        folder = cls(Path(path).absolute(), Path(manifest_path).absolute() if manifest_path is not None else None)
        if manifest_path is None:
            if not folder.run_json.exists() and not folder.journal.exists():
                raise RefusedError(f"{path} is not a run folder: it has no run.json", hint="Name a folder that `batchgen run` has begun.")
            return folder
        if new:
            return cls(_next_free(folder.path), folder.manifest)
        folder._check_owner()
        return folder

    def _check_owner(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RefusedError(f"{self.path} is a file, not a folder", hint="Name another folder with -o.")
        record = self.read_run()
        if record is None:
            if self.path.is_dir() and not self.journal.exists() and any(not _harmless(entry) for entry in self.path.iterdir()):
                raise RefusedError(
                    f"{self.path} is not empty and holds no run of batchgen", hint="Name an empty or a new folder with -o, or use --new.",
                )
            return
        begun_by = record.get("manifest", {})
        if self.manifest is None or not begun_by.get("path"):
            return
        moved = begun_by.get("sha256") is not None and begun_by["sha256"] == _hash(self.manifest)
        if Path(begun_by["path"]) != self.manifest and not moved:
            raise RefusedError(
                f"{self.path} was begun by another manifest: {begun_by['path']}",
                hint="Use --new to start beside it, or name another folder with -o.",
            )

    def lock(self) -> RunLock:
        """The run's lock, to be used as a context manager. Entering it makes the folder; raises RunLockedError, DiskError."""
        return RunLock(self.lock_path)

    def prepare(self) -> None:
        """Makes the folders a run writes to. With the lock held. Raises DiskError."""
        with disk_errors(self.path):
            for folder in (self.outputs, self.tables, self.spool, self.logs):
                make_folders(folder)

    def read_run(self) -> dict[str, Any] | None:
        """run.json, or None where there is none. Raises RunStoppedError where it cannot be read."""
        try:
            record = json.loads(self.run_json.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunStoppedError(
                f"{self.run_json} cannot be read: {error}",
                hint="Restore it, or move it away: then the folder is taken over by its journal and its outputs.",
            ) from error
        if not isinstance(record, dict):
            raise RunStoppedError(f"{self.run_json} does not hold a JSON object", hint="Restore it, or move it away.")
        return record

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Writes run.json whole, with the manifest it belongs to. Raises DiskError."""
        fields = {"schema": SCHEMA, "manifest": self.manifest_record(), **record}
        text = json.dumps(fields, indent=2, ensure_ascii=False, sort_keys=False)
        atomic_write(self.run_json, text.encode("utf-8", "surrogateescape"), overwrite=True)

    def manifest_record(self) -> dict[str, str | None]:
        if self.manifest is None:
            return {"path": None, "sha256": None}
        return {"path": str(self.manifest), "sha256": _hash(self.manifest)}

    def check_pixel_settings(self, new: Mapping[str, object]) -> None:
        """Raises RefusedError with the differences if this folder was begun with other settings that alter pixels."""
        record = self.read_run()
        old = (record or {}).get("pixel_settings")
        if not isinstance(old, dict):
            return
        if differences := pixel_diff(old, new):
            raise RefusedError(
                f"{self.path} was begun with other settings, which would give other pictures:\n"
                + "\n".join(f"  {line}" for line in differences),
                hint="Set them back to go on, or use --new to start beside it.",
            )


    def check_kind(self, kind: str) -> None:
        """Raises RefusedError if this folder was begun with the manifest's very bytes read as another kind: they give other prompts."""
        record = self.read_run() or {}
        began, manifest = record.get("manifest_kind"), record.get("manifest") or {}
        if self.manifest is None or began in (None, kind) or manifest.get("sha256") is None or manifest["sha256"] != _hash(self.manifest):
            return
        raise RefusedError(
            f"{self.path} was begun with {manifest.get('path')} read as {began}; the same bytes are read as {kind} now",
            hint=f"Go on with --format {began}, use --new to start beside it, or name another folder with -o.",
        )

    def check_remote(self, shown: str | None) -> None:
        """Raises RefusedError if this folder is the state of a run whose outputs are elsewhere. `shown`: a URL without secrets, or None."""
        record = self.read_run()
        if record is None or (began := record.get("remote")) == shown:
            return
        raise RefusedError(
            f"{self.path} belongs to a run with its outputs {'at ' + began if began else 'in the folder itself'}, not "
            f"{'at ' + shown if shown else 'in the folder itself'}",
            hint="Name the same place with -o, or another folder with --state.",
        )

    def check_shard(self, shard: str | None) -> None:
        """Raises RefusedError if this folder was begun with another share of the jobs: both would stand in one journal."""
        record = self.read_run()
        if record is None or (began := record.get("shard")) == shard:
            return
        said = f"--shard {began}" if began is not None else "no --shard"
        hint = f"Go on with {said}" if began is not None else "Go on without it"
        raise RefusedError(
            f"{self.path} was begun with {said}, not with {f'--shard {shard}' if shard is not None else 'all jobs'}",
            hint=f"{hint}, or give every shard a folder of its own with -o; `batchgen merge` joins shards.",
        )


# Settings that are written down only where they differ from these.
_UNSAID: Mapping[str, object] = {"image_format": "png", "vae_tiling": False, "compile": False}


def pixel_diff(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line per setting that differs, `name: old -> new`, sorted by name. Values are compared as JSON would write them."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = (_plain(values.get(name, _UNSAID.get(name))) for values in (old, new))
        if before != after:
            lines.append(f"{name}: {_shown(before)} -> {_shown(after)}")
    return lines


def _plain(value: object) -> object:
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def _shown(value: object) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _harmless(entry: Path) -> bool:
    # A lock, a log or a kept manifest alone is what a run leaves that ended before it began.
    return entry.name.startswith((".", "run.lock", "logs", "manifest."))


def _next_free(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _hash(path: Path) -> str | None:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError:
        return None
