"""A list with faulty rows that changes between runs: every command tells the same of it, and none raises a false alarm."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Said, batchgen

GOOD = [{"prompt": f"{number} boats", "seed": number + 1, "width": 64, "height": 64} for number in range(4)]
BAD = [{"prompt": f"bad {number}", "seed": 9, "width": "wide", "height": 64} for number in range(3)]


def render(folder: Path, model: Path, rows: list[dict[str, Any]], *more: object) -> Said:
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return batchgen(
        "run", "list.jsonl", "--model", model, "--steps", 1, "--batch-size", 1, "--skip-invalid", "-o", "out", *more, folder=folder,
    )


def csv_states(text: str) -> list[str]:
    return sorted(row["state"] for row in csv.DictReader(io.StringIO(text)))


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(batchgen("status", "out", "--json", folder=folder).out)
    return found


@pytest.mark.long
def test_a_list_that_has_faults_and_changes_raises_no_false_alarm(tmp_path: Path, tiny_folder: Any) -> None:
    model = tiny_folder("qwen_image")
    said = render(tmp_path, model, GOOD + BAD)
    assert said.code == 3, said
    assert "4 done in " in said.out
    assert said.out.count("3 invalid rows skipped") == 1
    for kind, words in (("md", "4 jobs: 4 done; 3 invalid rows skipped"), ("csv", "invalid row")):
        assert words in batchgen("report", "out", "--format", kind, folder=tmp_path).out
    told = csv_states(batchgen("report", "out", "--format", "csv", folder=tmp_path).out)
    assert told == csv_states((tmp_path / "out/tables/jobs.csv").read_text("utf-8")) == ["done"] * 4 + ["failed"] * 3
    first = status(tmp_path)
    assert (first["skipped_rows"], first["rate_per_minute"] > 0) == (3, True)

    # one row is taken out and one changed: two files stay that no row asks for
    before = {path.name for path in (tmp_path / "out/outputs").iterdir()}
    rows = [GOOD[0], {**GOOD[1], "seed": 77}, GOOD[2]]
    assert render(tmp_path, model, rows).code == 0
    assert "nothing was rendered: 3 of 3 jobs done; 3 invalid rows skipped" in render(tmp_path, model, rows + BAD).out
    assert len({path.name for path in (tmp_path / "out/outputs").iterdir()} - before) == 1
    verify_finds_nothing_wrong(tmp_path)
    said = batchgen("rerender", *sorted((tmp_path / "out/outputs").iterdir()), folder=tmp_path)
    assert said.code == 0, said
    assert said.out.splitlines()[-1] == "5 files: 5 equal"

    # the journal is lost: all is adopted, nothing rendered
    (tmp_path / "out/journal.sqlite").unlink()
    said = render(tmp_path, model, rows)
    assert "nothing was rendered: 3 of 3 jobs done\n" in said.out
    assert (status(tmp_path)["rate_per_minute"], status(tmp_path)["counts"]["done"]) == (None, 3)
    verify_finds_nothing_wrong(tmp_path)

    # it is lost again, and the first run after it has a limit: later rows are in the list all the same
    (tmp_path / "out/journal.sqlite").unlink()
    assert render(tmp_path, model, rows, "--limit", 1).code == 0
    said = batchgen("verify", "out", folder=tmp_path)
    assert said.code == 0, said
    assert "4 files of rows that --limit left out or that are no longer in the manifest, not compared\n1 output checked" in said.out
    assert "nothing was rendered: 3 of 3 jobs done\n" in render(tmp_path, model, rows).out
    verify_finds_nothing_wrong(tmp_path)


def verify_finds_nothing_wrong(folder: Path) -> None:
    said = batchgen("verify", "out", folder=folder)
    assert said.code == 0, said
    assert "2 files of rows no longer in the manifest" in said.out
    assert "3 outputs checked" in said.out
    assert "stranger" not in said.out
