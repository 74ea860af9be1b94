"""Sharpen the decoder on whole pictures, with the encoder and the latents' scale left as they are.

The denoiser's latents are never quite those of a picture, so the decoder learns from latents with a little noise in them.

    python tools/builtin/finish_vae.py --out build/builtin
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from data import PICTURE_SIZES, Scene, paint, training_scenes
from diffusers import AutoencoderKL
from train_vae import edge_weight, measure, to_input

NOISE = 0.12  # largest standard deviation of the noise, against latents of deviation 1
PIXELS_PER_STEP = 65_536


def batch(scenes: list[Scene], rng: random.Random) -> torch.Tensor:
    """Fresh pictures of one size: [B, 3, H, W] in -1..1."""
    width, height = rng.choice(PICTURE_SIZES)
    count = PIXELS_PER_STEP // (width * height)
    return to_input(torch.from_numpy(np.stack([paint(rng.choice(scenes), rng, width, height) for _ in range(count)])))


def main() -> None:
    """Train the decoder alone, then write the folder `vae` again and `finish_vae.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, scenes = random.Random("finish"), training_scenes()
    vae = AutoencoderKL.from_pretrained(arguments.out / "vae").to(memory_format=torch.channels_last)
    vae.encoder.requires_grad_(False)
    optimizer = torch.optim.AdamW(vae.decoder.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    probe = torch.from_numpy(np.stack([paint(rng.choice(scenes), rng) for _ in range(256)]))
    before, started = measure(vae, probe)[0], time.time()
    for step in range(arguments.steps):
        rate = arguments.learning_rate * min(1, (step + 1) / 50) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / arguments.steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        x = batch(scenes, rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=not arguments.fp32):
            with torch.no_grad():
                latents = vae.encode(x).latent_dist.mean.float()
            noise = torch.rand(len(x), 1, 1, 1) * NOISE / vae.config.scaling_factor
            decoded = vae.decode(latents + noise * torch.randn_like(latents)).sample
        error, weight = decoded.float() - x, edge_weight(x)
        loss = ((error.abs() + error.square()) * weight).mean() / weight.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.decoder.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} {time.time() - started:.0f} s loss {loss.item():.4f}", flush=True)
    record = {"steps": arguments.steps, "seconds": round(time.time() - started)}
    record |= {"mean_absolute_error_before": round(before, 5), "mean_absolute_error": round(measure(vae, probe)[0], 5)}
    vae.save_pretrained(arguments.out / "vae")
    (arguments.out / "finish_vae.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
