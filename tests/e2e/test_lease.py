"""Runs that would write one list to one address: refused, taken over from the dead and by force, shared by shards. Real runs, killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import batchgen, start

from batchgen.journal import Journal
from batchgen.lease import Lease, Terms
from batchgen.outputs.conditional import ConditionalStore
from batchgen.outputs.urls import Location
from batchgen.runlock import Holder
from s3stand import StandIn, stand_in

JOBS = 24
OPTIONS = ("--model", "builtin", "--batch-size", "1", "--workers", "1")


@pytest.fixture(scope="module")
def s3() -> Iterator[StandIn]:
    with stand_in() as stand:
        yield stand


@pytest.fixture
def far(s3: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine; a list to run. Both machines are this one: their state folders alone differ."""
    rows = "".join(f"picture {number},64,64,2\n" for number in range(JOBS))
    (tmp_path / "list.csv").write_text(f"prompt,width,height,steps\n{rows}")
    s3.puts.clear()
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3.environment | {"XDG_STATE_HOME": str(tmp_path / "states")}


def slowed(s3: StandIn, after: int) -> Callable[[], None]:
    """Lets so many uploads through; the next ones come one in two seconds, until the function that is returned is called."""
    free, turn = threading.Event(), threading.Lock()

    def gate(name: str) -> None:
        if len(s3.puts) >= after and not free.is_set():
            with turn:
                free.wait(2)

    s3.gate = gate
    return free.set


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


def lease_of(s3: StandIn, prefix: str, name: str = "all") -> Terms | None:
    key = f"{prefix}/leases/{name}.json"
    return Terms.read(s3.read(key)) if key in s3.objects(prefix) else None


def done(state: Path) -> int:
    with Journal.read(state / "journal.sqlite") as journal:
        return journal.counts()["done"]


def test_a_second_machine_is_refused_a_killed_one_is_followed_and_each_picture_is_put_once(
    tmp_path: Path, s3: StandIn, far: dict[str, str],
) -> None:
    command = ("run", "list.csv", *OPTIONS, "-o", "s3://night/one")
    let_go = slowed(s3, 3)
    first = start((*command, "--state", "north"), tmp_path, far)
    wait_for(lambda: len(s3.puts) >= 3, first)
    second = batchgen(*command, "--state", "south", folder=tmp_path, env=far)
    assert second.code == 2, second
    assert f"s3://night/one is in use by a run: process {first.pid} on " in second.err
    for advice in ("Wait for it", "-o", "--shard I/N", "--take-over"):
        assert advice in second.err
    assert not (tmp_path / "south").exists()
    first.send_signal(signal.SIGKILL)
    let_go()
    first.communicate(timeout=240)
    assert first.returncode == -signal.SIGKILL
    assert lease_of(s3, "one") is not None, "nobody gave it back"
    third = batchgen(*command, "--state", "south", folder=tmp_path, env=far)
    assert third.code == 0, third
    assert "s3://night/one is taken over from process" in third.err
    assert "that process has ended" in third.err
    puts = Counter(s3.puts)
    assert (len(puts), set(puts.values())) == (JOBS, {1})
    assert done(tmp_path / "south") == JOBS
    assert lease_of(s3, "one") is None, "given back"


@pytest.mark.long
def test_a_run_that_is_stopped_gives_the_address_back(tmp_path: Path, s3: StandIn, far: dict[str, str]) -> None:
    command = ("run", "list.csv", *OPTIONS, "-o", "s3://night/two")
    let_go = slowed(s3, 2)
    first = start((*command, "--state", "north"), tmp_path, far)
    wait_for(lambda: len(s3.puts) >= 2, first)
    holder = lease_of(s3, "two")
    assert holder is not None
    assert holder.holder.pid == first.pid
    first.send_signal(signal.SIGINT)
    let_go()
    first.communicate(timeout=240)
    assert first.returncode == 130
    assert lease_of(s3, "two") is None
    second = batchgen(*command, "--state", "south", folder=tmp_path, env=far)
    assert second.code == 0, second
    assert "taken over" not in second.err
    assert set(Counter(s3.puts).values()) == {1}


