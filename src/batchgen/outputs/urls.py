"""Places that are URLs: what of one may be shown and stored, what only the connection may know, and where a run's state lies.

Pure text. A URL can bear a password or a signed query; neither is ever printed, logged or written to a file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from batchgen.errors import UsageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")  # a drive has one letter
_IN_TEXT = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)([^\s'\"<>]*)")
S3 = frozenset({"s3", "s3a"})
# What a query of an S3 URL may say, and nothing else: the rest of a query would be thrown away unseen.
_S3_QUERY = ("endpoint_url", "region", "profile", "anon", "key", "secret", "token")


def is_url(text: str) -> bool:
    """`s3://bucket/prefix`, `memory://runs`; not `C:\\x` and no path."""
    return _URL.match(text) is not None


def check_slashes(text: str, option: str | None = "--output") -> None:
    """Raises UsageError for `s3:/bucket/run`, which as a path would be a folder that nobody meant."""
    if match := _ONE_SLASH.match(text):
        meant = without_secrets(f"{match.group(1)}://{text[match.end():]}")
        shown = meant.replace("://", ":/", 1)
        raise UsageError(
            f"{shown} is neither an address nor a folder: did you mean {meant}?", option=option,
            hint=f"An address has two slashes after the colon. A folder of that name is written ./{shown}",
        )


def without_secrets(text: str) -> str:
    """Any text with the user, the password and the query of each URL in it left out."""

    def clean(match: re.Match[str]) -> str:
        rest = re.split(r"[?#]", match.group(2), maxsplit=1)[0]
        host, slash, path = rest.partition("/")
        return match.group(1) + host.rpartition("@")[2] + slash + path

    return _IN_TEXT.sub(clean, text)


@dataclass(frozen=True, slots=True)
class Location:
    """A place for outputs. `shown` may be printed and stored; `address` and `options` are for the connection alone."""

    protocol: str
    shown: str
    address: str = field(repr=False)  # as fsspec takes it
    options: tuple[tuple[str, object], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, text: str) -> Location:
        """Raises UsageError for what names no place or bears a query that nobody would read."""
        protocol = text.partition("://")[0].lower()
        shown = without_secrets(text).rstrip("/")
        if "::" in protocol:
            message = f"outputs cannot go to a chained address: {shown}"
            raise UsageError(message, option="--output", hint="Name one place, like s3://bucket/run.")
        if not is_url(text) or shown.endswith(":") or (protocol in S3 and shown.partition("://")[2][:1] in ("", "/")):
            raise UsageError(f"{without_secrets(text)!r} names no place", option="--output", hint="Write it like s3://bucket/run.")
        plain = re.split(r"[?#]", text, maxsplit=1)[0].rstrip("/")
        if protocol in S3:
            return cls(protocol, shown, shown, _s3_options(text))
        if urlsplit(text).query:
            raise UsageError(
                f"{protocol}:// addresses of outputs take no query ({shown}?…)", option="--output",
                hint="Put what it says into the library's own settings or environment.",
            )
        return cls(protocol, shown, plain if shown.partition("://")[2] else text)


def _s3_options(text: str) -> tuple[tuple[str, object], ...]:
    parts = urlsplit(text)
    found: dict[str, object] = {}
    if "@" in parts.netloc:
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        found |= {"key": unquote(user), "secret": unquote(password)}
    client: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _S3_QUERY:
            known = ", ".join(_S3_QUERY)
            raise UsageError(f"the query of an s3:// address knows no {name!r}", option="--output", hint=f"It may say {known}.")
        if name == "region":
            client["region_name"] = value
        else:
            found[name] = value.lower() in ("1", "true", "yes") if name == "anon" else value
    if client:
        found["client_kwargs"] = tuple(sorted(client.items()))
    return tuple(sorted(found.items()))


def state_folder(location: Location, environ: Mapping[str, str], shard: str | None = None) -> Path:
    """Where a run with its outputs there keeps its journal by default: the user's state folder, a name made of the place.

    `shard`: the label of the share that the run renders, since shards of one place keep a journal each.
    """
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "state")
    stem = re.sub(r"[^\w.\-]+", "_", location.shown.rpartition("/")[2]).strip("._")[:60] or "run"
    name = f"{stem}-{hashlib.sha256(location.shown.encode()).hexdigest()[:10]}"
    return Path(base) / "batchgen" / (name if shard is None else f"{name}-{shard}")
