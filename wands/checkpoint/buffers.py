"""Host memory for the moving average of the weights, and for a copy of the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wands.errors import ConfigError
from wands.model.files.tensor_files import LazyTensor

_BLOCK = 2**30
_ALIGNMENT = 64


class TensorFile(NamedTuple):
    """Contents of a Safetensors file to write; `name` is its path in the folder of the checkpoint."""

    name: str
    tensors: Sequence[LazyTensor]
    metadata: Mapping[str, str]


class HostBuffers:
    """Host memory for a copy of a checkpoint's tensors, from which a thread writes with `checkpoint.asynchronous=true`.

    The first copy allocates the memory. Later copies use the same memory, unless the size of a tensor has changed.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def copy_files(self, files: Sequence[TensorFile]) -> list[TensorFile]:
        """Return `files` with copies of the tensors in host memory, which overwrite those of an earlier call.

        Raises:
            ConfigError: if the host has too little memory.
        """
        values = [tensor.read() for file in files for tensor in file.tensors]
        sizes = [value.nbytes for value in values]
        on_gpu = any(value.is_cuda for value in values)
        if sizes != [len(buffer) for buffer in self._buffers]:
            self._buffers = []  # the memory is free before new memory is allocated
            texts = ("checkpoint.asynchronous=true", "set checkpoint.asynchronous=false")
            self._buffers = allocate(sizes, torch.device("cpu"), on_gpu, *texts)
        copies = [
            buffer.view(value.dtype).view(value.shape).copy_(value, non_blocking=True)
            for buffer, value in zip(self._buffers, values, strict=True)
        ]
        if on_gpu:
            torch.cuda.synchronize()
        rest = iter(copies)
        return [
            file._replace(tensors=[LazyTensor.of(tensor.name, next(rest)) for tensor in file.tensors])
            for file in files
        ]


def allocate(sizes: Sequence[int], device: torch.device, pinned: bool, key: str, fix: str) -> list[Tensor]:
    """Allocate uint8 vectors with the given numbers of bytes, as parts of a few large blocks.

    Separate vectors would waste memory, because CUDA rounds each pinned allocation up to a power of two. `key` and `fix` go into
    the error message, such as "ema.device=cpu" and "set ema.device=gpu".

    Raises:
        ConfigError: if the host has too little memory.
    """
    blocks: list[list[int]] = []
    rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    for size in rounded:
        if not blocks or sum(blocks[-1]) + size > _BLOCK:
            blocks.append([])
        blocks[-1].append(size)
    try:
        tensors = [
            torch.empty(sum(block), dtype=torch.uint8, device=device, pin_memory=pinned) for block in blocks
        ]
    except RuntimeError as error:
        if device.type != "cpu":
            raise
        raise ConfigError(
            f"{key} needs {sum(rounded) / 2**30:.1f} GiB of {'pinned ' * pinned}host memory on this rank, but allocation failed "
            f"({str(error).splitlines()[0]}); {fix}, or use more nodes: ZeRO stages 1 to 3 divide the memory among the ranks."
        ) from error
    vectors = [
        vector for tensor, block in zip(tensors, blocks, strict=True) for vector in tensor.split(block)
    ]
    return [vector[:size] for vector, size in zip(vectors, sizes, strict=True)]
