"""`batchgen run` against hand-written diffusers loops: whole processes, one thread, same model, prompts, seeds and steps, paired.

    python tools/bench/against_loop.py [--rounds N] [--model tiny|larger]

Two loops are written as people write them: a call for each prompt, and calls of eight prompts with a generator each, both saving PNGs.
Each round runs the three once, one after another, so that a busy moment of the machine hits all; the record holds the median over the
rounds of the ratios within a round. Aims: batchgen at most 0.83 (tiny, 64 prompts) and 0.9 (larger, 16) of the loop prompt by prompt, at
most 1.05 of the batched one; the first picture no later than 1.5 times the loop's. Writes results/benchmarks/against_loop.json.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from _frame import MEASURED_ON, ONE_THREAD, RECORDS, TESTS, parser_for, versions, write_record

STEPS = 4
BATCH = 8


@dataclass(frozen=True)
class Case:
    """A model and how much it renders. `builder`: statements that save it into `folder`, with tests/tiny.py at hand."""

    prompts: int
    side: int
    builder: str
    aim_loop: float
    aim_batched: float = 1.05


LARGER = """
import diffusers as df
tok = tiny.qwen_tokenizer()
tiny.save(df.QwenImagePipeline(
    scheduler=df.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), tokenizer=tok,
    text_encoder=tiny.made(tiny.tr.Qwen2_5_VLForConditionalGeneration, tiny.qwen_vl_config(tok)),
    transformer=tiny.made(df.QwenImageTransformer2DModel, patch_size=2, in_channels=16, out_channels=4, num_layers=8,
                          attention_head_dim=64, num_attention_heads=8, joint_attention_dim=16, axes_dims_rope=(16, 24, 24)),
    vae=tiny.made(df.AutoencoderKLQwenImage, base_dim=16, z_dim=4, dim_mult=[1, 2, 2, 4], num_res_blocks=1,
                  temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4)), folder)
"""
CASES = {
    "tiny": Case(64, 64, "tiny.qwen_image(folder)", 0.83),
    "larger": Case(16, 256, LARGER, 0.9),
}

LOOP = """
import csv, sys
from pathlib import Path
import torch
from diffusers import QwenImagePipeline
model, rows, out, batch, side, steps = sys.argv[1], list(csv.DictReader(open(sys.argv[2]))), Path(sys.argv[3]), *map(int, sys.argv[4:])
out.mkdir(parents=True)
pipe = QwenImagePipeline.from_pretrained(model)
pipe.set_progress_bar_config(disable=True)
for start in range(0, len(rows), batch):
    part = rows[start : start + batch]
    images = pipe(
        prompt=[row["prompt"] for row in part], width=side, height=side, num_inference_steps=steps, true_cfg_scale=1.0,
        generator=[torch.Generator("cpu").manual_seed(int(row["seed"])) for row in part],
    ).images
    for number, image in enumerate(images, start):
        image.save(out / f"{number:06d}.png")
"""


def environment() -> dict[str, str]:
    return os.environ | ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false"}


def timed(command: list[str], out: Path, wanted: int) -> tuple[float, float]:
    """(seconds of the process, seconds until the first PNG). Raises CalledProcessError, or AssertionError where pictures are missing."""
    first: list[float] = []
    ended = threading.Event()
    begun = time.perf_counter()

    def watch() -> None:
        while not ended.wait(0.02):
            if any(path.suffix == ".png" for path in out.glob("*")):
                first.append(time.perf_counter() - begun)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
    finally:
        ended.set()
        watcher.join()
    assert len(list(out.glob("*.png"))) == wanted, f"{out} holds too few pictures"
    return seconds, first[0] if first else seconds


def measure(case: Case, rounds: int, folder: Path) -> dict[str, object]:
    model, listed = folder / "model", folder / "prompts.csv"
    builder = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import tiny; folder = {str(model)!r}\n{case.builder}"
    subprocess.run([sys.executable, "-c", builder], env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with listed.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "seed"])
        writer.writerows([f"picture number {number} of a red circle", 1000 + number] for number in range(case.prompts))
    ratios: dict[str, list[float]] = {"to the loop": [], "to batches of 8": [], "first picture to the loop's": []}
    for number in range(rounds):
        place = folder / f"round{number}"
        loop, loop_first = timed(loop_command(model, listed, place / "loop", 1, case), place / "loop", case.prompts)
        batched, _ = timed(loop_command(model, listed, place / "batched", BATCH, case), place / "batched", case.prompts)
        run = [
            sys.executable, "-m", "batchgen", "run", str(listed), "--model", str(model), "-o", str(place / "run"), "--steps", str(STEPS),
            "--size", f"{case.side}x{case.side}", "--guidance", "1", "--quiet", "--no-local-settings",
        ]
        mine, mine_first = timed(run, place / "run" / "outputs", case.prompts)
        ratios["to the loop"].append(mine / loop)
        ratios["to batches of 8"].append(mine / batched)
        ratios["first picture to the loop's"].append(mine_first / loop_first)
    found = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    return {
        "prompts": case.prompts, "side": case.side, "ratios": found,
        "rounds": {name: [round(value, 3) for value in values] for name, values in ratios.items()},
        "aims": {"to the loop": case.aim_loop, "to batches of 8": case.aim_batched, "first picture to the loop's": 1.5},
        "within_aims": found["to the loop"] <= case.aim_loop and found["to batches of 8"] <= case.aim_batched
        and found["first picture to the loop's"] <= 1.5,
    }


def loop_command(model: Path, listed: Path, out: Path, batch: int, case: Case) -> list[str]:
    return [sys.executable, "-c", LOOP, str(model), str(listed), str(out), str(batch), str(case.side), str(STEPS)]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=list(CASES))
    given = parser.parse_args()
    kept = RECORDS / "against_loop.json"
    record = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    record |= {
        "what": "wall time of batchgen's whole process divided by a hand-written diffusers loop's, medians of ratios within a round",
        "command": "python tools/bench/against_loop.py", "steps": STEPS, "threads": 1, "cores": os.cpu_count(),
        "versions": versions(),
        **MEASURED_ON,
    }
    for name in [given.model] if given.model else CASES:
        with tempfile.TemporaryDirectory() as folder:
            record[name] = measure(CASES[name], given.rounds, Path(folder))
        print(name, record[name]["ratios"])
    write_record("against_loop", record)


if __name__ == "__main__":
    main()
