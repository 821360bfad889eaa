"""The clock of the GPU measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def wait(device: str) -> None:
    """Wait until all work that was started on a CUDA device is finished. On a CPU, return at once."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(work: Callable[[], Any], device: str, rounds: int = 5) -> tuple[float, float]:
    """Return (seconds of the first call of `work`, median seconds of later calls).

    The first call is slower, because it also compiles and selects kernels. `rounds` is the number of timings for the median. A
    timing of short work is the mean of many calls.
    """
    times = []
    for number in (1, 1, *[0] * rounds):
        number = number or max(
            1, min(50, int(0.02 / times[1]))
        )  # short kernels: many calls between two waits
        wait(device)
        started = time.perf_counter()
        for _ in range(number):
            work()
        wait(device)
        times.append((time.perf_counter() - started) / number)
    return times[0], statistics.median(times[2:])
