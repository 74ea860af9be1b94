"""Write the prompts that the built-in model is judged on: 500 scenes that training never painted, worded freely.

python tools/builtin/held_out_prompts.py tests/unit/builtin/held_out_prompts.json
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

from data import PICTURE_SIZES, all_scenes, describe, held_out

COUNT = 500
SIZE_WEIGHTS = (50, 20, 15, 15)


def held_out_prompts() -> list[dict[str, object]]:
    """Rows of prompt, width, height, seed and the five properties of the scene; every scene once."""
    rng = random.Random("held-out prompts")
    scenes = rng.sample([scene for scene in all_scenes() if held_out(scene)], COUNT)
    rows: list[dict[str, object]] = []
    for number, scene in enumerate(scenes):
        width, height = rng.choices(PICTURE_SIZES, SIZE_WEIGHTS)[0]
        prompt = describe(scene, rng, complete=True)
        rows.append({"prompt": prompt, "width": width, "height": height, "seed": number, **asdict(scene)})
    return rows


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row) for row in held_out_prompts())
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")
