"""Rank slices of packed batches for each step, read ahead of the device."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Sequence
from typing import Any

from wands.data.collate import RankSlice
from wands.data.packing import Bin, assign_bins
from wands.data.patchify import frames_of_tokens, grid_size
from wands.data.sampler import StepPlan
from wands.distributed.dims import ParallelDims
from wands.distributed.layout import ContextLayout
from wands.train.run import TrainingRun


def rank_shards(run: TrainingRun, plan: StepPlan, grid: ParallelDims) -> list[RankSlice]:
    """Read and pack the samples that one rank forwards in one step, and cut the rank slices, without communication.

    Without packing, the same bins are forwarded one sample at a time. Ranks with fewer samples add forwards of weight zero,
    because under ZeRO-3 every rank must run the same number of forwards.
    """
    micro_steps = assign_bins(plan.bins, run.dp_size, run.sampler.bin_cost)
    ranks = list(zip(*micro_steps, strict=True))  # dp rank -> its bins, in order
    packs = list(ranks[grid.dp_rank])
    _check_step(run, plan, ranks)
    if not run.recipe.packing.enabled:
        most = max(sum(len(one) for one in bins) for bins in ranks)
        packs = [(i,) for one in packs for i in one]
        packs += [()] * (most - len(packs))
    return [read_shard(run, pack, plan, grid) for pack in packs]


def read_shard(run: TrainingRun, pack: Bin, plan: StepPlan, grid: ParallelDims) -> RankSlice:
    """Return one rank's slice of one pack; only the frames of the rank's tokens are read."""
    lens = [int(run.seq_lens[i]) for i in pack] or [1]  # the collator pads an empty pack with one token
    layout = ContextLayout.build(
        lens, ulysses_degree=grid.ulysses_degree, ring_degree=grid.ring_degree, cp_rank=grid.cp_rank
    )
    patch = run.shape.patch_size
    samples = []
    for i, length, tokens in zip(pack, lens, layout.token_ranges, strict=False):
        frames = frames_of_tokens(tokens, grid_size(run.data.latent_shape(i), patch), patch)
        samples.append(run.data.read(i, None if tokens == (0, length) else frames))
    names = [(sample.sample_id, run.data.keys[i]) for sample, i in zip(samples, pack, strict=True)]
    assert all(found == wanted for found, wanted in names), f"read {names}, not what was planned"
    return run.collator(samples, plan.repeat_indices(pack), plan.epoch).rank_slice(layout)


def _check_step(run: TrainingRun, plan: StepPlan, ranks: Sequence[Sequence[Bin]]) -> None:
    """Assert that the ranks together forward the bins of the plan, and no repeat of a sample twice."""
    dealt = sorted(one for bins in ranks for one in bins)
    assert dealt == sorted(plan.bins), f"step {plan.step} has bins {sorted(plan.bins)} but {dealt} were dealt"
    visits = [
        (run.data.keys[i], repeat_index)
        for one in dealt
        for i, repeat_index in zip(one, plan.repeat_indices(one), strict=True)
    ]
    assert len(set(visits)) == len(visits) == plan.num_samples, (
        f"step {plan.step} visits a sample twice: {visits}"
    )


def prefetched(
    run: TrainingRun, grid: ParallelDims, start_step: int
) -> Generator[tuple[StepPlan, list[RankSlice]], None, None]:
    """Yield the plan and the rank slices of each step, read ahead in a thread so that the device does not wait for the disk."""
    plans = run.sampler.iterate(start_step)
    if run.recipe.data.prefetch == 0:
        for plan in plans:
            yield plan, rank_shards(run, plan, grid)
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=run.recipe.data.prefetch)
    stop = threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def read_ahead() -> None:
        try:
            for plan in plans:
                put((plan, rank_shards(run, plan, grid)))
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again in the loop
            put(error)

    thread = threading.Thread(target=read_ahead, name="wands-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
