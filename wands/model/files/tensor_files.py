"""Tensors in files, one at a time: read from safetensors and tensor-only pickles, written as safetensors."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wands.errors import CheckpointError

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


class TensorFiles:
    """The tensors of some files: one is read when it is asked for.

    Safetensors are read into memory of their own rather than mapped, as their package does: the pages of a mapped
    file stay with the process, and a model that is read once would be there twice.

    Args:
        files: safetensors, or pickles that hold tensors alone.
        where: what to call them in errors, such as "model.path=DIR".
    """

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.files = list(files)
        self.where = where
        self.metadata: dict[str, str] = {}
        self._stack = ExitStack()
        self._readers: dict[str, _Reader] = {}

    def __enter__(self) -> TensorFiles:
        for file in self.files:
            self._readers |= (
                self._open_pickle(file) if file.suffix in PICKLES else self._open_safetensors(file)
            )
        return self

    def __exit__(self, *exc: Any) -> None:
        self._readers = {}
        self._stack.__exit__(*exc)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name, from headers alone."""
        return {name: reader.shape() for name, reader in self._readers.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, from its header alone."""
        return self._readers[name].dtype()

    def read(self, name: str) -> Tensor:
        """One tensor, as it is in the file."""
        return self._readers[name].read()

    def _open_safetensors(self, path: Path) -> dict[str, _Reader]:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.where}: {path} cannot be read ({error}); fetch it again.") from None
        self.metadata |= file.metadata() or {}
        stream = self._stack.enter_context(path.open("rb"))
        (length,) = struct.unpack("<Q", stream.read(8))
        header, start = json.loads(stream.read(length)), 8 + length

        def read(name: str) -> Tensor:
            begin, end = header[name]["data_offsets"]
            value = torch.empty(end - begin, dtype=torch.uint8)
            stream.seek(start + begin)
            if stream.readinto(memoryview(value.numpy())) != end - begin:
                raise CheckpointError(f"{self.where}: {path} has become shorter; fetch it again.")
            return value.view(_DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])

        def reader(name: str) -> _Reader:
            return _Reader(
                lambda: tuple(file.get_slice(name).get_shape()),
                lambda: _DTYPES[file.get_slice(name).get_dtype()],
                lambda: read(name),
            )

        return {name: reader(name) for name in file.keys()}  # noqa: SIM118 (no dict)

    def _open_pickle(self, path: Path) -> dict[str, _Reader]:
        found = _load_pickle(path, self.where)
        odd = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
        if odd:
            raise CheckpointError(
                f"{self.where}: {path} holds {odd[0]}, which is no tensor; give a file of one state dict."
            )

        def reader(value: Tensor) -> _Reader:
            return _Reader(lambda: tuple(value.shape), lambda: value.dtype, lambda: value)

        return {name: reader(value) for name, value in found.items()}


@dataclass(frozen=True)
class _Reader:
    shape: Callable[[], tuple[int, ...]]
    dtype: Callable[[], torch.dtype]
    read: Callable[[], Tensor]


def _load_pickle(path: Path, where: str) -> dict[str, Any]:
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # a file of torch before 1.6
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{where}: {path} is a pickle of more than tensors, whose code could do anything and is not run; give safetensors."
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{where}: {path} cannot be read ({reason}); fetch it again.") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{where}: {path} holds a {type(found).__name__}; give a file of one state dict."
        )
    return dict(found)


def find_weights(folder: Path, stem: str) -> list[Path]:
    """The safetensors of a model: one file, those that its index names, or numbered ones; [] for none.

    Args:
        folder: where they lie.
        stem: "diffusion_pytorch_model" or "model".

    Raises:
        CheckpointError: the index is damaged.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of weights ({error!r}); fetch it again.") from None
    return sorted(folder.glob(f"{stem}-*-of-*.safetensors"))


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is to be written.

    Attributes:
        name: in the new file.
        shape: of it.
        dtype: of it.
        read: gives it, in that shape and dtype; called once for each writing or comparing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Of its values in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_sharded(
    folder: Path, stem: str, entries: Sequence[LazyTensor], max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write safetensors of at most so many bytes each, and an index where there are several.

    No more than one tensor is in memory at a time, which the writers of safetensors' own package cannot do.

    Args:
        folder: that exists.
        stem: "diffusion_pytorch_model" or "model".
        entries: in the order in which shards are filled.
        max_shard_bytes: a single larger tensor gets a file of its own.
    """
    shards: list[list[LazyTensor]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    if len(shards) == 1:
        path = folder / f"{stem}.safetensors"
        write_safetensors(path, shards[0])
        return [path]
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(path, shard)
        paths.append(path)
        weight_map |= {entry.name: path.name for entry in shard}
    total = sum(entry.num_bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
    return paths


def write_safetensors(
    path: Path, entries: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one file, tensor by tensor.

    Source: the format's description in the README of the safetensors repository.
    """
    # As the format's own writer does: wide types first, so that every tensor lies at a multiple of its item's size.
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for entry in ordered:
            value = entry.read()
            assert (tuple(value.shape), value.dtype) == (entry.shape, entry.dtype), entry.name
            stream.write(memoryview(as_bytes(value).numpy()))


def as_bytes(value: Tensor) -> Tensor:
    """The bits of a tensor, uint8 [N]: equal bits are equal values, also where those are NaN."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
