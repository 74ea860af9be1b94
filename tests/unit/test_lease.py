"""Leases of addresses: one holder, given back, taken over from the dead alone, whatever the clocks say. On three kinds of store, and plain ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from batchgen.errors import LeaseHeldError
from batchgen.lease import LEASES, RENEW_SECONDS, STALE_SECONDS, Lease, Terms, lease_name
from batchgen.outputs.conditional import ConditionalStore
from batchgen.outputs.files import is_temp
from batchgen.outputs.urls import Location
from batchgen.runlock import Holder
from batchgen.shards import Shard
from s3stand import StandIn, stand_in

TESTS = Path(__file__).parents[1]
RENEW, STALE = 0.1, 1.5


class PlainFileSystem(LocalFileSystem):
    """A protocol of which nothing is known: it may read, write, list and remove."""

    protocol = ("plain",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("plain://"))


fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[StandIn]:
    with stand_in() as stand:
        yield stand


@pytest.fixture
def place(s3: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Location]]:
    """A new address of a kind."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)

    def made(kind: str) -> Location:
        name = uuid.uuid4().hex
        if kind.startswith("s3"):
            s3.conditions = kind.partition("-")[2] or "kept"
        return Location.parse({
            "memory": f"memory://{name}", "file": f"file://{tmp_path}/{name}", "plain": f"plain://{tmp_path}/{name}",
        }.get(kind, f"s3://{s3.bucket}/{name}"))

    yield made
    s3.conditions = "kept"


# plain, and S3 where conditional uploads are answered with 501 or ignored: written, then read back
every_kind = pytest.mark.parametrize("kind", ["memory", "file", "plain", "s3", "s3-501", "s3-ignored"])
DAYS = 10 * 86400.0
every_clock = pytest.mark.parametrize(
    ("kind", "skew"), [("memory", -DAYS), ("file", -DAYS), ("file", DAYS), ("plain", DAYS), ("s3", -DAYS)],
)


def lease(location: Location, shard: str | None = None, *, host: str | None = None, **more: Any) -> Lease:
    holder = Holder.me() if host is None else replace(Holder.me(), host=host, since=more.pop("since", time.time()))
    more = {"renew_seconds": RENEW, "stale_seconds": STALE} | more
    return Lease(location, None if shard is None else Shard.parse(shard), holder=holder, **more)


def names(location: Location) -> set[str]:
    return {name for name in ConditionalStore(location).sizes(LEASES) if not is_temp(name)}


def wait_for(what: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)


@every_kind
def test_the_second_is_refused_and_told_who_and_what_to_do_until_the_first_gives_it_back(kind: str, place: Any) -> None:
    location = place(kind)
    first = lease(location, host="north").acquire()
    with pytest.raises(LeaseHeldError) as caught:
        lease(location, host="south").acquire()
    assert caught.value.exit_code == 2
    assert f"process {os.getpid()} on north, since 20" in caught.value.message
    assert location.shown in caught.value.message
    for advice in ("Wait", "-o", "--shard I/N", "--take-over"):
        assert advice in str(caught.value.hint)
    assert first.confirm() is None
    first.release()
    assert names(location) == set()
    with lease(location, host="south"):
        assert names(location) == {"all.json"}
    assert names(location) == set()


@every_clock
def test_a_holder_that_renews_no_more_is_outlived_whatever_its_clock_said(kind: str, skew: float, place: Any) -> None:
    location = place(kind)
    clock = time.time() + skew
    stale = 5.0 if kind == "s3" else STALE  # S3 tells its times in whole seconds
    dead = Terms(replace(Holder.me(), host="north", since=clock), None, 7, clock, stale)
    assert ConditionalStore(location).create(lease_name(None), dead.as_bytes())
    said: list[str] = []
    written = time.monotonic()
    with lease(location, host="south").acquire(say=said.append) as held:
        assert time.monotonic() - written >= stale - (1.1 if kind == "s3" else 0.1)
        assert len(said) == 2
        assert "may have died: waiting up to" in said[0]
        assert "is taken over from process" in said[1]
        assert "on north" in said[1]
        assert held.confirm() is None


@every_clock
def test_a_holder_that_renews_is_found_alive_whatever_its_clock_says(kind: str, skew: float, place: Any) -> None:
    location = place(kind)
    with lease(location, host="north", since=time.time() + skew).acquire() as first:
        time.sleep(3 * RENEW)
        with pytest.raises(LeaseHeldError, match="on north"):
            lease(location, host="south").acquire()
        assert first.confirm() is None


def test_a_lease_that_is_old_by_the_stores_clock_is_not_waited_for(place: Any, tmp_path: Path) -> None:
    location = place("file")
    terms = Terms(replace(Holder.me(), host="north"), None, 1, time.time() + 9e5, STALE_SECONDS)
    assert ConditionalStore(location).create(lease_name(None), terms.as_bytes())
    path = Path(location.address.removeprefix("file://"), lease_name(None))
    os.utime(path, (time.time() - STALE_SECONDS - 1,) * 2)
    began = time.monotonic()
    with lease(location, host="south"):
        assert time.monotonic() - began < STALE_SECONDS / 10


@every_kind
def test_a_holder_whose_lease_is_taken_over_finds_out_and_leaves_the_others_alone(kind: str, place: Any) -> None:
    location, said = place(kind), []
    first = lease(location, host="north").acquire()
    second = lease(location, host="south").acquire(take_over=True, say=said.append)
    assert ["--take-over says so" in line for line in said] == [True]
    wait_for(lambda: first.lost)
    assert "was taken over by another run: process" in str(first.lost)
    assert "on south" in str(first.lost)
    first.release()
    assert names(location) == {"all.json"}
    time.sleep(3 * RENEW)
    assert second.confirm() is None
    second.release()


