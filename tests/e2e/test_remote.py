"""Whole runs with their outputs in a stand-in for S3: uploads turned away, processes killed, a state folder lost. Nothing lost or doubled."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Said, batchgen, start
from PIL import Image

from batchgen.journal import Journal
from s3stand import KEY, SECRET, StandIn, stand_in

JOBS = 8
PASSWORD = "word-of-the-address"


@pytest.fixture(scope="module")
def s3() -> Iterator[StandIn]:
    with stand_in() as stand:
        yield stand


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, s3: StandIn) -> tuple[Path, Said]:
    """A run whose first two uploads are turned away, with all that opens the store in its address."""
    folder = tmp_path_factory.mktemp("first")
    write_list(folder)
    environment = s3.environment | {"XDG_STATE_HOME": str(folder / "states")}
    del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    s3.fail, s3.failed = 2, 0
    address = f"s3://{KEY}:{PASSWORD}@night/one?token={SECRET}"
    said = batchgen("run", "list.csv", *OPTIONS, "-o", address, "--events", "events.jsonl", folder=folder, env=environment)
    assert said.code == 0, said
    return folder, said


OPTIONS = ("--model", "builtin", "--batch-size", "1", "--quiet")


def write_list(folder: Path) -> None:
    rows = "".join(f"picture {number},64,64,2\n" for number in range(JOBS))
    (folder / "list.csv").write_text(f"prompt,width,height,steps\n{rows}")


def pictures(s3: StandIn, prefix: str) -> dict[str, bytes]:
    """Name -> pixels."""
    found = {name.removeprefix(prefix): s3.read(name) for name in s3.objects(prefix)}
    return {name: Image.open(io.BytesIO(data)).convert("RGB").tobytes() for name, data in found.items()}


def test_uploads_that_are_turned_away_twice_come_through_and_nothing_secret_is_anywhere(s3: StandIn, first: tuple[Path, Said]) -> None:
    folder, said = first
    assert s3.failed == 2
    found = pictures(s3, "one/outputs/")
    assert (len(found), len(set(found.values()))) == (JOBS, JOBS)
    objects = s3.objects("one/")
    assert {"one/run.json", "one/journal.sqlite", "one/report.html", "one/tables/jobs.csv", "one/tables/timings.txt"} <= set(objects)
    assert not [name for name in objects if ".tmp" in name]
    assert s3.read("one/report.html").count(b"data:image/webp;base64,") == JOBS, "made before the pictures went"
    # the run says where its state is, and status finds it by the place
    assert "s3://night/one/outputs" in said.out
    (state,) = (folder / "states/batchgen").iterdir()
    assert str(state) in said.out
    assert list((state / "outputs").rglob("*.png")) == [], "the disk keeps no second copy"
    status = batchgen("status", "s3://night/one", "--json", folder=folder, env={"XDG_STATE_HOME": str(folder / "states")})
    assert json.loads(status.out)["counts"]["done"] == JOBS
    # no word of what opens the store, in any file, here or there
    texts = [said.out.encode(), said.err.encode(), *(s3.read(name) for name in objects if "/outputs/" not in name)]
    texts += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(texts) > 12
    for secret in (KEY, PASSWORD, SECRET):
        assert not [text for text in texts if secret.encode() in text]


def test_a_run_killed_amid_its_uploads_goes_on_and_puts_each_picture_once(tmp_path: Path, s3: StandIn, first: object) -> None:
    write_list(tmp_path)
    environment = s3.environment | {"XDG_STATE_HOME": str(tmp_path / "states")}
    command = ("run", "list.csv", *OPTIONS, "-o", "s3://night/two", "--state", "state")
    s3.puts.clear()
    run = start(command, tmp_path, environment)

    def kill(name: str) -> None:
        """After so many uploads, while one more is on its way."""
        if len(s3.puts) >= 4:
            s3.gate = lambda name: None
            os.kill(run.pid, signal.SIGKILL)

    s3.gate = kill
    run.communicate(timeout=300)
    assert run.returncode == -signal.SIGKILL
    said = batchgen(*command, folder=tmp_path, env=environment)
    assert said.code == 0, said
    assert pictures(s3, "two/outputs/") == pictures(s3, "one/outputs/")
    puts = Counter(s3.puts)
    assert set(puts.values()) == {1}, f"put again: {[name for name, times in puts.items() if times > 1]}"
    with Journal.read(tmp_path / "state/journal.sqlite") as journal:
        assert journal.counts()["done"] == JOBS
    assert batchgen("verify", "state", folder=tmp_path, env=environment).code == 0
    # the state is lost: what the last checkpoint says is taken up, and nothing is rendered or put again
    shutil.rmtree(tmp_path / "state")
    said = batchgen(*command, folder=tmp_path, env=environment)
    assert said.code == 0, said
    assert Counter(s3.puts) == puts


REFUSED = {
    "no-such-bucket": (("-o", "s3://nowhere/x"), "s3://nowhere/x does not exist"),
    "unknown-protocol": (("-o", "zzz://a/b"), "zzz://a/b cannot be used"),
    "state-without-an-address": (("-o", "out", "--state", "s"), "--state goes with outputs at a URL"),
    "a-query-that-nobody-reads": (("-o", "s3://night/x?colour=red"), "knows no 'colour'"),
    "another-place-for-the-same-state": (("-o", "s3://night/other", "--state", "state"), "belongs to a run with its outputs at s3://night/first"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_places_that_lead_nowhere_are_refused(tmp_path: Path, s3: StandIn, options: tuple[str, ...], words: str) -> None:
    write_list(tmp_path)
    environment = s3.environment | {"XDG_STATE_HOME": str(tmp_path / "states")}
    if "state" in options:
        (tmp_path / "state").mkdir()
        manifest = {"path": str(tmp_path / "list.csv"), "sha256": None}
        (tmp_path / "state/run.json").write_text(json.dumps({"remote": "s3://night/first", "manifest": manifest}))
    said = batchgen("run", "list.csv", *OPTIONS, *options, folder=tmp_path, env=environment)
    assert said.code == 2, said
    assert words in said.err
    assert not (tmp_path / "states").exists()
    assert not (tmp_path / "out").exists()
