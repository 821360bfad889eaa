"""The flow-matching loss as a sum, and the weights that make a sum of samples or of tokens out of it.

A step's loss is (sum over all ranks and micro steps) / (one denominator known from the plan): the number of
samples for `loss.reduction=sample`, of tokens for `token`, that a step of the epoch has on average. No rank ever
divides by a count of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flow_matching_loss(
    pred: Tensor, target: Tensor, segment_ids: Tensor, sample_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum over this rank's tokens of the squared error, averaged over channels.

    Every row counts: a caller whose rows end in pads cuts them off first.

    Args:
        pred: velocity the model predicts, [L, P], any float dtype; the arithmetic is fp32 (fp64 for fp64).
        target: [L, P].
        segment_ids: int64 [L], sample of each token.
        sample_weights: fp32 [S], from `loss_weights`.

    Returns:
        The sum, a scalar with gradient, and for each sample the plain squared error summed over its tokens here,
        [S] detached: over all ranks that share the sample, divided by its tokens, that is its mean squared error.
    """
    dtype = torch.promote_types(pred.dtype, torch.float32)
    errors = (pred.to(dtype) - target.to(dtype)).square().mean(dim=1)
    weights = sample_weights.to(device=pred.device, dtype=dtype)
    loss = (errors * weights[segment_ids]).sum()

    return loss, torch.zeros_like(weights).index_add_(0, segment_ids, errors.detach())


def loss_weights(
    trained_lens: Sequence[int], batch_weights: Tensor, sigma_weights: Tensor, reduction: str
) -> Tensor:
    """What a token's squared error of each sample is multiplied with.

    Args:
        trained_lens: tokens of each sample of the pack that are trained, whole: not only those held by this rank.
        batch_weights: fp32 [S], 0 for the sample that fills a padding bin.
        sigma_weights: fp32 [S], from `sigma_weight`.
        reduction: "sample": every clip counts once, so its tokens share 1; "token": every token counts 1.

    Returns:
        fp32 [S].
    """
    weights = batch_weights.to(sigma_weights.device) * sigma_weights
    if reduction == "token":
        return weights
    assert reduction == "sample", reduction
    return weights / torch.tensor(trained_lens, dtype=torch.float32).to(weights.device, non_blocking=True)
