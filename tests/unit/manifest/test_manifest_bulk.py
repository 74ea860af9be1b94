"""Reading a chunk at once finds what reading its rows one by one finds: the same counts, shapes, faults and warnings."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifestkit import CASES, options

from batchgen.inventory.records import SizeRules
from batchgen.manifest import ManifestOptions, ManifestSummary, survey
from batchgen.manifest.bulk import Bulk

TEXTS = st.sampled_from(["a cat", "a cat", "a (dog:1.2)", " edge ", "", "猫", "a\x07bell", "quo\"te", "two\nlines", "--ar 3", "x" * 50])
IDS = st.sampled_from(["", "a", "A", "b", "b ", "c" * 60, "C" * 60, "é", "é", "7"])
SEEDS = st.sampled_from(["", "", "1", "2", "1", "-1", "random", "18446744073709551615", "18446744073709551616", "4.0", "x", " 3 "])
SIZES = st.sampled_from(["", "512", "512.0", "500", "0", "768", "nope"])
NUMBERS = st.sampled_from(["", "7", "7.5", "7,5", "-1"])
NOTES = st.sampled_from(["", "n", "longer note"])
COLUMNS = {
    "prompt": TEXTS, "negative_prompt": TEXTS, "id": IDS, "seed": SEEDS, "width": SIZES, "height": SIZES, "guidance": NUMBERS,
    "n": st.sampled_from(["", "1", "2", "0"]), "frames": st.sampled_from(["", "5", "6"]), "strength": st.sampled_from(["", "", "", "0.5"]),
    "note": NOTES,
}
JSON_CELLS = {
    "prompt": TEXTS | st.sampled_from(["half \ud800", "nul \0", None, 5]), "id": IDS | st.sampled_from([None, 7, 8, 1.5, True]),
    "seed": SEEDS | st.sampled_from([None, 0, 5, 2**64, -1, -2, True, 4.0, 4.5]), "width": SIZES | st.sampled_from([None, 512, 512.0, True, 1]),
    "note": NOTES | st.sampled_from([None, 5, [1], {"a": "\ud800"}, "half \udfff", "nul \0"]),
}
GOOD = {"seed": ["1", "2", "3", "4", ""], "width": ["512", "768"], "guidance": ["7", "7.5"], "n": ["1", "2"]}


def found(path: Path, given: ManifestOptions, *, at_once: bool) -> object:
    if at_once:
        summary = survey(str(path), given)
    else:
        with mock.patch.object(Bulk, "take", return_value=None):
            summary = survey(str(path), given)
    plain = replace(summary, warnings=(), shapes=())
    return plain, sorted((notice.kind, notice.rows, notice.count) for notice in summary.warnings), _shapes(summary)


def _shapes(summary: ManifestSummary) -> list[tuple[str, int]]:
    return sorted((repr(count.shape), count.jobs) for count in summary.shapes)


def compare(path: Path) -> None:
    rules = SizeRules(width_multiple=16, height_multiple=16, frames_step=4, frames_offset=1, is_video=True)
    for chosen in (
        options(), options(rules=rules, skip_invalid=True), options(rules=rules, snap=True, skip_invalid=True, takes_negative_prompt=False),
        options(rules=replace(rules, is_video=False), limit=3, negative_prompt="noise", takes_negative_prompt=False),
        options(dedupe=True, allow_empty_prompt=True, skip_invalid=True),
    ):
        assert found(path, chosen, at_once=True) == found(path, chosen, at_once=False)


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    names = ["prompt", *draw(st.lists(st.sampled_from([name for name in COLUMNS if name != "prompt"]), unique=True))]
    good = draw(st.booleans())
    cells = {name: st.sampled_from(GOOD[name]) if good and name in GOOD else COLUMNS[name] for name in names}
    if good:
        cells["prompt"] = st.sampled_from(["a cat", "a dog", "a (bird:1.1)", " edge"])
        cells |= {"strength": st.just("")} if "strength" in names else {}
    return [names, *draw(st.lists(st.tuples(*(cells[name] for name in names)).map(list), min_size=1, max_size=8))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables())
def test_of_a_csv_file(tmp_path: Path, table: list[list[str]]) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(table)
    compare(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.fixed_dictionaries({"prompt": JSON_CELLS["prompt"]}, optional={n: c for n, c in JSON_CELLS.items() if n != "prompt"}), min_size=1, max_size=8))
def test_of_a_jsonl_file(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    compare(path)


@pytest.mark.parametrize("path", sorted(CASES.glob("[a-z]*.*")), ids=lambda path: path.name)
def test_of_the_cases(path: Path) -> None:
    compare(path)


def test_good_rows_are_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = "".join(f'r{n},"a cat, {n}",{n},512,{7.5 if n % 2 else 7}\n' for n in range(3000))
    path.write_text("id,prompt,seed,width,guidance\n" + rows, encoding="utf-8")
    with mock.patch("batchgen.manifest.stream.RowStream.entries", side_effect=AssertionError("read row by row")):
        summary = survey(str(path), options())
    assert (summary.rows, summary.jobs, len(summary.shapes)) == (3000, 3000, 2)
