"""Paint the held-out prompts with a model folder, judge the pictures with tests/judge.py and print the record.

python tools/builtin/score.py [--folder F] [--steps 9] [--guidance 0] [--limit 500] [--sheet sheet.png] [--json record.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import judge

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "tests" / "unit" / "builtin" / "held_out_prompts.json"
DEFAULT_STEPS = 9
SHEET_COLUMNS = 20


def paint_rows(pipeline: Any, rows: list[dict[str, Any]], steps: int, guidance: float, batch: int) -> list[np.ndarray[Any, Any]]:
    """One picture a row, in the rows' order; each has its own generator, so that the batch does not matter."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["width"], rows[i]["height"]))
    pictures: dict[int, np.ndarray[Any, Any]] = {}
    for (width, height), same in groupby(order, key=lambda i: (rows[i]["width"], rows[i]["height"])):
        numbers = list(same)
        for start in range(0, len(numbers), batch):
            part = numbers[start : start + batch]
            images = pipeline(
                [rows[i]["prompt"] for i in part],
                width=width,
                height=height,
                num_inference_steps=steps,
                guidance_scale=guidance,
                max_sequence_length=128,
                generator=[torch.Generator().manual_seed(rows[i]["seed"]) for i in part],
            ).images
            pictures.update(zip(part, map(np.asarray, images), strict=True))
    return [pictures[i] for i in range(len(rows))]


def write_sheet(path: Path, pictures: list[np.ndarray[Any, Any]]) -> None:
    """All pictures in one, 96 pixels a tile."""
    lines = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (96 * SHEET_COLUMNS, 96 * lines), (128, 128, 128))
    for number, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (96 * (number % SHEET_COLUMNS), 96 * (number // SHEET_COLUMNS)))
    sheet.save(path)


def main() -> None:
    """Judge and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "src" / "batchgen" / "builtin" / "model")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--guidance", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(arguments.prompts.read_text())[: arguments.limit]
    pipeline = DiffusionPipeline.from_pretrained(arguments.folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    started = time.time()
    pictures = paint_rows(pipeline, rows, arguments.steps, arguments.guidance, arguments.batch)
    seconds = time.time() - started
    readings = [judge.read_picture(picture) for picture in pictures]
    wanted = [{name: row[name] for name in judge.PROPERTIES if name in row} for row in rows]
    for row, reading, wish in zip(rows, map(asdict, readings), wanted, strict=True):
        wrong = [f"{name} {reading[name]} not {value}" for name, value in wish.items() if reading[name] != value]
        if wrong:
            print(f"{row['width']}x{row['height']} seed {row['seed']} {row['prompt']!r}: {'; '.join(wrong)}")
    record = {"prompts": len(rows), "steps": arguments.steps, "guidance": arguments.guidance, "seconds": round(seconds, 1)}
    record |= {name: round(share, 4) for name, share in judge.agreement(readings, wanted).items()}
    print(json.dumps(record))
    if arguments.sheet:
        write_sheet(arguments.sheet, pictures)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
