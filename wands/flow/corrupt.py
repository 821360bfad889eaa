"""From clean tokens to what the model sees and what it must predict.

L local tokens, S samples, P channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wands.config import FlowSection
from wands.flow.keys import SampleKey, rng
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS, sample_sigma
from wands.parallel.layout import ContextLayout


@dataclass(frozen=True)
class Noisy:
    """A corrupted batch on the tokens' device.

    Attributes:
        tokens: fp32 [L, P], x_t = (1 - sigma) * x0 + sigma * noise.
        target: fp32 [L, P], the velocity noise - x0.
        sigmas: fp32 [S].
        timesteps: fp32 [S], 1000 * sigma. Never bf16: that has 8 bits, and 997 would become 996.
    """

    tokens: Tensor
    target: Tensor
    sigmas: Tensor
    timesteps: Tensor


def corrupt(
    tokens: Tensor, layout: ContextLayout, keys: Sequence[SampleKey], flow: FlowSection, seed: int
) -> Noisy:
    """Mix noise into this rank's tokens, each sample at its own noise level.

    Noise and sigma depend on (seed, key) alone: never on the pack, its order, the rank or the device.

    Args:
        tokens: clean tokens held here, [L, P]; pads are zero and stay zero.
        layout: which tokens of the pack these are.
        keys: one per sample of the pack.
        flow: how sigma is drawn.
        seed: `train.seed`.
    """
    assert len(keys) == len(layout.seq_lens)
    assert len(tokens) == len(layout.token_index)
    sigmas = torch.tensor([sample_sigma(rng(seed, key, "sigma"), flow) for key in keys], dtype=torch.float32)
    noise = draw_noise(layout, keys, seed, tokens.shape[1]).to(tokens.device)
    sigmas = sigmas.to(tokens.device)
    clean = tokens.to(torch.float32)
    sigma_of_token = sigmas[layout.segment_ids.to(tokens.device)].unsqueeze(1)
    return Noisy(
        tokens=(1.0 - sigma_of_token) * clean + sigma_of_token * noise,
        target=noise - clean,
        sigmas=sigmas,
        timesteps=sigmas * NUM_TRAIN_TIMESTEPS,
    )


def draw_noise(layout: ContextLayout, keys: Sequence[SampleKey], seed: int, channels: int) -> Tensor:
    """Standard normal noise of the tokens held here, fp32 [L, channels] on the host, zero at pads.

    Every sample's noise is drawn whole and then sliced: ranks that share a sample must hold parts of one
    drawing, and a host generator's bits are the same on every machine, a GPU's are not.
    """
    whole = np.empty((sum(layout.seq_lens), channels), dtype=np.float32)
    start = 0
    for key, length in zip(keys, layout.seq_lens, strict=True):
        rng(seed, key, "noise").standard_normal(dtype=np.float32, out=whole[start : start + length])
        start += length
    index = layout.token_index.cpu()
    local = torch.from_numpy(whole)[index.clamp(min=0)]
    return local.masked_fill_((index < 0).unsqueeze(1), 0.0)
