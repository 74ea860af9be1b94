"""`batchgen check`: one JSON object or tables, exit code 2 for faults, and nothing in a prompt is acted on."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.main import run

CASES = Path(__file__).parents[2] / "cases" / "manifests"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["check", *words])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code, out, err = said(capsys, *words, "--json")
    assert err == ""
    return code, json.loads(out)


def test_a_good_manifest_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, str(CASES / "quirks.tsv"), "--num-images", "2", "--size", "64x32")
    assert code == 0
    assert {"schema", "rows", "jobs", "shapes", "faults", "warnings"} <= found.keys()
    assert (found["schema"], found["rows"], found["jobs"], found["faults"]) == (1, 5, 10, [])
    assert [(shape["width"], shape["height"], shape["jobs"]) for shape in found["shapes"]] == [(64, 32, 10)]
    assert [(notice["kind"], notice["rows"]) for notice in found["warnings"]] == [("quotes-kept", [3]), ("outer-space", [5]), ("extra-columns", [])]


def test_faults_as_json_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, str(CASES / "b32_batch.csv"))
    assert code == 2
    (fault,) = found["faults"]
    assert (fault["row"], fault["column"], fault["value"]) == (4, "num_images", "0")
    assert "at least 1" in fault["message"]


def test_a_file_that_cannot_be_read_is_a_fault_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, str(CASES / "b02_cp1252.csv"))
    assert (code, found["jobs"], found["faults"][0]["row"]) == (2, 0, 2)


@pytest.mark.parametrize(
    "words",
    [("missing.csv",), (str(CASES / "quirks.tsv"), "--name", "{nope}"), (str(CASES / "quirks.tsv"), "--delimiter", "::"), ("-",),
     (str(CASES / "quirks.tsv"), "--guidance", "nan"), (str(CASES / "quirks.tsv"), "--strength", "1.5"), (str(CASES / "quirks.tsv"), "--fps", ""),
     *((str(CASES / "quirks.tsv"), "--fps", value) for value in ("0", "0.0001", "1000.5", "12800")),
     (str(CASES / "quirks.tsv"), "--seed", "1e3"), (str(CASES / "quirks.tsv"), "--size", "64"),
     (str(CASES / "quirks.tsv"), "--size", "64x64", "--width", "32"), (str(CASES / "quirks.tsv"), "--width", "0"), (str(CASES / "quirks.tsv"), "--encoding", "klingon")],
)
def test_wrong_usage_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_tables_show_counts_shapes_names_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, str(CASES / "nested.jsonl"), "--name", "{index:05d}/samples/{k:04d}", "--num-images", "4", "--preview", "2")
    assert code == 0
    assert "3 rows, 12 jobs, 1 shape" in out
    assert "00000/samples/0001.png" in out
    assert "... and 10 more jobs" in out
    assert "'tag', 'include'" in out
    assert "No faults." in out


def test_faults_are_shown_as_file_row_column(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CASES / "b10_seeds.csv")
    code, out, _ = said(capsys, path)
    assert code == 2
    assert "7 faults:" in out
    assert f"{path}:13:seed: is not a whole number ('42.5'); write digits only, or leave it blank" in out
    code, out, _ = said(capsys, path, "--skip-invalid")
    assert code == 0
    assert "leaves out 7 rows" in out


def test_many_faults_are_summed_up_and_written_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "many.csv").write_text("prompt,seed\n" + "a,x\n" * 300, encoding="utf-8")
    code, out, _ = said(capsys, "many.csv")
    assert code == 2
    assert "... and 250 more faults (in all, number: 300)" in out
    assert "--faults-file" in out
    assert said(capsys, "many.csv", "--faults-file", "faults.txt")[0] == 2
    assert len((tmp_path / "faults.txt").read_text(encoding="utf-8").splitlines()) == 300


def test_standard_input_needs_a_format(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("a cat\n猫\n".encode())))
    code, out, _ = said(capsys, "-", "--format", "txt")
    assert code == 0
    assert "<stdin>: txt, 2 rows" in out


def test_nothing_in_a_prompt_is_interpreted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = "[bold red]x[/] {id} %s $HOME \x1b[31m<b>&amp; \\[y]"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "id": "\x1b]0;t\x07", "[red]c": 1}) + "\n", encoding="utf-8")
    code, out, _ = said(capsys, "a.jsonl")
    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "[bold red]x[/] {id} %s $HOME \\x1b[31m<b>&amp; \\[y]" in out
    assert "\\x1b]0;t\\x07" in out
    assert "'[red]c'" in out


def test_numbers_may_come_from_a_settings_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "batchgen.toml").write_text("guidance = 7.5\nfps = 8\nseed = 18446744073709551615\nsize = '64x32'\n", encoding="utf-8")
    code, found = as_json(capsys, str(CASES / "quirks.tsv"))
    assert code == 0
    assert [(shape["guidance"], shape["fps"], shape["width"]) for shape in found["shapes"]] == [(7.5, 8.0, 64)]


def test_shapes_that_differ_in_their_frames_a_second_alone_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["a,64,32,17,16", "b,64,32,17,24", "c,64,64,17,16"]
    (tmp_path / "list.csv").write_text("prompt,width,height,frames,fps\n" + "\n".join(rows))
    code, out, _ = said(capsys, "list.csv")
    assert (code, "3 shapes" in out) == (0, True), out
    table = out[out.index("Shapes") : out.index("First jobs")].split("\n")
    assert sorted(line.split("  ")[0] for line in table if line.startswith("64x")) == ["64x32x17, 16 fps", "64x32x17, 24 fps", "64x64x17"]
