"""A stock model and a packed one with the same weights, and packs of unequal samples for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import diffusers
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wands.attention.varlen import Segments, choose_backend, varlen_attention
from wands.data.patchify import patchify
from wands.model.transformer import PackedWanTransformer
from wands.parallel.layout import ContextLayout, PackedMeta
from wands.variants import TEXT_LEN

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
PATCH = (1, 2, 2)
GRIDS = [(3, 2, 2), (1, 2, 3), (2, 4, 3), (1, 1, 1), (4, 3, 2), (2, 2, 5), (1, 5, 2)]
TEXT_LENS = [5, 17, 1, 9, 512, 30, 3]
TIMESTEPS = [997.3, 301.7, 0.4, 650.1, 998.9, 42.0, 777.7]


@dataclass(frozen=True)
class Pack:
    """Unequal samples, sample by sample and packed."""

    latents: list[Tensor]
    texts: list[Tensor]
    timesteps: Tensor
    meta: PackedMeta

    @property
    def tokens(self) -> Tensor:
        return torch.cat([patchify(x, PATCH) for x in self.latents])

    @property
    def text_embeds(self) -> Tensor:
        return torch.cat(self.texts)

    def replaced(self, index: int, **parts: Tensor) -> Pack:
        """The pack with another `latents`, `texts` or `timesteps` for one sample."""
        changed = {}
        for name, value in parts.items():
            rows = list(getattr(self, name))
            rows[index] = value
            changed[name] = torch.stack(rows) if name == "timesteps" else rows
        return replace(self, **changed)


def make_pack(num_samples: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Pack:
    generator = torch.Generator().manual_seed(seed)
    grids, text_lens = GRIDS[:num_samples], TEXT_LENS[:num_samples]
    latents = [torch.randn(4, f, 2 * h, 2 * w, generator=generator).to(dtype) for f, h, w in grids]
    texts = [torch.randn(length, CONFIG["text_dim"], generator=generator).to(dtype) for length in text_lens]
    return Pack(latents, texts, torch.tensor(TIMESTEPS[:num_samples]), make_meta(grids, text_lens))


def make_meta(grids: list[tuple[int, int, int]], text_lens: list[int]) -> PackedMeta:
    layout = ContextLayout.build([f * h * w for f, h, w in grids])
    positions = [torch.cartesian_prod(*map(torch.arange, grid)).reshape(-1, 3) for grid in grids]
    return PackedMeta(
        torch.cat(positions),
        layout.segment_ids,
        layout.plan.chunk_lens,
        layout.local_lens,
        tuple(text_lens),
    )


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter, also those that start at zero or one, a value that matters."""
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


def build_pair(dtype: torch.dtype = torch.float32) -> tuple[WanTransformer3DModel, PackedWanTransformer]:
    """The stock model and ours, with the same non-trivial weights."""
    diffusers.logging.set_verbosity_error()  # a notice at every `.to(dtype)`
    stock, packed = WanTransformer3DModel(**CONFIG), PackedWanTransformer(**CONFIG)
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
    return model(pack.tokens, pack.meta, pack.timesteps, pack.text_embeds)


def run_stock(stock: WanTransformer3DModel, pack: Pack) -> Tensor:
    """One sample at a time through diffusers, as its own pipeline calls it; returned as packed tokens."""
    outputs = []
    for latents, text, timestep in zip(pack.latents, pack.texts, pack.timesteps, strict=True):
        padded = torch.cat([text, text.new_zeros(TEXT_LEN - len(text), text.shape[1])])
        output = stock(latents[None], timestep[None], padded[None], return_dict=False)[0]
        outputs.append(patchify(output[0], PATCH))
    return torch.cat(outputs)
