"""Load the data of the next steps, and draw their noise, while the device computes the current step.

Each rank loads only its rank slice, the part of a packed batch that the rank trains on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from wands.data.collate import PackingCollator, RankSlice
from wands.data.datasets import Dataset
from wands.data.packing import Bin, assign_bins
from wands.data.patchify import frames_of_tokens, grid_size
from wands.data.sampler import StepPlan
from wands.distributed.dims import ParallelDims
from wands.flow.noise import NoisyBatch, add_noise
from wands.run.run import TrainingRun
from wands.transfer import map_tensors

MicroBatch = tuple[RankSlice, NoisyBatch]
"""Data of one micro step on one rank, as a pair. The first item is the rank slice (the rank's part of a packed batch) without
its clean tokens. The second item contains the noisy tokens and their targets."""


def rank_slices(run: TrainingRun, plan: StepPlan, grid: ParallelDims) -> list[RankSlice]:
    """Read and pack the samples that one rank trains on in one step.

    Return one rank slice (the rank's part of a batch) per micro step. With packing, the batch of a micro step is one bin
    (the samples that are packed into one sequence). Without packing, the batch is one sample, and a rank with fewer samples
    than another rank gets additional micro steps. The loss of these additional micro steps has weight zero. ZeRO-3 needs
    the same number of forward passes on every rank. This function does not communicate with other ranks.

    Args:
        run: the checked training run.
        plan: plan of the step, with all bins.
        grid: parallel dimensions of the rank.
    """
    micro_steps = assign_bins(plan.bins, run.dp_size, run.sampler.bin_cost)
    bins_of_ranks = list(zip(*micro_steps, strict=True))
    _check_step(run, plan, bins_of_ranks)
    bins = list(bins_of_ranks[grid.dp_rank])
    if not run.recipe.packing.enabled:
        num_forwards = max(1, *(sum(map(len, rank_bins)) for rank_bins in bins_of_ranks))
        bins = [(i,) for bin in bins for i in bin]
        bins += [()] * (num_forwards - len(bins))

    def read(bin: Bin) -> RankSlice:
        rows = [(run.data, i) for i in bin]
        return read_rows_of_bin(run.collator, rows, plan.repeat_indices(bin), plan.epoch, grid)

    return [read(bin) for bin in bins]


def noisy_batches(run: TrainingRun, plan: StepPlan, grid: ParallelDims) -> list[list[MicroBatch]]:
    """Read the part of a step's data that one rank processes, and add noise.

    `grid` contains the rank's index in each parallel dimension. The result contains one list for each trained DiT, with the
    data of each micro step.

    The noise and the noise level of a sample depend only on the seed, the sample, the epoch, and how often the epoch has used
    the sample before. They do not depend on the rank, or on the other samples in the packed sequence.
    """
    flow, seed, slices = run.recipe.flow, run.recipe.train.seed, rank_slices(run, plan, grid)
    without_tokens = [replace(part, tokens=part.tokens.new_empty(0)) for part in slices]
    inputs = [(part.tokens, part.layout, part.keys, flow, seed, part.num_cond_tokens) for part in slices]
    return [
        list(zip(without_tokens, [add_noise(*args, expert.sigma_range) for args in inputs], strict=True))
        for expert in run.experts
    ]


def read_rows_of_bin(
    collator: PackingCollator,
    rows: Sequence[tuple[Dataset, int]],
    repeat_indices: Sequence[int],
    epoch: int,
    grid: ParallelDims,
) -> RankSlice:
    """Read samples, pack them into one sequence, and return the part of the packed batch that one rank processes.

    Latent frames without tokens of this rank are not read.

    Args:
        collator: collator that packs the samples.
        rows: (data set, index of the sample in the data set) of each sample.
        repeat_indices: for each sample, the number of its earlier uses in the epoch. Together with the epoch, it selects
            the random numbers of the sample.
        epoch: epoch that selects the random numbers of the samples.
        grid: parallel dimensions of the rank.
    """
    patch = collator.shape.patch_size
    grids = [grid_size(data.latent_shape(i), patch) for data, i in rows]
    lens = [math.prod(grid) for grid in grids] or [1]  # the collator pads an empty bin with one token
    layout = grid.layout(lens)
    samples = []
    for (data, i), length, size, tokens in zip(rows, lens, grids, layout.token_ranges, strict=False):
        frames = frames_of_tokens(tokens, size, patch)
        samples.append(data.read(i, None if tokens == (0, length) else frames))
    names, planned = [sample.sample_id for sample in samples], [data.keys[i] for data, i in rows]
    assert names == planned, f"read the samples {names}, but the plan has {planned}"
    return collator(samples, repeat_indices, epoch).rank_slice(layout)


def _check_step(run: TrainingRun, plan: StepPlan, bins_of_ranks: Sequence[Sequence[Bin]]) -> None:
    """Assert that all ranks together train on exactly the bins (packed sequences) of the plan.

    An epoch can use a sample several times, and each use is a repeat. The function also asserts that the step contains each
    (sample, repeat) only once.
    """
    bins = sorted(bin for rank_bins in bins_of_ranks for bin in rank_bins)
    assert bins == sorted(plan.bins), (
        f"step {plan.step} has bins {sorted(plan.bins)}, but the ranks have {bins}"
    )
    samples = [(run.data.keys[i], int(plan.repeat_index_of[i])) for bin in bins for i in bin]
    assert len(set(samples)) == len(samples) == plan.num_samples, (
        f"step {plan.step} contains a (sample, repeat) twice: {samples}"
    )


def prefetched(
    run: TrainingRun, grid: ParallelDims, start_step: int, pins: bool = False
) -> Generator[tuple[StepPlan, list[list[MicroBatch]]], None, None]:
    """Yield (packing plan of the step, batches) for each remaining step of the run.

    The batches are one list for each trained DiT, with the data of each micro step on this rank. A thread reads the samples
    and draws the noise of the next `data.prefetch` steps while the device computes.

    Args:
        run: the checked training run.
        grid: parallel dimensions of the rank.
        start_step: number of optimizer steps that the run has made.
        pins: whether to store the data in pinned memory. A GPU can copy from pinned memory while it computes.
    """
    plans = run.sampler.iterate(start_step)

    def read_next() -> tuple[StepPlan, list[list[MicroBatch]]] | None:
        plan = next(plans, None)
        if plan is None:
            return None
        batches = noisy_batches(run, plan, grid)
        return plan, map_tensors(batches, Tensor.pin_memory) if pins else batches

    if run.recipe.data.prefetch == 0:
        yield from iter(read_next, None)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="wands-prefetch") as thread:
        pending = deque(thread.submit(read_next) for _ in range(run.recipe.data.prefetch))
        try:
            while (batch := pending.popleft().result()) is not None:
                pending.append(thread.submit(read_next))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)
