"""Judge finished runs of the held-out prompts with tests/judge.py, and compare what their pictures show, one by one.

python tools/builtin/judge_runs.py --list build/held_out.csv
batchgen run build/held_out.csv --model builtin -o build/auto
batchgen run build/held_out.csv --model builtin -o build/offloaded --component-residency all=component-offload
python tools/builtin/judge_runs.py build/auto build/offloaded [--json record.json]
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import judge

PROMPTS = Path(__file__).parents[2] / "tests" / "unit" / "builtin" / "held_out_prompts.json"
WHAT = "tests/judge.py on the built-in model's pictures of the held-out prompts: right shares, and what differs from the first run"
COLUMNS = ("prompt", "width", "height", "seed")


def write_list(path: Path, rows: list[dict[str, Any]]) -> None:
    """The prompts as a manifest; what they are judged by stays out of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def pictures_of(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
    """uint8 [H, W, 3] of every row in order, and how the run made them. Exits where the run is of other prompts or has jobs left."""
    with (folder / "tables" / "jobs.csv").open(encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    if [job["prompt"] for job in jobs] != [row["prompt"] for row in rows] or any(job["state"] != "done" for job in jobs):
        sys.exit(f"{folder} is not a finished run of {PROMPTS}")
    plan = json.loads((folder / "run.json").read_text(encoding="utf-8"))["plan"]
    made = {"placements": {name: part["mode"] for name, part in plan["placements"].items()},
            "largest_batch": max(int(job["batch"]) for job in jobs)}  # fmt: skip
    return [np.asarray(Image.open(folder / "outputs" / job["output"]).convert("RGB")) for job in jobs], made


def main() -> None:
    """Write the list, or judge and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="run folders; all are compared with the first")
    parser.add_argument("--list", type=Path, help="write the prompts as a manifest")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = json.loads(PROMPTS.read_text())
    if arguments.list:
        write_list(arguments.list, rows)
    wanted = [{name: row[name] for name in judge.PROPERTIES} for row in rows]
    command = " ".join(["python tools/builtin/judge_runs.py", *(f"build/{folder.name}" for folder in arguments.folders)])
    record: dict[str, Any] = {"what": WHAT, "command": command, "prompts": len(rows), "runs": {}}
    first: list[np.ndarray[Any, Any]] = []
    for folder in arguments.folders:
        pictures, made = pictures_of(folder, rows)
        first = first or pictures
        readings = [judge.read_picture(picture) for picture in pictures]
        pairs = list(zip(map(judge.read_picture, first), readings, strict=True))
        levels = [int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in zip(first, pictures, strict=True)]
        made |= {name: round(share, 4) for name, share in judge.agreement(readings, wanted).items()}
        made |= {"read_unlike_the_first": sum(a != b for a, b in pairs), "equal_pixels": levels.count(0), "grey_levels_away": max(levels)}
        record["runs"][folder.name] = made
        print(folder.name, json.dumps(made))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
