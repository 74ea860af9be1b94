"""verify: every done output against the journal, and nothing is touched."""

from __future__ import annotations

import pytest

from batchgen.journal import Journal
from batchgen.reconcile import open_journal
from batchgen.verify import Tally, verify
from reportkit import finished_run, job, without_rows


@pytest.fixture
def run(tmp_path):
    return finished_run(tmp_path / "run", ["a", "b", "c", "d"], failed=[3])


def found(run, tally=None):
    with Journal.read(run.journal) as journal:
        return [(finding.wrong, finding.path) for finding in verify(run, journal, tally)]


def flip_a_byte(run):
    path = run.outputs / "000001.png"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def cut(run):
    path = run.outputs / "000001.png"
    path.write_bytes(path.read_bytes()[:-10])


CASES = [
    ("an untouched folder has no findings", lambda run: None, []),
    ("a changed byte of the same size is found", flip_a_byte, [("changed", "000001.png")]),
    ("a cut file is found", cut, [("changed", "000001.png")]),
    ("a missing file is found", lambda run: (run.outputs / "000002.png").unlink(), [("missing", "000002.png")]),
    ("a stranger is found", lambda run: (run.outputs / "holiday.png").write_bytes(b"x"), [("stranger", "holiday.png")]),
    ("a file under a failed job's name is a stranger", lambda run: (run.outputs / "000003.png").write_bytes(b"x"), [("stranger", "000003.png")]),
]


@pytest.mark.parametrize(("harm", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_wrong_is_named(run, harm, expected):
    harm(run)
    before = sorted((path.name, path.read_bytes()) for path in run.outputs.iterdir())
    assert found(run) == expected
    assert sorted((path.name, path.read_bytes()) for path in run.outputs.iterdir()) == before


def test_everything_done_is_counted(run):
    tally = Tally()
    found(run, tally)
    assert tally.checked == 3
    assert tally.size_bytes == sum((run.outputs / f"00000{number}.png").stat().st_size for number in range(3))


def clip_of_frames(run):
    """Job 1's output becomes a folder of frames."""
    with Journal.open(run.journal) as journal, journal._writing() as db:
        db.execute("UPDATE jobs SET output = 'clip', name_key = 'clip' WHERE idx = 1")
    (run.outputs / "000001.png").unlink()
    (run.outputs / "clip").mkdir()
    for number in range(3):
        (run.outputs / "clip" / f"{number:05d}.png").write_bytes(b"x")


def journal_lost(run, *, complete=True):
    """The journal is begun anew with the first row, all that the manifest has or all that a limit lets through."""
    run.journal.unlink()
    journal, recovered = open_journal(run)
    with journal:
        assert recovered == 0  # the kit's pictures name no job: they are found as a run's are
        journal.set_found([(f"{number:032x}", f"{number:06d}.png", None) for number in range(3)])
        journal.ingest([job(0, "a")], complete=complete)
        journal._db.execute("UPDATE jobs SET state = 'done'")


CHANGED = [
    ("files of vanished rows are counted and no finding", lambda run: without_rows(run, [0, 1]), 2, []),
    ("a vanished clip is one file and its frames are no strangers", lambda run: (clip_of_frames(run), without_rows(run, [1])), 1, []),
    ("a vanished file that was taken away is missed by nobody", lambda run: (without_rows(run, [0, 1]), cut(run), (run.outputs / "000000.png").unlink()),
     1, []),
    ("a file under a vanished job's name that failed is a stranger", lambda run: (without_rows(run, [3]), (run.outputs / "000003.png").write_bytes(b"x")),
     0, [("stranger", "000003.png")]),
    ("a stranger beside vanished rows is found", lambda run: (without_rows(run, [0]), (run.outputs / "holiday.png").write_bytes(b"x")),
     1, [("stranger", "holiday.png")]),
    ("rows that came back are checked again", lambda run: (without_rows(run, [0, 1]), without_rows(run, []), cut(run)), 0, [("changed", "000001.png")]),
    ("what a limit left out is checked and no stranger", lambda run: (without_rows(run, [1, 2], complete=False), cut(run)),
     0, [("changed", "000001.png")]),
]


@pytest.mark.parametrize(("change", "vanished", "expected"), [case[1:] for case in CHANGED], ids=[case[0] for case in CHANGED])
def test_a_changed_manifest_raises_no_false_alarm(run, change, vanished, expected):
    change(run)
    tally = Tally()
    assert (found(run, tally), tally.vanished) == (expected, vanished)


def written(run, name):
    path = run.outputs / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


IN_HAND = [
    ("a picture half written", [], lambda run: written(run, ".batchgen-7-ab.tmp"), "left behind by a run that was killed"),
    ("a clip's frames half written", [], lambda run: [written(run, f".batchgen-7-ab.tmp/0000{number}.png") for number in range(3)],
     "left behind by a run that was killed"),
    ("an output placed and not told of yet", [(0, "pending")], lambda run: None, "no done job of this run owns it"),
    ("an output of a job a worker has in hand", [(0, "running")], lambda run: None, "no done job of this run owns it"),
    ("a clip of frames placed and not told of yet", [(1, "running")], clip_of_frames, "no done job of this run owns it"),
]


@pytest.mark.parametrize(("states", "change", "text"), [case[1:] for case in IN_HAND], ids=[case[0] for case in IN_HAND])
def test_what_a_live_run_is_writing_is_counted_and_a_stranger_only_when_none_lives(run, states, change, text):
    change(run)
    with Journal.open(run.journal) as journal:
        for number, state in states:
            journal._db.execute("UPDATE jobs SET state = ? WHERE idx = ?", (state, number))
    with Journal.read(run.journal) as journal:
        with run.lock() as lock:
            tally = Tally()
            assert list(verify(run, journal, tally)) == []
            assert (tally.in_hand, tally.going_on) == (1, lock.holder.text)
        tally = Tally()
        assert [(finding.wrong, finding.text) for finding in verify(run, journal, tally)] == [("stranger", text)]
        assert (tally.in_hand, tally.going_on) == (0, None)


def test_what_a_live_run_finishes_while_outputs_are_compared_is_no_stranger(run):
    with Journal.open(run.journal) as journal:
        journal._db.execute("UPDATE jobs SET state = 'running' WHERE idx = 0")
    tally = Tally()
    (run.outputs / "000001.png").unlink()
    with run.lock(), Journal.read(run.journal) as reader:
        comparing = verify(run, reader, tally)
        assert next(comparing).wrong == "missing"
        with Journal.open(run.journal) as journal:
            journal._db.execute("UPDATE jobs SET state = 'done' WHERE idx = 0")
        assert list(comparing) == []
    assert (tally.checked, tally.in_hand) == (2, 1)


def test_a_stranger_and_a_failed_jobs_file_are_found_beside_a_live_run_too(run):
    for name in ("holiday.png", "000003.png"):
        written(run, name)
    with run.lock():
        assert found(run) == [("stranger", "000003.png"), ("stranger", "holiday.png")]


@pytest.mark.parametrize(("complete", "vanished", "unlisted"), [(True, 2, 0), (False, 0, 2)])
def test_outputs_that_a_journal_begun_anew_found_have_vanished_only_if_it_saw_the_whole_manifest(run, complete, vanished, unlisted):
    journal_lost(run, complete=complete)
    tally = Tally()
    assert [wrong for wrong in found(run, tally) if wrong[0] == "stranger"] == []
    assert (tally.vanished, tally.unlisted) == (vanished, unlisted)
