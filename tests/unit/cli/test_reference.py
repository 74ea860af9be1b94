"""docs/cli.md is what the program says of itself."""

from __future__ import annotations

from pathlib import Path

from batchgen.cli.main import COMMANDS
from batchgen.cli.reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_the_page_is_the_generated_text():
    assert PAGE.read_text("utf-8") == reference(), "run: python -m batchgen.cli.reference > docs/cli.md"


def test_every_command_and_its_options_are_there():
    text = reference()
    for name in COMMANDS:
        assert f"\n## batchgen {name}\n" in text
    for option in ("--component-residency NAME=MODE,...", "--keep-resident-min-available-gb", "--compile", "--stop-at HH:MM"):
        assert f"`{option}" in text
