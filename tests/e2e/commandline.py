"""Runs the installed command as a user would: a process of its own, its exit code, what it said and what it left. And a list to run."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "140"}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The test's own, without settings of whoever runs it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("BATCHGEN_")}
    return {**own, **QUIET, **(more or {})}


def start(arguments: Sequence[object], folder: Path, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchgen", *map(str, arguments)], cwd=folder, env=environment(env), text=True, encoding="utf-8",
        stdin=more.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )


def batchgen(*arguments: object, folder: Path, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Said:
    """Runs `batchgen ARGUMENTS` in `folder` to its end."""
    process = start(arguments, folder, env, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE)
    out, err = process.communicate(stdin, timeout=600)
    return Said(process.returncode, out, err)


def pixels(path: Path) -> np.ndarray:
    """uint8 [H, W, 3]."""
    with Image.open(path) as image:
        image.load()
        return np.asarray(image.convert("RGB"))


def texts(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        return dict(image.text)  # type: ignore[attr-defined]


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, a last line that a kill cut left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["event"] == kind:
            found.append(record)
    return found


def run_json(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return record


SIZES = ((64, 64), (64, 96), (96, 64))
PROMPTS = ("a red circle on a blue background", "a small green square", "two yellow stars, one above the other", "a ring")


def forty_rows() -> list[dict[str, str]]:
    """Three sizes, repeated prompts, own seeds, a third with a negative prompt, two rows with three pictures: 44 pictures."""
    rows = []
    for number in range(40):
        width, height = SIZES[number % 3]
        rows.append({
            "prompt": PROMPTS[number % 4] if number % 10 else f"picture {number}", "width": str(width), "height": str(height),
            "seed": str(1000 + 7 * number), "steps": "2", "negative_prompt": "blurry" if number % 3 == 0 else "",
            "num_images": "3" if number in (5, 21) else "",
        })
    return rows


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
