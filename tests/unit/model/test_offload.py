"""The store on the host: what comes back is what was put, in time, and nothing is held longer than it must be."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable

import pytest
import torch

from wands.errors import ConfigError
from wands.model.offload import ActivationOffloader, OffloadedTensor

CPU = torch.device("cpu")
PAGE = 64


class LateLane:
    """Copies nothing until somebody waits for it, as a device that is far behind the host: who does not wait reads garbage."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._count = 0

    def run(self, copy: Callable[[], None]) -> int:
        self._count += 1
        self._queue.append((self._count, copy))
        self.log.append(f"run {self._count}")
        return self._count

    def wait(self, event: int) -> None:
        while self._queue and self._queue[0][0] <= event:
            self._queue.popleft()[1]()
        self.log.append(f"wait {event}")


def store_of(lane: LateLane | None = None) -> ActivationOffloader:
    return ActivationOffloader(CPU, lane, PAGE)


def fill(
    store: ActivationOffloader, num_groups: int, num_members: int = 1, size: int = 40
) -> list[list[OffloadedTensor]]:
    """Group g's member m is full of the number 10 g + m."""
    found = []
    for group in range(num_groups):
        store.open_group()
        found.append([store.put(torch.full((size,), 10.0 * group + m)) for m in range(num_members)])
    return found


@pytest.mark.parametrize("shape", [(1,), (16,), (17, 3), (5, 4, 8), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_comes_back_is_what_was_put(shape: tuple[int, ...], dtype: torch.dtype):
    store = store_of(LateLane())
    tensors = [(torch.randn(shape) * 100).to(dtype) for _ in range(4)]
    kept = []
    for tensor in tensors:
        store.open_group()
        kept.append(store.put(tensor.mT if tensor.dim() == 2 else tensor))
    for one, tensor in zip(reversed(kept), reversed(tensors), strict=True):
        found = one.take()
        assert torch.equal(found, tensor.mT if tensor.dim() == 2 else tensor)
        assert found.dtype == dtype


def test_backward_finds_every_group_and_the_one_before_is_on_its_way():
    lane = LateLane()
    groups = fill(store_of(lane), 4, 2)  # copies 1 and 2 of the first group, 7 and 8 of the last
    assert lane.log == [
        *("run 1", "run 2", "run 3", "run 4"),
        *("wait 1", "wait 2", "run 5", "run 6"),  # the first group leaves the device when the third begins
        *("wait 3", "wait 4", "run 7", "run 8"),
    ]
    lane.log.clear()
    for number in (3, 2, 1, 0):
        values = [float(one.take()[0]) for one in groups[number]]
        assert values == [10.0 * number, 10.0 * number + 1]
    assert lane.log == [
        *("wait 7", "wait 8"),  # never left the device, nor has the group before
        *("run 9", "run 10", "wait 5", "wait 6"),  # the second group is fetched while the third is used
        *("run 11", "run 12", "wait 9", "wait 10"),
        *("wait 11", "wait 12"),
    ]


def test_a_tensor_can_be_taken_again():
    groups = fill(store_of(LateLane()), 3)
    for number in (2, 1, 0, 1, 0):
        assert float(groups[number][0].take()[-1]) == 10.0 * number


def test_at_most_two_groups_are_on_the_device():
    def here(kept: list[list[OffloadedTensor]]) -> list[bool]:
        return [one._on_device is not None for group in kept for one in group]

    groups = fill(store_of(LateLane()), 5)
    assert here(groups) == [False, False, False, True, True]
    groups[4][0].take()
    assert here(groups) == [False, False, False, True, False]
    groups[3][0].take()
    assert here(groups) == [False, False, True, False, False]


def test_host_memory_is_given_back_and_used_again():
    store = store_of()
    for size in (40, 33, 40):  # 160, 132 and 160 bytes: three pages each
        groups = fill(store, 3, 2, size)
        assert store.host_bytes == 6 * 4 * size
        assert store.reserved_bytes == 6 * 3 * PAGE
        for group in reversed(groups):
            for one in group:
                one.take()
        del groups, group, one
        assert store.host_bytes == 0
    assert store.peak_host_bytes == 6 * 4 * 40
    fill(store, 4, 2)  # a forward without a backward
    assert store.host_bytes == 0
    assert store.reserved_bytes == 8 * 3 * PAGE


def test_a_copy_on_its_way_is_waited_for_before_its_memory_goes():
    lane = LateLane()
    groups = fill(store_of(lane), 4)
    groups[2][0].take()  # the second group is on its way now
    lane.log.clear()
    del groups
    gc.collect()
    assert "wait 5" in lane.log


def test_who_does_not_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    groups = fill(store_of(LateLane()), 4)
    groups[3][0].take()
    monkeypatch.setattr(LateLane, "wait", lambda *_: None)
    assert float(groups[1][0].take()[0]) != 10.0


def test_host_memory_that_runs_out_is_not_taken_for_the_devices(monkeypatch: pytest.MonkeyPatch):
    store = ActivationOffloader(torch.device("cuda"), LateLane())
    pages = [torch.empty(store.page_bytes, dtype=torch.uint8)] * 64

    def pin(*_: object, **options: object) -> torch.Tensor:
        assert options["pin_memory"]
        if pages:
            return pages.pop()
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch, "empty", pin)
    with pytest.raises(
        ConfigError,
        match=r"cannot pin more than 1\.0 GiB of host memory .* out of memory\)\. Remove tensors from model\.offloaded_tensors",
    ):
        store._take_pages(2**30 + 1)


@pytest.mark.gpu
def test_copies_run_beside_the_computation():
    device = torch.device("cuda")
    store = ActivationOffloader(device)
    kept = []
    sums = []
    weight = torch.randn(4096, 4096, device=device)
    for number in range(6):
        tensor = torch.full((4096, 4096), float(number), device=device)
        store.open_group()
        kept.append(store.put(tensor))
        sums.append(tensor.sum())
        del tensor
        for _ in range(4):
            weight = (weight @ weight).tanh()  # the allocator is asked for the memory of what has left
    torch.cuda.synchronize()
    size = 4096 * 4096 * 4
    assert store.host_bytes == 6 * size
    assert torch.cuda.memory_allocated() <= 5 * size
    while kept:
        found = kept.pop().take()
        assert torch.equal(found.sum(), sums.pop())
        weight = (weight @ weight).tanh()
    assert store.host_bytes == 0
