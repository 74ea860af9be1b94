"""docs/scale.md names what there is, with the numbers that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from batchgen import checkpoints
from batchgen.cli.main import COMMANDS, load_command
from batchgen.execute import health
from batchgen.outputs import store

DOC = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
WORDS = {3: "three", 4: "four", 5: "five", 7: "seven"}


def test_every_option_on_the_page_is_one() -> None:
    known = {text for name in COMMANDS for part in load_command(name).params for text in (*part.opts, *part.secondary_opts)}
    slurm = {"--array", "--gres", "--time", "--signal", "--requeue"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOC))
    assert len(named) > 15
    assert named - known - slurm == set()


def test_the_numbers_are_the_codes() -> None:
    text = " ".join(DOC.split())
    assert f"died {WORDS[health.MAX_BARREN]} times in a row before a batch began" in text
    assert f"or {WORDS[health.MAX_FRUITLESS]} times in a row without a picture" in text
    assert f"{WORDS[health.SLOW_BATCHES]} batches in a row took more than {WORDS[int(health.SLOWER)]} times" in text
    assert f"tried {WORDS[store.ATTEMPTS]} times with pauses that double from half a second" in text
    assert store.FIRST_PAUSE_SECONDS == 0.5
    assert f"every {WORDS[int(checkpoints.EVERY_SECONDS / 60)]} minutes" in text


def test_every_way_has_a_section() -> None:
    assert re.findall(r"^## (.+)$", DOC, re.MULTILINE) == [
        "One card", "Eight cards", "Slurm, and other job arrays", "Ray", "Outputs in a store", "What was measured",
    ]
