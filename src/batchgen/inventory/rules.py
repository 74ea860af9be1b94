"""Which sizes and frame counts a model can make, read from the configs in its folder.

The numbers come from the configs themselves (VAE compression, transformer patch), never from a table of model names. What a config
does not say stays unknown, and then anything goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchgen.inventory.model import component_config
from batchgen.inventory.records import ModelFacts, SizeRules

# Pipelines that make clips. A class name is the one place where a folder says so.
_VIDEO_WORDS = (
    "Video", "Wan", "LTX", "Mochi", "Allegro", "Latte", "SkyReels", "EasyAnimate", "Cosmos", "ConsisID", "Kandinsky5T2V", "ChronoEdit",
)
# Patches that packing pipelines make of latents where the transformer's own config says 1.
_PACKS_BY_TWO = ("Flux", "QwenImage", "Bria", "Chroma", "LongCat", "HiDream")


def size_rules(facts: ModelFacts) -> SizeRules:
    """The rules of a model; all unknown for one without its files."""
    video = is_video(facts)
    if facts.folder is None:
        return SizeRules(is_video=video)
    folder = Path(facts.folder)
    vae = _first_config(facts, folder, "vae", "movq", "vqvae", "video_vae")
    scale, temporal = _vae_scale(vae), _vae_temporal(vae)
    patch, time_patch = _patch(facts, folder)
    if scale is None:
        return SizeRules(is_video=video)
    multiple = scale * patch
    frames = temporal * time_patch if video and temporal is not None else None
    source = f"VAE scale {scale} x patch {patch}"
    if frames is not None:
        source += f", {temporal} frames a latent"
    return SizeRules(multiple, multiple, frames, 1, video, source)


def is_video(facts: ModelFacts) -> bool:
    """Whether the pipeline makes clips, by its class name."""
    return any(word in (facts.pipeline_class or "") for word in _VIDEO_WORDS)


def tokenizers(facts: ModelFacts) -> tuple[str, ...]:
    """Absolute folders of the model's tokenizers, in index order."""
    if facts.folder is None:
        return ()
    found = []
    for name in facts.other:
        folder = Path(facts.folder) / name
        if name.startswith("tokenizer") and folder.is_dir():
            found.append(str(folder))
    return tuple(found)


def _first_config(facts: ModelFacts, folder: Path, *names: str) -> Mapping[str, object]:
    for name in names:
        if any(part.name == name for part in facts.components):
            return component_config(folder, name)
    return {}


def _vae_scale(config: Mapping[str, object]) -> int | None:
    """Pixels a latent, one side."""
    for key in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(value := config.get(key), int):
            return value
    if isinstance(levels := config.get("temperal_downsample"), list):  # Wan and Qwen-Image; the key is spelt so
        return int(2 ** len(levels)) * _int(config.get("patch_size"), 1)
    scaling = config.get("spatio_temporal_scaling")
    if isinstance(scaling, list) and isinstance(patch := config.get("patch_size"), int):  # LTX: patches before the levels
        return int(2 ** sum(map(bool, scaling))) * patch
    channels = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    if isinstance(channels, list) and channels:
        return int(2 ** (len(channels) - 1))  # FLUX.2's patch_size [2, 2] is packing, counted with the denoiser
    return None


def _vae_temporal(config: Mapping[str, object]) -> int | None:
    """Frames a latent."""
    for key in ("scale_factor_temporal", "temporal_compression_ratio"):
        if isinstance(value := config.get(key), int):
            return value
    if isinstance(levels := config.get("temperal_downsample"), list):
        return int(2 ** sum(map(bool, levels)))
    scaling = config.get("spatio_temporal_scaling")
    if isinstance(scaling, list):
        return int(2 ** sum(map(bool, scaling))) * _int(config.get("patch_size_t"), 1)
    return None


def _patch(facts: ModelFacts, folder: Path) -> tuple[int, int]:
    """(patch in space, patch in time) of the denoiser."""
    config = _first_config(facts, folder, "transformer", "unet", "prior", "transformer_2")
    if "down_block_types" in config:  # UNets take any latent: they carry the size of each level back up
        return 1, 1
    patch: object = config.get("patch_size", config.get("all_patch_size", 1))
    in_time = _int(config.get("patch_size_t"), 1)
    if isinstance(patch, list) and len(patch) == 3:
        return max(_int(patch[1], 1), _int(patch[2], 1)), _int(patch[0], 1)
    space = max((_int(side, 1) for side in patch), default=1) if isinstance(patch, list) else _int(patch, 1)
    if space == 1 and any((facts.pipeline_class or "").startswith(name) for name in _PACKS_BY_TWO):
        space = 2
    return space, in_time


def _int(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default

