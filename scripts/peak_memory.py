"""Measure the peak memory of a block of code, with CUDA's statistics, or on a CPU with torch's profiler."""

from __future__ import annotations

import gc
import time
from itertools import accumulate
from typing import Any

import torch


class PeakMemory:
    """Context manager that measures by how many bytes the allocated memory grows in a block of code.

    After the block, `bytes` is the peak memory minus the memory at the start of the block, and `kept` is the memory at the end
    minus the memory at the start.

    The block can call `mark` before each repetition of the same work. `peaks` then contains the peak of each repetition, and
    `bytes` is the lowest of these peaks, so that a disturbance of one repetition does not count.

    On a CPU, PyTorch's profiler records every operator, which slows the block down. The profiler misses the release of memory
    that was allocated before the block. It also misses memory that a thread of gloo releases.

    Args:
        device: device whose memory is measured.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.bytes = self.kept = 0
        self.peaks: list[int] = []
        self._before = 0
        self._marks: list[tuple[int, int]] = []  # time, and bytes that were allocated then
        self._profiler: Any = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._before = _tensor_bytes()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
            )
            self._profiler.__enter__()
        return self

    def mark(self) -> None:
        """Start to measure the next repetition, which ends at the next call of `mark` or at the end of the block.

        Memory peaks before the first call of `mark` do not count.

        On a CPU, this method counts all tensors that Python can reach. Call it only while no autograd graph holds tensors for
        a backward pass, because Python cannot reach these tensors.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self._marks:
                self._end_interval()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._marks.append((0, 0))
        else:
            self._marks.append((time.time_ns(), _tensor_bytes() - self._before))

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._end_interval()
            self.kept = torch.cuda.memory_allocated(self.device) - self._before
        else:
            self._profiler.__exit__(*exc)
            self._read_events()
        self.bytes = min(self.peaks)

    def _end_interval(self) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated(self.device) - self._before)

    def _read_events(self) -> None:
        events = [e for e in self._profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda e: e.start_ns())
        self._profiler = None
        marks = self._marks or [(0, 0)]
        ends = [when for when, _ in marks[1:]] + [time.time_ns()]
        for (start, held), end in zip(marks, ends, strict=True):
            sizes = (e.nbytes() for e in events if start <= e.start_ns() < end)
            running = [*accumulate(sizes, initial=held)]
            self.peaks.append(max(running))
            self.kept = running[-1]


def _tensor_bytes() -> int:
    """Return the total size in bytes of the CPU storages of all tensors that Python can reach.

    Storages that cannot be resized are not counted, because such storages share their memory with NumPy arrays.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (x.untyped_storage() for x in tensors if x.device.type == "cpu" and not x.is_sparse)
        if storage.resizable()
    }
    return sum(storages.values())
