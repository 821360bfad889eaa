"""Official Wan's modules by name and shape alone: what a state dict of the official repositories holds.

Written from `wan/modules/model.py`, `vae.py`, `vae2_2.py`, `t5.py` and `clip.py` of the official Wan 2.1 and 2.2 code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


class Weight(nn.Module):
    """An RMS norm of the DiT or of T5."""

    def __init__(self, dim: int, name: str = "weight", ones: int = 0) -> None:
        super().__init__()
        setattr(self, name, param(dim, *(1,) * ones))


def gamma(dim: int, ones: int) -> Weight:
    """An RMS norm of the VAE."""
    return Weight(dim, "gamma", ones)


class Attention(nn.Module):
    def __init__(self, dim: int, with_image: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q = Weight(dim)
        self.norm_k = Weight(dim)
        if with_image:
            self.k_img = nn.Linear(dim, dim)
            self.v_img = nn.Linear(dim, dim)
            self.norm_k_img = Weight(dim)


class Block(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, with_image: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.norm3 = nn.LayerNorm(dim)
        self.self_attn = Attention(dim, False)
        self.cross_attn = Attention(dim, with_image)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, dim))
        self.modulation = param(1, 6, dim)


class Head(nn.Module):
    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, out)
        self.modulation = param(1, 2, dim)


class ImageEmbedding(nn.Module):
    def __init__(self, image_dim: int, dim: int, positions: int | None) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(image_dim),
            nn.Linear(image_dim, image_dim),
            nn.GELU(),
            nn.Linear(image_dim, dim),
            nn.LayerNorm(dim),
        )
        if positions:
            self.emb_pos = param(1, positions, image_dim)


class WanModel(nn.Module):
    """The official DiT of a diffusers config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dim = config["num_attention_heads"] * config["attention_head_dim"]
        patch = tuple(config.get("patch_size", (1, 2, 2)))
        image_dim = config.get("image_dim")
        self.patch_embedding = nn.Conv3d(config["in_channels"], dim, patch, patch)
        self.text_embedding = nn.Sequential(
            nn.Linear(config["text_dim"], dim), nn.GELU(), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config["freq_dim"], dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim * 6))
        self.blocks = nn.ModuleList(
            Block(dim, config["ffn_dim"], image_dim is not None) for _ in range(config["num_layers"])
        )
        self.head = Head(dim, config["out_channels"] * math.prod(patch))
        if image_dim is not None:
            self.img_emb = ImageEmbedding(image_dim, dim, config.get("pos_embed_seq_len"))


def residual(old: int, new: int) -> nn.Module:
    block = nn.Module()
    block.residual = nn.Sequential(
        gamma(old, 3),
        nn.SiLU(),
        nn.Conv3d(old, new, 3),
        gamma(new, 3),
        nn.SiLU(),
        nn.Dropout(),
        nn.Conv3d(new, new, 3),
    )
    block.shortcut = nn.Conv3d(old, new, 1) if old != new else nn.Identity()
    return block


def resample(dim: int, new: int, in_time: int) -> nn.Module:
    """`in_time`: how many times its channels the convolution over time gives, 0 without one."""
    block = nn.Module()
    block.resample = nn.Sequential(nn.Identity(), nn.Conv2d(dim, new, 3))
    if in_time:
        block.time_conv = nn.Conv3d(dim, dim * in_time, (3, 1, 1))
    return block


def middle(dim: int) -> nn.Sequential:
    attention = nn.Module()
    attention.norm = gamma(dim, 2)
    attention.to_qkv = nn.Conv2d(dim, dim * 3, 1)
    attention.proj = nn.Conv2d(dim, dim, 1)
    return nn.Sequential(residual(dim, dim), attention, residual(dim, dim))


