"""The most memory that was allocated at once: CUDA's own statistics, or on a CPU the allocations that torch's profiler saw."""

from __future__ import annotations

import gc
import time
from itertools import accumulate
from typing import Any

import torch


class PeakMemory:
    """Measure a block of code.

    After the block, `bytes` is the most that was allocated at once since the last `mark` (or since the beginning), above what
    was allocated at the beginning; `kept` is what the block left behind. On a CPU the profiler notes every operator, which
    slows the block down: for tests and benchmarks. What was allocated before the block and is freed inside it, and the work of
    threads that existed before, are not seen there.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.bytes = self.kept = 0
        self._before = self._marked = 0
        self._held: int | None = None  # at the mark
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
        """Forget the peak so far: what follows counts, above what was allocated at the beginning.

        On a CPU, for a moment at which no graph waits for its backward: what is held is then counted anew, tensor by tensor. The
        profiler does not see what gloo's threads let go of.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._held = _tensor_bytes() - self._before
            self._marked = time.time_ns()

    def __exit__(self, *exc: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.kept = torch.cuda.memory_allocated(self.device) - self._before
            return
        self._profiler.__exit__(*exc)
        events = [e for e in self._profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda e: e.start_ns())
        sizes = [e.nbytes() for e in events if e.start_ns() >= self._marked]
        held = [*accumulate(sizes, initial=self._held or 0)]
        self.bytes, self.kept = max(held), held[-1]
        self._profiler = None


def _tensor_bytes() -> int:
    """Of all storages that torch has allocated on the CPU for tensors in Python's reach; NumPy's memory is not resizable."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (x.untyped_storage() for x in tensors if x.device.type == "cpu" and not x.is_sparse)
        if storage.resizable()
    }
    return sum(storages.values())
