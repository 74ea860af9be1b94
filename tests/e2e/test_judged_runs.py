"""The built-in model's pictures show what their prompts say, however a run is placed, batched or interrupted: read by tests/judge.py."""

from __future__ import annotations

import csv
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import batchgen, events, pixels, run_json, start, write_csv

import judge

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "unit" / "builtin" / "held_out_prompts.json").read_text())[:60]
FEW = 24  # rows of the slower placements: the first ones, so that their pictures are the same as in the long run
# fewest right of sixty: the targets for five hundred prompts, less three pictures
LEAST = {"colour": 0.93, "background": 0.93, "position": 0.90, "size": 0.90, "shape": 0.85}
OFFLOADED = ("--batch-size", 1, "--component-residency", "all=component-offload")
STREAMED = ("--component-residency", "dit=layerwise-offload,text_encoder=component-offload")


@dataclass(frozen=True)
class Judged:
    """A finished run and what its pictures show, in the list's order."""

    folder: Path
    jobs: tuple[dict[str, str], ...]
    readings: tuple[judge.Reading, ...]

    @property
    def placements(self) -> dict[str, str]:
        return {name: part["mode"] for name, part in run_json(self.folder)["plan"]["placements"].items()}


def judged(folder: Path) -> Judged:
    with (folder / "tables" / "jobs.csv").open(encoding="utf-8", newline="") as file:
        jobs = tuple(csv.DictReader(file))
    assert [job["state"] for job in jobs] == ["done"] * len(jobs)
    return Judged(folder, jobs, tuple(judge.read_picture(pixels(folder / "outputs" / job["output"])) for job in jobs))


def a_list(path: Path, count: int) -> Path:
    return write_csv(path, [{name: str(row[name]) for name in ("prompt", "width", "height", "seed")} for row in ROWS[:count]])


def rendered(here: Path, count: int, options: Sequence[object] = ()) -> Judged:
    said = batchgen("run", a_list(here / "prompts.csv", count), "--model", "builtin", "-o", "run", "-q", *options, folder=here)
    assert said.code == 0, said
    return judged(here / "run")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """The sixty prompts, resident, in batches that the tuner chose."""
    return rendered(tmp_path_factory.mktemp("calm"), len(ROWS))


def test_held_out_prompts_are_painted_as_told_by_a_run_in_auto_batches(calm: Judged) -> None:
    assert calm.placements == dict.fromkeys(("text_encoder", "transformer", "vae"), "resident")
    assert max(int(job["batch"]) for job in calm.jobs) > 1
    wanted = [{name: row[name] for name in judge.PROPERTIES} for row in ROWS]
    shares = judge.agreement(calm.readings, wanted)
    assert {name: shares[name] >= least for name, least in LEAST.items()} == dict.fromkeys(LEAST, True), shares


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "placements"),
    [
        pytest.param(OFFLOADED, {"text_encoder": "component-offload", "transformer": "component-offload", "vae": "component-offload"},
                     id="component-offload, batch 1"),
        pytest.param(STREAMED, {"text_encoder": "component-offload", "transformer": "layerwise-offload", "vae": "resident"},
                     id="layerwise-offload, auto batches"),
    ],
)  # fmt: skip
def test_every_picture_shows_the_same_under_other_placements_and_batches(
    options: tuple[object, ...], placements: dict[str, str], calm: Judged, tmp_path: Path,
) -> None:
    other = rendered(tmp_path, FEW, options)
    assert other.placements == placements
    batches = [int(job["batch"]) for job in other.jobs]
    assert set(batches) == {1} if "--batch-size" in options else max(batches) > 1
    assert other.readings == calm.readings[:FEW]


def test_every_picture_shows_the_same_after_a_kill_and_a_resume(calm: Judged, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    arguments = ["run", a_list(tmp_path / "prompts.csv", FEW), "--model", "builtin", "-o", "run", "-q", "--events", log]
    process = start(arguments, tmp_path)
    while process.poll() is None and not (log.exists() and events(log, "OutputDone")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    standing = {path: path.stat().st_ino for path in (tmp_path / "run" / "outputs").rglob("*.png")}
    assert 0 < len(standing) < FEW
    said = batchgen(*arguments, folder=tmp_path)
    assert said.code == 0, said
    assert {path: path.stat().st_ino for path in standing} == standing
    assert judged(tmp_path / "run").readings == calm.readings[:FEW]
