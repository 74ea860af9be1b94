"""docs/manifests.md says what the code does: every kind, column, warning and option, and its examples are the code's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from manifestkit import CASES, faults_of

from batchgen.cli import check, manifest_options
from batchgen.cli.main import load_command
from batchgen.manifest import survey
from batchgen.manifest.columns import COLUMNS
from batchgen.manifest.notices import MESSAGES
from batchgen.manifest.options import KINDS, ManifestOptions
from batchgen.manifest.readers import _BY_SUFFIX
from batchgen.outputs.names import FIELDS, parse_template, plan_name

TEXT = (Path(__file__).parents[3] / "docs" / "manifests.md").read_text(encoding="utf-8")


def table(section: str, number: int = 0) -> list[list[str]]:
    """The rows of a table in a section, header and rule left out, as cells."""
    body = re.split(r"^## ", TEXT.split(f"\n## {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    tables = re.findall(r"((?:^\|.*\n)+)", body, re.MULTILINE)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in tables[number].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_kind_is_told_with_its_suffixes() -> None:
    rows = table("Kinds")
    assert [code(row[0])[0] for row in rows] == list(KINDS)
    told = {suffix: code(row[0])[0] for row in rows for suffix in re.findall(r"\.\w+", row[1])}
    assert told == _BY_SUFFIX


def test_every_column_is_told_with_its_aliases() -> None:
    told = {name: code(row[1]) for row in table("Columns") for name in code(row[0])}
    assert told == {column.name: list(column.aliases) for column in COLUMNS}


def test_every_warning_is_told() -> None:
    assert [code(row[0])[0] for row in table("Warnings")] == list(MESSAGES)


def test_every_warning_in_the_code_is_known() -> None:
    folder = Path(survey.__code__.co_filename).parent
    used = set(re.findall(r'(?:notices\.add|_note)\("([\w-]+)"', "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))))
    syntax = {"weight", "escape", "lora-tag", "wildcard", "choice", "break", "flag"}
    assert used | syntax == set(MESSAGES)


def test_every_option_is_told_with_its_default() -> None:
    @click.command()
    @manifest_options.manifest_options
    def command(**given: object) -> None:
        """Takes the manifest's options alone."""

    found = {}
    for option in command.params:
        fixed = isinstance(option, click.Option) and not option.is_flag and isinstance(option.default, str | int)
        found[option.opts[-1] if option.opts[-1].startswith("--") else option.opts[0]] = str(option.default) if fixed else None
    told = {code(row[0])[0]: (code(row[1]) or [None])[0] for row in table("Options")}
    assert told == found
    for name in ("run", "check"):
        assert set(found) <= {text for option in load_command(name).params for text in option.opts}


def test_every_field_of_a_name_is_told() -> None:
    told = {name for row in table("Names") for name in re.findall(r"\{(\w+)\}", row[0])}
    assert told == {*FIELDS, "category"}


@pytest.mark.parametrize("row", table("Names", 1), ids=lambda row: row[0])
def test_the_example_names_are_the_codes_own(row: list[str]) -> None:
    fields = {"index": 7, "id": "kite-7", "prompt": "A red kite!", "seed": 42, "k": 2, "category": "Things that fly"}
    assert plan_name(parse_template(code(row[0])[0], columns=["category"]), fields) == code(row[1])[0]


def test_the_example_fault_is_the_codes_own() -> None:
    (fault,) = (fault for fault in faults_of(CASES / "b10_seeds.csv") if fault.row == 13)
    assert str(fault).replace(str(CASES / "b10_seeds.csv"), "prompts.csv") in TEXT


def test_the_example_object_has_the_keys_of_the_real_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    told = json.loads(example)
    (tmp_path / "a.csv").write_text("prompt,seed\na,-1\nb,42.5\n", encoding="utf-8")
    real = check.as_object(survey(str(tmp_path / "a.csv"), ManifestOptions()))
    assert list(told) == list(real)
    assert told["faults"][0].keys() == real["faults"][0].keys()
    assert told["warnings"][0].keys() == real["warnings"][0].keys()
    assert told["shapes"][0].keys() <= real["shapes"][0].keys()
