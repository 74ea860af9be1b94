"""The built-in model's text encoder and denoiser, and the batched forward pass that training uses.

`predict` computes what `ZImagePipeline` computes with the same modules (a test compares the two); it is quicker because
all prompts of a batch are padded to one length and all pictures have one size, so that no lists are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

TEXT_WIDTH = 96
# the pipeline reads the last layer but one, so the last layer never does anything
TEXT_LAYERS = 3
WIDTH = 192
LAYERS = 5
HEADS = 6
ROPE_AXES = (8, 12, 12)
SEQUENCE_MULTIPLE = 32


def build_text_encoder(vocabulary_size: int) -> Qwen3Model:
    """A small Qwen3 with fresh weights."""
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=vocabulary_size,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=TEXT_LAYERS,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=32,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        encoder.embed_tokens.weight.normal_(0, 0.2)
    return encoder


def build_denoiser(latent_channels: int) -> ZImageTransformer2DModel:
    """A small Z-Image denoiser with fresh weights; it starts by predicting zero."""
    denoiser = ZImageTransformer2DModel(
        in_channels=latent_channels,
        dim=WIDTH,
        n_layers=LAYERS,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=list(ROPE_AXES),
        axes_lens=[576, 64, 64],
    )
    with torch.no_grad():
        denoiser.x_pad_token.normal_(0, 0.02)
        denoiser.cap_pad_token.normal_(0, 0.02)
        final = denoiser.all_final_layer["2-1"]
        final.linear.weight.zero_()
        final.linear.bias.zero_()
    return denoiser


def encode_text(encoder: Qwen3Model, token_ids: torch.Tensor) -> torch.Tensor:
    """Hidden states before the last layer, for right-padded ids [B, L]: [B, L, TEXT_WIDTH]. Causal, so padding needs no mask."""
    hidden = encoder.embed_tokens(token_ids)
    length = token_ids.shape[1]
    positions = torch.arange(length)[None]
    rotary = encoder.rotary_emb(hidden, positions)
    causal = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
    for layer in encoder.layers[:-1]:
        hidden = layer(hidden, attention_mask=causal, position_embeddings=rotary, position_ids=positions)
    return hidden


def rope(denoiser: ZImageTransformer2DModel, caption_length: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of picture tokens (padded), then caption tokens: two of [1, 1, tokens, head_dim / 2]."""
    grid = denoiser.create_coordinate_grid((1, rows, columns), (caption_length + 1, 0, 0)).flatten(0, 2)
    padding = torch.zeros(-len(grid) % SEQUENCE_MULTIPLE, 3, dtype=grid.dtype)
    caption = denoiser.create_coordinate_grid((caption_length, 1, 1), (1, 0, 0)).flatten(0, 2)
    factors = denoiser.rope_embedder(torch.cat([grid, padding, caption]))[None, None]
    return factors.real.contiguous(), factors.imag.contiguous()


def patches(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] to [B, H/2 * W/2, 4C] in the denoiser's order."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, h * w // 4, 4 * c)


def unpatch(tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `patches`."""
    b, c, h, w = shape
    return tokens.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(shape)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of the last axis of [B, heads, L, head_dim]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1).flatten(-2)


def attend(attention: Any, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Self-attention over all tokens, written out: quicker on short sequences than the fused kernel's backward pass."""
    q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (attention.to_q, attention.to_k, attention.to_v))
    q = rotate(rms(q, attention.norm_q), cosines, sines).to(v.dtype)
    k = rotate(rms(k, attention.norm_k), cosines, sines).to(v.dtype)
    weights = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).float().softmax(dim=-1).to(v.dtype)
    return attention.to_out[0]((weights @ v).transpose(1, 2).flatten(2))


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """The module's RMSNorm, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def block(layer: Any, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, adaln: torch.Tensor | None) -> torch.Tensor:
    """One ZImageTransformerBlock over [B, L, WIDTH]; without `adaln` a context refiner block."""
    if adaln is None:
        x = x + rms(attend(layer.attention, rms(x, layer.attention_norm1), cosines, sines), layer.attention_norm2)
        return x + rms(layer.feed_forward(rms(x, layer.ffn_norm1)), layer.ffn_norm2)
    scale_msa, gate_msa, scale_mlp, gate_mlp = layer.adaLN_modulation(adaln).float().unsqueeze(1).chunk(4, dim=2)
    attended = attend(layer.attention, rms(x, layer.attention_norm1) * (1 + scale_msa), cosines, sines)
    x = x + gate_msa.tanh() * rms(attended, layer.attention_norm2)
    fed = layer.feed_forward(rms(x, layer.ffn_norm1) * (1 + scale_mlp))
    return x + gate_mlp.tanh() * rms(fed, layer.ffn_norm2)


def predict(
    denoiser: ZImageTransformer2DModel,
    latents: torch.Tensor,
    time: torch.Tensor,
    caption: torch.Tensor,
    caption_mask: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    run_block: Callable[..., torch.Tensor] = block,
) -> torch.Tensor:
    """The denoiser's output [B, C, H, W] at `time` (0 is noise, 1 is the picture).

    `caption` is [B, L, TEXT_WIDTH] with L a multiple of 32, `caption_mask` [B, L] is true on real tokens, `factors` comes from `rope`.
    """
    adaln = denoiser.t_embedder(time * denoiser.t_scale).float()
    tokens = patches(latents)
    count = tokens.shape[1]
    length = count + -count % SEQUENCE_MULTIPLE
    cosines, sines = factors
    x = denoiser.all_x_embedder["2-1"](tokens).float()
    x = torch.cat([x, denoiser.x_pad_token.expand(len(x), length - count, -1)], dim=1)
    for layer in denoiser.noise_refiner:
        x = run_block(layer, x, cosines[:, :, :length], sines[:, :, :length], adaln)
    norm, embed = denoiser.cap_embedder
    text = torch.where(caption_mask[..., None], embed(rms(caption, norm)).float(), denoiser.cap_pad_token)
    for layer in denoiser.context_refiner:
        text = run_block(layer, text, cosines[:, :, length:], sines[:, :, length:], None)
    x = torch.cat([x, text], dim=1)
    for layer in denoiser.layers:
        x = run_block(layer, x, cosines, sines, adaln)
    return unpatch(denoiser.all_final_layer["2-1"](x[:, :count], c=adaln), latents.shape)
