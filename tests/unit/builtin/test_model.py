"""The built-in model's folder: what is shipped, and that training and pipeline mean the same by it."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ModularPipeline, ZImagePipeline

from batchgen import builtin

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "builtin"))
import model
import text


@pytest.fixture(scope="module")
def pipeline() -> ZImagePipeline:
    loaded = DiffusionPipeline.from_pretrained(builtin.folder(), torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_folder_is_an_ordinary_one_of_the_family_and_small_enough_to_ship() -> None:
    files = [path for path in builtin.folder().rglob("*") if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert json.loads((builtin.folder() / "model_index.json").read_text())["_class_name"] == "ZImagePipeline"
    assert {path.parent.name for path in weights} == {"text_encoder", "transformer", "vae"}
    assert sum(path.stat().st_size for path in weights) <= 12_000_000
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".md", ".txt"}


def test_plain_loading_gives_a_pipeline_that_runs_in_single_precision() -> None:
    plain = DiffusionPipeline.from_pretrained(builtin.folder())
    plain.set_progress_bar_config(disable=True)
    assert {plain.text_encoder.dtype, plain.transformer.dtype, plain.vae.dtype} == {torch.float32}
    picture = plain("a red star on white", height=64, width=64, num_inference_steps=1, guidance_scale=0, max_sequence_length=32).images[0]
    assert picture.size == (64, 64)


def test_modular_blocks_paint_what_the_ordinary_pipeline_paints(pipeline: ZImagePipeline) -> None:
    modular = ModularPipeline.from_pretrained(str(builtin.folder()))
    modular.load_components()
    modular.set_progress_bar_config(disable=True)
    settings = {"height": 64, "width": 64, "num_inference_steps": 3}
    prompt = "a small red star at the top on blue"
    ordinary = pipeline([prompt], guidance_scale=0, generator=torch.Generator().manual_seed(0), **settings).images[0]
    blocks = modular(prompt=[prompt], generator=torch.Generator().manual_seed(0), output="images", **settings)[0]
    assert (np.abs(np.asarray(ordinary, dtype=int) - np.asarray(blocks, dtype=int)) <= 1).all()


def test_every_weight_is_finite(pipeline: ZImagePipeline) -> None:
    for component in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
        assert all(parameter.isfinite().all() for parameter in component.parameters())


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("a small red star", ["Ġa", "Ġsmall", "Ġred", "Ġstar"]),
        ("A BIG Green Ring", ["Ġa", "Ġbig", "Ġgreen", "Ġring"]),
        ("star, left.", ["Ġstar", ",", "Ġleft", "."]),
        ("reddish", ["Ġred", "d", "i", "s", "h"]),
    ],
)
def test_known_words_are_one_token_each_in_any_case(pipeline: ZImagePipeline, prompt: str, tokens: list[str]) -> None:
    ids = pipeline.tokenizer(text.chat(prompt, pipeline.tokenizer)).input_ids
    assert pipeline.tokenizer.convert_ids_to_tokens(ids)[3:-5] == tokens


def test_shipped_tokenizer_is_the_one_that_the_scripts_build(pipeline: ZImagePipeline) -> None:
    built = text.build_tokenizer()
    prompt = text.chat("please paint a tiny golden disc, up high, in front of violet", built)
    assert pipeline.tokenizer.get_vocab() == built.get_vocab()
    assert text.chat("please paint a tiny golden disc, up high, in front of violet", pipeline.tokenizer) == prompt
    assert pipeline.tokenizer(prompt).input_ids == built(prompt).input_ids


@pytest.mark.parametrize(("height", "width"), [(64, 64), (96, 64), (96, 96)])
def test_training_computes_what_the_pipeline_computes(pipeline: ZImagePipeline, height: int, width: int) -> None:
    prompts = ["a ring", "a small red star at the top on a blue background"]
    embeds, _ = pipeline.encode_prompt(list(prompts), do_classifier_free_guidance=False, max_sequence_length=64)
    latents = torch.randn(2, pipeline.transformer.in_channels, height // 8, width // 8, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([0.1, 0.7])
    with torch.no_grad():
        expected = torch.stack(pipeline.transformer(list(latents.unsqueeze(2)), time, embeds, return_dict=False)[0]).squeeze(2)
        tokens = [pipeline.tokenizer(text.chat(prompt, pipeline.tokenizer)).input_ids for prompt in prompts]
        mask = torch.arange(32)[None] < torch.tensor([[len(row)] for row in tokens])
        ids = torch.tensor([row + [0] * (32 - len(row)) for row in tokens])
        factors = model.rope(pipeline.transformer, 32, height // 16, width // 16)
        encoder = model.build_text_encoder(len(pipeline.tokenizer))
        encoder.load_state_dict(pipeline.text_encoder.state_dict())
        encoder.set_attn_implementation("eager")
        found = model.predict(pipeline.transformer, latents, time, model.encode_text(encoder, ids), mask, factors)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_demo_manifest_shows_sizes_negatives_repeats_and_several_pictures_a_row() -> None:
    with builtin.demo_manifest().open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    prompts = [row["prompt"] for row in rows]
    assert len(rows) >= 12
    assert len({(row["width"], row["height"]) for row in rows}) >= 2
    assert any(row["negative_prompt"] and float(row["guidance"]) > 0 for row in rows)
    assert any(prompts.count(row["prompt"]) > 1 for row in rows)
    assert any(int(row["num_images"] or 1) > 1 for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_all_that_a_wheel_holds_is_under_twenty_megabytes_unpacked() -> None:
    root = Path(__file__).parents[3]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folders = [root / name for name in (*wheel["packages"], *wheel["force-include"])]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    own = root / "src" / "batchgen" / "builtin"  # the package under test may be the installed one
    lists = {own / builtin.demo_manifest(with_failure=failing).name for failing in (False, True)}
    shipped = {*lists, root / "configs" / "models" / "builtin.toml"}
    assert {path.resolve() for path in shipped} <= {path.resolve() for path in files}
    assert sum(path.stat().st_size for path in files) < 20_000_000
