"""Train the built-in model's AutoencoderKL on painted pictures.

Most steps see 32x32 cuts round the shape, where all the edges are; every third one, and all of the last part, see whole
pictures, so that the normalisation layers meet the statistics they will work with.

    python tools/builtin/train_vae.py --out build/builtin
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from data import paint, training_scenes
from diffusers import AutoencoderKL

CHANNELS = (32, 32, 64, 64)
LATENT_CHANNELS = 16
CUT = 32
PIXELS_PER_STEP = 65_536
KL_WEIGHT = 1e-3


def build_vae() -> AutoencoderKL:
    """The autoencoder with fresh weights: 8 pixels a latent, 16 channels, as the Z-Image family has them."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * len(CHANNELS),
        up_block_types=["UpDecoderBlock2D"] * len(CHANNELS),
        block_out_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=LATENT_CHANNELS,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=64,
        force_upcast=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def picture_pool(count: int, side: int, rng: random.Random) -> torch.Tensor:
    """`count` painted pictures: uint8 [count, side, side, 3]."""
    scenes = training_scenes()
    return torch.from_numpy(np.stack([paint(rng.choice(scenes), rng, side, side) for _ in range(count)]))


def cut(picture: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A 32x32 cut whose middle lies on or near the shape."""
    side = picture.shape[0]
    rows, columns = torch.nonzero((picture != picture[0, 0]).any(dim=-1), as_tuple=True)
    y = rng.randint(int(rows.min()), int(rows.max())) - CUT // 2
    x = rng.randint(int(columns.min()), int(columns.max())) - CUT // 2
    y, x = min(max(y, 0), side - CUT), min(max(x, 0), side - CUT)
    return picture[y : y + CUT, x : x + CUT]


def to_input(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] to float [B, 3, H, W] in -1..1, channels last."""
    return (pictures.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def edge_weight(pictures: torch.Tensor) -> torch.Tensor:
    """1 on plain areas, 5 within two pixels of an edge: [B, 1, H, W]."""
    wide = torch.nn.functional.max_pool2d(pictures, 5, 1, 2) + torch.nn.functional.max_pool2d(-pictures, 5, 1, 2)
    return 1 + 4 * (wide.amax(dim=1, keepdim=True) > 0.2).float()


def batch(pools: dict[int, torch.Tensor], whole: bool, rng: random.Random) -> torch.Tensor:
    """One step's pictures, always about as many pixels."""
    side = rng.choice((64, 64, 96)) if whole else 64
    pool = pools[side]
    edge = side if whole else CUT
    chosen = pool[[rng.randrange(len(pool)) for _ in range(PIXELS_PER_STEP // edge**2)]]
    return to_input(chosen if whole else torch.stack([cut(picture, rng) for picture in chosen]))


@torch.no_grad()
def measure(vae: AutoencoderKL, pictures: torch.Tensor) -> tuple[float, float, float]:
    """Mean absolute error (0..1 scale), mean and standard deviation of the unscaled latents."""
    x = to_input(pictures)
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)])
    decoded = torch.cat([vae.decode(part).sample for part in latents.split(64)])
    return (decoded.clamp(-1, 1) - x).abs().mean().item() / 2, latents.mean().item(), latents.std().item()


def main() -> None:
    """Train, writing a checkpoint now and then, and end with the folder `vae` and `vae.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bfloat16 (slower where the CPU has bfloat16 units)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    pools = {64: picture_pool(8192, 64, rng), 96: picture_pool(1024, 96, rng)}
    vae = build_vae().to(memory_format=torch.channels_last)
    average = copy.deepcopy(vae).eval()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    started, recent = time.time(), []
    for step in range(arguments.steps):
        progress = step / arguments.steps
        rate = arguments.learning_rate * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = batch(pools, whole=progress > 0.7 or step % 3 == 0, rng=rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=not arguments.fp32):
            posterior = vae.encode(x).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        error = decoded.float() - x
        weight = edge_weight(x)
        loss = ((error.abs() + error.square()) * weight).mean() / weight.mean()
        loss = loss + KL_WEIGHT * posterior.kl().float().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        keep = min(0.995, (step + 1) / (step + 10))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), vae.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} {time.time() - started:.0f} s loss {np.mean(recent[-50:]):.4f}", flush=True)
        if (step + 1) % 400 == 0 or step + 1 == arguments.steps:
            error_mean, shift, deviation = measure(average, pools[64][:512])
            print(f"step {step + 1} mean absolute error {error_mean:.4f} latents {shift:.3f} +- {deviation:.3f}", flush=True)
            average.register_to_config(scaling_factor=1 / deviation, shift_factor=shift)
            average.save_pretrained(arguments.out / "vae")
    record = {"steps": arguments.steps, "seconds": round(time.time() - started), "loss": round(float(np.mean(recent[-50:])), 5)}
    record |= {"mean_absolute_error": round(error_mean, 5), "parameters": sum(p.numel() for p in vae.parameters())}
    (arguments.out / "vae.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
