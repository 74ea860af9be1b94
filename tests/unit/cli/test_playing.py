"""What the command line hears of a rehearsal in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from batchgen.cli.playing import played_apart

# Says what it plays, waits as long as it was asked to, and answers.
PLAYER = """
import json, sys, time
asked = json.load(sys.stdin)
print(json.dumps({"playing": "decode at 64x64, batch 2"}), flush=True)
time.sleep(asked["wait"])
if asked["answers"]:
    print(json.dumps({"rehearsed": asked["wait"]}))
"""


def played(*, wait: float, answers: bool = True, seconds: float = 60, tell: float = 60.0) -> tuple[object, list[str]]:
    said: list[str] = []
    request = {"wait": wait, "answers": answers}
    found = played_apart([sys.executable, "-c", PLAYER], request, os.environ, note=said.append, seconds=seconds, tell_seconds=tell)
    return found, said


def test_a_quick_rehearsal_answers_and_says_nothing() -> None:
    assert played(wait=0) == ({"rehearsed": 0}, [])


def test_a_slow_one_says_what_is_played() -> None:
    found, said = played(wait=1, tell=0.2)
    assert found == {"rehearsed": 1}
    assert any(line.startswith("  playing decode at 64x64, batch 2 (") for line in said)


def test_one_that_dies_gives_no_answer() -> None:
    with pytest.raises(ValueError, match="without an answer"):
        played(wait=0, answers=False)


def test_one_that_never_ends_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        played(wait=600, seconds=0.5)
