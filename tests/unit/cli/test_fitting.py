"""What the rehearsal is asked for a list: how long its prompts are, and what adapters weigh."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from batchgen.cli.fitting import Shapes, rehearsal_request, with_loras
from batchgen.inventory.loras import LoraFile
from batchgen.inventory.records import ComponentFacts, ModelFacts
from batchgen.jobs import ShapeKey
from batchgen.plan.records import Rehearsed, RehearsedComponent

MODEL = ModelFacts("m", "facts", "/nowhere", "", "QwenImagePipeline", tuple(
    ComponentFacts(name, "diffusers", "X", 1000, None, dtype=dtype)
    for name, dtype in (("text_encoder", "bfloat16"), ("transformer", "bfloat16"), ("transformer_2", "bfloat16"), ("vae", "float32"))
))  # fmt: skip
PARTS = Rehearsed(tuple(
    RehearsedComponent(part.name, 1000, 1000 - 100 * blocks, (100,) * blocks)
    for part, blocks in zip(MODEL.components, (0, 4, 4, 0), strict=True)
), ())  # fmt: skip

PROMPTS: dict[str, tuple[str | None, int]] = {
    "none": (None, 60),
    "short": ("a boat", 60),
    "as long as a careful prompt": ("x" * 240, 60),
    "longer, in steps": ("x" * 250, 128),
    "the next list of such prompts finds the same": ("x" * 300, 128),
    "long": ("x" * 1000, 384),
    "counted in bytes": ("船" * 100, 128),
}


@pytest.mark.parametrize(("prompt", "tokens"), PROMPTS.values(), ids=PROMPTS.keys())
def test_tokens_of_the_longest_prompt(prompt: str | None, tokens: int) -> None:
    assert Shapes((), prompt=prompt).tokens == tokens


def test_a_request_tells_how_long_prompts_are_and_nothing_of_them() -> None:
    size = ShapeKey(512, 512, None, None, 20, None, None, None, None, ())
    usual, longer = rehearsal_request(MODEL, [size]), rehearsal_request(MODEL, [size], 128)
    assert (usual["prompt"], usual["tokens"]) == (None, 94)
    assert (set(longer["prompt"].split()), len(longer["prompt"].split()), longer["tokens"]) == ({"word"}, 128, 162)


def test_a_request_names_the_steps_of_shapes_that_are_not_played_only_where_they_are_others() -> None:
    def sized(side: int, steps: int | None) -> ShapeKey:
        return ShapeKey(side, side, None, None, steps, None, None, None, None, ())

    shapes = [sized(512, 20), sized(256, 8)]
    assert rehearsal_request(MODEL, shapes, other_steps=[8, 20, 20]) == rehearsal_request(MODEL, shapes)
    assert rehearsal_request(MODEL, shapes, other_steps=[8, 50, None, 50])["other_steps"] == [None, 50]


def lora(path: Path, tensors: dict[str, tuple[int, int]]) -> LoraFile:
    """A file of zeros."""
    header, start = {}, 0
    for name, (rows, columns) in tensors.items():
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, start + rows * columns * 4]}
        start += rows * columns * 4
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))
    return LoraFile(path.stem, str(path))


def test_adapters_weigh_in_the_components_that_they_touch(tmp_path: Path) -> None:
    given = lora(tmp_path / "style.safetensors", {
        "transformer.blocks.0.attn.lora_A.weight": (4, 32), "transformer.blocks.0.attn.lora_B.weight": (32, 4),
        "text_encoder.layers.0.lora_A.weight": (2, 10),
    })  # fmt: skip
    found = {part.name: part for part in with_loras(PARTS, MODEL, [given]).components}
    assert found["transformer"].weights_bytes == 1000 + 2 * 256
    assert found["transformer"].block_bytes == (100 + 128,) * 4
    assert found["transformer"].outside_bytes == 600
    assert found["transformer_2"] == RehearsedComponent("transformer_2", 1512, 600, (228,) * 4), "a file for one expert is for both"
    assert found["text_encoder"].weights_bytes == 1000 + 2 * 20
    assert found["vae"] == PARTS.component("vae")


def test_files_of_other_trainers_mean_the_denoiser(tmp_path: Path) -> None:
    given = lora(tmp_path / "other.safetensors", {"diffusion_model.blocks.0.lora_down.weight": (4, 32)})
    found = {part.name: part.weights_bytes for part in with_loras(PARTS, MODEL, [given]).components}
    assert found == {"text_encoder": 1000, "transformer": 1256, "transformer_2": 1256, "vae": 1000}


def test_two_adapters_weigh_what_both_do(tmp_path: Path) -> None:
    names = {"transformer.blocks.0.lora_A.weight": (4, 8)}
    both = [lora(tmp_path / f"{name}.safetensors", names) for name in ("one", "two")]
    assert with_loras(PARTS, MODEL, both).component("transformer").weights_bytes == 1000 + 2 * 2 * 32
