"""Closed, full and unread standard streams, and the width of what is printed: nothing of it is a traceback or another exit code."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.cli.finishing import print_tables
from batchgen.report import console
from batchgen.report.sheet import Column, Sheet
from reportkit import finished_run

FULL = Path("/dev/full")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The line by bash, in which $B is the command."""
    env = {**os.environ, "B": f"{sys.executable} -m batchgen"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "p.csv").write_text("prompt,seed\na red circle,1\na blue square,2\n")
    return folder


STREAMS = {
    "a closed stdout is nowhere": ("$B check p.csv >&-", 0, ""),
    "all streams closed": ("$B check p.csv <&- >&- 2>&-", 0, ""),
    "a full stdout is a short message": ("$B check p.csv >/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
    "a full stdout of plain text, too": ("$B completion bash >/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
    "a full stderr takes nothing from the exit code": ("$B check none.csv 2>/dev/full", 2, ""),
    "a reader that goes is 141": ("$B check p.csv | true; exit ${PIPESTATUS[0]}", 141, ""),
}


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("line", "code", "said"), STREAMS.values(), ids=STREAMS)
def test_no_state_of_a_stream_is_unexpected(here: Path, line: str, code: int, said: str) -> None:
    result = shell(line, here)
    assert (result.returncode, result.stderr) == (code, said)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_run_keeps_its_exit_code_where_its_tables_cannot_be_printed(here: Path) -> None:
    full = shell("COLUMNS=abc $B run p.csv --model builtin --steps 1 -q -o full >/dev/full", here)
    assert full.returncode == 0, full.stderr
    assert full.stderr == f"the tables cannot be printed: No space left on device; they are in {here / 'full' / 'tables'}\n"
    assert len(list((here / "full" / "outputs").iterdir())) == 2
    assert (here / "full" / "tables" / "timings.txt").stat().st_size > 0
    closed = shell("$B run p.csv --model builtin --steps 1 -q -o full >&-", here)
    assert (closed.returncode, closed.stderr) == (0, "")
    unread = shell("$B run p.csv --model builtin --steps 1 -q -o full | true; exit ${PIPESTATUS[0]}", here)
    assert (unread.returncode, unread.stderr) == (141, "")
    other = shell("$B run p.csv --model builtin --steps 1 -q -o full --image-format jpeg", here)
    assert other.returncode == 2
    assert "image_format: png -> jpeg" in other.stderr


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("command", "made", "said"), [
    ("merge one two -o all", ["all/journal.sqlite", "all/report.html", "all/tables/jobs.csv"], "what was joined cannot be printed"),
    ("report whole", ["whole/report.html", "whole/contact.png"], "where the page is cannot be printed"),
], ids=["merge", "report"])  # fmt: skip
def test_what_is_made_is_made_and_told_by_its_exit_code_where_nobody_reads(tmp_path: Path, command: str, made: list[str], said: str) -> None:
    finished_run(tmp_path / "whole", ["a", "b"])
    for number, name in enumerate(("one", "two"), 1):
        shard = finished_run(tmp_path / name, ["a", "b"])
        shard.run_json.write_text(json.dumps({"shard": f"{number}/2", "manifest": {"path": "/lists/p.csv"}, "settings": {}}))
    for stream, code in ((">/dev/full", 0), (">&-", 0), ("| true; exit ${PIPESTATUS[0]}", 141)):
        result = shell(f"$B {command} {stream}", tmp_path)
        assert result.returncode == code, result.stderr
        assert (said in result.stderr) == (stream == ">/dev/full")
        assert "error" not in result.stderr
        for path in made:
            (tmp_path / path).rename(tmp_path / f"{path}.was")  # there, and made anew by the next
        shutil.rmtree(tmp_path / "all", ignore_errors=True)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_verdict_that_stands_nowhere_else_is_lost_with_a_full_stdout(tmp_path: Path) -> None:
    finished_run(tmp_path / "whole", ["a", "b"])
    assert shell("$B verify whole", tmp_path).returncode == 0
    full = shell("$B verify whole --json >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (1, "error: standard output cannot be written: No space left on device\n")


def table() -> Sheet:
    sheet = Sheet("Things", (Column("name"), Column("what", "text")))
    sheet.add("one", "long enough to show how wide the lines may be, and that is all it is for")
    sheet.add("two", "short")
    return sheet


WIDTHS = {
    "unset": (None, 140), "a number": ("60", 60), "no number": ("abc", 140), "negative": ("-5", 140), "zero": ("0", 140), "empty": ("", 140),
    "a digit that int() does not take": ("²", 140), "blanks around it": (" 60 ", 60),
}


@pytest.mark.parametrize(("columns", "width"), WIDTHS.values(), ids=WIDTHS)
def test_columns_is_the_width_where_it_is_a_positive_number(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console.console(io.StringIO(), elsewhere=140).width == width
    stream = io.StringIO()
    print_tables([table()], stream)
    assert ("all it is for" in stream.getvalue().splitlines()[3]) == (width == 140)


def test_what_is_no_terminal_gets_no_blanks_at_line_ends() -> None:
    stream = io.StringIO()
    console.console(stream, elsewhere=140).print(table())
    assert [line for line in stream.getvalue().splitlines() if line.endswith(" ")] == []
    assert "short" in stream.getvalue()


def test_a_full_stream_is_an_error_where_the_tables_are_kept_nowhere() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        print_tables([table()], Full())
