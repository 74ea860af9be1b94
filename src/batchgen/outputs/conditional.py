"""Small objects in a store that are made, changed and removed only if nobody else did so meanwhile. For leases.

S3 and file systems answer such conditions themselves. Elsewhere an object is looked for, written, and after a pause read back:
of several writers at once the last one finds its own words. An S3 that does not know the conditions is treated the same way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.outputs.files import TEMP_PREFIX, TEMP_SUFFIX, atomic_write, make_folders
from batchgen.outputs.store import LOCAL, OBJECTS, PROBE_ATTEMPTS, Store
from batchgen.outputs.urls import S3

SETTLE_SECONDS = 2.0  # between writing and reading back without conditions: others who had looked before have written by then

_IN_THIS_PROCESS = threading.Lock()  # of memory:// stores, which know no exclusive creation
_REFUSED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_UNKNOWN = frozenset({"NotImplemented", "501"})  # of stores in S3's manner that know no conditional writes


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it was read. `age_seconds`: since it was written, by the store's own clock; None where the store tells no time."""

    data: bytes
    age_seconds: float | None
    version: str | None = field(default=None, repr=False)  # the store's word for this very content


class ConditionalStore(Store):
    """A place of its own connection, so that a renewal never waits for uploads. Safe to use from several threads."""

    def look(self, name: str, *, attempts: int = PROBE_ATTEMPTS) -> Seen | None:
        """What stands under `name`; None where nothing does. Raises StoreError."""
        try:
            return self._tried(f"reading {name}", lambda: self._seen(name), attempts=attempts)
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes, *, attempts: int = PROBE_ATTEMPTS) -> bool:
        """Makes the object; False where one stands there already. Raises StoreError."""
        if self.look(name, attempts=attempts) is not None:  # a store that does not know the condition would write over it
            return False
        done = self._write(f"writing {name}", lambda: self._created(name, data), attempts)
        return self._stands(name, data, attempts) if done is None else done

    def replace(self, name: str, data: bytes, seen: Seen, *, own: bool = False, attempts: int = PROBE_ATTEMPTS) -> bool:
        """Writes over what was `seen`; False where something else, or nothing, stands there by now. Raises StoreError.

        `own`: it is the caller's own object, which is never gone for a moment, nor waited for.
        """
        done = self._write(f"writing {name}", lambda: self._replaced(name, data, seen, own=own), attempts)
        return done if done is not None else own or self._stands(name, data, attempts)

    def remove(self, name: str, seen: Seen, *, attempts: int = PROBE_ATTEMPTS) -> bool:
        """Removes what was `seen`; False where something else stands there. Raises StoreError."""
        now = self.look(name, attempts=attempts)
        if now is not None and now.data != seen.data:
            return False
        with contextlib.suppress(FileNotFoundError):
            self._tried(f"removing {name}", lambda: self._fs.rm_file(self._path(name)), attempts=attempts)
        return True

    # --- one kind of store and the other ------------------------------------------------------------------------------

    def _write(self, what: str, act: Callable[[], bool | None], attempts: int) -> bool | None:
        try:
            return self._tried(what, act, attempts=attempts)
        except FileNotFoundError:
            return False

    def _stands(self, name: str, data: bytes, attempts: int) -> bool:
        self._pause(SETTLE_SECONDS)
        now = self.look(name, attempts=attempts)
        return now is not None and now.data == data

    def _seen(self, name: str) -> Seen:
        path = self._path(name)
        if self.location.protocol in S3:
            return self._seen_s3(path)
        if self.location.protocol in LOCAL:
            data = Path(path).read_bytes()
            return Seen(data, _age(Path(path)))
        with self._fs.open(path, "rb") as source:
            return Seen(source.read(), None)

    def _seen_s3(self, path: str) -> Seen:
        # in functions alone: a run on a disk pays for none of it
        from fsspec.asyn import sync

        bucket, _, key = path.partition("/")

        async def read() -> tuple[bytes, dict[str, Any]]:
            answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                return await body.read(), answer

        data, answer = sync(self._fs.loop, read)
        return Seen(data, _store_age(answer), answer.get("ETag"))

    def _created(self, name: str, data: bytes) -> bool | None:
        """None: written, and whether it stands is to be read back."""
        path = self._path(name)
        if self.location.protocol in S3:
            return self._put_s3(path, data, IfNoneMatch="*")
        if self.location.protocol in LOCAL:
            return _made(Path(path), data)
        with _IN_THIS_PROCESS:
            if self._fs.exists(path):
                return False
            return self._put_plainly(path, data)

    def _replaced(self, name: str, data: bytes, seen: Seen, *, own: bool) -> bool | None:
        path = self._path(name)
        if self.location.protocol in S3 and seen.version is not None:
            return self._put_s3(path, data, IfMatch=seen.version)
        if self.location.protocol in LOCAL and not own:
            return _exchanged(Path(path), data, seen.data)
        with _IN_THIS_PROCESS:
            if self._seen(name).data != seen.data:
                return False
            if self.location.protocol in LOCAL:
                atomic_write(Path(path), data, overwrite=True)
                return True
            return self._put_plainly(path, data)

    def _put_plainly(self, path: str, data: bytes) -> bool | None:
        if self.location.protocol not in OBJECTS:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data)
        return True if self.process_bound else None

    def _put_s3(self, path: str, data: bytes, **condition: str) -> bool | None:
        bucket, _, key = path.partition("/")
        try:
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
        except FileNotFoundError:
            if "IfMatch" in condition:
                return False  # nothing stands there any more
            raise
        except Exception as error:
            codes = _codes(error)
            if codes & _REFUSED:
                return False
            if not codes & _UNKNOWN:
                raise
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data)
            return None
        return True


def _codes(error: BaseException) -> set[str]:
    """What the store said, by its own word and by HTTP's number. The library wraps it."""
    found: set[str] = set()
    said: BaseException | None = error
    while said is not None:
        answer = getattr(said, "response", None)
        if isinstance(answer, dict):
            found.add(str(answer.get("Error", {}).get("Code")))
            found.add(str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        said = said.__cause__ or said.__context__
    return found


def _store_age(answer: dict[str, Any]) -> float | None:
    """Both times are the store's: when it answered, and when the object was written."""
    from email.utils import parsedate_to_datetime

    written, told = answer.get("LastModified"), answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if written is None or not isinstance(told, str):
        return None
    try:
        return max(0.0, float((parsedate_to_datetime(told) - written).total_seconds()))
    except (ValueError, TypeError):
        return None


def _age(path: Path) -> float | None:
    """By the file system's clock, which on a network is the file server's."""
    probe = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(6)}{TEMP_SUFFIX}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def _made(path: Path, data: bytes) -> bool:
    try:
        atomic_write(path, data)
    except FileExistsError:
        return False
    return True


def _exchanged(path: Path, data: bytes, before: bytes) -> bool:
    """Moved away first, so that of several who would write over the same words one alone finds them."""
    make_folders(path.parent)
    aside = path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(6)}{TEMP_SUFFIX}")
    path.rename(aside)
    try:
        if aside.read_bytes() == before:
            return _made(path, data)
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # somebody else's: given back
        return False
    finally:
        aside.unlink(missing_ok=True)
