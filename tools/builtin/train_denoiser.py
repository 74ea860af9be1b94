"""Train the built-in model's text encoder and denoiser together, by flow matching on latents of painted pictures.

Needs the folder `vae` that train_vae.py wrote to the same place. Stops and goes on: run it again after a stop.

    python tools/builtin/train_denoiser.py --out build/builtin
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from data import PICTURE_SIZES, Scene, paint, training_scenes
from diffusers import AutoencoderKL
from model import block, build_denoiser, build_text_encoder, encode_text, predict, rope
from text import MAX_CONTENT_TOKENS, build_tokenizer, chat, training_prompt
from transformers import Qwen2Tokenizer

BATCH = 48
POOL = {(64, 64): 14_000, (96, 96): 5_000, (96, 64): 4_000, (64, 96): 4_000}
SIZE_WEIGHTS = {(64, 64): 55, (96, 96): 21, (96, 64): 12, (64, 96): 12}
LONG_PROMPTS = 0.08  # share of the 64x64 batches whose prompts fill a second block of 32 tokens
MUON_FROM = 3_500  # before this step AdamW moves the hidden matrices too, as it did in the run that made the shipped weights
# From which step on, centre and spread of the noise level's logit. What the prompt says is learnt where there is almost nothing but noise;
# the run that made the shipped weights turned to that late.
SIGMA_SHAPES = ((5_500, (1.4, 1.5)), (0, (0.3, 1.1)))
DECAY_SHARE = 0.3  # of the steps, at the end, in which the learning rate falls to zero


@dataclass(slots=True)
class Pictures:
    """All training pictures of one size."""

    scenes: list[Scene]
    latents: torch.Tensor  # scaled as the denoiser sees them, float16 [N, C, H / 8, W / 8]


@torch.no_grad()
def encode_pool(vae: AutoencoderKL, size: tuple[int, int], count: int) -> Pictures:
    """Paint `count` scenes and encode them."""
    rng = random.Random(f"pool {size}")
    scenes = training_scenes()
    chosen = [rng.choice(scenes) for _ in range(count)]
    parts = []
    for start in range(0, count, 100):
        pictures = np.stack([paint(scene, rng, *size) for scene in chosen[start : start + 100]])
        x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        mean = vae.encode(x.contiguous(memory_format=torch.channels_last)).latent_dist.mean
        parts.append(((mean - vae.config.shift_factor) * vae.config.scaling_factor).half().contiguous())
    return Pictures(chosen, torch.cat(parts))


def load_pool(out: Path) -> dict[tuple[int, int], Pictures]:
    """The latents of all training pictures, from the cache in `out` if it is there."""
    cache = out / "latents.pt"
    if cache.exists():
        return {size: Pictures(scenes, latents) for size, scenes, latents in torch.load(cache, weights_only=False)}
    vae = AutoencoderKL.from_pretrained(out / "vae").eval().to(memory_format=torch.channels_last)
    pool = {size: encode_pool(vae, size, POOL[size]) for size in PICTURE_SIZES}
    torch.save([(size, pictures.scenes, pictures.latents) for size, pictures in pool.items()], cache)
    return pool


def tokenize(tokenizer: Qwen2Tokenizer, scenes: list[Scene], rng: random.Random, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh prompts for `scenes`: ids [B, length] and their mask, true on real tokens."""
    ids = torch.zeros(len(scenes), length, dtype=torch.long)
    mask = torch.zeros(len(scenes), length, dtype=torch.bool)
    template = len(tokenizer(chat("", tokenizer)).input_ids)
    for row, scene in enumerate(scenes):
        for _ in range(20):
            tokens = tokenizer(chat(training_prompt(scene, rng, long=length > 32), tokenizer)).input_ids
            if length - 32 < len(tokens) <= template + MAX_CONTENT_TOKENS[length]:
                break
        tokens = tokens[:length]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
    return ids, mask


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up, stay, fall to zero."""
    return peak * min(1.0, (step + 1) / 300, (steps - step) / (DECAY_SHARE * steps))


def hidden_matrices(models: torch.nn.ModuleDict) -> list[torch.nn.Parameter]:
    """The matrices of attention and feed-forward layers, which Muon moves; AdamW moves all else."""
    parts = [models["transformer"].layers, models["transformer"].noise_refiner, models["transformer"].context_refiner]
    parts.append(models["text_encoder"].layers[:-1])
    named = [pair for part in parts for pair in part.named_parameters()]
    return [parameter for name, parameter in named if parameter.dim() == 2 and "adaLN" not in name]


class Training:
    """Everything that a step changes, and where it is kept between runs."""

    def __init__(self, out: Path, vocabulary_size: int, latent_channels: int, peak_rate: float) -> None:
        self.models = torch.nn.ModuleDict(
            {"text_encoder": build_text_encoder(vocabulary_size), "transformer": build_denoiser(latent_channels)}
        )
        self.models["text_encoder"].set_attn_implementation("eager")
        self.average = copy.deepcopy(self.models)
        self.optimizer = torch.optim.AdamW(self.models.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        self.muon = torch.optim.Muon(hidden_matrices(self.models), lr=peak_rate, ns_steps=4, adjust_lr_fn="match_rms_adamw")
        self.step, self.seconds = 0, 0.0
        self.checkpoint = out / "checkpoint.pt"
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.models.load_state_dict(state["models"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            if "muon" in state:
                self.muon.load_state_dict(state["muon"])
            self.step, self.seconds = state["step"], state["seconds"]

    def save(self, seconds: float) -> None:
        """Write a checkpoint beside the old one, then let it take that one's place."""
        fresh = self.checkpoint.with_suffix(".new")
        parts = {"models": self.models, "average": self.average, "optimizer": self.optimizer, "muon": self.muon}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "step": self.step, "seconds": seconds}, fresh)
        fresh.replace(self.checkpoint)

    def update(self, loss: torch.Tensor, rate: float) -> None:
        """One optimizer step, and the averaged weights after it."""
        for group in (*self.optimizer.param_groups, *self.muon.param_groups):
            group["lr"] = rate
        self.models.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.models.parameters(), 1.0)
        if self.step >= MUON_FROM:
            self.muon.step()
            for matrix in self.muon.param_groups[0]["params"]:
                matrix.grad = None  # AdamW passes over what has none
        self.optimizer.step()
        keep = min(0.9995, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.models.parameters()), 1 - keep)
        self.step += 1


