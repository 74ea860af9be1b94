"""Any text survives verbatim: from the file to the job, into the picture's metadata, and into jobs.csv."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from manifestkit import jobs_of, write

from batchgen.jobs import Job
from batchgen.outputs.image import write_image
from batchgen.outputs.metadata import MAX_TEXT_BYTES, read_settings, settings_for
from batchgen.report.jobs_csv import write_jobs_csv

# everything but NUL and halves of surrogate pairs, which are faults
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    ["{prompt} {0} {{}} %s %(x)s $HOME `ls` $(ls)", "[bold red]x[/] \\[x]", "\x1b[31mred\x07", "<b>&amp;</b><script>", 'say ""OPEN"", "now"', "'a,b;c\td'",
     "\r", "\n", "a\r\nb", "=1+1", "é é ﬁ", "\u2028\u2029\u0085\x0b\x0c\x1c", "\u202eevil", "🐈\u200d⬛", "\ufeff mark", "#not a comment", "sep=;"]
)
PROMPT = TEXT.filter(lambda text: text.strip())
ROWS = st.lists(st.tuples(PROMPT, TEXT, TEXT), min_size=1, max_size=4)
PIXELS = np.zeros((8, 8, 3), np.uint8)


def check_jobs(jobs: list[Job], rows: list[tuple[str, str, str]], folder: Path) -> None:
    assert [job.prompt for job in jobs] == [row[0] for row in rows]
    assert [job.negative_prompt for job in jobs] == [row[1] if row[1].strip() else None for row in rows]
    assert [dict(job.extra)["remark"] for job in jobs] == [row[2] for row in rows]
    for job in jobs:
        assert Job.from_json(job.as_json()) == job
        path = folder / "outputs" / job.output
        write_image(PIXELS, path, settings_for(job, {"model": "m", "revision": "r"}, 1))
        settings = read_settings(path)
        assert settings is not None
        assert len(job.prompt.encode()) > MAX_TEXT_BYTES or settings["prompt"] == job.prompt
        assert settings.get("negative_prompt") == job.negative_prompt
    table = io.BytesIO()
    write_jobs_csv(lambda: [asdict(job) | dict(job.extra) for job in jobs], table)
    back = list(csv.DictReader(io.StringIO(table.getvalue().decode(), newline="")))
    assert [(row["prompt"], row["negative_prompt"], row.get("remark", "")) for row in back] == [
        (prompt, negative if negative.strip() else "", remark) for prompt, negative, remark in rows
    ]


@settings(max_examples=80, deadline=None)
# with "\n" alone, some versions of the writer leave a carriage return unquoted, which ends the line for every reader
@given(ROWS, st.sampled_from([(csv.QUOTE_ALL, "\n"), (csv.QUOTE_ALL, "\r\n"), (csv.QUOTE_MINIMAL, "\r\n")]), st.sampled_from([",", ";", "\t"]))
def test_through_csv(rows: list[tuple[str, str, str]], form: tuple[int, str], delimiter: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=form[0], delimiter=delimiter, lineterminator=form[1])
    writer.writerow(["prompt", "negative_prompt", "remark"])
    writer.writerows(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / ("a.tsv" if delimiter == "\t" else "a.csv"), text.getvalue())
        check_jobs(jobs_of(path), rows, Path(folder))


@settings(max_examples=80, deadline=None)
@given(ROWS, st.booleans())
def test_through_jsonl(rows: list[tuple[str, str, str]], ascii_only: bool) -> None:
    lines = (json.dumps({"prompt": row[0], "negative_prompt": row[1], "remark": row[2]}, ensure_ascii=ascii_only) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "a.jsonl", "".join(line + "\n" for line in lines))
        check_jobs(jobs_of(path), rows, Path(folder))


@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPT, min_size=1, max_size=5))
def test_through_a_json_array_and_a_folder(prompts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        array = write(Path(folder) / "a.json", json.dumps([{"prompt": prompt} for prompt in prompts], ensure_ascii=False))
        assert [job.prompt for job in jobs_of(array)] == prompts
        for number, prompt in enumerate(prompts):
            write(Path(folder) / "texts" / f"{number}.txt", prompt.encode() + b"\n")
        assert [job.prompt for job in jobs_of(Path(folder) / "texts")] == [prompt.removeprefix("\ufeff").removesuffix("\r") for prompt in prompts]  # \r\n is one line end
