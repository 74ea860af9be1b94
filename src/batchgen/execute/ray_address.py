"""The address of a Ray cluster's head, looked at before Ray itself waits for it, which takes minutes and ends in no answer."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator

from batchgen.errors import UsageError

_OWN_WORDS = ("auto", "local")  # Ray's for this machine's cluster, and for a new one
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})")
_ANSWER_SECONDS = 5.0
# A head speaks gRPC, which is HTTP/2: both sides begin with a frame of settings. Source: RFC 9113, sections 3.4 and 6.5.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER = 9
_SETTINGS = 4
_STATUS = "`ray status` on the same machine should answer."


def refuse_dead(address: str, *, said_by: str = "--ray-address", seconds: float = _ANSWER_SECONDS) -> None:
    """Raises UsageError for an address that is none, and for one where no head answers within a few seconds.

    `said_by`: the option or variable that it came from.
    """
    if address in _OWN_WORDS:
        return
    if "://" in address:
        raise UsageError(
            f"{address}: a run drives the cluster from one of its own machines", option=said_by,
            hint="Run batchgen on a machine of the cluster, with HOST:PORT of its head, or leave the option out there.",
        )
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise UsageError(
            f"{address!r} is not an address", option=said_by, hint="Write HOST:PORT, with a port from 1 to 65535: head:6379.",
        )
    try:
        is_head = _speaks_http2(match[1] or match[2], int(match[3]), seconds)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(f"no Ray cluster answers at {address} ({why})", option=said_by, hint=_STATUS) from error
    if not is_head:
        raise UsageError(
            f"what answers at {address} is not the head of a Ray cluster", option=said_by,
            hint=f"Its port is the one of `ray start --head --port`, 6379 if none was given. {_STATUS}",
        )


def _speaks_http2(host: str, port: int, seconds: float) -> bool:
    """Whether the other side begins as a gRPC server does. Raises OSError where nobody answers."""
    with socket.create_connection((host, port), timeout=seconds) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True  # it would have to be asked with the cluster's own certificates
        connection.sendall(_PREFACE)
        header = b""
        while len(header) < _FRAME_HEADER:
            try:
                part = connection.recv(_FRAME_HEADER - len(header))
            except ConnectionError:
                return False
            if not part:
                return False
            header += part
    return header[3] == _SETTINGS


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """While entered: what this process's C++ libraries write to the terminal goes nowhere; Ray keeps its own logs."""
    kept: dict[int, int] = {}
    _flush()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # one that is closed has nothing to be kept from
            kept[number] = os.dup(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        _flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()