class Objective:
    """The loss of a step; all chance in it comes from the step's number."""

    def __init__(self, pool: dict[tuple[int, int], Pictures], tokenizer: Qwen2Tokenizer, fp32: bool, compiled: bool) -> None:
        self.pool, self.tokenizer, self.fp32 = pool, tokenizer, fp32
        self.run_block = torch.compile(block) if compiled else block
        self.factors: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def loss(self, models: torch.nn.ModuleDict, step: int) -> torch.Tensor:
        """Mean squared error of the velocity that ZImagePipeline expects: picture minus noise."""
        rng = random.Random(f"step {step}")
        torch.manual_seed(step + 1)
        size = rng.choices(list(SIZE_WEIGHTS), list(SIZE_WEIGHTS.values()))[0]
        length = 64 if size == (64, 64) and rng.random() < LONG_PROMPTS else 32
        pictures = self.pool[size]
        rows = [rng.randrange(len(pictures.scenes)) for _ in range(BATCH)]
        ids, mask = tokenize(self.tokenizer, [pictures.scenes[row] for row in rows], rng, length)
        clean = pictures.latents[rows].float()
        noise = torch.randn_like(clean)
        centre, spread = next(shape for first, shape in SIGMA_SHAPES if step >= first)
        sigma = torch.sigmoid(centre + spread * torch.randn(BATCH))[:, None, None, None]
        noisy = (1 - sigma) * clean + sigma * noise
        key = (length, clean.shape[2] // 2, clean.shape[3] // 2)
        if key not in self.factors:
            self.factors[key] = rope(models["transformer"], *key)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.fp32):
            caption = encode_text(models["text_encoder"], ids)
            output = predict(models["transformer"], noisy, 1 - sigma.flatten(), caption, mask, self.factors[key], self.run_block)
        return torch.nn.functional.mse_loss(output.float(), clean - noise)


def main() -> None:
    """Train, writing a checkpoint now and then, and end with `denoiser.pt` (averaged weights) and `denoiser.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=11_000)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bfloat16 (slower where the CPU has bfloat16 units)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the blocks (no C++ compiler needed, half as fast)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    pool, tokenizer = load_pool(arguments.out), build_tokenizer()
    training = Training(arguments.out, len(tokenizer), pool[64, 64].latents.shape[1], arguments.learning_rate)
    objective = Objective(pool, tokenizer, arguments.fp32, not arguments.no_compile)
    started, losses = time.time() - training.seconds, collections.deque[float](maxlen=500)
    while training.step < arguments.steps:
        loss = objective.loss(training.models, training.step)
        training.update(loss, learning_rate(training.step, arguments.steps, arguments.learning_rate))
        losses.append(loss.item())
        if training.step % 50 == 0:
            print(f"step {training.step} {time.time() - started:.0f} s loss {np.mean(losses):.4f} (mean of {len(losses)})", flush=True)
        if training.step % arguments.checkpoint_every == 0 or training.step == arguments.steps:
            training.save(time.time() - started)
    torch.save(training.average.state_dict(), arguments.out / "denoiser.pt")
    record = {"steps": training.step, "batch": BATCH, "seconds": round(time.time() - started), "loss": round(float(np.mean(losses)), 5)}
    record |= {f"{name}_parameters": sum(p.numel() for p in model.parameters()) for name, model in training.models.items()}
    (arguments.out / "denoiser.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
