"""Outputs in an object store or on a remote file system, by fsspec: whole objects in, sizes and hashes out.

An object is visible whole or not at all: one put where the store knows only whole objects, a temporary name and a rename elsewhere.
Passing failures are tried again with growing pauses; what stays is a StoreError, which a resume goes on from.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from batchgen.errors import RefusedError, StoreError, UsageError
from batchgen.outputs.files import TEMP_PREFIX, TEMP_SUFFIX, atomic_write
from batchgen.outputs.urls import S3, Location, without_secrets

T = TypeVar("T")

ATTEMPTS = 7
PROBE_ATTEMPTS = 3  # at a store that nobody answers for, before the night: a wrong address stays wrong
FIRST_PAUSE_SECONDS = 0.5  # doubled each time: about half a minute in all
OBJECTS = S3 | {"gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}  # a put is atomic there
LOCAL = frozenset({"file", "local"})
# By name: the libraries that raise them are extras.
_FINAL = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "InvalidEndpointError", "ParamValidationError", "ImportError",
    "ModuleNotFoundError",
)
_UNREACHED = frozenset({
    "EndpointConnectionError", "ConnectTimeoutError", "ConnectionRefusedError", "ClientConnectorError", "ConnectionTimeoutError",
    "gaierror",
})
_KEY, _HASH = "batchgen-key", "batchgen-sha256"


@dataclass(frozen=True, slots=True)
class Remote:
    """An object that is there. `key` and `sha256` as its uploader noted them beside it; None where the store keeps no such notes."""

    size_bytes: int
    key: str | None = None
    sha256: str | None = None


class UnreachedError(StoreError):
    """Nobody answers at the store's endpoint: nothing was asked of names, rights and credentials."""


