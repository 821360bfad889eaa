"""Flow-matching loss: a weighted sum of squared errors. Either all samples or all tokens have equal weight.

The loss of a training step is a sum over all ranks and micro steps, divided by a denominator that is equal for all steps
of an epoch. With `loss.reduction=sample`, the denominator is the epoch's mean number of samples per step. With `token`, the
denominator is the epoch's mean number of trained tokens (tokens that count in the loss) per step. No rank divides by its
own number of samples or tokens.

If a sample has a mask, the squared error of each token is multiplied by the token's weight in the mask. When trained tokens
are counted, a token of a sample with a mask counts as its weight (for example 0.5), and any other token counts as 1.

Letters: L local tokens of a rank, P channels of a token, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wands.transfer import to_device


def squared_errors(pred: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of each token, [L]: the mean over its P channels.

    Args:
        pred: [L, P], predicted velocity in any float dtype. The errors are computed in fp32 (in fp64 for fp64 inputs).
        target: [L, P], target velocity.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    return (pred.to(dtype) - target.to(dtype)).square().mean(dim=1)


def weighted_sum(
    token_errors: Tensor, segment_ids: Tensor, sample_weights: Tensor, token_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the errors of this rank's tokens, and the errors of each sample.

    Args:
        token_errors: fp32 or fp64 [L], error of each token, without padding.
        segment_ids: int64 [L], sample index of each token.
        sample_weights: fp32 [S], factor of each sample's errors, from `loss_weights`.
        token_weights: fp32 [L], weight of each token from the mask of its sample; 1 for samples without a mask.

    Returns:
        (loss, sample_errors). loss is a scalar with gradient. sample_errors is [S] without gradient: the sum of (error * token
        weight) over the tokens of each sample on this rank, without `sample_weights`.
    """
    errors = token_errors * token_weights.to(token_errors.dtype)
    weights = sample_weights.to(device=errors.device, dtype=errors.dtype)
    loss = (errors * weights[segment_ids]).sum()
    return loss, torch.zeros_like(weights).index_add_(0, segment_ids, errors.detach())


def loss_weights(
    trained_lens: Sequence[float], batch_weights: Tensor, sigma_weights: Tensor, reduction: str
) -> Tensor:
    """Return the factor by which `weighted_sum` multiplies the errors of each sample's tokens.

    Args:
        trained_lens: for each sample, the number of its tokens that count in the loss, on all ranks together. With a mask,
            the sum of the mask weights of these tokens.
        batch_weights: fp32 [S] for S samples, the `loss_weight` of each sample's entry in `data.sources`; 0 for a placeholder
            sample. Ranks without data in a micro step process a placeholder sample, so that all ranks take part in
            communication.
        sigma_weights: fp32 [S], weight of each sample's noise level, from `sigma_weight`.
        reduction: "sample": all samples have equal total weight, whatever their lengths. "token": all tokens have equal
            weight, except for the weights of a mask. In both cases, `batch_weights` and `sigma_weights` are extra factors.

    Returns:
        fp32 [S], one factor for each sample. With "token", the factors are `batch_weights` * `sigma_weights`. With "sample",
        the factors are `batch_weights` * `sigma_weights` / `trained_lens`.
    """
    weights = batch_weights.to(sigma_weights.device) * sigma_weights
    if reduction == "token":
        return weights
    assert reduction == "sample", f"reduction={reduction} must be sample or token"
    return weights / to_device(torch.tensor(trained_lens, dtype=torch.float32), weights.device)