@pytest.mark.long
def test_a_run_whose_address_is_taken_over_stops_and_nothing_is_lost(tmp_path: Path, s3: StandIn, far: dict[str, str]) -> None:
    command = ("run", "list.csv", *OPTIONS, "-o", "s3://night/three")
    let_go = slowed(s3, 3)
    first = start((*command, "--state", "north"), tmp_path, far)
    wait_for(lambda: len(s3.puts) >= 3, first)
    other = Lease(Location.parse("s3://night/three"), holder=replace(Holder.me(), host="south")).acquire(take_over=True)
    before = lease_of(s3, "three")
    try:
        said = first.communicate(timeout=240)
        assert first.returncode == 1, said
        assert "s3://night/three was taken over by another run: process" in said[1]
        assert "on south" in said[1]
        assert other.confirm() is None
        now = lease_of(s3, "three")
        assert now is not None
        assert before is not None
        assert now.holder == before.holder
        assert not {"three/run.json", "three/journal.sqlite"} & set(s3.objects("three/")), "the records there are the other's"
    finally:
        other.release()
    let_go()
    finished = done(tmp_path / "north")
    assert 3 <= finished < JOBS
    assert len(s3.puts) == finished
    second = batchgen(*command, "--state", "south", folder=tmp_path, env=far)
    assert second.code == 0, second
    assert set(Counter(s3.puts).values()) == {1}
    assert len(s3.puts) == JOBS
    assert batchgen("verify", "south", folder=tmp_path, env=far).code == 0


@pytest.mark.long
def test_a_dead_machine_is_waited_out_for_as_long_as_it_said(tmp_path: Path, far: dict[str, str]) -> None:
    place = f"file://{tmp_path}/far"
    terms = Terms(replace(Holder.me(), host="north", since=time.time() + 10**6), None, 3, time.time() + 10**6, 20.0)  # longer than a slow start
    assert ConditionalStore(Location.parse(place)).create("leases/all.json", terms.as_bytes())
    said = batchgen("run", "list.csv", *OPTIONS, "-o", place, folder=tmp_path, env=far)
    assert said.code == 0, said
    assert "which may have died: waiting up to" in said.err
    assert "was not renewed for 2" in said.err
    assert list((tmp_path / "far/leases").iterdir()) == []


@pytest.mark.long
def test_shards_share_an_address_and_a_run_of_the_whole_adopts_what_they_made(tmp_path: Path, s3: StandIn, far: dict[str, str]) -> None:
    command = ("run", "list.csv", *OPTIONS, "-o", "s3://night/five")
    let_go = slowed(s3, 0)
    runs = [start((*command, "--shard", f"{number}/2"), tmp_path, far) for number in (1, 2)]
    for number, run in enumerate(runs, 1):
        wait_for(lambda label=f"{number}-of-2": lease_of(s3, "five", label), run)  # type: ignore[misc]
    whole = batchgen(*command, folder=tmp_path, env=far)
    assert whole.code == 2, whole
    assert "s3://night/five is in use by shard " in whole.err
    assert lease_of(s3, "five") is None
    let_go()
    for run in runs:
        said = run.communicate(timeout=240)
        assert run.returncode == 0, said
    assert set(Counter(s3.puts).values()) == {1}
    assert len(s3.puts) == JOBS
    objects = s3.objects("five/")
    assert {f"five/shards/{number}-of-2/{name}" for number in (1, 2) for name in ("run.json", "journal.sqlite")} <= set(objects)
    assert not [name for name in objects if name.startswith(("five/leases/", "five/run.json"))]
    # the other's objects are no strangers
    states = sorted((tmp_path / "states/batchgen").iterdir())
    verified = json.loads(batchgen("verify", str(states[0]), "--json", folder=tmp_path, env=far).out)
    assert verified["findings"] == []
    assert (verified["checked"], verified["others"]) == (done(states[0]), done(states[1]))
    assert batchgen("merge", *map(str, states), "-o", "all", folder=tmp_path, env=far).code == 0
    assert done(tmp_path / "all") == JOBS
    # a lost state of one shard is taken up from its own records
    (states[0] / "journal.sqlite").rename(tmp_path / "away")
    (states[0] / "run.json").unlink()
    again = batchgen(*command, "--shard", "1/2", folder=tmp_path, env=far)
    assert again.code == 0, again
    whole = batchgen(*command, folder=tmp_path, env=far)
    assert whole.code == 0, whole
    assert len(s3.puts) == JOBS, "adopted, not rendered again"


@pytest.mark.long
def test_an_address_beside_another_has_its_state_where_status_looks(tmp_path: Path, far: dict[str, str]) -> None:
    place = f"file://{tmp_path}/far"
    for _ in range(2):
        said = batchgen("run", "list.csv", *OPTIONS, "--limit", "1", "--new", "-o", place, folder=tmp_path, env=far)
        assert said.code == 0, said
    status = batchgen("status", f"{place}-2", "--json", folder=tmp_path, env=far)
    assert json.loads(status.out)["counts"]["done"] == 1
    assert len(os.listdir(tmp_path / "states/batchgen")) == 2


def test_taking_over_is_for_addresses(tmp_path: Path, far: dict[str, str]) -> None:
    said = batchgen("run", "list.csv", *OPTIONS, "--take-over", "-o", "out", folder=tmp_path, env=far)
    assert said.code == 2
    assert "--take-over goes with outputs at a URL" in said.err
    assert not (tmp_path / "out").exists()
