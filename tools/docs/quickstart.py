"""Runs the commands of docs/quickstart.md and writes what they print into the page: `python tools/docs/quickstart.py`.

tests/e2e/test_quickstart.py runs the same commands and compares, numbers and places aside.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
WIDTH = 100
_FILE = re.compile(r"```csv (\S+)\n(.*?)```", re.DOTALL)
_EXAMPLE = re.compile(r"```console\n\$ (batchgen [^\n]*)\n(.*?)```", re.DOTALL)


def files(page: str) -> dict[str, str]:
    """The files that the page shows, by name."""
    return dict(_FILE.findall(page))


def examples(page: str) -> list[tuple[str, str]]:
    """(command line, what the page says that it prints), in order."""
    return _EXAMPLE.findall(page)


def played(page: str, folder: Path) -> Iterator[tuple[str, int, str]]:
    """Runs the commands in `folder`, one after the other: (command line, exit code, what it printed)."""
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    # its own home, so that the page shows nobody's; the hub is not asked
    environment |= {"COLUMNS": str(WIDTH), "HOME": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for line, _ in examples(page):
        done = subprocess.run(
            [sys.executable, "-m", "batchgen", *shlex.split(line)[1:]], cwd=folder, env=environment,
            capture_output=True, text=True, encoding="utf-8", check=False,
        )
        yield line, done.returncode, "".join(f"{row.rstrip()}\n" for row in done.stdout.replace(str(folder), "/home/me").splitlines())


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        printed = {}
        for number, (line, code, text) in enumerate(played(page, Path(folder))):
            print(code, line, flush=True)
            printed[number] = text
    numbers = iter(printed)
    PAGE.write_text(_EXAMPLE.sub(lambda match: f"```console\n$ {match[1]}\n{printed[next(numbers)]}```", page), encoding="utf-8")


if __name__ == "__main__":
    main()
