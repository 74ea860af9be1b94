"""docs/scale.md names what there is, with the numbers that the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from batchgen import checkpoints
from batchgen.cli.main import COMMANDS, load_command
from batchgen.execute import health, supervisor
from batchgen.outputs import store

DOC = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
WORDS = {3: "three", 4: "four", 5: "five", 7: "seven"}


def test_every_option_on_the_page_is_one() -> None:
    known = {text for name in COMMANDS for part in load_command(name).params for text in (*part.opts, *part.secondary_opts)}
    slurm = {"--array", "--gres", "--time", "--signal", "--requeue"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", DOC))
    assert len(named) > 15
    ray = {"--head", "--port", "--address"}
    assert named - known - slurm - ray == set()


def test_the_numbers_are_the_codes() -> None:
    text = " ".join(DOC.split())
    assert f"died {WORDS[health.MAX_BARREN]} times in a row before a batch began" in text
    assert f"or {WORDS[health.MAX_FRUITLESS]} times in a row without a picture" in text
    assert f"{WORDS[health.SLOW_BATCHES]} batches in a row took more than {WORDS[int(health.SLOWER)]} times" in text
    assert f"tried {WORDS[store.ATTEMPTS]} times with pauses that double from half a second" in text
    assert store.FIRST_PAUSE_SECONDS == 0.5
    assert f"every {WORDS[int(checkpoints.EVERY_SECONDS / 60)]} minutes" in text


def test_how_long_a_run_waits_for_a_cluster_is_the_codes() -> None:
    assert supervisor._PATIENCE_SECONDS == 1800
    assert "the run waits half an hour for resources, then ends with exit code 1" in " ".join(DOC.split())


def test_what_was_measured_on_a_cluster_is_the_records() -> None:
    record = json.loads((Path(__file__).parents[3] / "results" / "benchmarks" / "ray_cluster.json").read_text(encoding="utf-8"))
    assert (record["lost"], record["told_twice"], record["most_rendered_again"], record["jobs"]) == (0, 0, 1, 200)
    text = " ".join(DOC.split())
    assert "Lost: none. Told twice: none. Rendered again: 1 picture at most." in text
    assert f"noticed after {record['runs'][0]['noticed_seconds']} seconds" in text


def test_every_way_has_a_section() -> None:
    assert re.findall(r"^## (.+)$", DOC, re.MULTILINE) == [
        "One card", "Eight cards", "A model that no card holds", "Slurm, and other job arrays", "Ray", "Outputs in a store", "What was measured",
    ]
