"""Wrong input is one clear message and exit code 2, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import batchgen

GOOD = "prompt,width,height,steps\na ring,64,64,1\n"


def empty_index(model: Path) -> None:
    (model / "model_index.json").write_text("")


def no_weights(model: Path) -> None:
    for path in model.rglob("*.safetensors"):
        path.unlink()


def as_it_is(model: Path) -> None: ...


CASES: list[tuple[str, str, Callable[[Path], None], list[str], list[str]]] = [
    # name, manifest, what is done to the model, other arguments, words of the message
    ("a missing manifest", "", as_it_is, ["absent.csv", "--model", "model"], ["absent.csv"]),
    ("an unknown column near a known one", "promt,width\na ring,64\n", as_it_is, [], ["promt", "'prompt'"]),
    ("a bad number", "prompt,steps\na ring,many\n", as_it_is, [], ["list.csv:2:steps", "many"]),
    ("an unknown model folder", GOOD, as_it_is, ["list.csv", "--model", "./no-such-model"], ["no-such-model"]),
    ("an empty model_index.json", GOOD, empty_index, [], ["model_index.json", "empty"]),
    ("a folder without weights", GOOD, no_weights, [], ["text_encoder", "transformer", "vae"]),
    ("no model", GOOD, as_it_is, ["list.csv"], ["--model builtin"]),
    ("a size the model cannot make", "prompt,width,height\na ring,65,64\n", as_it_is, [], ["list.csv:2:width", "64", "--snap"]),
    ("an unknown option", GOOD, as_it_is, ["list.csv", "--modle", "model"], ["--modle", "--model"]),
    ("a wrong value of an option", GOOD, as_it_is, ["list.csv", "--model", "model", "--batch-size", "0"], ["--batch-size", "'0'"]),
    ("an unknown placement", GOOD, as_it_is, ["list.csv", "--model", "model", "--component-residency", "vae=residnt"],
     ["residnt", "resident"]),
    ("an unknown component", GOOD, as_it_is, ["list.csv", "--model", "model", "--component-residency", "vea=resident"],
     ["vea", "vae"]),
    ("an unknown preset", GOOD, as_it_is, ["list.csv", "--model", "model", "--preset", "overnite"], ["overnite", "overnight"]),
    ("standard input of no kind", GOOD, as_it_is, ["-", "--model", "model"], ["--format"]),
    ("an empty manifest", "", as_it_is, [], ["list.csv"]),
    ("an unwritable events file", GOOD, as_it_is, ["list.csv", "--model", "model", "--events", "no/such/folder/log"], ["--events"]),
]  # fmt: skip


@pytest.mark.parametrize(("manifest", "harm", "arguments", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_is_refused(
    manifest: str, harm: Callable[[Path], None], arguments: list[str], words: list[str], tmp_path: Path, qwen_folder: Path,
) -> None:
    shutil.copytree(qwen_folder, tmp_path / "model")
    harm(tmp_path / "model")
    (tmp_path / "list.csv").write_text(manifest, encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    said = batchgen("run", *(arguments or ["list.csv", "--model", "model"]), folder=tmp_path)
    assert said.code == 2, said
    assert all(word in said.err for word in words), said
    assert "Traceback" not in said.err
    assert said.err.count("error: ") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_other_pixel_settings_are_refused_with_their_difference(tmp_path: Path, qwen_folder: Path) -> None:
    (tmp_path / "list.csv").write_text("prompt,width,height\na ring,64,64\n", encoding="utf-8")
    arguments = ["run", "list.csv", "--model", qwen_folder, "-o", "run"]
    assert batchgen(*arguments, "--steps", 1, folder=tmp_path).code == 0
    kept = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run" / "outputs").iterdir())
    said = batchgen(*arguments, "--steps", 2, folder=tmp_path)
    assert said.code == 2, said
    assert "steps: 1 -> 2" in said.err
    assert "--new" in said.err
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run" / "outputs").iterdir()) == kept
    assert batchgen(*arguments, "--steps", 2, "--new", folder=tmp_path).code == 0
    assert len(list((tmp_path / "run-2" / "outputs").iterdir())) == 1


@pytest.mark.long
def test_a_folder_in_which_nothing_was_rendered_holds_nobody_to_its_settings(tmp_path: Path, qwen_folder: Path) -> None:
    # the download is mended, or the settings are, and the same command goes on
    model = tmp_path / "model"
    shutil.copytree(qwen_folder, model)
    weights = next((model / "vae").glob("*.safetensors"))
    whole = weights.read_bytes()
    shutil.copyfile(next((model / "transformer").glob("*.safetensors")), weights)
    (tmp_path / "list.csv").write_text("prompt,width,height\na ring,64,64\n", encoding="utf-8")
    arguments = ["run", "list.csv", "--model", "model", "-o", "run", "--steps"]
    said = batchgen(*arguments, 1, folder=tmp_path)
    assert (said.code, "vae" in said.err) == (2, True), said
    weights.write_bytes(whole)
    said = batchgen(*arguments, 2, folder=tmp_path)
    assert said.code == 0, said
    assert "nothing was rendered" in said.err
    assert list((tmp_path / "run" / "spool").iterdir()) == []
    status = json.loads(batchgen("status", "run", "--json", folder=tmp_path).out)
    assert status["counts"] == {"pending": 0, "running": 0, "done": 1, "failed": 0, "filtered": 0, "vanished": 0}
    record = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert record["pixel_settings"]["steps"] == 2
    # from now on it does
    assert batchgen(*arguments, 1, folder=tmp_path).code == 2
    # also where the picture is on the disk alone, or in the journal alone
    for file in ("journal.sqlite", "outputs"):
        shutil.copytree(tmp_path / "run", tmp_path / f"less-{file}")
        lost = tmp_path / f"less-{file}" / file
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
        assert batchgen("run", "list.csv", "--model", "model", "-o", f"less-{file}", "--steps", 1, folder=tmp_path).code == 2


def test_another_manifests_folder_is_refused(tmp_path: Path, qwen_folder: Path) -> None:
    for name, prompt in (("one.csv", "a ring"), ("two.csv", "a star")):
        (tmp_path / name).write_text(f"prompt,width,height,steps\n{prompt},64,64,1\n", encoding="utf-8")
    assert batchgen("run", "one.csv", "--model", qwen_folder, "-o", "run", folder=tmp_path).code == 0
    said = batchgen("run", "two.csv", "--model", qwen_folder, "-o", "run", folder=tmp_path)
    assert said.code == 2, said
    assert "one.csv" in said.err
    assert "--new" in said.err
    # the same bytes, read as a list of three prompts
    (tmp_path / "one.txt").write_bytes((tmp_path / "one.csv").read_bytes())
    said = batchgen("run", "one.txt", "--model", qwen_folder, "-o", "run", folder=tmp_path)
    assert said.code == 2, said
    assert "read as csv; the same bytes are read as txt now" in said.err
    assert batchgen("run", "one.txt", "--format", "csv", "--model", qwen_folder, "-o", "run", folder=tmp_path).code == 0


SLIPS = [
    ("a size nobody means", "prompt,width,height\nhuge,100000,100000\na star,64,64\n", "10,000,000,000 pixels"),
]


@pytest.mark.parametrize(("text", "said"), [case[1:] for case in SLIPS], ids=[case[0] for case in SLIPS])
def test_sizes_beyond_any_picture_are_refused_before_a_model_is_touched(text, said, tmp_path):
    (tmp_path / "list.csv").write_text(text)
    result = batchgen("run", "list.csv", "--model", "builtin", "-o", "out", folder=tmp_path)
    assert result.code == 2, result
    assert said in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_said_plainly(tmp_path):
    (tmp_path / "list.csv").write_text("prompt\na star\n")
    result = batchgen("run", "list.csv", "--model", "builtin", "-o", "/proc/batchgen-out", folder=tmp_path)
    assert result.code == 1, result
    assert "/proc/batchgen-out" in result.err
    assert "unexpected" not in result.err
