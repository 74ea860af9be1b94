"""Shards joined into one run folder: nothing lost, doubled or changed, whatever interrupts it; foreign folders are refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchgen.cli.main import run
from batchgen.cli.manifest_options import _NAMES as MANIFEST_NAMES
from batchgen.cli.run import command as run_command
from batchgen.cli.settings import option_name
from batchgen.errors import RefusedError
from batchgen.events import JobFailed, MemorySample, StageBatchDone
from batchgen.jobs import Job
from batchgen.journal import Journal
from batchgen.manifest.options import JobDefaults
from batchgen.merging import JOB_OPTIONS, check_target, merge, not_there, read_parts
from batchgen.outputs.store import Store
from batchgen.outputs.urls import Location
from batchgen.report.measured import add_measured, read_measured
from batchgen.report.summary import Summary
from batchgen.runfolder import RunFolder
from batchgen.shards import Shard
from batchgen.verify import verify
from scripted import picture, written
from scripted_run import make_jobs, make_plan

SHARDS = 3
PIXELS = {"model": "r1", "steps": 4}


def make_shard(path: Path, number: int, jobs: Sequence[Job], *, left: int = 0, failed: int = 0, skipped: int = 1, **record: Any) -> RunFolder:
    """A shard's folder as a run leaves it: of its jobs the last `left` are pending, the ones before them failed; `skipped` rows of the list had
    faults."""
    folder = RunFolder(path)
    folder.prepare()
    shard = Shard(number, SHARDS)
    manifest = {"path": "/lists/p.csv", "sha256": "ab12"}
    folder.write_run({"pixel_settings": PIXELS, "shard": str(shard), "manifest": manifest, "manifest_kind": "csv", "settings": {}} | record)
    own = list(shard.of(jobs))
    with Journal.open(folder.journal) as journal:
        journal.ingest(own)
        journal.set_skipped([(7, None, "no prompt")] * skipped)
        journal.begin_run()
        good = own[: len(own) - left - failed]
        journal.record([written(folder.outputs, job) for job in good])
        journal.record([JobFailed(0, job.key, "error", "denoise", "broken") for job in own[len(good) : len(own) - left]])
        journal.record(MemorySample(0, "decode", 2**30, 0, 0))
        journal.record(StageBatchDone(0, 1, "denoise", "32x32", tuple(job.key for job in good), len(good), 1.0))
        journal.end_run(None)
    return folder


def make_shards(tmp_path: Path, jobs: Sequence[Job], **more: Any) -> list[Path]:
    return [make_shard(tmp_path / f"s{number}", number, jobs, **more).path for number in range(1, SHARDS + 1)]


def join(target: Path, paths: Sequence[Path], **more: Any) -> Any:
    folder = RunFolder(target)
    parts = read_parts(paths, partial=more.pop("partial", False))
    check_target(folder, parts)
    with folder.lock():
        return merge(folder, parts, say=lambda line: None, **more)


def whole(target: Path, jobs: Sequence[Job]) -> None:
    """Every job done once, with its own pixels under its own name, and no file too many."""
    folder = RunFolder(target)
    with Journal.read(folder.journal) as journal:
        rows = list(journal.rows())
        assert list(verify(folder, journal)) == []
    assert [row["key"] for row in rows] == [job.key for job in jobs], "all jobs in the manifest's order"
    assert {row["state"] for row in rows} == {"done"}
    for job, row in zip(jobs, rows, strict=True):
        assert row["output"] == job.output
        with Image.open(folder.outputs / job.output) as image:
            assert np.array_equal(np.asarray(image), picture(job))


@pytest.mark.parametrize("copy", [False, True])
def test_shards_become_one_whole_run(tmp_path: Path, copy: bool) -> None:
    jobs = make_jobs(20)
    paths = make_shards(tmp_path, jobs)
    found = join(tmp_path / "all", paths, copy=copy)
    assert (found.linked, found.copied) == ((0, 20) if copy else (20, 0))
    whole(tmp_path / "all", jobs)
    record = RunFolder(tmp_path / "all").read_run()
    assert record is not None
    assert (record["shard"], record["pixel_settings"], record["manifest"]["sha256"]) == (None, PIXELS, "ab12")
    same = os.path.samefile(tmp_path / "all/outputs" / jobs[0].output, next(path / "outputs" / jobs[0].output for path in paths if Shard.parse(f"{path.name[1:]}/3").holds(jobs[0].key)))
    assert same != copy


def test_shards_with_their_outputs_in_a_store_are_fetched(tmp_path: Path) -> None:
    jobs = make_jobs(9)
    paths = make_shards(tmp_path, jobs, remote="file:///the/store")
    for path in paths:
        (path / "outputs").rename(path / "away")
    stores = {path: Store(Location.parse(f"file://{path}/far")) for path in paths}
    for path, store in stores.items():
        for picture_path in (path / "away").iterdir():
            store.put(f"outputs/{picture_path.name}", picture_path)
    found = join(tmp_path / "all", paths, store_of=lambda folder: stores[folder.path])
    assert (found.copied, found.redone) == (9, [])
    whole(tmp_path / "all", jobs)
    record = RunFolder(tmp_path / "all").read_run()
    assert record is not None
    assert record["remote"] is None


def test_what_runs_measured_comes_over_once_however_often_it_is_merged(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, make_jobs(9))
    for _ in range(3):
        join(tmp_path / "all", paths)
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        runs = journal.runs()
        assert len(runs) == SHARDS
        assert [run["started"] for run in runs] == sorted(run["started"] for run in runs)
        for table in ("memory", "work"):
            assert [len(list(journal.rows_of_run(table, run["id"]))) for run in runs] == [1] * SHARDS
        assert journal.skipped() == [(7, None, "no prompt")], "all shards read the same manifest"


def run_of_the_whole(folder: RunFolder, seconds: float) -> None:
    """A run of the joined folder, begun after those of the shards: a batch and a sample of memory."""
    with Journal.open(folder.journal) as journal:
        journal.begin_run()
        journal.record(MemorySample(0, "decode", 2**31, 0, 0))
        journal.record(StageBatchDone(0, 1, "denoise", "32x32", ("own",), 1, seconds))
        journal.end_run("stop-at")


def test_the_folders_own_runs_outlast_merging_again_in_the_order_of_time(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, make_jobs(9), left=1)
    join(tmp_path / "all", paths)
    run_of_the_whole(RunFolder(tmp_path / "all"), 7.0)
    for _ in range(2):
        join(tmp_path / "all", paths)
        with Journal.read(tmp_path / "all/journal.sqlite") as journal:
            runs = journal.runs()
            assert [run["started"] for run in runs] == sorted(run["started"] for run in runs)
            assert [run["stopped_by"] for run in runs] == [None] * SHARDS + ["stop-at"]
            for table in ("memory", "work"):
                assert [len(list(journal.rows_of_run(table, run["id"]))) for run in runs] == [1] * (SHARDS + 1)
            (own,) = journal.rows_of_run("work", runs[-1]["id"])
            assert own["seconds"] == 7.0


def test_shards_merged_one_after_the_other_keep_what_their_runs_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_shards(tmp_path, make_jobs(9))
    for number, path in enumerate(paths, 1):
        measured(RunFolder(path), 10.0**number)
    for named in ([0], [1], [2, 0], [2]):
        assert run(["merge", *(str(paths[number]) for number in named), "-o", str(tmp_path / "all"), "--partial"]) == 3
    capsys.readouterr()
    folder = RunFolder(tmp_path / "all")
    assert read_measured(folder)["stages"]["denoise"]["seconds"] == 1110.0
    with Journal.read(folder.journal) as journal:
        assert len(journal.runs()) == SHARDS
        assert len(list(journal.work_rows())) == SHARDS


def measured(folder: RunFolder, seconds: float) -> None:
    """Adds a run with one batch to the folder's sums."""
    summary = Summary()
    summary.listen(StageBatchDone(0, 0, "denoise", "32x32", ("a",), 1, seconds))
    add_measured(folder, make_plan(), summary)


