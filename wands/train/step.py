"""Run one optimizer step: the forward and backward pass of every micro step, then the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from wands.distributed.dims import ProcessGroups
from wands.flow.loss import flow_matching_loss, loss_weights
from wands.flow.rng import SampleKey
from wands.flow.sigmas import sigma_weight
from wands.model.offload import new_copy_stream
from wands.run.run import TrainingRun
from wands.train.batches import MicroBatch
from wands.train.block_norms import measure_blocks
from wands.transfer import to_device


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step on one rank.

    `loss`, `errors` and `norm` stay on the device. The properties `grad_norm` and `samples` copy values to the host, which
    makes the host wait for the device.

    Attributes:
        loss: weighted loss summed over this rank's tokens, fp32 scalar. The logged loss is the sum of these scalars over
            all ranks, divided by the number of samples or tokens of the step (`TrainingRun.count`).
        clips: (key, noise level, weight) of each sample that this rank trains on. The key consists of the sample id, the
            epoch and the number of the sample's earlier uses in the epoch. The weight is the `loss_weight` of the sample's
            data source, or 0 for a padding sample. A padding sample lets a rank without data make as many forward passes as
            the other ranks.
        errors: mean squared error over the trained tokens of each item of `clips`, fp64.
        norm: norm of the whole gradient before clipping, which is equal on every rank.
        skipped: whether the update was discarded, so that weights and optimizer states did not change.
        blocks: gradient norm and relative weight change of each block, from `measure_blocks`; empty if not measured.
    """

    loss: torch.Tensor
    clips: Sequence[tuple[SampleKey, float, float]]
    errors: torch.Tensor
    norm: torch.Tensor | float
    skipped: bool
    blocks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def grad_norm(self) -> float:
        """Norm of the whole gradient of the step before clipping: the value of `norm` as a Python number."""
        return float(self.norm)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Loss of each sample that this rank trains on, without padding samples.

        The keys of each dict are `sample_id`, `repeat_index` (0, 1, ... for the uses of the sample in the epoch), `epoch`,
        `sigma` (the noise level) and `loss`. The loss is the mean squared error over the trained tokens, weighted by the mask
        if the sample has one. The loss weights of data sources and of noise levels are not applied.
        """
        return [
            {**vars(key), "sigma": sigma, "loss": loss}
            for (key, sigma, weight), loss in zip(self.clips, self.errors.tolist(), strict=True)
            if weight > 0
        ]


def train_step(
    engine: Any,
    batches: Sequence[MicroBatch],
    run: TrainingRun,
    groups: ProcessGroups,
    device: torch.device,
    denominator: float,
    is_bad: Callable[[torch.Tensor, float], bool] | None = None,
    measures_blocks: bool = False,
) -> StepResult:
    """Run one optimizer step: the forward and backward pass of every micro step, then the update of the weights.

    Args:
        engine: DeepSpeed engine of a DiT.
        batches: for each micro step, the part of the packed batch that this rank trains on, in host memory. All ranks have
            the same number of micro steps.
        run: the checked training run.
        groups: process groups of this rank.
        device: device of the engine.
        denominator: result of `TrainingRun.denominator`: the number by which the summed loss of the step is divided before
            the backward pass.
        is_bad: function that decides whether the update is discarded. Its arguments are this rank's weighted loss and the
            norm of the whole gradient. Its result must be equal on all ranks. None keeps every update.
        measures_blocks: whether to measure the gradient and the update of each block.
    """
    recipe = run.recipe
    total, micro_errors = torch.zeros((), device=device), []
    for number, (batch, noisy) in enumerate(_on_device(batches, device), start=1):
        engine.set_gradient_accumulation_boundary(number == len(batches))
        pred = engine(**batch.model_inputs(noisy.tokens, noisy.timesteps))

        sigma_weights = sigma_weight(noisy.sigmas, recipe.flow)
        weights = loss_weights(batch.trained_lens, batch.weights, sigma_weights, recipe.loss.reduction)
        rows = noisy.trained  # without tail padding and conditioning tokens
        loss, errors = flow_matching_loss(
            pred[rows], noisy.target[rows], batch.meta.segment_ids[rows], weights, batch.token_weights[rows]
        )
        # ZeRO averages over the world at every stage. The factor world_size turns the average into the sum over ranks.
        engine.backward(loss * (run.world_size / denominator), scale_wrt_gas=False)

        total += loss.detach()
        micro_errors.append(errors)
    gradients = (parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None)
    # At ZeRO stage 0, every rank has the whole gradient, and DeepSpeed does not report the norm.
    unpartitioned = None if run.zero_stage else get_total_norm(gradients, foreach=False)
    finish = measure_blocks(engine) if measures_blocks else None
    skipped, norm = _step(engine, unpartitioned, is_bad and partial(is_bad, total))
    sums = torch.cat(micro_errors)
    if groups.cp is not None:  # each rank has the sums over its local tokens
        dist.all_reduce(sums, group=groups.cp)
    lens = torch.tensor([n for part, _ in batches for n in part.trained_lens], dtype=torch.float64)
    clips = [
        clip
        for part, noisy in batches
        for clip in zip(part.keys, noisy.sigmas.tolist(), part.weights.tolist(), strict=True)
    ]
    blocks = finish() if finish else {}
    return StepResult(total, clips, sums.double() / to_device(lens, device), norm, skipped, blocks)


def _step(engine: Any, norm: Any, is_bad: Any) -> tuple[bool, Any]:
    """Update the weights. If `is_bad` returns True for the gradient norm, discard the update instead.

    ZeRO computes the norm inside `engine.step`, and discards updates whose gradients overflow. This function marks a bad
    update as an overflow, so that ZeRO discards the update. The learning rate schedule counts a discarded update as a step.

    Args:
        engine: DeepSpeed engine after the backward pass.
        norm: gradient norm at ZeRO stage 0; None at the other stages.
        is_bad: function that takes the gradient norm as a float. None keeps every update.

    Returns:
        (whether the update was discarded, gradient norm as a float or as a tensor on the device).
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    if is_bad is None:
        engine.step()
        return False, engine.get_global_grad_norm() if norm is None else norm
    optimizer, stage, bad = engine.optimizer, engine.zero_optimization_stage(), False

    def judge(**_: Any) -> Any:
        nonlocal norm, bad
        norm = combine_grad_norm_groups(optimizer._get_norm_groups()) if stage == 3 else measure(optimizer)
        optimizer.overflow = bad = is_bad(float(norm))
        return norm

    if norm is not None:
        bad = is_bad(float(norm))
        engine.zero_grad() if bad else engine.step()
    else:
        # In DeepSpeed 0.19, `step` of stages 1 and 2 uses the norm that scaled_global_norm returns, and then `overflow`.
        # `step` of stage 3 begins with the other method, ignores its result, and reads `overflow`. The norm comes too late
        # there, because Muon changes its momentum before the norm.
        name = "_overflow_check_and_loss_scale_update" if stage == 3 else "scaled_global_norm"
        measure = getattr(type(optimizer), name)
        setattr(optimizer, name, judge)
        engine.step()
        delattr(optimizer, name)
    if bad:
        engine.lr_scheduler.step()
    return bad, float(norm)


# All steps use one copy stream of a device, because each stream gets separate memory in PyTorch.
_copy_stream = cache(new_copy_stream)


def _on_device(batches: Sequence[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield each batch on the device. While the device computes, a copy stream copies the next batch."""
    copies = _copy_stream(device)

    def start(batch: MicroBatch) -> tuple[list[MicroBatch], Any]:
        copied: list[MicroBatch] = []
        with record_function("copies"):
            return copied, copies.run(lambda: copied.append(to_device(batch, device)))

    ahead = start(batches[0])
    for following in (*batches[1:], None):
        [batch], event = ahead
        copies.wait(event)
        ahead = start(following) if following else ahead
        yield batch
