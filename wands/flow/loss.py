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


def flow_matching_loss(
    pred: Tensor, target: Tensor, segment_ids: Tensor, sample_weights: Tensor, token_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of squared errors over this rank's tokens.

    The squared error of a token is the mean over the token's channels.

    Args:
        pred: [L, P], predicted velocity of L tokens with P channels, without padding, in any float dtype. The loss is
            computed in fp32 (in fp64 for fp64 inputs).
        target: [L, P], target velocity.
        segment_ids: int64 [L], sample index of each token.
        sample_weights: fp32 [S] for S samples, factor of each sample's squared errors, from `loss_weights`.
        token_weights: fp32 [L], weight of each token from the mask of its sample; 1 for samples without a mask.

    Returns:
        (loss, sample_errors). loss is the weighted sum, a scalar with gradient. sample_errors is [S] without gradient.
        Entry s is the sum of (squared error * token weight) over the tokens of sample s on this rank, without
        `sample_weights`. To compute the mean squared error of sample s, add entry s over all ranks, and divide the result
        by the sum of the token weights of sample s on all ranks.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    errors = (pred.to(dtype) - target.to(dtype)).square().mean(dim=1) * token_weights.to(dtype)
    weights = sample_weights.to(device=pred.device, dtype=dtype)
    loss = (errors * weights[segment_ids]).sum()

    return loss, torch.zeros_like(weights).index_add_(0, segment_ids, errors.detach())


def loss_weights(
    trained_lens: Sequence[float], batch_weights: Tensor, sigma_weights: Tensor, reduction: str
) -> Tensor:
    """Return the factor by which `flow_matching_loss` multiplies the squared errors of each sample's tokens.

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
