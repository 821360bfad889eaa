"""The result of an optimizer step on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from wands.flow.rng import SampleKey


class TrainedClip(NamedTuple):
    """Use of a sample in a step, or of one of its chunks.

    Attributes:
        key: sample id, repeat and epoch.
        sigma: noise level.
        weight: `loss_weight` of the data source, or 0 for a padding sample, which lets a rank without data make as many forward
            passes as the others.
        chunk: number of the chunk; None for a whole sample.
    """

    key: SampleKey
    sigma: float
    weight: float
    chunk: int | None


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step on one rank.

    `loss`, `errors` and `norm` stay on the device; `grad_norm` and `samples` make the host wait for the device.

    Attributes:
        loss: weighted loss summed over this rank's tokens, fp32 scalar; 0 on all but the first rank of a tensor-parallel group.
            The logged loss is the sum over all ranks / `Schedule.count`.
        clips: samples that this rank trains on, in causal training each chunk.
        errors: mean squared error over the trained tokens of each item of `clips`, fp64.
        norm: norm of the whole gradient before clipping, which is equal on every rank.
        skipped: whether the update was discarded, so that weights and optimizer states did not change.
        blocks: gradient norm and relative weight change of each block, from `measure_blocks`; empty if not measured.
    """

    loss: torch.Tensor
    clips: Sequence[TrainedClip]
    errors: torch.Tensor
    norm: torch.Tensor | float
    skipped: bool
    blocks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def grad_norm(self) -> float:
        """Value of `norm` as a Python number."""
        return float(self.norm)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Loss of each sample that this rank trains on, without padding samples.

        The keys are `sample_id`, `repeat_index`, `epoch`, `sigma` (the noise level), in causal training `chunk`, and `loss`: the
        mean squared error over the trained tokens, weighted by the mask if there is one, but not by data source or noise level.
        """
        rows = []
        for (key, sigma, weight, chunk), loss in zip(self.clips, self.errors.tolist(), strict=True):
            of_chunk = {} if chunk is None else {"chunk": chunk}
            if weight > 0:
                rows.append({**vars(key), **of_chunk, "sigma": sigma, "loss": loss})
        return rows
