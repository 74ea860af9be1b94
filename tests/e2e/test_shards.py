"""A job array by hand: three shards of one list, each a run of its own, joined; against one run of the whole list."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from commandline import batchgen, pixels, write_csv

from batchgen.journal import Journal

OPTIONS = ("--model", "builtin", "--batch-size", "1", "--quiet", "--num-images", "2")
FOLDERS = [f"results/list-builtin-shard-{number}-of-3" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of sixteen rows, some of them equal, and its three shards."""
    folder = tmp_path_factory.mktemp("shards")
    rows = [{"prompt": f"a {name} circle", "width": "64", "height": "64", "steps": "2"} for name in ("red", "green", "blue", "red") * 4]
    write_csv(folder / "list.csv", rows)
    for number in (1, 2, 3):
        said = batchgen("run", "list.csv", *OPTIONS, "--shard", f"{number}/3", folder=folder)
        assert said.code == 0, said
    return folder


def test_three_shards_joined_are_one_run(tmp_path: Path) -> None:
    options, folders = OPTIONS, FOLDERS
    assert batchgen("run", "list.csv", *options, "-o", "one", folder=tmp_path).code == 0
    counts = [len(list((tmp_path / folder / "outputs").iterdir())) for folder in folders]
    assert sum(counts) == 32
    assert all(counts)
    joined = batchgen("merge", *folders, "-o", "all", folder=tmp_path)
    assert joined.code == 0, joined
    one, merged = tmp_path / "one/outputs", tmp_path / "all/outputs"
    assert {path.name for path in merged.iterdir()} == {path.name for path in one.iterdir()}
    assert all(np.array_equal(pixels(path), pixels(merged / path.name)) for path in one.iterdir())
    tables = [list(csv.DictReader((tmp_path / name / "tables/jobs.csv").read_text(encoding="utf-8").splitlines())) for name in ("one", "all")]
    assert [row["output"] for row in tables[0]] == [row["output"] for row in tables[1]]
    assert (tmp_path / "all/report.html").read_text(encoding="utf-8").count("outputs/") >= 32
    assert {path.name for path in (tmp_path / "all/tables").iterdir()} >= {"residency.txt", "timings.txt", "measured.json"}
    # a folder like any other: looked at, compared, run
    assert json.loads(batchgen("status", "all", "--json", folder=tmp_path).out)["counts"]["done"] == 32
    assert json.loads(batchgen("status", folders[1], "--json", folder=tmp_path).out)["shard"] == "2/3"
    assert batchgen("verify", "all", folder=tmp_path).code == 0
    again = batchgen("run", "list.csv", *options, "-o", "all", folder=tmp_path)
    assert again.code == 0, again
    with Journal.read(tmp_path / "all/journal.sqlite") as journal:
        assert journal.counts()["done"] == 32
        assert journal.runs()[-1]["done_before"] == 32
    # and merged into again
    repeated = batchgen("merge", *folders, "-o", "all", folder=tmp_path)
    assert repeated.code == 0, repeated
    assert "32 already there" in repeated.err


def test_wrong_shards_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = ("run", "list.csv", *OPTIONS, "-o", "out")
    for wrong in ("0/3", "4/3", "two", "1/0"):
        said = batchgen(*run, "--shard", wrong, folder=tmp_path)
        assert said.code == 2, said
        assert "--shard" in said.err
    assert not (tmp_path / "out").exists()
    for other in (("--shard", "2/3"), ()):
        said = batchgen("run", "list.csv", *OPTIONS, *other, "-o", FOLDERS[0], folder=tmp_path)
        assert said.code == 2, said
        assert "was begun with --shard 1/3" in said.err
    said = batchgen("merge", *FOLDERS[:2], "-o", "some", folder=tmp_path)
    assert said.code == 2, said
    assert "of 3 shards 3 is missing" in said.err
    assert not (tmp_path / "some").exists()
