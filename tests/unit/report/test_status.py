"""What `status` says of a run, from its folder alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchgen.cli.status import command
from batchgen.errors import RefusedError
from batchgen.events import JobFailed, MemorySample, OutputDone
from batchgen.journal import Journal
from batchgen.report.status import collect
from batchgen.runfolder import RunFolder
from scripted_run import make_jobs


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.prepare()
    run.write_run({})
    return run


def fill(folder: RunFolder, *, done: int = 3, failed: int = 2, end: str | None = "finished") -> None:
    jobs = make_jobs(8)
    with Journal.open(folder.journal) as journal:
        journal.ingest(jobs)
        journal.begin_run()
        journal.set_worker(0, pid=4242, device="cuda:0", state="working", since=time.time(), stage="denoise", window=3, rss_bytes=2**31)
        journal.record([OutputDone(0, job.key, job.output, 10, "00", 2, 0.5, "") for job in jobs[:done]])
        journal.record([JobFailed(0, job.key, "non-finite", "decode", "not a [red]number[/red]\x1b[31m") for job in jobs[-failed:]])
        journal.record(MemorySample(0, "decode", 2**31, 2**30, 2**30))
        journal._db.execute("UPDATE runs SET started = started - 60")
        if end is not None:
            journal.end_run(None if end == "finished" else end)


def run_status(folder: RunFolder, *options: str) -> str:
    result = CliRunner().invoke(command, [str(folder.path), *options], standalone_mode=False)
    assert result.exception is None, result.exception
    return result.output


def test_counts_rate_and_time_left_of_a_run_that_goes_on(folder: RunFolder) -> None:
    with folder.lock():
        fill(folder, end=None)
        status = collect(folder)
    assert status["state"] == "running"
    assert status["counts"] == {"pending": 3, "running": 0, "done": 3, "failed": 2, "filtered": 0, "vanished": 0}
    assert status["jobs"] == 8
    assert status["rate_per_minute"] == pytest.approx(3, rel=0.1)
    assert status["eta_seconds"] == pytest.approx(60, rel=0.1)
    assert status["failures"] == [
        {"state": "failed", "kind": "non-finite", "stage": "decode", "reason": "not a [red]number[/red]\x1b[31m", "count": 2,
         "examples": ("job6", "job7"), "rows": (8, 9)}
    ]
    (worker,) = status["workers"]
    assert (worker["pid"], worker["device"], worker["stage"], worker["rss_bytes"]) == (4242, "cuda:0", "denoise", 2**31)
    assert "process" in status["holder"]


@pytest.mark.parametrize(
    ("adopted", "rate"),
    [(0, 6.0), (4, 2.0), (6, None)],
    ids=["rendered outputs make the rate", "adopted outputs add nothing to it", "adopted outputs alone have none"],
)
def test_only_what_was_rendered_makes_a_rate(folder: RunFolder, adopted: int, rate: float | None) -> None:
    jobs = make_jobs(6)
    with Journal.open(folder.journal) as journal:
        journal.ingest(jobs)
        journal.begin_run()
        flags = [("flat", "adopted") if number < adopted else ("flat",) for number in range(6)]
        journal.record([OutputDone(0, job.key, job.output, 10, "00", 2, 0.5, "", own) for job, own in zip(jobs, flags, strict=True)])
        journal._db.execute("UPDATE runs SET started = started - 60")
        journal.end_run(None)
    status = collect(folder)
    assert status["rate_per_minute"] == (None if rate is None else pytest.approx(rate, rel=0.1))
    headline = run_status(folder).splitlines()[0]
    assert headline.startswith("finished: 6 of 6 done")
    assert ("a minute" in headline) == (rate is not None)
    with Journal.read(folder.journal) as journal:
        assert len(list(journal.written_times())) == 6 - adopted


@pytest.mark.parametrize(
    ("end", "done", "state"),
    [("SIGINT", 3, "stopped"), (None, 3, "crashed"), ("finished", 6, "finished")],
)
def test_how_a_run_ended(folder: RunFolder, end: str | None, done: int, state: str) -> None:
    fill(folder, done=done, end=end)
    status = collect(folder)
    assert (status["state"], status["stopped_by"], status["holder"], status["workers"]) == (
        state, end if state == "stopped" else None, None, [],
    )


def test_outputs_of_a_time_before_the_clock_was_set_back_are_not_this_runs(folder: RunFolder) -> None:
    fill(folder, done=6, end="finished")
    with Journal.open(folder.journal) as journal:
        journal._db.execute("UPDATE jobs SET written_at = written_at + 86400 WHERE state = 'done'")
        journal._db.execute("UPDATE runs SET started = started - 60")
    assert collect(folder)["rate_per_minute"] is None


def test_what_was_in_flight_when_a_run_ended_without_a_word_is_left_to_do(folder: RunFolder) -> None:
    fill(folder, done=3, end=None)
    with Journal.open(folder.journal) as journal:
        journal._db.execute("UPDATE jobs SET state = 'running' WHERE key = (SELECT min(key) FROM jobs WHERE state = 'pending')")
        before = journal.counts()
    assert before["running"] == 1
    status = collect(folder)
    assert status["state"] == "crashed"
    assert status["counts"] == before | {"running": 0, "pending": before["pending"] + 1}


def test_people_see_counts_reasons_and_no_terminal_codes(folder: RunFolder) -> None:
    fill(folder, end="SIGINT")
    text = run_status(folder)
    assert "stopped (SIGINT): 3 of 8 done" in text
    assert "goes on from here" in text
    assert "non-finite" in text
    assert "[red]number[/red]" in text
    assert "\x1b" not in text


ENDS = {
    "a refusal, its reason and no promise": ("RefusedError: a foreign file\x1b[2J is there", "refused: 3 of 8 done\na foreign file\\x1b[2J is there\n", False),
    "a refusal of an older journal": ("RefusedError", "refused: 3 of 8 done\n", False),
    "an error in words": ("DiskError: the disk is full", "stopped (the disk): 3 of 8 done", True),
    "an error without words of its own": ("RunStoppedError: it broke", "stopped (an error): 3 of 8 done", True),
    "an ordered end": ("max-hours", "stopped (max-hours): 3 of 8 done", True),
}


@pytest.mark.parametrize(("end", "said", "promised"), ENDS.values(), ids=ENDS)
def test_an_end_is_said_in_words_without_the_names_of_classes(folder: RunFolder, end: str, said: str, promised: bool) -> None:
    fill(folder, end=end)
    text = run_status(folder).replace(", 3.0 a minute", "")
    assert text.startswith(said)
    assert ("goes on from here" in text) == promised
    assert "Error" not in text
    status = collect(folder)
    name, _, because = end.partition(": ")
    assert (status["stopped_by"], status["stopped_because"]) == (name, because or None)


def test_json_is_one_object(folder: RunFolder) -> None:
    fill(folder)
    assert json.loads(run_status(folder, "--json"))["schema"] == 1


def test_watching_ends_with_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder.lock().acquire()
    fill(folder, end=None)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            lock.release()

    monkeypatch.setattr("batchgen.cli.status.time.sleep", nap)
    lines = run_status(folder, "--watch", "--json", "--interval", "0.5").splitlines()
    states = [json.loads(line)["state"] for line in lines]
    assert states == ["running", "running", "running", "crashed"]
    assert naps == [0.5] * 3


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="not a run folder"):
        RunFolder.open(tmp_path)
    result = CliRunner().invoke(command, [str(tmp_path)], standalone_mode=False)
    assert isinstance(result.exception, RefusedError)


def test_a_run_begun_and_not_yet_journalled_says_so(folder: RunFolder) -> None:
    with pytest.raises(RefusedError, match="no journal"):
        collect(folder)


SCHEMA: dict[str, type | tuple[type, ...]] = {
    "schema": int, "folder": str, "state": str, "stopped_by": (str, type(None)), "stopped_because": (str, type(None)), "holder": (str, type(None)),
    "heartbeat_seconds": (float, type(None)), "jobs": int, "counts": dict, "skipped_rows": int, "limit": (int, type(None)), "shard": (str, type(None)),
    "rate_per_minute": (float, type(None)),
    "eta_seconds": (float, type(None)), "last_output_at": (float, type(None)), "runs": int, "failures": list, "workers": list,
}


def test_the_json_has_the_keys_that_programs_count_on(folder: RunFolder) -> None:
    fill(folder)
    status: dict[str, Any] = collect(folder)
    assert {name: isinstance(status[name], kind) for name, kind in SCHEMA.items()} == dict.fromkeys(SCHEMA, True)
    assert set(status) == set(SCHEMA)