def test_the_folders_own_timings_outlast_merging_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, target = make_shards(tmp_path, make_jobs(9), left=1), RunFolder(tmp_path / "all")
    for number, path in enumerate(paths, 1):
        measured(RunFolder(path), 10.0**number)
        (path / "tables/timings.txt").write_text(f"timings of {number}\n")
        (path / "tables/residency.txt").write_text("where all lives\n")
    command = ["merge", *map(str, paths), "-o", str(target.path)]
    assert run(command) == 3
    for own in ("timings of the whole\n", "timings of the whole, later\n"):
        measured(target, 7.0)
        (target.tables / "timings.txt").write_text(own)
        for _ in range(2):
            assert run(command) == 3
            shards = "\n".join(f"shard {number}/3 (s{number})\n\ntimings of {number}\n" for number in (1, 2, 3))
            assert (target.tables / "timings.txt").read_text() == f"{shards}\nruns of the joined folder\n\n{own}"
            assert (target.tables / "residency.txt").read_text() == "shards 1/3, 2/3, 3/3\n\nwhere all lives\n"
    assert read_measured(target)["stages"]["denoise"]["seconds"] == 1110.0 + 2 * 7.0
    capsys.readouterr()


def test_the_last_line_counts_skipped_rows_and_they_are_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_shards(tmp_path, make_jobs(9))
    assert run(["merge", *map(str, paths), "-o", str(tmp_path / "all")]) == 3
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path / 'all'}: 9 done; 1 invalid row skipped"


