"""The training step on one screen: every micro batch forward and backward, then the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from wands.data.collate import RankSlice
from wands.distributed.dims import ProcessGroups
from wands.flow.loss import flow_matching_loss, loss_weights
from wands.flow.noise import add_noise
from wands.flow.sigmas import sigma_weight
from wands.train.run import TrainingRun


@dataclass(frozen=True)
class SampleLoss:
    """Unweighted mean squared error of one clip, with the noise level it was drawn at."""

    sample_id: str
    repeat_index: int
    epoch: int
    sigma: float
    loss: float


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step leaves behind on a rank.

    Attributes:
        loss: this rank's part of the loss SUM, fp32 scalar.
        samples: the error of each clip of this rank's bins.
        grad_norm: norm of the whole gradient before clipping, the same on every rank.
    """

    loss: torch.Tensor
    samples: list[SampleLoss]
    grad_norm: float


def train_step(
    engine: Any,
    shards: list[RankSlice],
    run: TrainingRun,
    groups: ProcessGroups,
    device: torch.device,
    denominator: float,
    sigma_range: tuple[float, float] = (0.0, 1.0),
) -> StepResult:
    """One optimizer step: every micro batch forward and backward, then the update.

    Args:
        engine: the DeepSpeed engine.
        shards: this rank's part of its micro batches; their number is the same on every rank.
        run: recipe and shape.
        groups: the ranks that share these micro batches.
        device: of the engine.
        denominator: samples (or tokens) that a step has on average, over all ranks.
        sigma_range: noise levels of the expert that the engine trains.
    """
    recipe = run.recipe
    total, forwarded = torch.zeros((), device=device), []
    for number, host_shard in enumerate(shards, start=1):
        shard, layout = host_shard.to(device), host_shard.layout
        # x_t, target and sigmas: a function of (seed, sample, epoch), whatever the rank and the pack
        noisy = add_noise(
            shard.tokens,
            layout,
            shard.keys,
            recipe.flow,
            recipe.train.seed,
            shard.num_cond_tokens,
            sigma_range,
        )

        engine.set_gradient_accumulation_boundary(number == len(shards))
        tokens = shard.model_input(noisy.tokens)
        pred = engine(tokens, shard.meta, noisy.timesteps, shard.text_embeds, shard.image_embeds)

        sigma_weights = sigma_weight(noisy.sigmas, recipe.flow)
        weights = loss_weights(shard.trained_lens, shard.weights, sigma_weights, recipe.loss.reduction)
        # a SUM over this rank's tokens; tail padding and given frames are left out
        rows = noisy.trained
        loss, errors = flow_matching_loss(
            pred[rows], noisy.target[rows], shard.meta.segment_ids[rows], weights
        )
        # ZeRO averages over the world at every stage, so this factor makes the gradient that of the whole step.
        engine.backward(loss * (run.world_size / denominator), scale_wrt_gas=False)

        total += loss.detach()
        forwarded.append((host_shard, noisy.sigmas, errors))
    grad_norm = None if run.zero_stage else _unsharded_grad_norm(engine.module)
    engine.step()
    # Read only now: asking for a number earlier would make the host wait for the device between micro batches.
    samples = _name_losses(forwarded, groups)
    return StepResult(
        total, samples, float(grad_norm if grad_norm is not None else engine.get_global_grad_norm())
    )


def _name_losses(
    forwarded: list[tuple[RankSlice, torch.Tensor, torch.Tensor]], groups: ProcessGroups
) -> list[SampleLoss]:
    """The errors of a step's clips with their names; the sample that stands for an empty bin is left out."""
    sums = torch.cat([errors for _, _, errors in forwarded])
    if groups.cp is not None:  # each rank of the group has summed over its own tokens
        dist.all_reduce(sums, group=groups.cp)
    found = []
    for shard, sigmas, errors in forwarded:
        mine, sums = sums[: len(errors)].tolist(), sums[len(errors) :]
        values = zip(
            shard.keys, sigmas.tolist(), mine, shard.trained_lens, shard.weights.tolist(), strict=True
        )
        found += [
            SampleLoss(key.sample_id, key.repeat_index, key.epoch, sigma, error / num_tokens)
            for key, sigma, error, num_tokens, weight in values
            if weight > 0
        ]
    return found


def _unsharded_grad_norm(module: torch.nn.Module) -> torch.Tensor:
    """DeepSpeed reports the norm only where ZeRO shards something; without, all ranks hold the whole gradient."""
    return torch.linalg.vector_norm(
        torch.stack(
            [torch.linalg.vector_norm(p.grad.float()) for p in module.parameters() if p.grad is not None]
        )
    )
