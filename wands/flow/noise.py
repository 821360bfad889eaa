"""Add noise to clean tokens: compute the model input and the target velocity.

Letters: L local tokens, S samples, M timesteps, P channels of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.config.recipe import FlowConfig
from wands.flow.rng import SampleKey, rng
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS, sample_sigma, with_clip_shift

_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class NoisyBatch:
    """Noisy tokens and their targets, in host memory. x0 are the clean tokens, and L includes padding.

    Attributes:
        tokens: fp32 [L, P], (1 - sigma) * x0 + sigma * noise. Conditioning tokens are x0 without noise.
        target: fp32 [L, P], the velocity (noise - x0).
        sigmas: fp32 [S], noise level of each sample.
        timesteps: fp32 [M], 1000 * sigma for each sample, after a timestep 0 if the sample has conditioning tokens. Do not cast
            to bf16, which would round 997 to 996.
        trained: slice or int64 indices of the tokens in the loss: all except conditioning tokens and padding.
    """

    tokens: Tensor
    target: Tensor
    sigmas: Tensor
    timesteps: Tensor
    trained: slice | Tensor


def add_noise(
    tokens: Tensor,
    layout: ContextLayout,
    keys: Sequence[SampleKey],
    flow: FlowConfig,
    seed: int,
    num_cond_tokens: Sequence[int] = (),
    sigma_range: tuple[float, float] = (0.0, 1.0),
    given_sigmas: Sequence[float] | None = None,
) -> NoisyBatch:
    """Add noise to this rank's tokens, with one noise level per sample.

    The random numbers depend only on the seed and the key of the sample, not on bin, rank or device. All tensors are in host
    memory, so that a thread can draw the noise of the next steps while the device computes.

    Args:
        tokens: [L, P], clean tokens of this rank. Padding must be zero and stays zero.
        layout: positions of this rank's tokens in the bin.
        keys: key of the random numbers of each sample of the bin.
        flow: distribution of sigma.
        seed: `train.seed`.
        num_cond_tokens: number of conditioning tokens at the start of each sample, which get no noise. Empty means none.
        sigma_range: (smallest, largest) sigma, such as the range of one expert.
        given_sigmas: noise level of each sample. None draws the noise levels.
    """
    assert len(keys) == len(layout.seq_lens)
    assert len(tokens) == len(layout.token_index)
    pairs = zip(keys, layout.seq_lens, strict=True)
    drawn = (draw_sigma(seed, key, with_clip_shift(flow, n), sigma_range) for key, n in pairs)
    sigmas = torch.tensor(given_sigmas or [*drawn], dtype=torch.float32)
    noise = draw_noise(layout, keys, seed, tokens.shape[1])
    clean = tokens.to(torch.float32)
    token_sigmas = sigmas[layout.segment_ids].unsqueeze(1)
    timesteps = sigmas * NUM_TRAIN_TIMESTEPS
    trained: slice | Tensor = slice(layout.num_valid)
    if any(num_cond_tokens):
        is_cond = _cond_mask(layout, num_cond_tokens)
        trained = (~is_cond[: layout.num_valid]).nonzero().squeeze(1)
        token_sigmas = token_sigmas.masked_fill(is_cond.unsqueeze(1), 0.0)
        # A sample with conditioning tokens has a first timestep 0, even on ranks that hold none of these tokens.
        num_timesteps = torch.tensor(num_cond_tokens).gt(0).int() + 1
        index = num_timesteps.cumsum(0) - 1  # index of each sample's last timestep, 1000 * sigma
        timesteps = timesteps.new_zeros(int(index[-1]) + 1).index_copy_(0, index, timesteps)
    noisy = (1.0 - token_sigmas) * clean + token_sigmas * noise
    return NoisyBatch(tokens=noisy, target=noise - clean, sigmas=sigmas, timesteps=timesteps, trained=trained)


def draw_sigma(seed: int, key: SampleKey, flow: FlowConfig, sigma_range: tuple[float, float]) -> float:
    """Draw the noise level for one use of a sample. `flow` is the result of `with_clip_shift`.

    With `flow.stratified`, the noise level follows from a number u (`stratum` of `sample_sigma`): random in epoch 0, then raised
    by the golden ratio (0.618), modulo 1, in every epoch, so that the values of u cover 0 to 1 evenly. Otherwise it is random in
    every epoch.
    """
    start = rng(seed, replace(key, epoch=0), "sigma_start").random() if flow.stratified else 0.0
    stratum = (start + key.epoch * _GOLDEN_RATIO) % 1.0 if flow.stratified else None
    return sample_sigma(rng(seed, key, "sigma"), flow, *sigma_range, stratum)


def _cond_mask(layout: ContextLayout, num_cond_tokens: Sequence[int]) -> Tensor:
    """Return whether each token of this rank is among the first `num_cond_tokens` tokens of its sample: bool [L]."""
    starts = torch.tensor([0, *layout.seq_lens]).cumsum(0)[:-1]
    index_in_sample = layout.token_index - starts[layout.segment_ids]
    return (layout.token_index >= 0) & (index_in_sample < torch.tensor(num_cond_tokens)[layout.segment_ids])


def draw_noise(layout: ContextLayout, keys: Sequence[SampleKey], seed: int, channels: int) -> Tensor:
    """Return standard normal noise for the tokens of this rank, fp32 [L, channels] on the host, with zeros for padding.

    The noise is drawn for whole samples, so ranks that share a sample use parts of the same noise. A host generator gives the
    same bits on every machine; a GPU generator does not.
    """
    whole = torch.empty(sum(layout.seq_lens), channels, dtype=torch.float32, device="cpu")
    for key, rows in zip(keys, whole.split(layout.seq_lens), strict=True):
        rng(seed, key, "noise").standard_normal(dtype=np.float32, out=rows.numpy())
    index = layout.token_index.cpu()
    return whole[index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(1), 0.0)
