"""Flow-matching loss: a weighted sum of squared errors, in which all samples or all tokens have equal weight.

The sum runs over all ranks and micro steps of a step, and is divided by a number that is equal for all steps of an epoch: the
epoch's mean number of samples (`loss.reduction=sample`) or trained tokens (`token`) per step. No rank divides by its own number.
A mask multiplies the error of each token by the token's weight, and a trained token counts as its weight.

Letters: L local tokens of a rank, P channels of a token, E entries of `RankSlice.entries` (one for each sample, without chunks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wands.transfer import to_device


def squared_errors(pred: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of each token, [L], in fp32 (fp64 for fp64 inputs): the mean over the P channels of [L, P]."""
    dtype = torch.promote_types(pred.dtype, torch.float32)
    return (pred.to(dtype) - target.to(dtype)).square().mean(dim=1)


def weighted_sum(
    token_errors: Tensor, entry_ids: Tensor, entry_weights: Tensor, token_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the errors of this rank's tokens, and the errors of each entry.

    The sum is a scalar with gradient. The errors are [E] without gradient: the sum of (error * token weight) over the entry's
    tokens on this rank, without `entry_weights`.

    Args:
        token_errors: fp32 or fp64 [L], without padding.
        entry_ids: int64 [L], index of the entry of each token: of its sample, or in causal training of its chunk.
        entry_weights: fp32 [E], from `loss_weights`.
        token_weights: fp32 [L], weight of each token from the mask of its sample; 1 without a mask.
    """
    errors = token_errors * token_weights.to(token_errors.dtype)
    weights = entry_weights.to(device=errors.device, dtype=errors.dtype)
    loss = (errors * weights[entry_ids]).sum()
    return loss, torch.zeros_like(weights).index_add_(0, entry_ids, errors.detach())


def loss_weights(
    trained_lens: Sequence[float], batch_weights: Tensor, sigma_weights: Tensor, reduction: str
) -> Tensor:
    """Return the factor of each entry's errors in `weighted_sum`, fp32 [E].

    Args:
        trained_lens: sum of the token weights of the sample of each entry in the loss, on all ranks together.
        batch_weights: fp32 [E], `loss_weight` of the sample's item in `data.sources`; 0 for a placeholder sample, which a rank
            without data processes to take part in communication.
        sigma_weights: fp32 [E], from `sigma_weight`.
        reduction: "token" returns `batch_weights` * `sigma_weights`. "sample" divides this by `trained_lens`, so that samples of
            all lengths have equal weight.
    """
    weights = batch_weights.to(sigma_weights.device) * sigma_weights
    if reduction == "token":
        return weights
    assert reduction == "sample", f"reduction={reduction} must be sample or token"
    return weights / to_device(torch.tensor(trained_lens, dtype=torch.float32), weights.device)
