"""`plan` explains without weights: the decision table, JSON under its schema, the devices people have."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from commandline import Said, batchgen, forty_rows, write_csv

SCHEMA = json.loads(files("batchgen.report").joinpath("plan.schema.json").read_text(encoding="utf-8"))
CASES = Path(__file__).parents[1] / "cases" / "tables"


def plan(*arguments: object, folder: Path) -> Said:
    said = batchgen("plan", *arguments, folder=folder)
    assert said.code == 0, said
    return said


def test_a_manifest_and_a_folder_give_the_decision_table(tmp_path: Path, qwen_folder: Path) -> None:
    write_csv(tmp_path / "prompts.csv", forty_rows())
    before = sorted(tmp_path.rglob("*"))
    said = plan("prompts.csv", "--model", qwen_folder, "--show-residency", folder=tmp_path)
    assert all(word in said.out for word in ("Residency", "text_encoder", "transformer", "vae", "resident", "why"))
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_model_it_answers_for_qwen_image(tmp_path: Path) -> None:
    assert "Qwen/Qwen-Image" in plan("--show-residency", folder=tmp_path).out


@pytest.mark.parametrize("more", [["--policy-only"], []])
def test_json_follows_its_schema(more: list[str], tmp_path: Path, qwen_folder: Path) -> None:
    write_csv(tmp_path / "prompts.csv", forty_rows())
    found = json.loads(plan("prompts.csv", "--model", qwen_folder, "--json", *more, folder=tmp_path).out)
    jsonschema.validate(found, SCHEMA)
    assert set(found["placements"]) == {"text_encoder", "transformer", "vae"}


@pytest.mark.parametrize("memory", ["24", "80"])
def test_the_table_for_a_full_size_qwen_image(memory: str, tmp_path: Path) -> None:
    said = plan("--platform", "cuda", "--device-memory", memory, "--policy-only", "--show-residency", folder=tmp_path)
    found = [line.rstrip() for line in said.out.splitlines()]
    assert found == (CASES / f"plan-qwen-{memory}.txt").read_text(encoding="utf-8").splitlines()


def test_24_and_80_gb_place_qwen_image_differently(tmp_path: Path) -> None:
    modes = []
    for memory in ("24", "80"):
        said = plan("--platform", "cuda", "--device-memory", memory, "--policy-only", "--json", folder=tmp_path)
        modes.append({name: part["mode"] for name, part in json.loads(said.out)["placements"].items()})
    assert modes[0] != modes[1]
