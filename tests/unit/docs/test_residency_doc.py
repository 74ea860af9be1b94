"""docs/residency.md against the code: its commands print what it says they print, its tables name what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from batchgen.cli.main import run
from batchgen.cli.plan import command
from batchgen.inventory.profiles import read_profile
from batchgen.plan import selectors

DOC = (Path(__file__).parents[3] / "docs" / "residency.md").read_text(encoding="utf-8")
WIDTH = "118"
EXAMPLES = re.findall(r"```console\n\$ (batchgen [^\n]*)\n(.*?)\n```", DOC, re.DOTALL)


@pytest.mark.parametrize(("line", "expected"), EXAMPLES, ids=[line for line, _output in EXAMPLES])
def test_an_example_prints_what_the_page_shows(
    line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (facts,) = re.findall(r"```json\n(.*?)```", DOC, re.DOTALL)
    (tmp_path / "qwen-image.json").write_text(facts, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    assert run(shlex.split(line)[1:]) == 0
    printed = "\n".join(row.rstrip() for row in capsys.readouterr().out.splitlines())
    assert printed == expected


def test_the_worked_example_is_on_24_48_and_80() -> None:
    assert [found for line, _output in EXAMPLES for found in re.findall(r"--device-memory (\d+) --policy-only --show", line)] == ["24", "48", "80"]


def test_the_group_table_names_exactly_the_members() -> None:
    rows = dict(re.findall(r"^\| `(dit|image_encoder|vae)` \| ([^|]+) \|", DOC, re.MULTILINE))
    for group, text in rows.items():
        members = {word.strip() for word in text.split(",")}
        assert members == set(selectors._MEMBERS[group])
        assert all(selectors.group_of(member) == group for member in members)
    assert set(rows) == {"dit", "image_encoder", "vae"}


def test_every_placement_option_is_on_the_page() -> None:
    options = {text for parameter in command.params for text in parameter.opts if re.search(r"offload|residency|fsdp|resident|mode|profile|gpu", text)}
    missing = {text for text in options if text not in DOC and text.removeprefix("--").removesuffix("-cpu-offload") not in DOC}
    assert not missing


def test_the_example_profile_is_a_right_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    assert read_profile(file).profile.keep_resident_components == ("text_encoder", "vae")
