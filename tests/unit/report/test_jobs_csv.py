"""jobs.csv: text comes back exactly, columns are in a fixed order, rows are streamed."""

from __future__ import annotations

import csv
import io

import pandas
from hypothesis import given
from hypothesis import strategies as st

from batchgen.report.jobs_csv import columns, write_jobs_csv

# What the manifest reader lets through: anything but NUL and lone surrogates.
PROMPTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1)


def written(rows: list[dict[str, object]]) -> bytes:
    file = io.BytesIO()
    assert write_jobs_csv(lambda: iter(rows), file) == len(rows)
    return file.getvalue()


@given(PROMPTS)
def test_a_prompt_comes_back_exactly(prompt: str) -> None:
    text = written([{"index": 0, "prompt": prompt, "seed": 2**64 - 1}]).decode()
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert row["prompt"] == prompt
    assert row["seed"] == str(2**64 - 1)


def test_pandas_reads_it() -> None:
    rows: list[dict[str, object]] = [{"index": 0, "prompt": 'a "b",\r\nc', "seed": 7}, {"index": 1, "prompt": "NA", "seed": 8}]
    frame = pandas.read_csv(io.BytesIO(written(rows)))
    assert list(frame["index"]) == [0, 1]
    assert frame["prompt"][0] == 'a "b",\r\nc'


def test_known_columns_lead_and_empty_ones_are_left_out() -> None:
    rows = [
        {"mine": "x", "prompt": "a", "lora": None, "index": 0, "reason": None},
        {"prompt": "b", "index": 1, "late": 1, "lora": ""},
    ]
    assert columns(rows) == ["index", "prompt", "reason", "mine", "late"]


def test_no_rows_is_an_empty_table() -> None:
    assert written([]) == b"\n"