def test_merging_again_takes_over_what_a_shard_has_done_since(tmp_path: Path) -> None:
    jobs = make_jobs(20)
    paths = make_shards(tmp_path, jobs, left=1, failed=1)
    join(tmp_path / "all", paths)
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        assert journal.counts() | {"done": 14, "pending": 3, "failed": 3} == journal.counts()
    for number, path in enumerate(paths, 1):
        with Journal.open(path / "journal.sqlite") as journal:
            states = {row["key"]: row["state"] for row in journal.rows()}
            journal.record([written(RunFolder(path).outputs, job) for job in Shard(number, SHARDS).of(jobs) if states[job.key] != "done"])
    found = join(tmp_path / "all", paths)
    assert (found.kept, found.linked) == (14, 6)
    whole(tmp_path / "all", jobs)


def test_a_missing_shard_is_named_unless_the_rest_may_come_later(tmp_path: Path) -> None:
    jobs = make_jobs(20)
    paths = make_shards(tmp_path, jobs)
    with pytest.raises(RefusedError, match="of 3 shards 2 is missing"):
        join(tmp_path / "all", [paths[2], paths[0]])
    join(tmp_path / "all", [paths[2], paths[0]], partial=True)
    join(tmp_path / "all", paths)
    whole(tmp_path / "all", jobs)


def test_an_output_missing_or_cut_in_its_shard_is_left_to_be_rendered(tmp_path: Path) -> None:
    jobs = make_jobs(6)
    paths = make_shards(tmp_path, jobs)
    outputs = sorted(path for folder in paths for path in (folder / "outputs").iterdir())
    outputs[0].unlink()
    outputs[1].write_bytes(outputs[1].read_bytes()[:-1])
    found = join(tmp_path / "all", paths)
    assert sorted(found.redone) == sorted(path.name for path in outputs[:2])
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        assert {row["output"] for row in journal.rows() if row["state"] == "pending"} == set(found.redone)


def test_names_that_clash_after_the_list_was_changed_are_made_two(tmp_path: Path) -> None:
    """Shards of one list never clash; one that kept a name of an older list can."""
    jobs = make_jobs(12)
    one, other = (next(Shard(number, SHARDS).of(jobs)) for number in (1, 2))
    clashing = [replace(job, output=one.output.upper()) if job is other else job for job in jobs]
    paths = [make_shard(tmp_path / f"s{number}", number, clashing).path for number in (1, 2, 3)]
    found = join(tmp_path / "all", paths)
    ((old, new),) = found.renamed
    assert old == other.output.replace(other.output, one.output.upper())
    with Image.open(tmp_path / "all/outputs" / new) as image:
        assert np.array_equal(np.asarray(image), picture(other))
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        assert list(verify(RunFolder(tmp_path / "all"), journal)) == []
        assert journal.job(other.key).output == new


