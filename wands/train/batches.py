"""Load the data of the next steps, and prepare it for the objective, while the device computes the current step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

from torch import Tensor

from wands.data.collate import PackingCollator, RankSlice
from wands.data.datasets import Dataset
from wands.data.packing import Bin, assign_bins
from wands.data.sampler import PlanSampler, StepPlan
from wands.distributed.dims import ParallelDims
from wands.errors import WandsError
from wands.objectives.objective import Objective, Prepared
from wands.patches import frames_of_tokens, grid_size
from wands.transfer import map_tensors
from wands.variants import Expert

MicroBatch = tuple[RankSlice, Prepared]
"""Data of one micro step on one rank: the rank slice without its clean tokens, and what the objective prepared from it."""
StepData = tuple[StepPlan, list[list[MicroBatch]]]
"""Plan of a step, and the data of its micro steps on one rank for each trained DiT."""


@dataclass(frozen=True, kw_only=True)
class BatchReader:
    """Reader of the data that one rank trains on. Without packing (`packs`), a micro step has one sample."""

    data: Dataset
    collator: PackingCollator
    sampler: PlanSampler
    objective: Objective
    experts: Sequence[Expert]
    packs: bool
    dims: ParallelDims

    def rank_slices(self, plan: StepPlan) -> list[RankSlice]:
        """Return the rank slice of each micro step of a step. No communication.

        ZeRO-3 needs the same number of forward passes on every rank. Without packing, a rank with fewer samples therefore gets
        additional micro steps with an empty bin, whose loss has weight 0.
        """
        micro_steps = assign_bins(plan.bins, self.dims.dp_size, self.sampler.bin_cost)
        bins_of_ranks = list(zip(*micro_steps, strict=True))
        self._check_step(plan, bins_of_ranks)
        bins = list(bins_of_ranks[self.dims.dp_rank])
        if not self.packs:
            num_forwards = max(1, *(sum(map(len, rank_bins)) for rank_bins in bins_of_ranks))
            bins = [(i,) for bin in bins for i in bin]
            bins += [()] * (num_forwards - len(bins))
        return [self._read(plan, bin) for bin in bins]

    def micro_batches(self, plan: StepPlan) -> list[list[MicroBatch]]:
        """Return the data of each micro step of a step, for each trained DiT."""
        slices = self.rank_slices(plan)
        without_tokens = [replace(part, tokens=part.tokens.new_empty(0)) for part in slices]
        batches = []
        for expert in self.experts:
            prepared = [self.objective.prepare(part, expert) for part in slices]
            batches.append(list(zip(without_tokens, prepared, strict=True)))
        return batches

    def prefetched(
        self,
        start_step: int,
        num_ahead: int,
        pins: bool = False,
        on_failure: Callable[[WandsError], object] | None = None,
    ) -> Generator[StepData, None, None]:
        """Yield (plan, batches of each DiT) for every remaining step after `start_step`.

        A step is yielded once the next one has been read, so that a rank knows of a failed read one step early, and all ranks can
        stop together after that step. A thread reads `num_ahead` steps beyond the next one; 0 means no thread. `pins` stores the
        data in pinned memory, from which a GPU copies while it computes. `on_failure` gets the error of a failed read before the
        last step is yielded; without it, the error is raised there.

        Raises:
            WandsError: if the data of the first step cannot be read.
        """
        steps = self._steps(start_step, num_ahead, pins)
        with closing(steps):
            current = next(steps, None)
            while current is not None:
                try:
                    following = next(steps, None)
                except WandsError as error:
                    if on_failure is None:
                        raise
                    on_failure(error)
                    following = None
                yield current
                current = following

    def _steps(self, start_step: int, num_ahead: int, pins: bool) -> Generator[StepData, None, None]:
        plans = self.sampler.iterate(start_step)

        def read_next() -> StepData | None:
            plan = next(plans, None)
            if plan is None:
                return None
            batches = self.micro_batches(plan)
            return plan, map_tensors(batches, Tensor.pin_memory) if pins else batches

        if num_ahead == 0:
            yield from iter(read_next, None)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="wands-prefetch") as thread:
            # One more: while a step is computed, the data of the next step has already been read.
            pending = deque(thread.submit(read_next) for _ in range(num_ahead + 1))
            try:
                while (batch := pending.popleft().result()) is not None:
                    pending.append(thread.submit(read_next))
                    yield batch
            finally:
                thread.shutdown(cancel_futures=True)

    def _read(self, plan: StepPlan, bin: Bin) -> RankSlice:
        rows = [(self.data, i) for i in bin]
        return read_rows_of_bin(self.collator, rows, plan.repeat_indices(bin), plan.epoch, self.dims)

    def _check_step(self, plan: StepPlan, bins_of_ranks: Sequence[Sequence[Bin]]) -> None:
        """Assert that all ranks together train on the bins of the plan, and on no use of a clip twice."""
        bins = sorted(bin for rank_bins in bins_of_ranks for bin in rank_bins)
        assert bins == sorted(plan.bins), (
            f"step {plan.step} has bins {sorted(plan.bins)}, but the ranks have {bins}"
        )
        samples = [(self.data.keys[i], int(plan.repeat_index_of[i])) for bin in bins for i in bin]
        assert len(set(samples)) == len(samples) == plan.num_samples, (
            f"step {plan.step} contains a (sample, repeat) twice: {samples}"
        )


def read_rows_of_bin(
    collator: PackingCollator,
    rows: Sequence[tuple[Dataset, int]],
    repeat_indices: Sequence[int],
    epoch: int,
    dims: ParallelDims,
) -> RankSlice:
    """Return the rank slice of a bin of samples, each given as (data set, index in the data set).

    Latent frames without tokens of this rank are not read. `epoch` and `repeat_indices` (the repeat of each sample) select the
    random numbers of the samples.
    """
    patch = collator.shape.patch_size
    grids = [grid_size(data.latent_shape(i), patch) for data, i in rows]
    padded_grids = grids or [(1, 1, 1)]  # the collator pads an empty bin with one token
    lens = [math.prod(grid) for grid in padded_grids]
    layout = dims.layout(lens, [*map(collator.unit_rule, padded_grids)] if collator.unit_rule else None)
    samples = []
    for number, ((data, i), length, size) in enumerate(zip(rows, lens, grids, strict=False)):
        tokens = layout.clip_range(number)
        frames = frames_of_tokens(tokens, size, patch)
        samples.append(data.read(i, None if tokens == (0, length) else frames))
    names = [sample.sample_id for sample in samples]
    planned = [data.keys[i] for data, i in rows]
    assert names == planned, f"read the samples {names}, but the plan has {planned}"
    return collator(samples, repeat_indices, epoch).rank_slice(layout)