class VaeHalf(nn.Module):
    """Encoder or decoder; `nested` for Wan 2.2's own VAE, whose blocks have lists of their own."""

    def __init__(
        self,
        dims: list[int],
        ends: tuple[int, int],
        num_blocks: int,
        times: list[bool],
        up: bool,
        nested: bool,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(ends[0], dims[0], 3)
        steps: list[nn.Module] = []
        for i, (old, new) in enumerate(pairwise(dims)):
            if up and not nested and i:
                old //= 2
            own = [residual(old if not j else new, new) for j in range(num_blocks)]
            if i < len(dims) - 2:
                halved = new // 2 if up and not nested else new
                own.append(resample(new, halved, times[i] * (2 if up else 1)))
            if nested:
                block = nn.Module()
                setattr(block, "upsamples" if up else "downsamples", nn.Sequential(*own))
                own = [block]
            steps += own
        setattr(self, "upsamples" if up else "downsamples", nn.Sequential(*steps))
        self.middle = middle(dims[0] if up else dims[-1])
        self.head = nn.Sequential(gamma(dims[-1], 3), nn.SiLU(), nn.Conv3d(dims[-1], ends[1], 3))


class WanVae(nn.Module):
    """`WanVAE_` of Wan 2.1, or with `nested` of Wan 2.2."""

    def __init__(
        self,
        dim: int = 4,
        z_dim: int = 16,
        num_blocks: int = 2,
        nested: bool = False,
        decoder_dim: int | None = None,
    ) -> None:
        super().__init__()
        mult = [1, 2, 4, 4]
        times = [False, True, True]
        pixels = 12 if nested else 3
        down = [dim * m for m in [1, *mult]]
        up = [(decoder_dim or dim) * m for m in [mult[-1], *mult[::-1]]]
        self.encoder = VaeHalf(down, (pixels, 2 * z_dim), num_blocks, times, False, nested)
        self.conv1 = nn.Conv3d(2 * z_dim, 2 * z_dim, 1)
        self.conv2 = nn.Conv3d(z_dim, z_dim, 1)
        self.decoder = VaeHalf(up, (z_dim, pixels), num_blocks + 1, times[::-1], True, nested)


class T5Encoder(nn.Module):
    """The encoder of `umt5_xxl`, with a separate position embedding in each block."""

    def __init__(
        self, vocab: int, dim: int, dim_attn: int, dim_ffn: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList()
        for _ in range(num_layers):
            block = nn.Module()
            block.norm1 = Weight(dim)
            block.norm2 = Weight(dim)
            block.attn = nn.Module()
            block.ffn = nn.Module()
            block.pos_embedding = nn.Module()
            for name in "qkv":
                setattr(block.attn, name, nn.Linear(dim, dim_attn, bias=False))
            block.attn.o = nn.Linear(dim_attn, dim, bias=False)
            block.ffn.gate = nn.Sequential(nn.Linear(dim, dim_ffn, bias=False), nn.GELU())
            block.ffn.fc1 = nn.Linear(dim, dim_ffn, bias=False)
            block.ffn.fc2 = nn.Linear(dim_ffn, dim, bias=False)
            block.pos_embedding.embedding = nn.Embedding(32, num_heads)
            self.blocks.append(block)
        self.norm = Weight(dim)


class XlmRobertaClip(nn.Module):
    """The picture's half whole, and of the text's half one tensor, which nothing here reads."""

    def __init__(
        self, dim: int, mlp_dim: int, num_layers: int, patch: int = 14, size: int = 224, out: int = 8
    ) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.patch_embedding = nn.Conv2d(3, dim, patch, patch, bias=False)
        self.visual.cls_embedding = param(1, 1, dim)
        self.visual.pos_embedding = param(1, (size // patch) ** 2 + 1, dim)
        self.visual.pre_norm = nn.LayerNorm(dim)
        self.visual.post_norm = nn.LayerNorm(dim)
        self.visual.transformer = nn.Sequential()
        for _ in range(num_layers):
            block = nn.Module()
            block.norm1 = nn.LayerNorm(dim)
            block.norm2 = nn.LayerNorm(dim)
            block.attn = nn.Module()
            block.attn.to_qkv = nn.Linear(dim, dim * 3)
            block.attn.proj = nn.Linear(dim, dim)
            block.mlp = nn.Sequential(
                nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim), nn.Dropout()
            )
            self.visual.transformer.append(block)
        self.visual.head = param(dim, out)
        self.textual = nn.Linear(2, 2, bias=False)
        self.log_scale = param()


def random_state(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Its state dict with distinct random values of a size that keeps a forward finite."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator) / max(value[..., 0].numel(), 1) ** 0.5
        if value.ndim
        else value
        for name, value in model.state_dict().items()
    }
