"""A slip of the pen is answered with what was meant, and with nothing silly where nothing is near."""

from __future__ import annotations

import json

import pytest

from batchgen.cli import main

SLIPS = [
    ("the built-in model", ["plan", "--model", "buitlin"], "did you mean 'builtin'?"),
    ("a hub id", ["plan", "--model", "qwen/qwen-imag"], "did you mean 'Qwen/Qwen-Image'?"),
    ("a model folder", ["plan", "--model", "./my-modle"], "did you mean 'my-model'?"),
    ("a card", ["plan", "--gpu", "RTX 4900"], "Did you mean 'RTX 4090'?"),
    ("a platform", ["plan", "--platform", "cudaa"], "Did you mean 'cuda'?"),
    ("what people call a device", ["plan", "--device", "gpu"], "Did you mean 'cuda'?"),
    ("a command", ["paln"], "did you mean 'plan'?"),
    ("a preset", ["run", "x.csv", "--preset", "overnite"], "did you mean 'overnight'?"),
    ("an option", ["plan", "--show-residencies"], "--show-residency"),
]
FAR = [
    ("no card", ["plan", "--gpu", "banana"], "there is no 'banana' in the catalogue."),
    ("no platform", ["plan", "--platform", "vax"], "there is no platform 'vax'."),
    ("no device", ["plan", "--device", "toaster"], "'toaster' is no device."),
    ("no model", ["plan", "--model", "zzz"], "there is no model folder 'zzz'"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "model_index.json").write_text(json.dumps({"_class_name": "NoPipeline"}))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("arguments", "suggestion"), [row[1:] for row in SLIPS], ids=[row[0] for row in SLIPS])
def test_what_is_near_is_suggested(arguments, suggestion, here, capsys):
    assert main.run(arguments) == 2
    assert suggestion in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [row[1:] for row in FAR], ids=[row[0] for row in FAR])
def test_nothing_is_suggested_where_nothing_is_near(arguments, message, here, capsys):
    assert main.run(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "did you mean" not in said.lower()
    assert "hint: " in said


def test_a_name_that_is_known_is_not_suggested_to_itself(here, capsys):
    main.run(["doctor", "--model", "black-forest-labs/FLUX.1-dev", "--json"])
    assert "did you mean" not in capsys.readouterr().out.lower()


def test_cards_may_be_named_with_commas(capsys):
    arguments = ["plan", "--policy-only", "--json", "--gpu", "RTX 4090, L40S"]
    assert main.run(arguments) == 0
    assert [device["name"] for device in json.loads(capsys.readouterr().out)["devices"]] == ["RTX 4090", "L40S"]
    assert main.run(["plan", "--compare", "RTX 4090,,L40S"]) == 2
    assert "names no card" in capsys.readouterr().err
