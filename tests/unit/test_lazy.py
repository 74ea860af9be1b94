"""Help and a policy-only plan leave the heavy libraries unloaded: asked of a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "diffusers", "transformers", "pandas", "accelerate", "numpy")
PROBE = """
import sys
from batchgen.cli.main import run
code = run(sys.argv[1:])
sys.stdout.flush()
print("loaded:", *sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def loaded_by(*arguments: str) -> tuple[int, str, list[str]]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *arguments], capture_output=True, text=True, check=False, timeout=120,
    )
    line = next(line for line in reversed(result.stderr.splitlines()) if line.startswith("loaded:"))
    return result.returncode, result.stdout, line.split()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("--version",), ("run", "--help"), ("plan", "--help"), ("check", "--help"), ("status", "--help"), ("demo", "--help"),
        ("plan", "--policy-only", "--device-memory", "24", "--platform", "cuda", "--json"),
        ("plan", "--policy-only", "--device-memory", "24", "--platform", "cuda", "--show-residency"),
    ],
    ids=" ".join,
)
def test_heavy_libraries_stay_unloaded(arguments: tuple[str, ...]) -> None:
    code, output, loaded = loaded_by(*arguments)
    assert code == 0
    assert output
    assert loaded == []


def test_the_probe_sees_a_loaded_library() -> None:
    probe = "import numpy\n" + PROBE.format(heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", probe, "--version"], capture_output=True, text=True, check=True)
    assert result.stderr.split()[-1] == "numpy"
