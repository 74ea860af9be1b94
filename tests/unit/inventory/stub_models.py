"""Model folders of stub weights: real safetensors files of a few elements, written without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int64": 8, "uint8": 1}
CODE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int64": "I64", "uint8": "U8"}
Tensors = Mapping[str, tuple[str, Sequence[int]]]


def write_weights(path: Path, tensors: Tensors) -> None:
    """A safetensors file of zeros: {name: (dtype, shape)}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    size = 0
    for name, (dtype, shape) in tensors.items():
        end = size + math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": CODE[dtype], "shape": list(shape), "data_offsets": [size, end]}
        size = end
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


INDEX: dict[str, Any] = {
    "_class_name": "QwenImagePipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}


def write_model(folder: Path, index: Mapping[str, Any] = INDEX, *, weights: bool = True, dtype: str = "bfloat16") -> Path:
    """A whole pipeline folder of stub parts: 6 + 8 + 4 elements."""
    write_json(folder / "model_index.json", index)
    write_json(folder / "scheduler" / "scheduler_config.json", {"shift": 1.0})
    write_json(folder / "tokenizer" / "tokenizer_config.json", {})
    write_json(folder / "text_encoder" / "config.json", {"model_type": "qwen2_5_vl"})
    write_json(folder / "transformer" / "config.json", {"patch_size": 2})
    write_json(folder / "vae" / "config.json", {"temperal_downsample": [False, True, True]})
    if weights:
        write_weights(folder / "text_encoder" / "model.safetensors", {"a": (dtype, [2, 3])})
        write_weights(folder / "transformer" / "diffusion_pytorch_model.safetensors", {"b": (dtype, [8])})
        write_weights(folder / "vae" / "diffusion_pytorch_model.safetensors", {"c": (dtype, [4])})
    return folder
