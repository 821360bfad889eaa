"""Find ranks that compute more slowly than the other ranks, and would make all ranks wait."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from wands.distributed.bootstrap import gather_objects
from wands.distributed.consistency import NUM_NAMED, all_gather
from wands.model.tensor_parallel import ColumnsLinear
from wands.run.append_log import EventLog
from wands.texts import Log

WINDOW = 50
"""Number of steps between two comparisons of the ranks, which use the medians over these steps."""
SLOW = 1.2
"""Smallest ratio with which a rank counts as slow: its time / the median time of the other ranks, for equal work."""


class ComputeTimes:
    """Time that this rank computes in the feed-forward layers of the transformer blocks, without waiting for other ranks.

    The duration of a step does not show which rank is slow, because all wait for the slowest. The linear layers of the
    feed-forward contain no communication. At ZeRO-3, the time to gather their weights is not included: `deepspeed.initialize`
    must already have wrapped the DiTs, so that these hooks run inside those of ZeRO-3.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], device: torch.device, events: EventLog, log: Log
    ) -> None:
        self._device = device
        self._events = events
        self._log = log
        self._hosts = gather_objects(socket.gethostname())
        self._marks = list[Any]()
        self._num_inputs = 0
        self._steps = deque[tuple[float, float]](maxlen=WINDOW)
        for model in models:
            for name, layer in model.named_modules():
                waits = isinstance(layer, ColumnsLinear)  # for the other ranks of a tensor-parallel group
                if ".ffn." in name and isinstance(layer, torch.nn.Linear) and not waits:
                    layer.register_forward_pre_hook(self._mark)
                    layer.register_forward_hook(self._mark, prepend=True)

    def _mark(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *output: torch.Tensor) -> None:
        """Record the time before a forward pass of a layer, or after it, where PyTorch passes `output`."""
        if not layer.training:  # samples and evaluations are not part of a step
            return
        self._num_inputs += 0 if output else inputs[0].numel()
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def end_step(self, step: int) -> list[float] | None:
        """Record the compute time of a step; after each `WINDOW` steps, report slow ranks. Every rank must call this method.

        Return the median seconds per step in the feed-forward layers of each rank, or None if the ranks were not compared.
        """
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        else:
            seconds = sum(end - begin for begin, end in pairs)
        self._steps.append((seconds, seconds / max(self._num_inputs, 1)))
        self._marks = []
        self._num_inputs = 0
        if step % WINDOW or len(self._steps) < WINDOW:
            return None
        # A single stall, such as a garbage collection, does not change a median.
        medians = np.median(self._steps, axis=0)
        table = all_gather(torch.from_numpy(medians).to(self._device)).cpu().numpy()
        names = []
        for rank, ratio in slow_ranks(table).items():
            self._events.write("slow rank", rank=rank, host=self._hosts[rank], ratio=ratio)
            names.append(f"rank {rank} on {self._hosts[rank]} ({ratio:.2f})")
        if names:
            more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
            self._log(
                f"step {step}: slow ranks (time for the same work / time of the other ranks, over {WINDOW} steps): "
                f"{', '.join(names[:NUM_NAMED])}{more}. All ranks wait for the slowest rank. Look at the clocks, temperature "
                "and other processes of these machines."
            )
        return [float(f"{value:.4g}") for value in table[:, 0]]


def slow_ranks(table: np.ndarray) -> dict[int, float]:
    """Return the ratio of each slow rank, slowest first.

    `table` [world_size, 2] has the seconds per step in the feed-forward layers of each rank, and these seconds per element of the
    layers' inputs. The ratio is the rank's value / the median of the other ranks, the smaller one of both columns; a rank is slow
    from `SLOW` on. The seconds alone would also report a rank with more tokens, the seconds per element one with fewer, because
    each layer has a constant cost.
    """
    ratios = {}
    for rank in range(len(table) if len(table) > 1 else 0):
        others = np.percentile(np.delete(table, rank, axis=0), 50, axis=0, method="higher")
        ratios[rank] = round(float((table[rank] / np.maximum(others, 1e-30)).min()), 3)
    return {rank: ratio for rank, ratio in sorted(ratios.items(), key=lambda item: -item[1]) if ratio >= SLOW}
