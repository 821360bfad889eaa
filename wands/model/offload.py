"""Activation offloading to host memory, with copies that run in parallel with the computation.

A group is the set of tensors that one block of the model offloads. The backward pass uses the groups in reverse order: when it
uses a tensor of block n, the copies of block n - 1 back to the device start. The last two groups also stay on the device, because
they are needed before they could be copied back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wands.errors import ConfigError

PAGE_BYTES = 1 << 24
"""Size of a page of host memory. Pinning takes longer than a copy, so sequences of any length reuse pages of one size.

Larger buffers would waste memory: torch rounds the size of a pinned buffer up to a power of two."""
_GROUPS_ON_DEVICE = 2


class CopyStream:
    """Stream that runs copies between host and device one after another. This class is for devices without CUDA: `run` blocks."""

    def run(self, copy: Callable[[], None]) -> Any:
        """Run a copy after all computation that was submitted before this call. Return an event to pass to `wait`."""
        copy()

    def wait(self, event: Any) -> None:
        """Make later computation wait for a copy and for all earlier copies. `event` is what `run` returned for the copy."""


class _CudaCopyStream(CopyStream):
    """CUDA stream for copies. The host never waits for a copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


def new_copy_stream(device: torch.device) -> CopyStream:
    """Return the object that runs copies between the host and a device: for a GPU a `_CudaCopyStream`, else a `CopyStream`."""
    return _CudaCopyStream(device) if device.type == "cuda" else CopyStream()


def new_page(device: torch.device, num_bytes: int) -> Tensor:
    """Allocate host memory, uint8 [num_bytes], pinned for a CUDA device; raise RuntimeError if CUDA cannot pin it."""
    if device.type != "cuda":
        return torch.from_numpy(np.empty(num_bytes, np.uint8))
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def copy_pages(tensor: Tensor, pages: list[Tensor], to_host: bool = False) -> None:
    """Copy a tensor to pages of host memory if `to_host` is True; otherwise fill the tensor from the pages."""
    parts = tensor.view(-1).view(torch.uint8).split(len(pages[0])) if pages else ()
    for part, page in zip(parts, pages, strict=True):
        target, source = (page[: len(part)], part) if to_host else (part, page[: len(part)])
        target.copy_(source, non_blocking=True)


