"""Tensors that wait on the host for the backward: copied out beside the computation, fetched back before they are asked for.

A group is what one block puts here. Backward takes the groups in the opposite order, so that whoever takes from one starts the
copies of the group before it. The last two groups stay on the device as well: their copies have the time of a block to finish,
and backward, which begins with them, finds them there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from wands.errors import ConfigError

PAGE_BYTES = 1 << 24
"""Host memory comes in pages of one size, so that packs of any length use the same: pinning memory takes longer than copying to
it, and torch rounds a pinned buffer up to a power of two."""
_ON_DEVICE = 2  # groups


class Lane(Protocol):
    """Where copies run, one after the other in the order in which they were given."""

    def run(self, copy: Callable[[], None]) -> Any:
        """Copy behind everything that the computation has been told to do so far; returns what `wait` takes."""
        ...

    def wait(self, event: Any) -> None:
        """Let the computation go on only when this copy, and so all before it, are over."""
        ...


class _SideStream:
    """A CUDA stream beside that of the computation; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class _AtOnce:
    """Without streams a copy is over when it returns."""

    def run(self, copy: Callable[[], None]) -> None:
        copy()

    def wait(self, event: None) -> None:
        pass


def detached(tensor: Tensor) -> Tensor:
    """The tensor without its graph; a change of one in place counts as a change of the other, also beneath autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class ActivationOffloader:
    """Keeps tensors of one device in host memory.

    Args:
        device: where the tensors come from and go back to.
        lane: where copies run; of a CUDA device a stream of their own.
        page_bytes: size of the host's pages.

    Attributes:
        host_bytes: of the tensors that are kept now.
        peak_host_bytes: the most that `host_bytes` has been.
        reserved_bytes: of all pages, pinned for a CUDA device; a page that becomes free waits for the next tensor. torch's
            allocator on the CPU has no part in them: what it counts is "the device" there too.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None, page_bytes: int = PAGE_BYTES) -> None:
        self.device, self.page_bytes = device, page_bytes
        self.lane: Lane = lane or (_SideStream(device) if device.type == "cuda" else _AtOnce())
        self.host_bytes = self.peak_host_bytes = self.reserved_bytes = 0
        self._free: list[Tensor] = []
        self._groups: deque[_Group] = deque()

    def open_group(self) -> None:
        """What is put here from now on is taken back together, before what was put here until now."""
        before = weakref.ref(self._groups[-1]) if self._groups else None
        if len(self._groups) == _ON_DEVICE:
            self._groups.popleft().leave_device()
        self._groups.append(_Group(before))

    def put(self, tensor: Tensor) -> Stored:
        """Start the copy to the host; the tensor may not change from now on.

        Args:
            tensor: of any shape and dtype, on the store's device.

        Returns:
            What gives it back; host memory is kept for it as long as it lives.
        """
        assert self._groups, "open_group comes first"
        with torch.no_grad():
            stored = Stored(self, self._groups[-1], detached(tensor).contiguous())
        self._groups[-1].members.append(weakref.ref(stored))
        return stored

    def _borrow(self, num_bytes: int) -> list[Tensor]:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        missing = -(-num_bytes // self.page_bytes) - len(self._free)
        self._free += [self._new_page() for _ in range(missing)]
        return [self._free.pop() for _ in range(-(-num_bytes // self.page_bytes))]

    def _new_page(self) -> Tensor:
        if self.device.type != "cuda":
            page = torch.from_numpy(np.empty(self.page_bytes, np.uint8))
        else:
            try:
                page = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # CUDA calls it "out of memory", as if it were the device's
                raise ConfigError(
                    f"model.checkpointing=offload cannot pin more than {self.reserved_bytes / 2**30:.1f} GiB of host memory on "
                    f"this rank ({str(error).splitlines()[0]}); offload less, lower packing.max_tokens, or set it to full."
                ) from error
        self.reserved_bytes += self.page_bytes
        return page

    def _give_back(self, pages: list[Tensor], num_bytes: int) -> None:
        self.host_bytes -= num_bytes
        self._free += pages  # a copy that may still read them comes before the next one that writes them


class _Group:
    """The tensors of one block; whoever got one of them keeps it alive."""

    def __init__(self, before: weakref.ref[_Group] | None) -> None:
        self._before = before
        self.members: list[weakref.ref[Stored]] = []

    def __iter__(self) -> Iterator[Stored]:
        return (stored for member in self.members if (stored := member()) is not None)

    def leave_device(self) -> None:
        for stored in self:
            stored.leave_device()

    def prefetch(self) -> None:
        """Start the copies of this group, and then those of the one before."""
        before = self._before() if self._before else None
        for group in (self, *([before] if before else [])):
            for stored in group:
                stored.prefetch()


class Stored:
    """One tensor of a `ActivationOffloader`."""

    def __init__(self, store: ActivationOffloader, group: _Group, tensor: Tensor) -> None:
        self._store, self._group, self._taken = store, group, False
        self._like = torch.empty_like(tensor, device="meta")
        self._here: Tensor | None = None
        self._pages: list[Tensor] = []
        self._pages = store._borrow(tensor.nbytes)
        # Held until the copy is over: its memory may not go to others before.
        self._here = tensor
        self._version: int | None = tensor._version  # of what was put, until it leaves
        self._copied = store.lane.run(partial(_copy_out, tensor, self._pages))

    def take(self) -> Tensor:
        """The tensor on its device, once what the caller does next may read it."""
        if self._here is None:
            self._start()
        self._group.prefetch()
        self._store.lane.wait(self._copied)
        tensor, self._taken = self._here, True
        assert tensor is not None
        self._let_go(tensor)
        return tensor

    def prefetch(self) -> None:
        """Start the copy back to the device, unless the tensor is there or has been taken."""
        if self._here is None and not self._taken:
            self._start()

    def leave_device(self) -> None:
        """Let go of the device's memory when the copy to the host is over."""
        if self._here is not None:
            self._store.lane.wait(self._copied)
            self._let_go(self._here)

    def _let_go(self, tensor: Tensor) -> None:
        assert self._version in (None, tensor._version), "a kept result was changed in place"
        self._here = self._version = None

    def _start(self) -> None:
        # Memory of the computation's stream: it is used there, and freed there.
        self._here = torch.empty_like(self._like, device=self._store.device)
        self._copied = self._store.lane.run(partial(_copy_back, self._here, self._pages))

    def __del__(self) -> None:
        if self._here is not None:  # nobody may get its memory while a copy still writes to it
            with suppress(Exception):  # CUDA may be gone when the interpreter ends
                self._store.lane.wait(self._copied)
        self._store._give_back(self._pages, self._like.nbytes)


def _copy_out(tensor: Tensor, pages: list[Tensor]) -> None:
    for part, page in _parts(tensor, pages):
        page.copy_(part, non_blocking=True)


def _copy_back(tensor: Tensor, pages: list[Tensor]) -> None:
    for part, page in _parts(tensor, pages):
        part.copy_(page, non_blocking=True)


def _parts(tensor: Tensor, pages: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of a tensor, page by page, and where each page keeps them."""
    if not pages:
        return
    for part, page in zip(tensor.view(-1).view(torch.uint8).split(len(pages[0])), pages, strict=True):
        yield part, page[: len(part)]
