"""Sizes and frame counts follow from the configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_models import INDEX, write_json, write_model

from batchgen.inventory.model import ModelOptions, resolve
from batchgen.inventory.records import ModelFacts, SizeRules
from batchgen.inventory.rules import size_rules, tokenizers

# (pipeline class, VAE config, denoiser config) -> (multiple, frames step, video)
WAN_VAE = {"temperal_downsample": [False, True, True]}
RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int | None, int | None, bool]]] = {
    "Qwen-Image: 8 x 2": ("QwenImagePipeline", WAN_VAE, {"patch_size": 2}, (16, None, False)),
    "FLUX packs latents two by two": ("FluxPipeline", {"block_out_channels": [1] * 4}, {"patch_size": 1}, (16, None, False)),
    "FLUX.2: the VAE's patch is the packing": (
        "Flux2Pipeline",
        {"block_out_channels": [1] * 4, "patch_size": [2, 2]},
        {"patch_size": 1},
        (16, None, False),
    ),
    "Z-Image names all its patches": ("ZImagePipeline", {"block_out_channels": [1] * 4}, {"all_patch_size": [2]}, (16, None, False)),
    "a UNet takes any latent": (
        "StableDiffusionXLPipeline",
        {"block_out_channels": [1] * 4},
        {"down_block_types": ["A", "B", "C"]},
        (8, None, False),
    ),
    "SD3": ("StableDiffusion3Pipeline", {"block_out_channels": [1] * 4}, {"patch_size": 2}, (16, None, False)),
    "Wan 2.1: frames 4n+1": ("WanPipeline", WAN_VAE, {"patch_size": [1, 2, 2]}, (16, 4, True)),
    "Wan 2.2 5B: the VAE says 16": (
        "WanPipeline",
        WAN_VAE | {"scale_factor_spatial": 16, "scale_factor_temporal": 4, "patch_size": 2},
        {"patch_size": [1, 2, 2]},
        (32, 4, True),
    ),
    "LTX: 32, frames 8n+1": (
        "LTXPipeline",
        {"spatio_temporal_scaling": [True, True, True, False], "patch_size": 4, "patch_size_t": 1},
        {"patch_size": 1, "patch_size_t": 1},
        (32, 8, True),
    ),
    "HunyuanVideo 1.5": (
        "HunyuanVideo15Pipeline",
        {"spatial_compression_ratio": 16, "temporal_compression_ratio": 4},
        {"patch_size": 1, "patch_size_t": 1},
        (16, 4, True),
    ),
    "a VAE that says nothing leaves all open": ("QwenImagePipeline", {}, {"patch_size": 2}, (None, None, False)),
}


def facts(tmp_path: Path, pipeline: str, vae: dict[str, Any], denoiser: dict[str, Any]) -> ModelFacts:
    folder = write_model(tmp_path / "model", INDEX | {"_class_name": pipeline})
    write_json(folder / "vae" / "config.json", vae)
    write_json(folder / "transformer" / "config.json", denoiser)
    return resolve(str(folder), ModelOptions(), platform="cpu")


@pytest.mark.parametrize(("pipeline", "vae", "denoiser", "expected"), RULES.values(), ids=RULES.keys())
def test_sizes(
    tmp_path: Path,
    pipeline: str,
    vae: dict[str, Any],
    denoiser: dict[str, Any],
    expected: tuple[int | None, int | None, bool],
) -> None:
    rules = size_rules(facts(tmp_path, pipeline, vae, denoiser))
    assert (rules.width_multiple, rules.frames_step, rules.is_video) == expected
    assert rules.height_multiple == rules.width_multiple


def test_a_model_known_by_numbers_only_has_no_rules() -> None:
    assert size_rules(ModelFacts("x", "facts", None, "", None, ())) == SizeRules()


def test_tokenizers_are_given_by_folder(tmp_path: Path) -> None:
    found = facts(tmp_path, "QwenImagePipeline", WAN_VAE, {})
    assert tokenizers(found) == (str(Path(found.folder or "") / "tokenizer"),)
