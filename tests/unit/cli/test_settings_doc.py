"""docs/settings.md says what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from batchgen.cli import settings
from batchgen.cli.main import COMMANDS, load_command

DOCUMENT = Path(__file__).parents[3] / "docs" / "settings.md"


def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_every_preset_is_described_with_all_it_sets() -> None:
    rows = {row[0].strip("` "): row[2] for row in re.findall(r"^\| (`\w+`) \| (.*?) \| (.*) \|$", text(), re.MULTILINE)}
    assert set(rows) == set(settings.preset_names())
    for name, said in rows.items():
        table = tomllib.loads(settings.preset_file(name).read_text(encoding="utf-8"))["run"]
        assert set(re.findall(r"`([\w-]+) =", said)) == set(table)
        for key, value in table.items():
            assert tomllib.loads("\n".join(re.findall(rf"`({key} = [^`]+)`", said))) == {key: value}


def test_the_example_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", text(), re.DOTALL)
    path = tmp_path / "batchgen.toml"
    path.write_text(example)
    others = settings.OtherOptions(lambda: {name: load_command(name) for name in COMMANDS})
    for name in ("run", "plan"):
        layer = settings.read_layer(path, "local", name, settings.options_of(load_command(name)), others)
        assert layer.values["model"] == "Qwen/Qwen-Image"


def test_the_example_message_is_the_codes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("batchgen.toml")
    path.write_text("batch-sise = 4")
    run = load_command("run")
    with pytest.raises(settings.SettingsError) as caught:
        settings.read_layer(path, "local", "run", settings.options_of(run), settings.OtherOptions(lambda: {"run": run}))
    assert f"error: {caught.value.message}" in text()
