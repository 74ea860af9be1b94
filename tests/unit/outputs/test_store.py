"""Outputs in stores: memory, another folder, and a stand-in for S3 that turns uploads away."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from batchgen.checkpoints import Checkpoints, take_up
from batchgen.errors import RefusedError, StoreError, UsageError
from batchgen.events import JobFailed, OutputDone
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.outputs.delivery import Delivery
from batchgen.outputs.files import measure
from batchgen.outputs.store import ATTEMPTS, PROBE_ATTEMPTS, Store
from batchgen.outputs.urls import Location
from batchgen.remotecheck import reconcile_remote, verify_remote
from batchgen.runfolder import RunFolder
from batchgen.verify import Tally
from s3stand import StandIn, stand_in
from scripted import written
from scripted_run import make_jobs


@pytest.fixture(scope="module")
def s3() -> Iterator[StandIn]:
    with stand_in() as stand:
        yield stand


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3: StandIn, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    name = uuid.uuid4().hex
    address = {"memory": f"memory://{name}", "file": f"file://{tmp_path}/far", "s3": f"s3://{s3.bucket}/{name}"}[request.param]
    return Store(Location.parse(address), pause=lambda seconds: None)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "state")
    run.prepare()
    return run


def test_what_is_put_is_there_whole(store: Store, tmp_path: Path) -> None:
    store.probe()
    assert store.sizes("outputs") == {}
    (tmp_path / "x.bin").write_bytes(b"abcde" * 1000)
    size, digest = measure(tmp_path / "x.bin")
    store.put("outputs/a/x.bin", tmp_path / "x.bin", key="k1", sha256=digest)
    found = store.stat("outputs/a/x.bin")
    assert found is not None
    assert found.size_bytes == size
    assert (found.key, found.sha256) in ((None, None), ("k1", digest))
    assert store.sizes("outputs") == {"a/x.bin": size}
    assert store.measure("outputs/a/x.bin") == (size, digest)
    assert store.get("outputs/a/x.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"abcde" * 1000
    assert store.stat("outputs/a") is None
    assert not store.get("outputs/b", tmp_path / "none")
    assert store.measure("outputs/b") is None


def test_an_upload_that_fails_twice_comes_through_at_the_third_try(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    put, tries, pauses = store._put, [], []

    def failing(*arguments: Any) -> None:
        tries.append(arguments)
        if len(tries) <= 2:
            raise OSError(5, "connection reset")
        put(*arguments)

    monkeypatch.setattr(store, "_put", failing)
    monkeypatch.setattr(store, "_pause", pauses.append)
    store.put("outputs/x", tmp_path / "x")
    assert store.sizes("outputs") == {"x": 3}
    assert (len(tries), len(pauses)) == (3, 2)
    assert 0.25 <= pauses[0] <= 0.75, "half a second, more or less"
    assert 0.5 <= pauses[1] <= 1.5, "twice as long"


def test_a_store_that_turns_uploads_away_twice(s3: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store = Store(Location.parse(f"s3://{s3.bucket}/away"), pause=lambda seconds: None)
    (tmp_path / "x").write_bytes(b"abc")
    s3.fail, s3.failed = 2, 0
    store.put("outputs/x", tmp_path / "x")
    assert (s3.failed, s3.objects("away/")) == (2, {"away/outputs/x": 3})
    s3.fail, s3.failed = 10**6, 0
    with pytest.raises(StoreError, match=r"s3://night/away: uploading outputs/y failed"):
        store.put("outputs/y", tmp_path / "x")
    assert s3.failed == ATTEMPTS, "one policy of retries, not several inside each other"
    s3.fail = 0
    assert s3.objects("away/") == {"away/outputs/x": 3}


@pytest.mark.parametrize("address", ["s3://no-such-bucket/x", "file:///proc/no/x"])
def test_a_place_that_cannot_be_written_to_is_found_before_the_night(address: str, s3: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError) as caught:
        Store(Location.parse(address), pause=lambda seconds: None).probe()
    assert caught.value.exit_code == 2


def test_a_store_that_nobody_answers_for_is_said_to_be_out_of_reach(s3: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:9"
    for name, value in (s3.environment | {"AWS_ENDPOINT_URL": url}).items():
        monkeypatch.setenv(name, value)
    pauses: list[float] = []
    with pytest.raises(RefusedError) as caught:
        Store(Location.parse("s3://night/a"), pause=pauses.append).probe()
    assert f"its endpoint {url} could not be reached" in caught.value.message
    assert "credentials" not in str(caught.value)
    assert len(pauses) == PROBE_ATTEMPTS - 1, "a wrong address is not waited for"


def test_a_protocol_that_nobody_speaks_is_refused() -> None:
    with pytest.raises(UsageError, match="zzz"):
        Store(Location.parse("zzz://x/y"))


# --- delivery --------------------------------------------------------------------------------------------------------


def test_a_file_goes_once_and_is_then_gone_here(store: Store, folder: RunFolder) -> None:
    (job,) = make_jobs(1)
    delivery, event = Delivery(store, folder.outputs), written(folder.outputs, job)
    assert delivery.send(event) == event
    assert not delivery.staged(event)
    assert store.measure(f"outputs/{job.output}") == (event.size_bytes, event.sha256)


def test_the_same_job_s_object_is_adopted_and_another_s_is_left_alone(store: Store, folder: RunFolder) -> None:
    one, other = make_jobs(2)
    delivery = Delivery(store, folder.outputs)
    first = written(folder.outputs, one)
    delivery.send(first)
    written(folder.outputs, one)
    again = delivery.send(replace(first, sha256="of another rendering"))
    assert isinstance(again, OutputDone)
    assert (again.sha256, "adopted" in again.flags) == (first.sha256, True)
    written(folder.outputs, replace(other, output=one.output))
    refused = delivery.send(replace(first, key=other.key))
    assert isinstance(refused, JobFailed)
    assert "is not this job's output" in refused.reason
    assert store.measure(f"outputs/{one.output}") == (first.size_bytes, first.sha256)


def test_a_file_that_the_store_refuses_stays_here(store: Store, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = make_jobs(1)
    delivery, event = Delivery(store, folder.outputs), written(folder.outputs, job)

    def down(*_: object) -> None:
        raise OSError(5, "down")

    monkeypatch.setattr(store, "_put", down)
    with pytest.raises(StoreError):
        delivery.send(event)
    assert delivery.staged(event)
    assert store.stat(f"outputs/{job.output}") is None


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def night(store: Store, folder: RunFolder) -> Iterator[tuple[list[Job], Journal, Delivery]]:
    """Six jobs: four done and sent."""
    jobs, delivery = make_jobs(6), Delivery(store, folder.outputs)
    with Journal.open(folder.journal) as journal:
        journal.ingest(jobs)
        journal.record([delivery.send(written(folder.outputs, job)) for job in jobs[:4]])
        yield jobs, journal, delivery


def look(folder: RunFolder, night: tuple[list[Job], Journal, Delivery], **asked: Any) -> Any:
    return reconcile_remote(folder, night[1], night[2], **({"after_crash": False} | asked))


def test_a_resume_finds_what_is_there_and_what_is_not(store: Store, folder: RunFolder, night: Any, tmp_path: Path) -> None:
    jobs, journal, _ = night
    found = look(folder, night)
    assert (found.checked, found.hashed, found.lines) == (4, 0, [])
    store._fs.rm_file(store._path(f"outputs/{jobs[0].output}"))
    (tmp_path / "cut").write_bytes(b"\x89PNG\r\n\x1a\n")
    store.put(f"outputs/{jobs[1].output}", tmp_path / "cut")
    found = look(folder, night)
    assert sorted(found.redone) == [jobs[0].output, jobs[1].output]
    assert journal.counts()["done"] == 2


def test_an_object_put_before_its_row_is_adopted(store: Store, folder: RunFolder, night: Any) -> None:
    jobs, journal, delivery = night
    delivery.send(written(folder.outputs, jobs[4]))
    found = look(folder, night, after_crash=True)
    assert (found.adopted, found.hashed) == ([jobs[4].output], 4)
    assert journal.counts()["done"] == 5


def test_a_file_finished_here_and_not_yet_sent_is_sent(store: Store, folder: RunFolder, night: Any) -> None:
    jobs, _, delivery = night
    event = written(folder.outputs, jobs[5])
    found = look(folder, night, after_crash=True)
    assert found.adopted == [jobs[5].output]
    assert not delivery.staged(event)
    assert store.measure(f"outputs/{jobs[5].output}") == (event.size_bytes, event.sha256)


def test_a_foreign_object_under_a_planned_name_stops_the_run_before_it_begins(store: Store, folder: RunFolder, night: Any, tmp_path: Path) -> None:
    jobs, _, _ = night
    (tmp_path / "mine").write_bytes(b"my holiday")
    store.put(f"outputs/{jobs[5].output}", tmp_path / "mine")
    with pytest.raises(RefusedError, match=jobs[5].output):
        look(folder, night)
    assert look(folder, night, overwrite=True).lines == []
    assert store.sizes("outputs")[jobs[5].output] == 10


def test_verify_reads_every_object(store: Store, folder: RunFolder, night: Any, tmp_path: Path) -> None:
    jobs, journal, _ = night
    tally = Tally()
    assert list(verify_remote(folder, store, journal, tally)) == []
    assert tally.checked == 4
    data = bytearray((tmp_path / "copy").read_bytes()) if store.get(f"outputs/{jobs[0].output}", tmp_path / "copy") else bytearray()
    data[-30] ^= 1
    (tmp_path / "changed").write_bytes(data)
    store.put(f"outputs/{jobs[0].output}", tmp_path / "changed")
    store.put("outputs/stranger.png", tmp_path / "changed")
    assert [(finding.wrong, finding.path) for finding in verify_remote(folder, store, journal, Tally())] == [
        ("changed", jobs[0].output), ("stranger", "stranger.png"),
    ]


def test_objects_of_rows_no_longer_in_the_manifest_are_no_strangers(store: Store, folder: RunFolder, night: Any) -> None:
    jobs, journal, _ = night
    journal.ingest([job for job in jobs if job is not jobs[0]])
    tally = Tally()
    assert list(verify_remote(folder, store, journal, tally)) == []
    assert (tally.checked, tally.vanished) == (3, 1)


def test_objects_that_a_live_run_puts_are_strangers_only_when_none_lives(store: Store, folder: RunFolder, night: Any, tmp_path: Path) -> None:
    jobs, journal, _ = night
    (tmp_path / "half").write_bytes(b"x")
    for name in (jobs[4].output, ".batchgen-ab.tmp"):  # a pending job's, and one on its way
        store.put(f"outputs/{name}", tmp_path / "half")
    with folder.lock() as lock:
        tally = Tally()
        assert list(verify_remote(folder, store, journal, tally)) == []
        assert (tally.in_hand, tally.going_on) == (2, lock.holder.text)
    assert [finding.wrong for finding in verify_remote(folder, store, journal, Tally())] == ["stranger"] * 2


def test_a_lost_state_folder_is_taken_up_from_the_last_checkpoint(store: Store, folder: RunFolder, night: Any, tmp_path: Path) -> None:
    jobs, _, delivery = night
    folder.write_run({"pixel_settings": {"steps": 4}})
    (folder.tables / "jobs.csv").write_text("index\n")
    Checkpoints(folder, store).finish()
    assert store.stat("tables/jobs.csv") is not None
    delivery.send(written(folder.outputs, jobs[4]))  # after the checkpoint
    other = RunFolder(tmp_path / "other")
    assert take_up(other, store)
    assert not take_up(other, store), "a state that is there is the truth"
    other.prepare()
    with Journal.open(other.journal) as again:
        assert again.counts()["done"] == 4
        found = reconcile_remote(other, again, Delivery(store, other.outputs), after_crash=True)
        assert (found.adopted, again.counts()["done"]) == ([jobs[4].output], 5)


def test_checkpoints_come_in_their_time_and_one_that_fails_stops_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Location.parse(f"memory://{uuid.uuid4().hex}"), pause=lambda seconds: None)
    folder.write_run({})
    seldom = Checkpoints(folder, store)
    seldom.maybe()
    assert store.stat("run.json") is None
    often = Checkpoints(folder, store, every_seconds=0.0)
    upload: Callable[[], None] = often.upload
    monkeypatch.setattr(often, "upload", lambda: (_ for _ in ()).throw(StoreError("away")))
    often.maybe()
    assert often._thread is not None
    often._thread.join()
    assert often.failed == "away"
    monkeypatch.setattr(often, "upload", upload)
    often.maybe()
    often.finish()
    assert (often.failed, store.stat("run.json") is None) == (None, False)


def test_what_memory_holds_is_bound_to_its_process() -> None:
    assert Store(Location.parse("memory://x")).process_bound


def test_a_place_in_memory_alone_warns_that_it_is_lost(tmp_path: Path) -> None:
    warning = Store(Location.parse("memory://x/z")).warning
    assert warning is not None
    assert warning.startswith("memory://x/z holds the outputs in this process's memory")
    assert Store(Location.parse(f"file://{tmp_path}")).warning is None
    assert isinstance(Store(Location.parse("memory://x"))._fs, fsspec.get_filesystem_class("memory"))
