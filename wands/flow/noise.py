"""From clean tokens to what the model sees and what it must predict.

L local tokens, S samples, M timesteps, P channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wands.config.recipe import FlowConfig
from wands.distributed.layout import ContextLayout
from wands.flow.rng import SampleKey, rng
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS, sample_sigma


@dataclass(frozen=True)
class NoisyBatch:
    """A corrupted batch on the tokens' device.

    Attributes:
        tokens: fp32 [L, P], x_t = (1 - sigma) * x0 + sigma * noise; x0 where a token is given clean.
        target: fp32 [L, P], the velocity noise - x0.
        sigmas: fp32 [S].
        timesteps: fp32 [M], 1000 * sigma of each sample, and before it 0 where the sample begins clean. Never bf16:
            that has 8 bits, and 997 would become 996.
        trained: which rows are trained, a slice or int64 indices: not the clean ones, nor the tail padding.
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
) -> NoisyBatch:
    """Mix noise into this rank's tokens, each sample at its own noise level.

    Noise and sigma depend on (seed, key) alone: never on the pack, its order, the rank or the device.

    Args:
        tokens: clean tokens held here, [L, P]; pads are zero and stay zero.
        layout: which tokens of the pack these are.
        keys: one per sample of the pack.
        flow: how sigma is drawn.
        seed: `train.seed`.
        num_cond_tokens: tokens at the start of each sample that stay clean; none by default.
        sigma_range: where sigma is drawn, that of one expert.
    """
    assert len(keys) == len(layout.seq_lens)
    assert len(tokens) == len(layout.token_index)
    # What is drawn on the host goes to the device without waiting for what the device has still to do.
    there: dict[str, Any] = {"device": tokens.device, "non_blocking": True}
    drawn = [sample_sigma(rng(seed, key, "sigma"), flow, *sigma_range) for key in keys]
    sigmas = torch.tensor(drawn, dtype=torch.float32).to(**there)
    noise = draw_noise(layout, keys, seed, tokens.shape[1]).to(**there)
    clean = tokens.to(torch.float32)
    sigma_of_token = sigmas[layout.segment_ids.to(**there)].unsqueeze(1)
    timesteps, trained = sigmas * NUM_TRAIN_TIMESTEPS, slice(layout.num_valid)
    if any(num_cond_tokens):
        # On the host, which then knows how many there are without waiting for the device.
        is_clean = _clean_rows(layout, num_cond_tokens)
        trained = (~is_clean[: layout.num_valid]).nonzero().squeeze(1).to(**there)
        sigma_of_token = sigma_of_token.masked_fill(is_clean.to(**there).unsqueeze(1), 0.0)
        # Beside its own timestep each such sample has that of its clean tokens, also on ranks that hold none of them.
        place = torch.tensor(num_cond_tokens).gt(0).int()
        place = (place + 1).cumsum(0) - 1
        timesteps = timesteps.new_zeros(int(place[-1]) + 1).index_copy_(0, place.to(**there), timesteps)
    return NoisyBatch(
        tokens=(1.0 - sigma_of_token) * clean + sigma_of_token * noise,
        target=noise - clean,
        sigmas=sigmas,
        timesteps=timesteps,
        trained=trained,
    )


def _clean_rows(layout: ContextLayout, num_cond_tokens: Sequence[int]) -> Tensor:
    """Which rows held here are among the first `num_cond_tokens` tokens of their sample, bool [L]; no pad is."""
    starts = torch.tensor([0, *layout.seq_lens]).cumsum(0)[:-1]
    place = layout.token_index - starts[layout.segment_ids]
    return (layout.token_index >= 0) & (place < torch.tensor(num_cond_tokens)[layout.segment_ids])


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
