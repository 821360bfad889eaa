"""Flow-matching loss as a sum, with weights that count every sample or every token once.

The loss of a step is the sum over all ranks and micro steps, divided by one denominator from the plan: the mean number of samples
(`loss.reduction=sample`) or tokens (`token`) per step of the epoch. No rank divides by a number of local samples or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flow_matching_loss(
    pred: Tensor, target: Tensor, segment_ids: Tensor, sample_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the weighted squared error, averaged over channels, over this rank's tokens.

    Args:
        pred: [L, P], predicted velocity of any float dtype, without padding. The arithmetic is fp32 (fp64 for fp64).
        target: [L, P], target velocity.
        segment_ids: int64 [L], sample index of each token.
        sample_weights: fp32 [S], from `loss_weights`.

    Returns:
        The weighted sum, a scalar with gradient; and the unweighted squared error of each sample, summed over local tokens,
        [S] without gradient. Summed over all ranks and divided by the sample's tokens, it is the sample's mean squared error.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    errors = (pred.to(dtype) - target.to(dtype)).square().mean(dim=1)
    weights = sample_weights.to(device=pred.device, dtype=dtype)
    loss = (errors * weights[segment_ids]).sum()

    return loss, torch.zeros_like(weights).index_add_(0, segment_ids, errors.detach())


def loss_weights(
    trained_lens: Sequence[int], batch_weights: Tensor, sigma_weights: Tensor, reduction: str
) -> Tensor:
    """Return the factor of each sample's squared error per token.

    Args:
        trained_lens: number of trained tokens of each sample, on all ranks.
        batch_weights: fp32 [S], 0 for the sample of a padding bin, else 1.
        sigma_weights: fp32 [S], from `sigma_weight`.
        reduction: "sample": the tokens of a sample have the total weight 1; "token": every token has the weight 1.

    Returns:
        fp32 [S].
    """
    weights = batch_weights.to(sigma_weights.device) * sigma_weights
    if reduction == "token":
        return weights
    assert reduction == "sample", reduction
    return weights / torch.tensor(trained_lens, dtype=torch.float32).to(weights.device, non_blocking=True)
