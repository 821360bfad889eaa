"""A stock and a packed model with the same weights, and packs of unequal samples for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import diffusers
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.varlen import Segments, choose_backend, varlen_attention
from wands.model.transformer import PackedWanTransformer
from wands.patches import patchify
from wands.selftest.stock import stock_velocity

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 3,
}
# Config keys of each kind of Wan model: conditioning channels after the 4 latent channels, and CLIP tokens of an image (with a
# position embedding for two images). ti2v has timesteps of tokens instead of samples.
IMAGE_ROWS = 6
KINDS = {
    "t2v": {},
    "i2v with clip": {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 48},
    "flf2v": {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 48, "pos_embed_seq_len": IMAGE_ROWS},
    "i2v": {"in_channels": 12},
    "ti2v": {},
}
PATCH = (1, 2, 2)
GRIDS = [(3, 2, 2), (1, 2, 3), (2, 4, 3), (1, 1, 1), (4, 3, 2), (2, 2, 5), (1, 5, 2)]
TEXT_LENS = [5, 17, 1, 9, 512, 30, 3]
TIMESTEPS = [997.3, 301.7, 0.4, 650.1, 998.9, 42.0, 777.7]


@dataclass(frozen=True)
class Pack:
    """Unequal samples, separate and packed.

    `images` contains [I, D] for each sample, or nothing; `num_cond_tokens` is the number of tokens at timestep 0 of each sample.
    """

    latents: list[Tensor]
    texts: list[Tensor]
    timesteps: Tensor
    meta: PackedMeta
    images: list[Tensor] = field(default_factory=list)
    num_cond_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> Tensor:
        return torch.cat([patchify(x, PATCH) for x in self.latents])

    @property
    def text_embeds(self) -> Tensor:
        return torch.cat(self.texts)

    @property
    def image_embeds(self) -> Tensor | None:
        return torch.stack(self.images) if self.images else None

    @property
    def row_timesteps(self) -> Tensor:
        """Timestep of each entry of `meta.timestep_lens`."""
        num_cond_tokens = self.num_cond_tokens or (0,) * len(self.timesteps)
        pairs = zip(self.timesteps, num_cond_tokens, strict=True)
        return torch.stack([t for step, clean in pairs for t in ([0 * step] if clean else []) + [step]])

    def replaced(self, index: int, **parts: Tensor) -> Pack:
        """Return the pack with other `latents`, `texts`, `images` or `timesteps` for one sample."""
        changed = {}
        for name, value in parts.items():
            rows = list(getattr(self, name))
            rows[index] = value
            changed[name] = torch.stack(rows) if name == "timesteps" else rows
        return replace(self, **changed)


def make_pack(num_samples: int, dtype: torch.dtype = torch.float32, seed: int = 1, kind: str = "t2v") -> Pack:
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG | KINDS[kind]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    grids = GRIDS[:num_samples]
    text_lens = TEXT_LENS[:num_samples]
    latents = [normal(config["in_channels"], f, 2 * h, 2 * w) for f, h, w in grids]
    texts = [normal(length, config["text_dim"]) for length in text_lens]
    with_images = "image_dim" in config
    images = [normal(IMAGE_ROWS, config["image_dim"]) for _ in grids] if with_images else []
    num_cond_tokens = ()
    if kind == "ti2v":  # every second sample with more than one frame has a clean first frame
        num_cond_tokens = tuple(h * w if f > 1 and i % 2 == 0 else 0 for i, (f, h, w) in enumerate(grids))
    meta = make_meta(grids, text_lens, num_cond_tokens)
    return Pack(latents, texts, torch.tensor(TIMESTEPS[:num_samples]), meta, images, num_cond_tokens)


def make_meta(
    grids: list[tuple[int, int, int]], text_lens: list[int], num_cond_tokens: tuple[int, ...] = ()
) -> PackedMeta:
    layout = ContextLayout.build([f * h * w for f, h, w in grids])
    positions = [torch.cartesian_prod(*map(torch.arange, grid)).reshape(-1, 3) for grid in grids]
    parted = [
        (clean, length - clean) if clean else (length,)
        for clean, length in zip(num_cond_tokens, layout.seq_lens, strict=False)
    ]
    return PackedMeta(
        positions=torch.cat(positions),
        segment_ids=layout.segment_ids,
        chunk_lens=layout.plan.chunk_lens,
        local_seq_lens=layout.local_seq_lens,
        text_lens=tuple(text_lens),
        timestep_lens=tuple(length for lens in parted for length in lens),
    )


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Set every parameter to random values, also parameters that start at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if "scale_shift_table" in name:
            value = 0.5 * noise
        elif param.dim() == 1:
            value = 0.1 * noise + (1 if "norm" in name and name.endswith("weight") else 0)
        else:
            value = noise / param[0].numel() ** 0.5
        param.data.copy_(value)


def build_pair(
    dtype: torch.dtype = torch.float32, kind: str = "t2v"
) -> tuple[WanTransformer3DModel, PackedWanTransformer]:
    """Return the stock and the packed model with the same random weights."""
    diffusers.logging.set_verbosity_error()  # a notice at every `.to(dtype)`
    config = CONFIG | KINDS[kind]
    stock = WanTransformer3DModel(**config)
    packed = PackedWanTransformer(**config)
    randomize(stock)
    packed.load_state_dict(stock.state_dict())
    set_attention(packed, dtype)
    return stock.to(dtype), packed.to(dtype)


def set_attention(
    model: PackedWanTransformer,
    dtype: torch.dtype,
    segments_of: Callable = lambda meta: Segments.build(meta.chunk_lens[0]),
) -> None:
    backend = choose_backend("cpu", "cpu", dtype)
    model.set_attention(lambda q, k, v, m: varlen_attention(q, k, v, segments_of(m), backend), backend)


def run_packed(model: PackedWanTransformer, pack: Pack) -> Tensor:
    return model(pack.tokens, pack.meta, pack.row_timesteps, pack.text_embeds, pack.image_embeds)


def run_stock(stock: WanTransformer3DModel, pack: Pack, per_token: bool = False) -> Tensor:
    """Run the stock model on one sample at a time, as diffusers pipelines do; return packed tokens.

    Args:
        per_token: use a timestep per token, as for TI2V.
    """
    outputs = []
    for i, (latents, text, timestep) in enumerate(zip(pack.latents, pack.texts, pack.timesteps, strict=True)):
        timesteps = timestep[None]
        if pack.num_cond_tokens or per_token:
            timesteps = timestep.repeat(pack.meta.local_seq_lens[i])[None]
            timesteps[:, : (pack.num_cond_tokens or (0,) * len(pack.latents))[i]] = 0
        image = pack.images[i] if pack.images else None
        outputs.append(patchify(stock_velocity(stock, latents, timesteps, text, image), PATCH))
    return torch.cat(outputs)