def test_a_foreign_file_under_an_outputs_name_is_never_written_over(tmp_path: Path) -> None:
    jobs = make_jobs(6)
    paths = make_shards(tmp_path, jobs)
    join(tmp_path / "all", paths[:1], partial=True)
    foreign = next(Shard(2, SHARDS).of(jobs))
    (tmp_path / "all/outputs" / foreign.output).write_bytes(b"my holiday")
    with pytest.raises(RefusedError, match=foreign.output):
        join(tmp_path / "all", paths)
    assert (tmp_path / "all/outputs" / foreign.output).read_bytes() == b"my holiday"


@pytest.mark.parametrize("copy", [False, True])
def test_an_output_damaged_without_a_change_of_size_is_left_to_be_rendered(tmp_path: Path, copy: bool) -> None:
    jobs = make_jobs(6)
    paths = make_shards(tmp_path, jobs)
    victim = next(Shard(2, SHARDS).of(jobs)).output
    path = paths[1] / "outputs" / victim
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    found = join(tmp_path / "all", paths, copy=copy)
    assert found.redone == [victim]
    assert not (tmp_path / "all/outputs" / victim).exists()
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        assert [row["output"] for row in journal.rows() if row["state"] == "pending"] == [victim]


def test_an_output_damaged_after_a_killed_merge_had_linked_it_is_not_taken_for_whole(tmp_path: Path) -> None:
    jobs = make_jobs(6)
    paths = make_shards(tmp_path, jobs)
    victim = next(Shard(2, SHARDS).of(jobs)).output
    (tmp_path / "all/outputs").mkdir(parents=True)
    parts = read_parts(paths)
    os.link(paths[1] / "outputs" / victim, tmp_path / "all/outputs" / victim)
    with (paths[1] / "outputs" / victim).open("r+b") as file:  # in place: both names see it
        file.write(b"X")
    found = merge(RunFolder(tmp_path / "all"), parts, say=lambda line: None)
    assert found.redone == [victim]
    assert not (tmp_path / "all/outputs" / victim).exists()


def test_shards_that_are_not_there_are_known_until_merged_or_rendered(tmp_path: Path) -> None:
    jobs = make_jobs(20)
    paths, target = make_shards(tmp_path, jobs), RunFolder(tmp_path / "all")
    join(target.path, [paths[0]], partial=True)
    assert [str(shard) for shard in not_there(target, read_parts([paths[0]], partial=True))] == ["2/3", "3/3"]
    join(target.path, [paths[1]], partial=True)
    assert [str(shard) for shard in not_there(target, read_parts([paths[1]], partial=True))] == ["3/3"]
    with Journal.open(target.journal) as journal:  # a run of the whole list
        journal.ingest(jobs)
    assert not_there(target, read_parts([paths[1]], partial=True)) == []


def test_a_merge_that_lacks_a_shard_says_so_and_is_not_called_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_shards(tmp_path, make_jobs(6), skipped=0)
    assert run(["merge", *map(str, paths[:2]), "--partial", "-o", str(tmp_path / "all")]) == 3
    assert "shard 3/3 is not there" in capsys.readouterr().err
    assert run(["merge", str(paths[2]), "--partial", "-o", str(tmp_path / "all")]) == 0
    assert "is not there" not in capsys.readouterr().err


def test_options_that_make_other_jobs_are_all_compared() -> None:
    """Each option of a manifest is compared by itself, or stands among the settings that alter pixels."""
    pixels = {name.replace("_", "-") for name in JobDefaults.__dataclass_fields__ if name != "num_images"} | {"size"}
    options = {option_name(option) for option in run_command.params if option.name in MANIFEST_NAMES}
    assert options - pixels - {"faults-file"} == set(JOB_OPTIONS) - {"limit", "video-format"}


def test_columns_to_carry_may_be_named_at_once_or_one_by_one(tmp_path: Path) -> None:
    jobs = make_jobs(3)
    said = [{"carry": {"value": value}} for value in (["a,b"], ["a", "b"], ["a", "b"])]
    paths = [make_shard(tmp_path / f"s{number}", number, jobs, settings=said[number - 1]).path for number in (1, 2, 3)]
    assert len(read_parts(paths)) == SHARDS


def test_a_file_in_the_place_of_the_new_folder_is_refused(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, make_jobs(3))
    (tmp_path / "list.csv").write_text("prompt\n")
    with pytest.raises(RefusedError, match="is a file"):
        join(tmp_path / "list.csv", paths)
    assert (tmp_path / "list.csv").read_text() == "prompt\n"