class Store:
    """One place, and what lies below it. Safe to use from several threads. Paths are below the place, POSIX separators."""

    def __init__(self, location: Location, *, pause: Callable[[float], None] = time.sleep) -> None:
        """Connects to nothing yet. Raises UsageError for a protocol that nobody here speaks."""
        self.location = location
        self._pause = pause
        # fsspec's families load at their first use: a run on a disk pays for none of them
        import fsspec

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if location.protocol in LOCAL:
            options = {"auto_mkdir": True}
        if location.protocol in S3:
            options |= {name: dict(value) if isinstance(value, tuple) else value for name, value in location.options}
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}  # one policy of retries, not three inside each other
        if location.protocol == "memory":
            options = {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(location.address, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise UsageError(
                f"{location.shown} cannot be used: {without_secrets(str(error))}", option="--output",
                hint='Object stores need an extra: python -m pip install "batchgen[remote]"; other protocols need the library named above.',
            ) from None
        except OSError as error:  # some connect at once
            raise RefusedError(
                f"{location.shown} cannot be reached: {without_secrets(str(error))}", hint="Look to the name and the credentials.",
            ) from None
        if location.protocol in S3:
            self._fs.retries = 1
        self._root = str(self._root).rstrip("/")

    @property
    def shown(self) -> str:
        return self.location.shown

    @property
    def process_bound(self) -> bool:
        """What one process puts no other sees."""
        return self.location.protocol == "memory"

    @property
    def warning(self) -> str | None:
        """One line for people, where what is put is not kept."""
        if not self.process_bound:
            return None
        return f"{self.shown} holds the outputs in this process's memory: they are lost at its end; name a folder or a store to keep them"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, what: str, act: Callable[[], T], *, attempts: int = ATTEMPTS, unreached_attempts: int = ATTEMPTS) -> T:
        """The act's result, after passing failures too. FileNotFoundError passes through; raises StoreError.

        `unreached_attempts`: how often to try where nobody answers at the endpoint.
        """
        for attempt in range(1, attempts + 1):
            try:
                return act()
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001  each family of stores raises its own
                if attempt == attempts or _final(error) or (attempt >= unreached_attempts and _unreached(error)):
                    raise self._error(what, error) from None
            # a crowd of workers that were turned away together does not come back together
            self._pause(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))  # noqa: S311 no secret
        raise AssertionError

    def _error(self, what: str, error: BaseException) -> StoreError:
        first = (without_secrets(str(error)).strip().splitlines() or [""])[0]
        if _unreached(error):
            endpoint = re.search(r"https?://[^/\s\"']+", first)
            place = f"its endpoint {endpoint.group()} could not be reached" if endpoint else f"it could not be reached: {first}"
            return UnreachedError(
                f"{self.shown}: {what} failed: {place}",
                hint="Everything finished so far is kept. Look to the network, and run the same command again; it resumes.",
            )
        return StoreError(
            f"{self.shown}: {what} failed: {type(error).__name__}: {first}",
            hint="Everything finished so far is kept. Look to the store and its credentials, and run the same command again; it resumes.",
        )

    def probe(self) -> None:
        """Writes and removes a small object, so that a wrong name or missing right is known before the night. Raises RefusedError."""
        name = f"{TEMP_PREFIX}{secrets.token_hex(6)}{TEMP_SUFFIX}"
        try:
            self._tried("writing", lambda: self._fs.pipe_file(self._path(name), b"batchgen"), unreached_attempts=PROBE_ATTEMPTS)
            self._tried("removing", lambda: self._fs.rm_file(self._path(name)))
        except FileNotFoundError:
            raise RefusedError(f"{self.shown} does not exist", hint="Make the bucket or folder first, or name another with -o.") from None
        except UnreachedError as error:
            how = "AWS_ENDPOINT_URL, or endpoint_url in the address" if self.location.protocol in S3 else "host and port in the address"
            raise RefusedError(error.message, hint=f"Look to the endpoint ({how}) and the network.") from None
        except StoreError as error:
            raise RefusedError(error.message, hint="Look to the name and the credentials.") from None

    def put(self, name: str, local: Path, *, key: str | None = None, sha256: str | None = None) -> None:
        """Puts a file under `name`, whole or not at all, in the place of what is there. Raises StoreError, OSError of the local file."""
        local.stat()  # a file that is gone is no failure of the store
        try:
            self._tried(f"uploading {name}", lambda: self._put(name, local, key, sha256))
        except FileNotFoundError as error:
            raise self._error(f"uploading {name}", error) from None

    def _put(self, name: str, local: Path, key: str | None, sha256: str | None) -> None:
        goal, protocol = self._path(name), self.location.protocol
        if protocol in LOCAL:
            atomic_write(Path(goal), lambda handle: _copy(local, handle), overwrite=True)
        elif protocol == "memory":
            self._fs.pipe_file(goal, local.read_bytes())
        elif protocol in OBJECTS:
            notes = {_KEY: key, _HASH: sha256}
            metadata = {note: value for note, value in notes.items() if value is not None}
            self._fs.put_file(str(local), goal, **({"Metadata": metadata} if metadata and protocol in S3 else {}))
        else:
            self._put_renamed(goal, local)

    def _put_renamed(self, goal: str, local: Path) -> None:
        folder, _, _name = goal.rpartition("/")
        temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(6)}{TEMP_SUFFIX}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.put_file(str(local), temp)
            self._fs.mv(temp, goal)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def stat(self, name: str) -> Remote | None:
        """What stands under `name`; None where nothing does. Raises StoreError."""
        try:
            return self._tried(f"looking at {name}", lambda: self._stat(self._path(name)))
        except FileNotFoundError:
            return None

    def _stat(self, path: str) -> Remote | None:
        if self.location.protocol not in S3:
            found = self._fs.info(path)
            return Remote(int(found["size"])) if found.get("type") != "directory" else None
        bucket, _, key = path.partition("/")
        head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        notes = head.get("Metadata", {})
        return Remote(int(head["ContentLength"]), notes.get(_KEY), notes.get(_HASH))

    def sizes(self, below: str) -> dict[str, int]:
        """Name below `below` -> bytes, of everything there. Raises StoreError."""
        base = self._path(below)
        try:
            found = self._tried(f"listing {below}", lambda: self._fs.find(base, detail=True))
        except FileNotFoundError:
            return {}
        start = len(str(self._fs._strip_protocol(base)).rstrip("/")) + 1
        return {str(path)[start:]: int(entry["size"]) for path, entry in found.items()}

    def get(self, name: str, local: Path) -> bool:
        """Fetches `name` to a file; False where there is none. Raises StoreError."""
        def fetch() -> None:
            local.parent.mkdir(parents=True, exist_ok=True)
            with local.open("wb") as handle, self._fs.open(self._path(name), "rb") as source:
                shutil.copyfileobj(source, handle, 1 << 20)

        try:
            self._tried(f"fetching {name}", fetch)
        except FileNotFoundError:
            local.unlink(missing_ok=True)
            return False
        return True

    def measure(self, name: str) -> tuple[int, str] | None:
        """Size and SHA-256 of an object, by reading it; None where there is none. Raises StoreError."""
        def read() -> tuple[int, str]:
            size, digest = 0, hashlib.sha256()
            with self._fs.open(self._path(name), "rb") as source:
                while block := source.read(1 << 20):
                    size += len(block)
                    digest.update(block)
            return size, digest.hexdigest()

        try:
            return self._tried(f"reading {name}", read)
        except FileNotFoundError:
            return None


def _copy(local: Path, handle: BinaryIO) -> None:
    with local.open("rb") as source:
        shutil.copyfileobj(source, handle, 1 << 20)


def _unreached(error: BaseException) -> bool:
    """Was there nobody at the address? The libraries wrap what the system said."""
    said: BaseException | None = None if _final(error) else error  # credentials may be looked for at addresses of their own
    while said is not None:
        if {kind.__name__ for kind in type(said).__mro__} & _UNREACHED:
            return True
        said = said.__cause__ or said.__context__
    return False


def _final(error: BaseException) -> bool:
    """Would the same come of another try?"""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)) or bool(kinds & set(_FINAL))
