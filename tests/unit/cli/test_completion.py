"""Completion: the scripts load in their shells, and names complete as a shell would ask for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = "import sys; from batchgen.cli.main import main; main(sys.argv[1:])"


def ask(line: str, folder: Path, **env: str) -> list[str]:
    """What completing `line` offers, as the bash script asks."""
    words = line.split(" ")
    asked = {**os.environ, **env, "_BATCHGEN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-c", ENTRY], env=asked, cwd=folder, capture_output=True, text=True, check=True)
    return [text.partition(",")[2] for text in done.stdout.splitlines()]


LINES = [
    ("a command", "batchgen pl", ["plan"]),
    ("an option", "batchgen plan --show-r", ["--show-residency"]),
    ("a profile", "batchgen plan --profile qwen-image-l", ["qwen-image-layered"]),
    ("a preset", "batchgen run --preset over", ["overnight"]),
    ("a device", "batchgen run --device cp", ["cpu"]),
    ("a hub id that profiles know", "batchgen run --model Qwen/Qwen-Image-E", ["Qwen/Qwen-Image-Edit", "Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"]),
    ("the built-in model", "batchgen run --model bui", ["builtin"]),
    ("a run folder", "batchgen status results/ni", ["results/night"]),
]


@pytest.mark.parametrize(("line", "expected"), [row[1:] for row in LINES], ids=[row[0] for row in LINES])
def test_names_complete(line, expected, tmp_path):
    (tmp_path / "results" / "night").mkdir(parents=True)
    (tmp_path / "results" / "night" / "journal.sqlite").touch()
    assert ask(line, tmp_path) == expected


def test_completing_a_profile_loads_nothing_heavy(tmp_path):
    code = "import atexit, sys\natexit.register(lambda: print('HEAVY', {'torch', 'diffusers', 'pandas'} & set(sys.modules), file=sys.stderr))\n" + ENTRY
    asked = {**os.environ, "_BATCHGEN_COMPLETE": "bash_complete", "COMP_WORDS": "batchgen plan --profile z", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "z-image-turbo" in done.stdout
    assert done.stderr.strip().endswith("HEAVY set()")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_loads_in_its_shell(shell, tmp_path):
    made = subprocess.run([sys.executable, "-c", ENTRY, "completion", shell], capture_output=True, text=True, check=True)
    assert "_BATCHGEN_COMPLETE" in made.stdout
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} on this machine")
    script = tmp_path / f"batchgen.{shell}"
    # zsh's own completion system first, as any user of it has
    script.write_text(("autoload -Uz compinit && compinit -D\n" if shell == "zsh" else "") + made.stdout)
    done = subprocess.run([found, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
