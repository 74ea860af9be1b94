"""Put trained parts together as an ordinary diffusers folder (half precision on disk).

python tools/builtin/export.py --out build/builtin [--folder src/batchgen/builtin/model]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline
from model import build_denoiser, build_text_encoder
from text import build_tokenizer

PACKAGE_FOLDER = Path(__file__).parents[2] / "src" / "batchgen" / "builtin" / "model"
LARGEST_BYTES = 12_000_000


def assemble(out: Path) -> ZImagePipeline:
    """The pipeline of the averaged weights in `out`: of the finished training, or else of its last checkpoint."""
    finished, checkpoint = out / "denoiser.pt", out / "checkpoint.pt"
    state = torch.load(finished, weights_only=True) if finished.exists() else torch.load(checkpoint, weights_only=True)["average"]
    vae = AutoencoderKL.from_pretrained(out / "vae")
    tokenizer = build_tokenizer()
    models = torch.nn.ModuleDict(
        {"text_encoder": build_text_encoder(len(tokenizer)), "transformer": build_denoiser(vae.config.latent_channels)}
    ).eval()
    models.load_state_dict(state)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=models["text_encoder"],
        tokenizer=tokenizer,
        transformer=models["transformer"],
    )


def run_in_single_precision(config: Path) -> None:
    """Have transformers load the half-precision file as fp32, as diffusers does its own; a mixed pipeline would not run."""
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Write the folder anew and refuse one that is too large to ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the training scripts wrote")
    parser.add_argument("--folder", type=Path, default=PACKAGE_FOLDER)
    arguments = parser.parse_args()
    card = arguments.folder / "README.md"
    kept = card.read_bytes() if card.exists() else None
    shutil.rmtree(arguments.folder, ignore_errors=True)
    assemble(arguments.out).to(dtype=torch.float16).save_pretrained(arguments.folder)
    run_in_single_precision(arguments.folder / "text_encoder" / "config.json")
    if kept is not None:
        card.write_bytes(kept)
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*.safetensors"))
    print(f"{arguments.folder}: {size:,} bytes of weights")
    if size > LARGEST_BYTES:
        raise SystemExit(f"the weights take {size:,} bytes; at most {LARGEST_BYTES:,} may be shipped")


if __name__ == "__main__":
    main()
