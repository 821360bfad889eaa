"""Run one optimizer step: the forward and backward pass of every micro step, then the update of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from wands.data.collate import NO_TOKENS, LossEntry, RankSlice
from wands.distributed.dims import ProcessGroups
from wands.distributed.engine_protocol import TrainingEngine
from wands.engine.block_norms import measure_blocks
from wands.model.offload import new_copy_stream
from wands.model.tensor_parallel import cut_of
from wands.objectives.objective import Objective
from wands.run.step_result import StepResult, TrainedClip
from wands.train.batches import MicroBatch
from wands.transfer import to_device


def train_step(
    engine: TrainingEngine,
    batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    groups: ProcessGroups,
    device: torch.device,
    denominator: float,
    is_bad: Callable[[torch.Tensor, float], bool] | None = None,
    measures_blocks: bool = False,
) -> StepResult:
    """Run one optimizer step: the forward and backward pass of every micro step, then the update of the weights.

    `batches` are in host memory, and all ranks have the same number. `denominator` is the result of `Schedule.denominator`.
    `is_bad` decides from this rank's weighted loss and the norm of the whole gradient whether the update is discarded; its result
    must be equal on all ranks. None keeps every update.
    """
    total = torch.zeros((), device=device)
    micro_errors = []
    zero_size = groups.dims.zero_size
    for number, (part, prepared) in enumerate(_on_device(batches, device), start=1):
        engine.set_gradient_accumulation_boundary(number == len(batches))
        loss, errors = objective.loss(engine, part, prepared)
        # At every stage, ZeRO averages over the ranks with the same part of the weights. The factor zero_size turns the average
        # into the sum over these ranks.
        engine.backward(loss * (zero_size / denominator), scale_wrt_gas=False)

        total += loss.detach()
        micro_errors.append(errors)
    if groups.dims.tensor_rank:  # all ranks of a tensor-parallel group have the same loss, which counts once
        total = torch.zeros_like(total)
    # At ZeRO stage 0, no gradient is partitioned, and DeepSpeed does not report the norm.
    is_partitioned = engine.zero_optimization_stage() > 0
    unpartitioned = None if is_partitioned else _gradient_norm(engine.module, groups)
    finish = measure_blocks(engine) if measures_blocks else None
    skipped, norm = _step(engine, unpartitioned, is_bad and partial(is_bad, total))
    sums = torch.cat(micro_errors)
    if groups.cp is not None:  # each rank has the sums over its local tokens
        dist.all_reduce(sums, group=groups.cp)
    entries = [(part, entry) for part, _ in batches for entry in part.entries]
    lens = torch.tensor([entry.trained_len for _, entry in entries], dtype=torch.float64)
    sigmas = [sigma for _, prepared in batches for sigma in prepared.sigmas.tolist()]
    clips = [
        TrainedClip(part.keys[entry.sample], sigma, _weight_in_log(part, entry), entry.chunk)
        for (part, entry), sigma in zip(entries, sigmas, strict=True)
    ]
    blocks = finish() if finish else {}
    return StepResult(
        loss=total,
        clips=clips,
        errors=sums.double() / to_device(lens, device),
        norm=norm,
        skipped=skipped,
        blocks=blocks,
    )


def _weight_in_log(part: RankSlice, entry: LossEntry) -> float:
    """Return the weight of a clip, or 0 for a chunk without trained tokens, which has no loss."""
    is_masked = entry.chunk is not None and entry.trained_len <= NO_TOKENS
    return 0.0 if is_masked else float(part.weights[entry.sample])


def _gradient_norm(model: torch.nn.Module, groups: ProcessGroups) -> torch.Tensor:
    """Return the norm of the whole gradient at ZeRO stage 0. Every rank of a tensor-parallel group must call this function."""
    gradients = {one: one.grad for one in model.parameters() if one.grad is not None}
    if groups.tensor is None:
        return get_total_norm(list(gradients.values()), foreach=False)
    # The first rank counts what all ranks of the group have.
    is_first = groups.dims.tensor_rank == 0
    own = [gradient for one, gradient in gradients.items() if is_first or cut_of(one) is not None]
    device = next(model.parameters()).device  # also if this rank counts nothing
    square = get_total_norm(own, foreach=False).square().to(device)
    dist.all_reduce(square, group=groups.tensor)
    return square.sqrt()


def _step(
    engine: TrainingEngine, norm: torch.Tensor | float | None, is_bad: Callable[[float], bool] | None
) -> tuple[bool, torch.Tensor | float]:
    """Update the weights, unless `is_bad` discards the update. Return (whether it was discarded, gradient norm).

    ZeRO computes the norm inside `engine.step`, and discards updates whose gradients overflow, so a bad update is marked as an
    overflow. The learning rate schedule counts it as a step. `norm` is None except at ZeRO stage 0.
    """
    if is_bad is None:
        engine.step()
        norm = engine.get_global_grad_norm() if norm is None else norm
        assert norm is not None
        return False, norm
    if norm is None:
        bad, norm = _judged_zero_step(engine, is_bad)
    else:
        bad = is_bad(float(norm))
        engine.zero_grad() if bad else engine.step()
    if bad:
        engine.lr_scheduler.step()
    return bad, float(norm)


def _judged_zero_step(engine: TrainingEngine, is_bad: Callable[[float], bool]) -> tuple[bool, float]:
    """Update the weights at ZeRO stage 1 to 3, as `_step` does."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    optimizer: Any = engine.optimizer
    stage = engine.zero_optimization_stage()
    verdicts: list[tuple[bool, float]] = []

    def judge(**_: Any) -> Any:
        norm = combine_grad_norm_groups(optimizer._get_norm_groups()) if stage == 3 else measure(optimizer)
        value = float(norm)
        optimizer.overflow = is_bad(value)
        verdicts.append((optimizer.overflow, value))
        return norm

    # In DeepSpeed 0.19, `step` of stages 1 and 2 uses the norm that scaled_global_norm returns, and then `overflow`.
    # `step` of stage 3 begins with the other method, ignores its result, and reads `overflow`. The norm comes too late
    # there, because Muon changes its momentum before the norm.
    name = "_overflow_check_and_loss_scale_update" if stage == 3 else "scaled_global_norm"
    measure = getattr(type(optimizer), name)
    setattr(optimizer, name, judge)
    try:
        engine.step()
    finally:
        delattr(optimizer, name)  # the method of the class again
    [verdict] = verdicts
    return verdict


# All steps use one copy stream of a device, because each stream gets separate memory in PyTorch.
_copy_stream = cache(new_copy_stream)


def _on_device(batches: Sequence[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield each batch on the device, while a copy stream copies the next one."""
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
