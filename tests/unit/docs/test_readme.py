"""README.md: its links lead somewhere, its commands and options exist, its picture is small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from batchgen.cli.main import COMMANDS, load_command

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"(?ms)^```\n(.*?)^```", README))
LINES = sorted({*re.findall(r"(?m)^(?:\$ )?(batchgen [a-z].*)$", BLOCKS), *re.findall(r"(?<!`)`(batchgen [a-z][^`]*)`(?!`)", README)})


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_a_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


@pytest.mark.parametrize("line", LINES)
def test_a_command_and_its_options_exist(line: str) -> None:
    words = shlex.split(line.replace(" && ", " "))
    assert words[1] in COMMANDS
    known = {text for part in load_command(words[1]).params if isinstance(part, click.Option) for text in part.opts}
    assert {word for word in words[2:] if word.startswith("-")} <= known


def test_the_two_commands_and_a_small_picture_are_there() -> None:
    assert "python -m pip install -c constraints.txt . && batchgen demo" in README
    assert "python -m pip install nox && nox" in README
    assert len(LINES) >= 5
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / picture).stat().st_size < 300_000 for picture in pictures)
