"""Nothing in a prompt or an id is ever interpreted: not by the log, the tables, the names, the files' settings or the report."""

from __future__ import annotations

import csv
import json

import pytest
from commandline import batchgen, texts

HOSTILE = [
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 bell",
    "[bold red]markup[/bold red] [link=http://x]y[/link] :smile:",
    "{0} {prompt} {{braces}} %s %(x)s %d 100%",
    "$HOME `id` $(id) ; rm -rf . && echo",
    "</td><script>alert(1)</script>&amp;",
    "=1+1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    rows = [{"id": f"{number} {text}", "prompt": text, "negative_prompt": text, "width": 64, "height": 64} for number, text in enumerate(HOSTILE)]
    rows.append({"id": "fails " + HOSTILE[0], "prompt": "a large red star [red]", "guidance": 3e38, "width": 64, "height": 64})
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = batchgen("run", "list.jsonl", "--model", "builtin", "--steps", 2, "--verbose", "-o", "out", folder=folder)
    assert said.code == 3, said
    return folder / "out", said


def test_log_and_tables_hold_no_terminal_commands(run):
    folder, said = run
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err
    for table in (folder / "tables").glob("*.txt"):
        assert "\x1b" not in table.read_text("utf-8")
    for command in ("status", "verify"):
        told = batchgen(command, folder, folder=folder.parent)
        assert "\x1b" not in told.out + told.err


def test_prompts_come_out_of_files_and_tables_as_they_went_in(run):
    folder, _ = run
    with (folder / "tables" / "jobs.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["prompt"] for row in found[: len(HOSTILE)]] == HOSTILE
    for number, text in enumerate(HOSTILE):
        picture = folder / "outputs" / found[number]["output"]
        record = json.loads(texts(picture)["batchgen"])
        assert (record["prompt"], record["negative_prompt"]) == (text, text)


def test_names_are_plain_and_stay_inside(run):
    folder, _ = run
    names = [path.name for path in (folder / "outputs").iterdir()]
    assert len(names) == len(HOSTILE)
    assert all(name.isprintable() and not set(name) & set('\x1b<>:"/\\|?*$`') for name in names)


def test_the_report_holds_them_as_text(run):
    folder, _ = run
    page = (folder / "report.html").read_text("utf-8")
    assert "<script>alert" not in page
    assert "\x1b" not in page
