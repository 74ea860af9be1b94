"""A cluster's address is looked at before Ray waits for it: one message within seconds, whatever is there or is not."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from batchgen.errors import UsageError
from batchgen.execute.ray_address import refuse_dead, silent

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@contextmanager
def listening(reply: bytes | None) -> Iterator[str]:
    """Somebody at a port of this machine, who says `reply` and hangs up; None: takes the call and says nothing."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            held.append(server.accept()[0])
            if reply is not None:
                with suppress(OSError):  # who asked may have hung up by now
                    held[0].sendall(reply)
                    held[0].shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)
        for one in held:
            one.close()


NO_ADDRESSES = {
    "a port beyond the last": "127.0.0.1:99999", "port 0": "127.0.0.1:0", "no port": "head", "no host": ":6379", "a word for a port": "head:ray",
    "nothing": "", "a path": "/tmp/ray", "two ports": "head:1:2", "white space": "he ad:6379", "digits of another script": "head:６３７９",
}  # fmt: skip


@pytest.mark.parametrize("address", NO_ADDRESSES.values(), ids=NO_ADDRESSES)
def test_what_is_no_address_is_refused_with_how_one_looks(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address") as caught:
        refuse_dead(address)
    assert (caught.value.option, caught.value.exit_code) == ("--ray-address", 2)
    assert "HOST:PORT" in str(caught.value.hint)


def test_the_message_says_how_the_address_was_given() -> None:
    with pytest.raises(UsageError, match="one of its own machines") as caught:
        refuse_dead("ray://head:10001", said_by="RAY_ADDRESS")
    assert caught.value.option == "RAY_ADDRESS"


def test_a_head_that_is_gone_is_told_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UsageError, match=f"no Ray cluster answers at {address} .*refused"):
        refuse_dead(address)


def test_a_head_that_takes_calls_and_says_nothing_is_waited_for_no_longer_than_asked() -> None:
    with listening(None) as address, pytest.raises(UsageError, match="no answer"):
        refuse_dead(address, seconds=0.2)


@pytest.mark.parametrize("reply", [HTTP, b"", b"SSH-2.0-x"], ids=["a web page", "hangs up", "another protocol"])
def test_something_else_at_the_port_is_no_head(reply: bytes) -> None:
    with listening(reply) as address, pytest.raises(UsageError, match="not the head of a Ray cluster"):
        refuse_dead(address)


def test_what_begins_as_a_head_does_is_taken() -> None:
    with listening(SETTINGS) as address:
        refuse_dead(address)


@pytest.mark.parametrize("word", ["auto", "local"])
def test_ray_s_own_words_are_taken(word: str) -> None:
    refuse_dead(word)


def test_what_libraries_write_past_python_is_silent_and_only_meanwhile(capfd: pytest.CaptureFixture[str]) -> None:
    with silent():
        for number in (1, 2):
            os.write(number, b"[W 1 1] rpc_client.h: a line of C++")
    os.write(1, b"out")
    os.write(2, b"err")
    assert capfd.readouterr() == ("out", "err")
