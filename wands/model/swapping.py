"""Frozen weights in host memory, copied to the device block by block while the computation runs.

The weights of a swapped block have no memory on the device. While a block runs with its weights in one of two shared device
buffers, those of the next swapped block are copied to the other. The backward pass runs the swapped blocks again, in descending
order, and prefetches in this order. Nothing is copied back, because the weights do not change.

Without activation checkpointing, autograd would keep views of a buffer whose contents change, so `swap_rules` of
`wands.config.deepspeed_rules` refuses such a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wands.errors import ConfigError
from wands.model.offload import PAGE_BYTES, CopyStream, copy_pages, new_copy_stream, new_page

ALIGNMENT = 256
"""Bytes. Every weight starts at a multiple in its buffer, as in memory of CUDA's allocator."""


def spread(num_swapped: int, num_blocks: int) -> list[int]:
    """Return the numbers of the swapped blocks: evenly spread, so that every copy has the same time to hide in."""
    return [number * num_blocks // num_swapped for number in range(num_swapped)]


class BlockSwapper:
    """Swaps the frozen weights of blocks between host memory and two buffers on the device.

    The constructor moves the weights of `blocks`, which are on the CPU and in the order of the forward pass, to the host. Create
    it before `deepspeed.initialize`, which copies all weights of a model to the device. The blocks must be alike and run under
    activation checkpointing. `copy_stream` None makes a new stream.

    Raises:
        ConfigError: if the host memory cannot be pinned.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        copy_stream: CopyStream | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.device = device
        self.copy_stream = copy_stream or new_copy_stream(device)
        self._weights = [
            [weight for weight in block.parameters() if not weight.requires_grad] for block in blocks
        ]
        self._like = [torch.empty_like(weight, device="meta") for weight in self._weights[0]]
        self._starts = [0]
        for like in self._like:
            self._starts.append(self._starts[-1] + -(-like.nbytes // ALIGNMENT) * ALIGNMENT)
        self._pages = [self._move_to_host(weights, page_bytes) for weights in self._weights]
        self._slots = [_Slot(self._starts[-1], device) for _ in range(min(2, len(blocks)))]
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))

    @property
    def host_bytes(self) -> int:
        return sum(page.nbytes for pages in self._pages for page in pages)

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self._slots)

    def find(self, weight: Tensor) -> Tensor | None:
        """Return the values of a swapped weight from the host memory, on the CPU; None for any other tensor."""
        for weights, pages in zip(self._weights, self._pages, strict=True):
            for index, each in enumerate(weights):
                if each is weight:
                    like = self._like[index]
                    start = self._starts[index]
                    values = _read(pages, start, start + like.nbytes)
                    return values.view(like.dtype).view(like.shape)
        return None

    def _move_to_host(self, weights: Sequence[nn.Parameter], page_bytes: int) -> list[Tensor]:
        for weight, like in zip(weights, self._like, strict=True):
            assert (weight.shape, weight.dtype) == (like.shape, like.dtype), (
                "the swapped blocks must be alike"
            )
        flat = torch.zeros(self._starts[-1], dtype=torch.uint8)
        for index, weight in enumerate(weights):
            self._view(flat, index).copy_(weight.data)
            _release(weight)
        pages = []
        for _ in range(0, len(flat), page_bytes):
            try:
                pages.append(new_page(self.device, page_bytes))
            except RuntimeError as error:  # CUDA reports "out of memory" for the host too
                raise ConfigError(
                    f"model.swap_blocks={len(self._weights)} cannot pin {len(self._weights) * len(flat) / 2**30:.1f} GiB of "
                    f"host memory on this rank ({str(error).splitlines()[0]}). Lower model.swap_blocks, or set "
                    "lora.quantize=fp8 or nf4."
                ) from error
        copy_pages(flat, pages, to_host=True)
        return pages

    def _view(self, flat: Tensor, index: int) -> Tensor:
        like = self._like[index]
        start = self._starts[index]
        return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def _enter(self, number: int, *_: Any) -> None:
        """Give a block its weights before it runs, and start the copy for the block that follows."""
        slot = self._fetch(number)
        self.copy_stream.wait(slot.copied)
        for index, weight in enumerate(self._weights[number]):
            weight.data = self._view(slot.buffer, index)
        is_backward = torch._C._current_graph_task_id() != -1
        following = number + (-1 if is_backward else 1)
        if following == len(self._weights) and not torch.is_grad_enabled():
            following = 0  # no backward pass follows
        if 0 <= following < len(self._weights) and len(self._slots) > 1:
            self._fetch(following, busy=slot)

    def _fetch(self, number: int, busy: _Slot | None = None) -> _Slot:
        """Return the buffer of a block's weights. If there is none, start a copy to a buffer other than `busy`."""
        for slot in self._slots:
            if slot.number == number:
                return slot
        slot = next(slot for slot in self._slots if slot is not busy)
        if slot.number is not None:
            # The block has run, and so has its backward pass if this is one: a later use must fail, not read other weights.
            for weight in self._weights[slot.number]:
                _release(weight)
        slot.number = number
        slot.copied = self.copy_stream.run(partial(copy_pages, slot.buffer, self._pages[number]))
        return slot


class _Slot:
    """Buffer on the device, uint8 [bytes of a block], for the weights of one swapped block.

    `number` is the block whose weights are, or will be, in the buffer. `copied` is the event of the copy.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.number: int | None = None
        self.copied: Any = None


def _read(pages: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Return a copy of the bytes from `start` to `end` of pages of equal size."""
    size = len(pages[0])
    parts = [
        pages[number][max(start - number * size, 0) : end - number * size]
        for number in range(start // size, -(-end // size))
    ]
    return torch.cat(parts)


def _release(weight: nn.Parameter) -> None:
    weight.data = weight.data.new_empty(0)
