"""The one table about model families: which modular blocks split a pipeline class into stages.

All else that differs between models is read from their own configs, from the blocks' own inputs and outputs, and from the
ordinary pipeline's own call signature. A pipeline class that is not here runs through its ordinary call as one stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """A row: pipelines of this class, whose index fits, are split by these blocks."""

    pipeline: str
    blocks: str  # class name in diffusers
    having: tuple[str, ...] = ()  # settings of the index that must be set and true
    lacking: tuple[str, ...] = ()  # settings that must be unset or false
    guider: tuple[tuple[str, Any], ...] = ()  # guider settings where the ordinary pipeline's formula is not the stock guider's
    # picture inputs for which the library's sister pipeline is called instead: no stages overlay a mask onto float pictures
    whole_inputs: frozenset[str] = frozenset({"mask_image"})
    pairs_only: bool = False  # the text stage cannot encode prompts without negatives
    # its stages change the size asked for to a picture's own shape, where the ordinary call stretches the picture: their steps that
    # resize are left out, and what they would give is the picture as it is
    unresized: bool = False


FAMILIES: tuple[Family, ...] = (
    # its stage takes the mode of an encoded picture, where the ordinary pipeline draws a sample
    Family("QwenImagePipeline", "QwenImageAutoBlocks", whole_inputs=frozenset({"image", "mask_image"})),
    Family("QwenImageEditPipeline", "QwenImageEditAutoBlocks"),
    # conditional + scale * (conditional - negative): off is 0
    Family("ZImagePipeline", "ZImageAutoBlocks", guider=(("use_original_formulation", True),)),
    Family("QwenImageEditPlusPipeline", "QwenImageEditPlusAutoBlocks"),
    Family("FluxPipeline", "FluxAutoBlocks"),
    Family("FluxKontextPipeline", "FluxKontextAutoBlocks"),
    Family("Flux2Pipeline", "Flux2AutoBlocks"),
    Family("Flux2KleinPipeline", "Flux2KleinAutoBlocks", having=("is_distilled",)),
    Family("Flux2KleinPipeline", "Flux2KleinBaseAutoBlocks"),
    Family("StableDiffusion3Pipeline", "StableDiffusion3AutoBlocks"),
    Family("StableDiffusionXLPipeline", "StableDiffusionXLAutoBlocks"),
    # the blocks know neither a timestep for every token nor that VAE's scale: such models take the ordinary call
    Family("WanPipeline", "Wan22Blocks", having=("boundary_ratio",), lacking=("expand_timesteps",), pairs_only=True),
    Family("WanPipeline", "WanBlocks", lacking=("expand_timesteps",), pairs_only=True),
    Family("WanImageToVideoPipeline", "Wan22Image2VideoBlocks", having=("boundary_ratio",), lacking=("expand_timesteps",),
           pairs_only=True, unresized=True),
    Family("WanImageToVideoPipeline", "WanImage2VideoAutoBlocks", lacking=("expand_timesteps",), pairs_only=True, unresized=True),
    Family("LTXPipeline", "LTXAutoBlocks"),
    Family("LTX2Pipeline", "LTX2AutoBlocks"),
    # its image-to-video sister takes the ordinary call: the blocks write zeros over what the image encoder gave
    Family("HunyuanVideo15Pipeline", "HunyuanVideo15AutoBlocks", pairs_only=True),
)


def find_family(pipeline_class: str, settings: Mapping[str, Any]) -> Family | None:
    """The first row that fits, or None: then the model runs through its ordinary call. `settings`: the index's plain values."""
    for family in FAMILIES:
        if (
            family.pipeline == pipeline_class
            and all(settings.get(name) for name in family.having)
            and not any(settings.get(name) for name in family.lacking)
        ):
            return family
    return None