@every_kind
def test_of_many_at_once_one_alone_holds_it(kind: str, place: Any) -> None:
    location = place(kind)
    start, refused = threading.Barrier(5), []
    contenders = [lease(location, host=f"host{number}") for number in range(5)]

    def take(contender: Lease) -> None:
        start.wait()
        try:
            contender.acquire()
        except LeaseHeldError:
            refused.append(contender)

    threads = [threading.Thread(target=take, args=(contender,)) for contender in contenders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if kind in ("memory", "file", "s3"):  # elsewhere one that wrote late is told by the next renewal
        assert len(refused) == 4
    wait_for(lambda: sum(contender.lost is None for contender in contenders if contender not in refused) == 1)
    assert names(location) == {"all.json"}
    for contender in contenders:
        contender.release()
    assert names(location) == set()


@pytest.mark.parametrize(("one", "other", "together"), [
    ("1/3", "2/3", True), ("1/3", "1/3", False), ("1/3", "1/2", False), ("1/3", None, False), (None, "2/3", False),
])
def test_shards_of_one_run_share_an_address_and_what_has_jobs_in_common_does_not(
    one: str | None, other: str | None, together: bool, place: Any,
) -> None:
    location = place("file")
    with lease(location, one, host="north") as first:
        second = lease(location, other, host="south")
        if together:
            with second:
                assert names(location) == {"1-of-3.json", "2-of-3.json"}
        else:
            with pytest.raises(LeaseHeldError, match="shard 1/3 of this list" if one else "in use by a run"):
                second.acquire()
            assert len(names(location)) == 1, "what was refused leaves nothing"
            # by force: the first one's lease goes, and it finds out
            with lease(location, other, host="south").acquire(take_over=True):
                wait_for(lambda: first.lost)
                assert "on south" in str(first.lost)
    assert names(location) == set()


def test_a_lease_that_somebody_removed_by_hand_is_made_anew(place: Any) -> None:
    location = place("file")
    with lease(location) as held:
        Path(location.address.removeprefix("file://"), lease_name(None)).unlink()
        wait_for(lambda: names(location) == {"all.json"})
        assert held.confirm() is None


UNREADABLE = [
    b"", b"{", b"[]", b"null", b'{"holder": 3}', b"\xff\xfe",
    *(json.dumps({**json.loads(Terms(Holder.me(), None, 1, 1.0, 9.0).as_bytes()), **wrong}).encode() for wrong in (
        {"stale_seconds": 1e300}, {"stale_seconds": -1}, {"stale_seconds": float("nan")}, {"shard": "x"}, {"shard": 3},
        {"holder": {"host": 3}}, {"renewals": None},
    )),
    Terms(replace(Holder.me(), since=1e300), None, 1, 1.0, 9.0).as_bytes(),
]


@pytest.mark.parametrize("data", UNREADABLE)
def test_what_cannot_be_read_is_held_by_an_unknown_one_for_the_ordinary_time(data: bytes) -> None:
    terms = Terms.read(data)
    assert (terms.holder.pid, terms.stale_seconds, terms.shard) == (0, STALE_SECONDS, None)
    assert "an unknown machine" in terms.holder.text


def test_terms_come_back_as_they_were_written() -> None:
    terms = Terms(Holder.me(), "2/3", 5, 123.5, 60.0)
    assert Terms.read(terms.as_bytes()) == terms


def test_several_renewals_may_fail_before_a_lease_is_stale() -> None:
    assert STALE_SECONDS >= 4 * RENEW_SECONDS


# --- real processes ---------------------------------------------------------------------------------------------------------


def hold(location: Location, host: str = "", shard: str = "-", *, take_over: bool = False, stale: float = 3.0) -> subprocess.Popen[str]:
    words = [location.address, host, shard, "0.2", str(stale), "yes" if take_over else "no"]
    return subprocess.Popen(
        [sys.executable, str(TESTS / "lease_run.py"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS,
    )


def said_by(process: subprocess.Popen[str]) -> list[str]:
    """Its lines up to the one that says how it went."""
    lines: list[str] = []
    assert process.stdout is not None
    while not lines or lines[-1].startswith("said:"):
        line = process.stdout.readline()
        assert line, lines
        lines.append(line.strip())
    return lines


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_killed_process_of_another_machine_is_outlived_and_one_of_this_machine_at_once(kind: str, place: Any) -> None:
    location = place(kind)
    first = hold(location, "north")
    assert said_by(first) == ["held"]
    refused = hold(location, "south")
    assert "is in use by a run: process" in said_by(refused)[-1]
    refused.communicate("", timeout=60)
    assert refused.returncode == 2
    killed(first)
    second = hold(location)
    *waited, taken, held = said_by(second)
    assert all("which may have died: waiting up to" in line for line in waited)  # none where it was slow to start
    assert re.search(r"not renewed for \d", taken)
    assert held == "held"
    killed(second)
    third = hold(location)
    taken, held = said_by(third)
    assert "that process has ended" in taken
    assert held == "held"
    assert third.communicate("", timeout=60)[0] == ""
    assert names(location) == set()


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_process_that_was_suspended_for_long_finds_its_lease_taken(kind: str, place: Any) -> None:
    location = place(kind)
    first = hold(location, "north")
    assert said_by(first) == ["held"]
    first.send_signal(signal.SIGSTOP)
    second = hold(location, "south")
    assert said_by(second)[-1] == "held"
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate("", timeout=60)
    assert said.startswith("lost: ")
    assert "on south" in said
    assert names(location) == {"all.json"}
    assert second.communicate("", timeout=60)[0] == ""
    assert names(location) == set()
