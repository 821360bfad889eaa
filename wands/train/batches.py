"""From the plan of a step to the packed batches that one rank forwards, read ahead of the device."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from typing import Any

from wands.data.collate import PackedBatch
from wands.data.packing import assign_bins
from wands.data.sampler import StepPlan
from wands.train.job import Job


def rank_batches(job: Job, plan: StepPlan, dp_rank: int) -> list[PackedBatch]:
    """Read and pack what one dp rank forwards in one step.

    With packing off the same bins go through one sample at a time; ranks with fewer samples add forwards of weight zero, because
    under ZeRO-3 every rank must run the same number.
    """
    micro_steps = assign_bins(plan.bins, job.dp_size, job.sampler.bin_cost)
    ranks = list(zip(*micro_steps, strict=True))  # dp rank -> its bins, in order
    batches = [
        job.collator([job.data.read(i) for i in one], plan.occurrences(one), plan.epoch)
        for one in ranks[dp_rank]
    ]
    if job.recipe.packing.enabled:
        return batches
    singles = [
        single for batch, one in zip(batches, ranks[dp_rank], strict=True) if one for single in batch.split()
    ]
    most = max(sum(len(one) for one in bins) for bins in ranks)
    return singles + [job.collator([], [], plan.epoch) for _ in range(most - len(singles))]


def prefetched(
    job: Job, dp_rank: int, start_step: int
) -> Generator[tuple[StepPlan, list[PackedBatch]], None, None]:
    """Batches of the coming steps, read ahead in a thread so that the device does not wait for the disk."""
    plans = job.sampler.iterate(start_step)
    if job.recipe.data.prefetch == 0:
        for plan in plans:
            yield plan, rank_batches(job, plan, dp_rank)
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=job.recipe.data.prefetch)
    stop = threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def read_ahead() -> None:
        try:
            for plan in plans:
                put((plan, rank_batches(job, plan, dp_rank)))
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again where the loop waits for data
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
