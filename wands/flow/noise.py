"""Add noise to clean tokens: compute the model input and the target velocity.

Letters: L local tokens, S samples, E entries of the loss, M timesteps, P channels of a token.
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
from wands.flow.rng import SampleKey, permutation, rng
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS, sample_sigma, with_clip_shift

_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class NoisyBatch:
    """Noisy tokens and their targets, in host memory. x0 are the clean tokens, and L includes padding.

    Attributes:
        tokens: fp32 [L, P], (1 - sigma) * x0 + sigma * noise. Conditioning tokens are x0 without noise.
        target: fp32 [L, P], the velocity (noise - x0).
        sigmas: fp32 [E], noise level of each entry of `RankSlice.entries`.
        entry_ids: int64 [L], index of the entry of each token that has a loss.
        timesteps: fp32 [M], 1000 * sigma for each entry of `ContextLayout.timestep_parts`. Do not cast to bf16, which would round
            997 to 996.
        trained: slice or int64 indices of the tokens in the loss: all except conditioning tokens, context and padding.
    """

    tokens: Tensor
    target: Tensor
    sigmas: Tensor
    entry_ids: Tensor
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
    pairs = zip(keys, layout.seq_lens, strict=True)
    drawn = (draw_sigma(seed, key, with_clip_shift(flow, n), sigma_range) for key, n in pairs)
    pairs_of_units = zip(given_sigmas or drawn, layout.samples, strict=True)
    sigmas = [[sigma] * (units[-1].chunk + 1) for sigma, units in pairs_of_units]
    return mix_noise(tokens, layout, keys, seed, sigmas, num_cond_tokens=num_cond_tokens)


def mix_noise(
    tokens: Tensor,
    layout: ContextLayout,
    keys: Sequence[SampleKey],
    seed: int,
    sigmas: Sequence[Sequence[float]],
    *,
    num_cond_tokens: Sequence[int] = (),
    context_noise: float = 0.0,
) -> NoisyBatch:
    """Add noise to this rank's tokens, at given noise levels. The arguments are those of `add_noise`, and two others.

    `sigmas` are, for each sample, the noise level of each chunk. `context_noise` is the noise level of the units that are only
    context, with noise of their own.
    """
    assert len(tokens) == len(layout.token_index)
    units = [(unit, of_sample) for own, of_sample in zip(layout.samples, sigmas, strict=True) for unit in own]
    unit_sigmas = torch.tensor(
        [context_noise if unit.is_context else of_sample[unit.chunk] for unit, of_sample in units],
        dtype=torch.float32,
    )
    is_context = torch.tensor([unit.is_context for unit, _ in units])[layout.unit_ids]
    noise = draw_noise(layout, keys, seed, tokens.shape[1])
    if context_noise:
        of_context = draw_noise(layout, keys, seed, tokens.shape[1], "context_noise")
        noise = torch.where(is_context.unsqueeze(1), of_context, noise)
    clean = tokens.to(torch.float32)
    token_sigmas = unit_sigmas[layout.unit_ids].unsqueeze(1)
    is_free = ~is_context  # neither context nor given
    if any(num_cond_tokens):
        is_given = _cond_mask(layout, num_cond_tokens)
        is_free &= ~is_given
        token_sigmas = token_sigmas.masked_fill(is_given.unsqueeze(1), 0.0)
    trained: slice | Tensor = slice(layout.num_valid)
    if any(num_cond_tokens) or any(unit.is_context for unit, _ in units):
        trained = is_free[: layout.num_valid].nonzero().squeeze(1)
    entry_units = [number for _, number, _ in layout.loss_units(num_cond_tokens)]
    parts = layout.timestep_parts(num_cond_tokens)
    of_units = unit_sigmas[[part.unit for part in parts]] * NUM_TRAIN_TIMESTEPS
    timesteps = of_units.masked_fill(torch.tensor([part.is_given for part in parts]), 0.0)
    noisy = (1.0 - token_sigmas) * clean + token_sigmas * noise
    return NoisyBatch(
        tokens=noisy,
        target=noise - clean,
        sigmas=unit_sigmas[entry_units],
        entry_ids=torch.searchsorted(torch.tensor(entry_units), layout.unit_ids),
        timesteps=timesteps,
        trained=trained,
    )


def draw_sigma(
    seed: int, key: SampleKey, flow: FlowConfig, sigma_range: tuple[float, float], chunk: int = 0
) -> float:
    """Draw the noise level for one use of a sample, or of one of its chunks. `flow` is the result of `with_clip_shift`.

    With `flow.stratified`, the noise level follows from a number u (`stratum` of `sample_sigma`): random in epoch 0, then raised
    by the golden ratio (0.618), modulo 1, in every epoch, so that the values of u cover 0 to 1 evenly. Otherwise it is random in
    every epoch.
    """
    purpose = f"sigma_{chunk}" if chunk else "sigma"
    stratum = _stratum(seed, key, purpose) if flow.stratified else None
    return sample_sigma(rng(seed, key, purpose), flow, *sigma_range, stratum)


def draw_chunk_sigmas(
    seed: int,
    key: SampleKey,
    flow: FlowConfig,
    sigma_range: tuple[float, float],
    *,
    num_chunks: int,
    stratified: bool,
) -> list[float]:
    """Draw the noise levels of a sample's chunks, as `draw_sigma`.

    `stratified` spreads the chunks of a sample evenly over the distribution, in random order.
    """
    if not stratified:
        return [draw_sigma(seed, key, flow, sigma_range, chunk) for chunk in range(num_chunks)]
    start = _stratum(seed, key, "sigma") if flow.stratified else rng(seed, key, "sigma").random()
    order = permutation(num_chunks, seed, key.sample_id, key.repeat_index, key.epoch, "chunk_order")
    strata = [(start + int(place) / num_chunks) % 1.0 for place in order]
    return [
        sample_sigma(rng(seed, key, f"sigma_{chunk}"), flow, *sigma_range, stratum)
        for chunk, stratum in enumerate(strata)
    ]


def _stratum(seed: int, key: SampleKey, purpose: str) -> float:
    """Return a number from 0 to 1 that is random in epoch 0, and raised by the golden ratio, modulo 1, in every epoch."""
    start = rng(seed, replace(key, epoch=0), purpose.replace("sigma", "sigma_start")).random()
    return (start + key.epoch * _GOLDEN_RATIO) % 1.0


def _cond_mask(layout: ContextLayout, num_cond_tokens: Sequence[int]) -> Tensor:
    """Return whether each token of this rank is among the first `num_cond_tokens` tokens of its sample: bool [L]."""
    starts = torch.tensor([0, *layout.seq_lens]).cumsum(0)[:-1]
    index_in_sample = layout.token_index - starts[layout.segment_ids]
    return (layout.token_index >= 0) & (index_in_sample < torch.tensor(num_cond_tokens)[layout.segment_ids])


def draw_noise(
    layout: ContextLayout, keys: Sequence[SampleKey], seed: int, channels: int, purpose: str = "noise"
) -> Tensor:
    """Return standard normal noise for the tokens of this rank, fp32 [L, channels] on the host, with zeros for padding.

    The noise is drawn for whole samples, so ranks that share a sample use parts of the same noise, and copies of a token get the
    same noise. A host generator gives the same bits on every machine; a GPU generator does not.
    """
    whole = torch.empty(sum(layout.seq_lens), channels, dtype=torch.float32, device="cpu")
    for key, rows in zip(keys, whole.split(layout.seq_lens), strict=True):
        rng(seed, key, purpose).standard_normal(dtype=np.float32, out=rows.numpy())
    index = layout.token_index.cpu()
    return whole[index.clamp(min=0)].masked_fill_((index < 0).unsqueeze(1), 0.0)