def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor from its graph. Both share one version counter, so a caller can detect later in-place changes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class ActivationOffloader:
    """Host memory, allocated in pages of equal size, for the activations of one device.

    `host_bytes` counts the tensors that are offloaded now, `reserved_bytes` all pages. Free pages are reused and never released.
    """

    def __init__(
        self, device: torch.device, copy_stream: CopyStream | None = None, page_bytes: int = PAGE_BYTES
    ) -> None:
        self.device = device
        self.page_bytes = page_bytes
        self.copy_stream = copy_stream or new_copy_stream(device)
        self.host_bytes = self.peak_host_bytes = self.reserved_bytes = 0
        self._free_pages: list[Tensor] = []
        self._groups: deque[_Group] = deque()

    def open_group(self) -> None:
        """Start a new group. Its tensors are copied back to the device together, before the tensors of earlier groups."""
        previous = weakref.ref(self._groups[-1]) if self._groups else None
        if len(self._groups) == _GROUPS_ON_DEVICE:
            for offloaded in self._groups.popleft():
                offloaded.leave_device()
        self._groups.append(_Group(previous))

    def put(self, tensor: Tensor) -> OffloadedTensor:
        """Start the copy of a tensor to the host, and return a handle whose `take` returns the tensor.

        The tensor must not change afterwards. Deleting the handle frees the host memory.
        """
        assert self._groups, "call open_group before put"
        with torch.no_grad():
            offloaded = OffloadedTensor(self, self._groups[-1], detached(tensor).contiguous())
        self._groups[-1].members.append(weakref.ref(offloaded))
        return offloaded

    def _take_pages(self, num_bytes: int) -> list[Tensor]:
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        num_pages = -(-num_bytes // self.page_bytes)
        self._free_pages += [self._new_page() for _ in range(num_pages - len(self._free_pages))]
        return [self._free_pages.pop() for _ in range(num_pages)]

    def _new_page(self) -> Tensor:
        try:
            page = new_page(self.device, self.page_bytes)
        except RuntimeError as error:  # CUDA reports "out of memory" for the host too
            raise ConfigError(
                f"model.checkpointing=offload cannot pin more than {self.reserved_bytes / 2**30:.1f} GiB of host memory on "
                f"this rank ({str(error).splitlines()[0]}). Remove tensors from model.offloaded_tensors, lower "
                "packing.max_tokens, or set model.checkpointing=full."
            ) from error
        self.reserved_bytes += self.page_bytes
        return page

    def _return_pages(self, pages: list[Tensor], num_bytes: int) -> None:
        self.host_bytes -= num_bytes
        # The stream finishes any copy that still reads these pages before a new copy overwrites the pages.
        self._free_pages += pages


class _Group:
    """Tensors that one block of the model offloads.

    When the backward pass takes the first one, `prefetch` starts the copies of the others, and of the previous block's group.
    """

    def __init__(self, previous: weakref.ref[_Group] | None) -> None:
        self._previous = previous
        self.members: list[weakref.ref[OffloadedTensor]] = []

    def __iter__(self) -> Iterator[OffloadedTensor]:
        return (offloaded for member in self.members if (offloaded := member()) is not None)

    def prefetch(self) -> None:
        """Start the copies of this group back to the device, then those of the previous block's group, which is needed next."""
        previous = self._previous() if self._previous else None
        for offloaded in (*self, *(previous or ())):
            offloaded.prefetch()


class OffloadedTensor:
    """Handle of a tensor that an `ActivationOffloader` stores."""

    def __init__(self, offloader: ActivationOffloader, group: _Group, tensor: Tensor) -> None:
        self._offloader = offloader
        self._group = group
        self._taken = False
        self._like = torch.empty_like(tensor, device="meta")
        self._on_device: Tensor | None = None
        self._pages: list[Tensor] = []
        self._pages = offloader._take_pages(tensor.nbytes)
        # Keep a reference until the copy is done, so that the tensor's memory is not reused.
        self._on_device = tensor
        # Version of the original tensor, while it is on the device.
        self._version: int | None = tensor._version
        self._copied = offloader.copy_stream.run(partial(copy_pages, tensor, self._pages, to_host=True))

    def take(self) -> Tensor:
        """Return the offloaded tensor on its device. Later computation on the device waits for the copy from the host."""
        if self._on_device is None:
            self._fetch()
        self._group.prefetch()
        self._offloader.copy_stream.wait(self._copied)
        tensor = self._on_device
        self._taken = True
        assert tensor is not None
        self._release(tensor)
        return tensor

    def prefetch(self) -> None:
        """Start to copy this tensor from the host to the device, unless it is on the device or `take` has returned it."""
        if self._on_device is None and not self._taken:
            self._fetch()

    def leave_device(self) -> None:
        """Free the tensor's device memory after the copy to the host is done."""
        if self._on_device is not None:
            self._offloader.copy_stream.wait(self._copied)
            self._release(self._on_device)

    def _release(self, tensor: Tensor) -> None:
        assert self._version in (None, tensor._version), "an offloaded tensor was changed in place"
        self._on_device = self._version = None

    def _fetch(self) -> None:
        # Allocate on the computation's stream, because this stream uses and frees the memory.
        self._on_device = torch.empty_like(self._like, device=self._offloader.device)
        self._copied = self._offloader.copy_stream.run(partial(copy_pages, self._on_device, self._pages))

    def __del__(self) -> None:
        if self._on_device is not None:  # the memory must not be reused while a copy still writes to it
            with suppress(Exception):  # CUDA may be gone when the interpreter exits
                self._offloader.copy_stream.wait(self._copied)
        self._offloader._return_pages(self._pages, self._like.nbytes)