REFUSED = {
    "other-pixels": ({"pixel_settings": PIXELS | {"steps": 8}}, "steps: 4 -> 8"),
    "another-manifest": ({"manifest": {"path": "/lists/p.csv", "sha256": "cd34"}}, "manifest: ab12 -> cd34"),
    "another-number-of-shards": ({"shard": "2/5"}, "shards: 3 -> 5"),
    "the-same-shard-twice": ({"shard": "1/3"}, "shard 1/3 is named twice"),
    "no-shard-at-all": ({"shard": None}, "is no shard"),
    "the-same-bytes-as-another-kind": ({"manifest_kind": "txt"}, "--format: csv -> txt"),
    "another-limit": ({"settings": {"limit": {"value": 5}}}, "--limit: not set -> 5"),
    "another-number-of-pictures": ({"settings": {"num-images": {"value": 2}}}, "--num-images: not set -> 2"),
    "another-column": ({"settings": {"prompt-column": {"value": "text"}}}, "--prompt-column: not set -> text"),
    "rows-left-out": ({"settings": {"dedupe": {"value": True}}}, "--dedupe: not set -> true"),
    "other-columns-carried": ({"settings": {"carry": {"value": ["seed"]}}}, "--carry: not set -> seed"),
}


@pytest.mark.parametrize(("record", "words"), REFUSED.values(), ids=REFUSED)
def test_folders_of_different_runs_are_refused_with_what_differs(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    jobs = make_jobs(3)
    paths = [make_shard(tmp_path / "s1", 1, jobs).path, make_shard(tmp_path / "s2", 2, jobs, **record).path]
    with pytest.raises(RefusedError, match="(?s)" + words):
        join(tmp_path / "all", paths, partial=True)
    assert not (tmp_path / "all").exists()


def test_a_shard_at_work_and_a_folder_with_something_else_are_refused(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, make_jobs(3))
    with RunFolder(paths[1]).lock(), pytest.raises(RefusedError, match="is at work"):
        join(tmp_path / "all", paths)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(RefusedError, match="not empty"):
        join(tmp_path / "mine", paths)
    with pytest.raises(RefusedError, match="one of the shards"):
        join(paths[0], paths)
    RunFolder(tmp_path / "own").prepare()
    RunFolder(tmp_path / "own").write_run({"pixel_settings": PIXELS})
    with pytest.raises(RefusedError, match="a run of its own"):
        join(tmp_path / "own", paths)


def test_a_merge_killed_again_and_again_is_finished_by_the_same_command(tmp_path: Path) -> None:
    jobs = make_jobs(120)
    paths = make_shards(tmp_path, jobs)
    target = tmp_path / "all"
    # one row a transaction and a pause after each, so that kills hit between link and row
    code = (
        "import sys, time, pathlib\nimport batchgen.merging as m\nfrom batchgen.runfolder import RunFolder\n"
        "m._CHUNK = 1\nbring = m._bring_file\n"
        "def slowly(*a, **k):\n    found = bring(*a, **k)\n    time.sleep(0.002)\n    return found\n"
        "m._bring_file = slowly\nparts = m.read_parts([pathlib.Path(p) for p in sys.argv[2:]])\ntarget = RunFolder(pathlib.Path(sys.argv[1]))\n"
        "m.check_target(target, parts)\nwith target.lock():\n    m.merge(target, parts)\n"
    )
    command = [sys.executable, "-c", code, str(target), *map(str, paths)]
    chance, kills = random.Random(7), 0
    while True:
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        goal = chance.randrange(5, 40) + (len(list((target / "outputs").iterdir())) if (target / "outputs").exists() else 0)
        while kills < 4 and run.poll() is None and (not (target / "outputs").exists() or len(list((target / "outputs").iterdir())) < goal):
            time.sleep(0.001)
        if kills < 4 and run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
            run.communicate()
            continue
        _, err = run.communicate()
        assert run.returncode == 0, err.decode()
        break
    assert kills >= 3
    whole(target, jobs)
    assert json.loads((target / "run.json").read_text())["merged"]["shards"] == ["1/3", "2/3", "3/3"]
