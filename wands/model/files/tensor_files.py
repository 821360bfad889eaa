"""Tensor files: read one tensor at a time from safetensors and tensor-only pickles, write safetensors."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wands.errors import CheckpointError, one_line

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """Tensor of a file that is read or will be written.

    Attributes:
        name: name in the file.
        shape: shape in the file.
        dtype: dtype in the file.
        read: returns the tensor in this shape and dtype; every call reads it again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, value: Tensor, dtype: torch.dtype | None = None) -> LazyTensor:
        """Return a tensor in memory as a LazyTensor that casts it to `dtype` when it is read."""
        dtype = dtype or value.dtype
        return cls(name, tuple(value.shape), dtype, partial(value.to, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of the values in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """Tensors of several files; a tensor is read when `read` is called.

    Safetensors are read into new memory. The safetensors package maps the file instead, and the pages of a mapped
    file stay with the process: a model that is read once would be in memory twice.

    Args:
        files: safetensors, or pickles that contain only tensors.
        where: name of the files in errors, such as "model.path=DIR".
    """

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.files = list(files)
        self.where = where
        self.metadata: dict[str, str] = {}
        self._stack = ExitStack()
        self._tensors: dict[str, LazyTensor] = {}

    def __enter__(self) -> TensorFiles:
        for file in self.files:
            tensors = self._open_pickle(file) if file.suffix in PICKLES else self._open_safetensors(file)
            self._tensors |= {tensor.name: tensor for tensor in tensors}
        return self

    def __exit__(self, *exc: Any) -> None:
        self._tensors = {}
        self._stack.__exit__(*exc)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name, read from headers."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, read from the header."""
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._tensors[name].read()

    def _open_safetensors(self, path: Path) -> list[LazyTensor]:
        try:
            with safe_open(path, framework="pt") as file:  # checks the header
                self.metadata |= file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.where}: {path} cannot be read ({one_line(error)}). Download the file again."
            ) from None
        stream = self._stack.enter_context(path.open("rb"))
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        unknown = {entry["dtype"] for entry in header.values()} - _DTYPES.keys()
        if unknown:
            raise CheckpointError(
                f"{self.where}: {path} has tensors of dtype {', '.join(unknown)}. wands reads {', '.join(_DTYPES)}."
            )
        return [
            LazyTensor(
                name,
                tuple(entry["shape"]),
                _DTYPES[entry["dtype"]],
                partial(self._read_values, stream, path, 8 + length, entry),
            )
            for name, entry in header.items()
        ]

    def _read_values(self, stream: BinaryIO, path: Path, start: int, entry: Mapping[str, Any]) -> Tensor:
        begin, end = entry["data_offsets"]
        value = torch.empty(end - begin, dtype=torch.uint8)
        stream.seek(start + begin)
        if stream.readinto(memoryview(value.numpy())) != end - begin:  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{self.where}: {path} was truncated while it was read. Download the file again."
            )
        return value.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def _open_pickle(self, path: Path) -> list[LazyTensor]:
        state = _load_pickle(path, self.where)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{self.where}: {path} contains {name}, which is not a tensor. Give a file of one state dict."
                )
        return [LazyTensor.of(name, value) for name, value in state.items()]


def _load_pickle(path: Path, where: str) -> dict[str, Any]:
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        try:
            state = load(mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # a file of torch < 1.6 cannot be mapped
                raise
            state = load()
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{where}: {path} is a pickle of more than tensors. Such a file can run any code, so wands does not load it. Give "
            "a safetensors file."
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{where}: {path} cannot be read ({one_line(error)}). Download the file again."
        ) from None
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{where}: {path} contains a {type(state).__name__}. Give a file of one state dict."
        )
    return dict(state)


def find_weights(folder: Path, stem: str) -> list[Path]:
    """Return the safetensors files of a model: one file, the files of an index, or numbered files; [] if there are none.

    Args:
        folder: folder of the model.
        stem: "diffusion_pytorch_model" or "model".

    Raises:
        CheckpointError: if the index is damaged.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not an index of weights ({error!r}). Download the file again."
            ) from None
    return sorted(folder.glob(f"{stem}-*-of-*.safetensors"))


def write_sharded(
    folder: Path, stem: str, tensors: Sequence[LazyTensor], max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write safetensors files of limited size, and an index if there are several.

    At most one tensor is in memory at a time, which the writers of the safetensors package cannot do.

    Args:
        folder: existing folder.
        stem: "diffusion_pytorch_model" or "model".
        tensors: tensors in the order in which files are filled.
        max_shard_bytes: largest size of a file; a larger single tensor gets its own file.
    """
    shards: list[list[LazyTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    several = len(shards) > 1
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if several else ""
        paths.append(folder / f"{stem}{suffix}.safetensors")
        write_safetensors(paths[-1], shard)
        weight_map |= {tensor.name: paths[-1].name for tensor in shard}
    if several:
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    return paths


def write_safetensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, tensor by tensor.

    The file gets the permissions of the umask; the safetensors package makes it readable for its owner only.
    Source: the description of the format in the README of the safetensors repository.
    """
    # Wide dtypes first, as in the package's own writer, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            value = tensor.read()
            assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), tensor.name
            stream.write(memoryview(as_bytes(value).numpy()))


def check_written(tensors: Sequence[LazyTensor], files: Sequence[Path], command: str) -> None:
    """Read files back and compare every bit with the tensors that were written.

    Args:
        tensors: tensors that were written.
        files: written files.
        command: name of the command in errors.

    Raises:
        CheckpointError: if a tensor is missing or differs.
    """
    with TensorFiles(files, command) as written:
        if written.shapes.keys() != {tensor.name for tensor in tensors}:
            raise CheckpointError(
                f"{command}: {files[0]} does not contain the tensors that were written. Write to another disk."
            )
        for tensor in tensors:
            if not torch.equal(as_bytes(written.read(tensor.name)), as_bytes(tensor.read())):
                raise CheckpointError(
                    f"{command}: {tensor.name} read back from {files[0].parent} differs from the source. Write to another disk."
                )


def as_bytes(value: Tensor) -> Tensor:
    """Return the bits of a tensor, uint8 [N]; unlike values, bits compare equal for NaN."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
