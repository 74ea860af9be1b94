"""The journal: what it keeps of a job over manifests and runs, in both journal modes, damaged or newer."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import journalfile
from batchgen.errors import RefusedError, RunStoppedError
from batchgen.events import ComponentLoaded, ComponentMoved, JobFailed, LatentsSpooled, MemorySample, OutputDone, StageBatchDone
from batchgen.jobs import Job
from batchgen.journal import MAX_ATTEMPTS, Ingested, Journal
from batchgen.journalfile import mode_for
from scripted_run import make_job, make_jobs

MODES = ("wal", "rollback")
CASES = Path(__file__).parents[1] / "cases" / "journals"


@pytest.fixture(params=MODES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite", mode=request.param) as opened:
        yield opened


def done(job: Job, **fields: object) -> OutputDone:
    plain = OutputDone(0, job.key, job.output, 100, "ab" * 32, 2, 1.5, '{"key":"k","width":32,"scheduler":"x"}')
    return replace(plain, **fields)


def failed(job: Job, *, retry: bool = False, kind: str = "error", reason: str = "bad") -> JobFailed:
    return JobFailed(0, job.key, kind, "denoise", reason, retry)  # type: ignore[arg-type]


def states(journal: Journal) -> dict[str, str]:
    return {row["id"]: row["state"] for row in journal.rows()}


# --- manifests that change ------------------------------------------------------------------------------------------


def test_jobs_come_out_as_they_went_in(journal: Journal) -> None:
    job = replace(make_job("a", 0), seed=2**64 - 1, extra=(("note", "x\n猫"), ("state", "mine")), lora="style:0.5", guidance=3.5)
    journal.ingest([job])
    _, taken, spooled = journal.take(5, 0)
    assert (taken, spooled) == ([job], {})
    row = next(journal.rows())
    assert row["seed"] == 2**64 - 1
    assert (row["note"], row["manifest_state"], row["state"]) == ("x\n猫", "mine", "running")


def test_rows_added_removed_and_moved_between_runs(journal: Journal) -> None:
    first = make_jobs(["a", "b", "c"])
    assert journal.ingest(first) == Ingested(3, 0, 0)
    journal.record([done(first[0]), done(first[1])])
    second = [make_job("new", 0), make_job("c", 1), make_job("a", 2)]
    assert journal.ingest(second) == Ingested(1, 2, 1)
    assert states(journal) == {"new": "pending", "c": "pending", "a": "done", "b": "vanished"}
    assert journal.counts() == {"pending": 2, "running": 0, "done": 1, "failed": 0, "filtered": 0, "vanished": 1}
    assert [job.id for job in journal.take(9, 0)[1]] == ["new", "c"]


def test_a_row_that_comes_back_is_still_done(journal: Journal) -> None:
    jobs = make_jobs(["a", "b"])
    journal.ingest(jobs)
    journal.record(done(jobs[1]))
    journal.ingest(jobs[:1])
    assert journal.ingest(jobs) == Ingested(0, 2, 0, returned=1)
    assert states(journal) == {"a": "pending", "b": "done"}


def test_a_snapped_size_is_told_beside_the_one_asked_for(journal: Journal) -> None:
    journal.ingest([replace(make_job("a", 0), width=64, snapped=(("width", 65), ("num_frames", 6)))])
    row = next(journal.rows())
    assert (row["width"], row["snapped"]) == (64, "width 65, num_frames 6")


def test_a_known_job_keeps_its_path_when_its_row_moves(journal: Journal) -> None:
    journal.ingest([make_job("a", 0)])
    moved = make_job("a", 7)
    assert moved.output == "000007-a.png"
    journal.ingest([moved])
    row = next(journal.rows())
    assert (row["output"], row["index"]) == ("000000-a.png", 7)


@pytest.mark.parametrize("wanted", ["x.png", "X.PNG", "x.png".upper().lower()], ids=["same", "other case", "again"])
def test_a_new_job_never_takes_a_taken_name(journal: Journal, wanted: str) -> None:
    journal.ingest([replace(make_job("a", 0), output="x.png")])
    journal.ingest([replace(make_job("b", 0), output=wanted)])  # a has vanished, its picture has not
    outputs = [row["output"].casefold() for row in journal.rows()]
    assert len(set(outputs)) == 2


def test_names_equal_after_normalisation_are_one_name(journal: Journal) -> None:
    journal.ingest([replace(make_job("a", 0), output="caf\u00e9.png"), replace(make_job("b", 1), output="cafe\u0301.png")])
    assert len({row["output"].replace("e\u0301", "\u00e9") for row in journal.rows()}) == 2


def test_the_first_drawn_seed_stays(journal: Journal) -> None:
    drawn = replace(make_job("a", 0), seed=11, seed_source="drawn")
    journal.ingest([drawn])
    journal.ingest([replace(drawn, seed=99, extra=(("note", "edited"),))])
    row = next(journal.rows())
    assert (row["seed"], row["note"]) == (11, "edited")


def test_a_limited_run_forgets_nothing(journal: Journal) -> None:
    jobs = make_jobs(4)
    journal.ingest(jobs)
    assert journal.ingest(jobs[:2], complete=False) == Ingested(0, 2, 0)
    assert journal.counts()["pending"] == 2
    assert journal.counts()["vanished"] == 0
    assert len(journal.take(9, 0)[1]) == 2
    journal.ingest(jobs)
    assert sum(journal.counts().values()) == 4


def test_a_limited_run_takes_no_vanished_job_for_one_that_it_left_out(journal: Journal) -> None:
    jobs = make_jobs(4)
    journal.ingest(jobs)
    journal.record([done(job) for job in jobs])
    journal.ingest(jobs[:3])
    journal.ingest(jobs[:1], complete=False)
    assert list(journal.left_behind()) == [jobs[3].output]
    assert [row.key for row in journal.finished()] == [job.key for job in jobs[:3]]
    assert journal.ingest(jobs[:1]) == Ingested(0, 1, 2), "those that the limit had left out have gone now"
    assert journal.counts()["vanished"] == 3


def never() -> Iterator[Job]:
    raise AssertionError("the manifest was read again")
    yield


def test_an_unchanged_manifest_is_not_read_again(journal: Journal) -> None:
    jobs = make_jobs(4)
    journal.ingest(jobs, mark="m1")
    journal.record(done(jobs[0]))
    assert journal.ingest(never(), mark="m1") == Ingested(0, 4, 0)
    assert journal.counts()["done"] == 1
    assert journal.ingest(jobs[1:], mark="m2") == Ingested(0, 3, 1)
    assert journal.ingest(jobs, mark="m1") == Ingested(0, 4, 0, returned=1), "the last one counts, not any"
    journal.ingest(jobs)
    with pytest.raises(AssertionError):
        journal.ingest(never(), mark="m1")


def test_two_jobs_of_one_identity_are_refused_and_change_nothing(journal: Journal) -> None:
    with pytest.raises(ValueError, match="identity"):
        journal.ingest([make_job("a", 0), make_job("b", 1), make_job("a", 2)])
    assert sum(journal.counts().values()) == 0


def test_a_manifest_that_breaks_off_changes_nothing(journal: Journal) -> None:
    journal.ingest(make_jobs(["old"]))

    def broken():
        yield from make_jobs(1200)
        raise OSError("the share is gone")

    with pytest.raises(OSError, match="share"):
        journal.ingest(broken())
    assert states(journal) == {"old": "pending"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), unique=True, max_size=31), min_size=1, max_size=5))
def test_any_sequence_of_manifests_leaves_each_job_one_row_and_one_name(tmp_path_factory: pytest.TempPathFactory, manifests) -> None:
    with Journal.open(tmp_path_factory.mktemp("j") / "j.sqlite") as journal:
        known: set[int] = set()
        names: dict[str, str] = {}
        for rows in manifests:
            # All rows want few names, so that they meet.
            jobs = [replace(make_job(f"n{row}", place), output=f"{place % 3}.png") for place, row in enumerate(rows)]
            result = journal.ingest(jobs)
            assert (result.added, result.kept) == (len(set(rows) - known), len(set(rows) & known))
            known |= set(rows)
            found = {row["id"]: row["output"] for row in journal.rows()}
            assert len(set(found.values())) == len(found) == len(known)
            assert names.items() <= found.items()
            names = found
            assert sum(journal.counts().values()) - journal.counts()["vanished"] == len(rows)


# --- what becomes of jobs -------------------------------------------------------------------------------------------


def test_each_outcome_has_its_state(journal: Journal) -> None:
    jobs = make_jobs(["ok", "bad", "again", "nsfw", "left"])
    journal.ingest(jobs)
    journal.take(4, 0)
    journal.record([done(jobs[0]), failed(jobs[1]), failed(jobs[2], retry=True), failed(jobs[3], kind="filtered")])
    assert states(journal) == {"ok": "done", "bad": "failed", "again": "pending", "nsfw": "filtered", "left": "pending"}
    row = next(journal.rows())
    assert (row["size_bytes"], row["batch"], row["seconds"], row["attempts"]) == (100, 2, 1.5, 0)


def test_twice_failed_is_set_aside(journal: Journal) -> None:
    (job,) = make_jobs(1)
    journal.ingest([job])
    for attempt in range(MAX_ATTEMPTS):
        assert journal.counts()["pending"] == 1, attempt
        journal.take(1, 0)
        journal.record(failed(job, retry=True))
    assert journal.counts()["failed"] == 1
    assert next(journal.rows())["attempts"] == MAX_ATTEMPTS


def test_a_job_that_failed_before_comes_last_and_alone(journal: Journal) -> None:
    jobs = make_jobs(4)
    journal.ingest(jobs)
    journal.take(2, 0)
    journal.record([failed(jobs[0], retry=True), failed(jobs[1], retry=True)])
    assert [[job.id for job in journal.take(9, 0)[1]] for _ in range(4)] == [["job2", "job3"], ["job0"], ["job1"], []]


def test_a_late_failure_does_not_undo_a_done_job(journal: Journal) -> None:
    (job,) = make_jobs(1)
    journal.ingest([job])
    journal.record([done(job), failed(job)])
    assert journal.counts()["done"] == 1


def test_spooled_latents_come_with_their_jobs_first(journal: Journal) -> None:
    jobs = make_jobs(3)
    journal.ingest(jobs)
    journal.take(3, 0)
    journal.record(LatentsSpooled(0, (jobs[1].key, jobs[2].key), "spool/1.safetensors", 2))
    assert journal.spool_in_use() == {"spool/1.safetensors"}
    journal.record(done(jobs[1]))
    journal.release()
    _, taken, spooled = journal.take(1, 0)
    assert [job.id for job in taken] == ["job2"]
    assert spooled == {jobs[2].key: "spool/1.safetensors"}
    journal.record(done(jobs[2]))
    assert journal.spool_in_use() == set()


def test_window_numbers_go_on_over_runs(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        with Journal.open(tmp_path / "j.sqlite") as journal:
            journal.ingest(make_jobs(3))
            numbers.append(journal.take(1, 0)[0])
    assert numbers == [0, 1, 2]


def test_retry_gives_failed_jobs_their_attempts_back_but_not_filtered_ones(journal: Journal) -> None:
    jobs = make_jobs(["bad", "nsfw"])
    journal.ingest(jobs)
    journal.record([failed(jobs[0]), failed(jobs[1], kind="filtered")])
    assert journal.retry_failed() == 1
    assert states(journal) == {"bad": "pending", "nsfw": "filtered"}


def test_failures_are_grouped_by_reason_the_commonest_first(journal: Journal) -> None:
    jobs = make_jobs(6)
    journal.ingest(jobs)
    journal.record([failed(job, reason="odd" if job.index == 2 else "same") for job in jobs[:5]])
    groups = journal.failures_by_reason()
    assert [(group.reason, group.count, group.examples) for group in groups] == [
        ("same", 4, ("job0", "job1", "job3")), ("odd", 1, ("job2",)),
    ]


def test_memory_is_kept_per_batch(journal: Journal) -> None:
    journal.set_worker(0, pid=1, state="working", since=0.0)
    journal.record([MemorySample(0, "decode", 10, 20, 30), MemorySample(0, "decode", 11, 21, 31)])
    assert [row[1:] for row in journal.memory_rows()] == [(0, 10, 20), (0, 11, 21)]


def test_rows_are_paged_without_loss(journal: Journal) -> None:
    jobs = make_jobs(1203)
    journal.ingest(jobs)
    journal.ingest(jobs[5:])
    assert [row["id"] for row in journal.rows()] == [job.id for job in [*jobs[5:], *jobs[:5]]]


@pytest.mark.parametrize("ask", [lambda reader: reader.finished(), lambda reader: reader.rows(), lambda reader: reader.raw_rows()],
                         ids=["finished", "rows", "raw_rows"])
def test_a_reader_that_takes_its_time_keeps_no_writer_waiting(
    journal: Journal, ask: Callable[[Journal], Iterator[object]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchgen.journalreader._CHUNK", 2)
    jobs = make_jobs(5)
    journal.ingest(jobs)
    journal.record([OutputDone(0, job.key, job.output, 1, "", 1, 0.0, "") for job in jobs])
    journal._db.execute("PRAGMA busy_timeout = 0")
    with Journal.read(journal.path) as reader:
        slowly = ask(reader)
        next(slowly)
        journal.record(MemorySample(0, "decode", 1, 0, 0))
        assert len(list(slowly)) == 4


def test_what_was_set_in_a_run_is_kept_for_the_next(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j.sqlite") as journal:
        assert journal.begin_run() is True
        journal.set_skipped([(7, "x", "no prompt")])
    with Journal.open(tmp_path / "j.sqlite") as journal:
        assert journal.skipped() == [(7, "x", "no prompt")]
        assert journal.begin_run() is False, "the run before never said that it ended"
        journal.end_run("SIGINT")
        assert journal.begin_run() is True
        assert [run["stopped_by"] for run in journal.runs()] == [None, "SIGINT", None]


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("ext4", "wal"), ("xfs", "wal"), ("btrfs", "wal"), ("tmpfs", "wal"), ("overlay", "wal"),
        ("nfs", "rollback"), ("nfs4", "rollback"), ("cifs", "rollback"), ("smb3", "rollback"), ("lustre", "rollback"), ("gpfs", "rollback"),
        ("9p", "rollback"), ("fuse.sshfs", "rollback"), ("fuse.glusterfs", "rollback"), ("ceph", "rollback"), (None, "rollback"),
    ],
)
def test_network_file_systems_get_the_rollback_journal(kind: str | None, mode: str) -> None:
    assert mode_for(kind, platform="linux") == mode


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_asked_for_is_the_mode_in_use(tmp_path: Path, mode: str) -> None:
    with Journal.open(tmp_path / "j.sqlite", mode=mode), sqlite3.connect(tmp_path / "j.sqlite") as plain:  # type: ignore[arg-type]
        assert (plain.execute("PRAGMA journal_mode").fetchone()[0] == "wal") == (mode == "wal")


@pytest.mark.parametrize("mode", MODES)
def test_a_journal_moves_from_one_mode_to_the_other(tmp_path: Path, mode: str) -> None:
    other = MODES[1 - MODES.index(mode)]
    with Journal.open(tmp_path / "j.sqlite", mode=mode) as journal:  # type: ignore[arg-type]
        journal.ingest(make_jobs(3))
    with Journal.open(tmp_path / "j.sqlite", mode=other) as journal:  # type: ignore[arg-type]
        assert journal.counts()["pending"] == 3


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal.open(path).close()
    with sqlite3.connect(path) as plain:
        plain.execute("PRAGMA user_version = 99")
    for way in (Journal.open, Journal.read):
        with pytest.raises(RefusedError, match="version 99"):
            way(path)


def test_an_older_schema_is_moved_on_with_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.sqlite"
    with Journal.open(path) as journal:
        journal.ingest(make_jobs(3))
    now = journalfile.SCHEMA_VERSION
    monkeypatch.setattr(journalfile, "SCHEMA_VERSION", now + 2)
    monkeypatch.setattr(
        journalfile, "_MIGRATIONS",
        {now: "ALTER TABLE jobs ADD COLUMN colour TEXT;", now + 1: "UPDATE jobs SET colour = 'red';"},
    )
    with Journal.open(path) as journal:
        assert journal.counts()["pending"] == 3
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT DISTINCT colour FROM jobs").fetchall() == [("red",)]
        assert plain.execute("PRAGMA user_version").fetchone()[0] == now + 2


def first_version(path: Path, jobs: int) -> Path:
    """A journal as the first version left it, with done jobs, a run and samples of memory."""
    with sqlite3.connect(path) as plain:
        plain.executescript((CASES / "version-1.sql").read_text(encoding="utf-8"))
        for job in make_jobs(jobs):
            plain.execute(
                "INSERT INTO jobs (key, idx, k, line, id, state, seed, output, name_key, job, written_at) "
                "VALUES (?, ?, ?, ?, ?, 'done', ?, ?, ?, ?, 150.0)",
                (job.key, job.index, job.k, job.row, job.id, str(job.seed), job.output, job.output, job.as_json()),
            )
        plain.execute("INSERT INTO runs VALUES (1, 100.0, 200.0, NULL, 'here', 1, 0)")
        plain.execute("INSERT INTO memory VALUES (1, 120.0, 0, 1, 'decode', 10, 20, 30)")
    return path


def test_a_journal_of_the_first_version_is_read_as_it_is(tmp_path: Path) -> None:
    path = first_version(tmp_path / "j.sqlite", 2)
    with Journal.read(path) as journal:
        assert (journal.counts()["done"], list(journal.work_rows()), journal.run_spans()) == (2, [], [(100.0, 200.0)])
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA user_version").fetchone()[0] == 1


def test_a_journal_of_the_first_version_takes_up_a_timeline(tmp_path: Path) -> None:
    path = first_version(tmp_path / "j.sqlite", 2)
    with Journal.open(path) as journal:
        journal.begin_run()
        journal.record(StageBatchDone(0, 7, "denoise", "64x64", ("a", "b"), 2, 1.5))
        assert [row["state"] for row in journal.rows()] == ["done", "done"]
    with sqlite3.connect(path) as plain, Journal.open(tmp_path / "new.sqlite") as fresh:
        assert plain.execute("PRAGMA user_version").fetchone()[0] == journalfile.SCHEMA_VERSION
        assert plain.execute("SELECT run, kind, name, window, computed FROM work").fetchall() == [(2, "batch", "denoise", 7, 2)]
        tables = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name = 'work'"
        assert plain.execute(tables).fetchall() == [tuple(row) for row in fresh._db.execute(tables).fetchall()]


def test_what_workers_did_is_kept_in_order_and_weights_that_go_out_are_not(journal: Journal) -> None:
    journal.begin_run()
    journal.record([
        ComponentLoaded(1, "vae", "resident", 10, 2.0), ComponentMoved(1, "vae", "in", 10, 0.5), ComponentMoved(1, "vae", "out", 0, 0.0),
        StageBatchDone(1, 3, "decode", "64x64", ("a", "b", "c"), 2, 1.5),
    ])
    found = [(row.run, row.worker, row.kind, row.name, row.seconds, row.computed, row.jobs) for row in journal.work_rows()]
    assert found == [
        (1, 1, "load", "vae", 2.0, 0, 0), (1, 1, "move", "vae", 0.5, 0, 0), (1, 1, "batch", "decode", 1.5, 2, 3),
    ]


def test_a_run_that_ended_without_a_word_ends_with_the_last_that_is_known(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 130.0, 140.0, 500.0, 600.0])
    monkeypatch.setattr("batchgen.journal.time.time", lambda: next(now))
    jobs = make_jobs(2)
    journal.ingest(jobs)
    journal.begin_run()
    journal.record(done(jobs[0]))
    journal.record(MemorySample(0, "decode", 10, 20, 30))
    journal.begin_run()
    journal.end_run(None)
    assert journal.run_spans() == [(100.0, 140.0), (500.0, 600.0)]


def test_a_journal_that_was_closed_is_one_file_and_readers_leave_it_so(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal.open(path, mode="wal") as journal:
        journal.ingest(make_jobs(3))
        with Journal.read(path) as reader:
            assert reader.counts()["pending"] == 3
    with Journal.read(path) as reader:
        assert reader.counts()["pending"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["journal.sqlite"]
    with Journal.open(path, mode="wal") as journal:
        assert journalfile.journal_mode(journal._db) == "wal"


def test_a_journal_that_is_being_read_is_closed_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open(path, mode="wal")
    journal.ingest(make_jobs(3))
    with Journal.read(path) as reader, reader.snapshot():
        assert reader.counts()["pending"] == 3
        journal.close()
        assert reader.counts()["pending"] == 3
    with Journal.open(path) as journal:
        assert journal.counts()["pending"] == 3


def test_a_migration_that_fails_half_way_leaves_the_old_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.sqlite"
    Journal.open(path).close()
    now = journalfile.SCHEMA_VERSION
    monkeypatch.setattr(journalfile, "SCHEMA_VERSION", now + 1)
    monkeypatch.setattr(journalfile, "_MIGRATIONS", {now: "ALTER TABLE jobs ADD COLUMN colour TEXT; UPDATE nowhere SET x = 1;"})
    with pytest.raises(sqlite3.OperationalError):
        Journal.open(path)
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA user_version").fetchone()[0] == now
        assert "colour" not in [row[1] for row in plain.execute("PRAGMA table_info(jobs)")]


def test_every_version_since_the_first_has_its_step() -> None:
    assert set(journalfile._MIGRATIONS) == set(range(1, journalfile.SCHEMA_VERSION))


@pytest.mark.parametrize("content", [b"not a database at all, whatever its name says " * 40, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_and_a_new_journal_begun(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with Journal.open(path) as journal:
        assert journal.damaged is not None
        assert journal.damaged.read_bytes() == content
        journal.ingest(make_jobs(2))
        assert journal.counts()["pending"] == 2


def test_somebody_elses_database_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as plain:
        plain.execute("CREATE TABLE photos (name)")
    plain.close()
    with Journal.open(path) as journal:
        assert journal.damaged is not None
        with sqlite3.connect(journal.damaged) as kept:
            assert kept.execute("SELECT count(*) FROM photos").fetchone() == (0,)


def test_reading_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no journal"):
        Journal.read(tmp_path / "journal.sqlite")
    assert not list(tmp_path.iterdir())


def test_a_damaged_journal_is_said_so_to_readers_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database" * 400)
    with pytest.raises(RunStoppedError, match="not a database") as caught:
        Journal.read(path)
    assert caught.value.exit_code == 1
    assert "same command again" in str(caught.value)
    assert path.read_bytes() == b"not a database" * 400


def test_a_killed_writers_half_commit_is_rolled_back_for_readers(tmp_path: Path) -> None:
    """With a rollback journal left hot, which a read-only connection cannot roll back."""
    path = tmp_path / "journal.sqlite"
    with Journal.open(path, mode="rollback") as journal:
        journal.ingest(make_jobs(300))
    code = (
        "import os, sqlite3, sys\nconnection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA cache_size = 5')\nconnection.execute('BEGIN IMMEDIATE')\n"
        "connection.execute(\"UPDATE jobs SET state = 'failed', reason = hex(randomblob(3000))\")\nos._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert path.with_name("journal.sqlite-journal").stat().st_size > 0
    with Journal.read(path) as journal:
        assert journal.counts()["pending"] == 300


@pytest.mark.parametrize("mode", MODES)
def test_a_journal_on_read_only_media_can_be_read(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal.open(path, mode=mode) as journal:  # type: ignore[arg-type]
        journal.ingest(make_jobs(3))
    script = (
        'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77\n'
        '"$2" -c "import sys; from pathlib import Path; from batchgen.journal import Journal; '
        "print(Journal.read(Path(sys.argv[1])).counts()['pending'])\" \"$1/journal.sqlite\""
    )
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable], capture_output=True, text=True, check=False
    )
    if ran.returncode in (1, 77) and not ran.stdout and "Traceback" not in ran.stderr:
        pytest.skip("no mount namespaces here")
    assert ran.stdout == "3\n", ran.stderr


def test_a_journal_that_is_only_being_made_is_said_so(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal.sqlite") as plain:
        plain.execute("PRAGMA journal_mode = WAL")
    plain.close()
    with pytest.raises(RefusedError, match="only being made"):
        Journal.read(tmp_path / "journal.sqlite")


@pytest.mark.parametrize("mode", MODES)
def test_readers_and_the_writer_never_find_it_locked(tmp_path: Path, mode: str) -> None:
    """Each look is a new connection, while jobs are journalled without a pause."""
    path = tmp_path / "j.sqlite"
    jobs = make_jobs(2000)
    with Journal.open(path, mode=mode) as journal:  # type: ignore[arg-type]
        journal.ingest(jobs)
    stop, written, errors = threading.Event(), [], []

    def write() -> None:
        try:
            with Journal.open(path, mode=mode) as journal:  # type: ignore[arg-type]
                while not stop.is_set():
                    for job in jobs[:50]:
                        journal.record(done(job))
                        written.append(1)
        except Exception as error:  # noqa: BLE001 told by the main thread
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            with Journal.read(path) as reader, reader.snapshot():
                counts = reader.counts()
                reader.workers()
            assert sum(counts.values()) == 2000
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert len(written) > 5, "the writer was starved"
