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
"""Number of steps between two comparisons of the ranks. A comparison uses the medians over these steps."""
SLOW = 1.2
"""Smallest ratio with which a rank counts as slow. The ratio is the rank's time / the median time of the other ranks, for equal
work."""


class ComputeTimes:
    """Time that this rank computes in the feed-forward layers of the transformer blocks, without waiting for other ranks.

    The duration of a step does not show which rank is slow, because all ranks wait for the slowest rank. The linear layers of
    the feed-forward contain no communication, so their time does not depend on other ranks. At ZeRO-3, the time in which their
    weights are gathered is not included.

    Args:
        models: the DiTs. `deepspeed.initialize` must already have wrapped them, so that the hooks of this class run inside the
            hooks of ZeRO-3.
        device: device of this rank.
        events: log to which slow ranks are written.
        log: function that prints a line for the user.
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
        """Record the time before or after a forward pass of a layer. This method is a hook for both moments.

        PyTorch passes `output` only after the forward pass.
        """
        if not layer.training:  # samples and evaluations are not part of a step
            return
        self._num_inputs += 0 if output else inputs[0].numel()
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def end_step(self, step: int) -> list[float] | None:
        """Record the compute time of a step. After each `WINDOW` steps, compare the ranks and report slow ranks.

        Every rank must call this method after each step.

        Args:
            step: number of optimizer steps that the run has made.

        Returns:
            For each rank, the median seconds per step in the feed-forward layers, over the last `WINDOW` steps. None if the
            ranks were not compared after this step.
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
    """Find the ranks that are slower than the other ranks.

    Each rank has two ratios, one for each column of `table`: the rank's value / the median value of the other ranks. A rank is
    slow if both ratios are at least `SLOW`. If only the seconds were compared, a rank with more tokens than the other ranks
    would also be reported. If only the seconds per input value were compared, a rank with fewer tokens would also be
    reported, because each layer has a constant cost.

    Args:
        table: [world_size, 2], for each rank the seconds per step in the feed-forward layers, and these seconds divided by
            the number of input values (elements of the inputs of these layers).

    Returns:
        A dict that maps each slow rank to the smaller of its two ratios, slowest rank first.
    """
    ratios = {}
    for rank in range(len(table) if len(table) > 1 else 0):
        others = np.percentile(np.delete(table, rank, axis=0), 50, axis=0, method="higher")
        ratios[rank] = round(float((table[rank] / np.maximum(others, 1e-30)).min()), 3)
    return {rank: ratio for rank, ratio in sorted(ratios.items(), key=lambda item: -item[1]) if ratio >= SLOW}
