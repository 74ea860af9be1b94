"""verify: every done output against the journal, and nothing is touched."""

from __future__ import annotations

import pytest

from batchgen.journal import Journal
from batchgen.verify import Tally, verify
from reportkit import finished_run


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
