"""Read tensors one at a time from safetensors files or from pickles of tensors, and write safetensors files."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wands.disk_errors import disk_number, read_patiently, unreadable
from wands.errors import CheckpointError, one_line

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
TRAINING_STATES = ("generator_ema", "generator")
"""State dicts in checkpoints of Self-Forcing and its relatives: the moving average, for sampling, and the last weights."""
_CODES = {dtype: code for code, dtype in safetensors.torch._TYPES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """Tensor that is in a file, or will be written to a file. Each call of `read` reads the values again."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, value: Tensor, dtype: torch.dtype | None = None) -> LazyTensor:
        """Return a LazyTensor for a tensor in memory. Its function `read` casts the tensor to `dtype`; None keeps the dtype."""
        dtype = dtype or value.dtype
        return cls(name=name, shape=tuple(value.shape), dtype=dtype, read=partial(value.detach().to, dtype))

    def derived(self, name: str, change: Callable[[Tensor], Tensor]) -> LazyTensor:
        """Return a LazyTensor with a new name, whose function `read` applies `change` to the values of this tensor."""
        result = change(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        return LazyTensor(
            name=name, shape=tuple(result.shape), dtype=result.dtype, read=lambda: change(self.read())
        )

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """Tensors of several files. A tensor is read only when `read` is called.

    While a safetensors file is open, the tensors that were read from it stay in memory, so the whole model would be in memory
    twice. Therefore `read` opens the file, copies one tensor and closes the file.

    Args:
        files: safetensors files, or pickles that contain only tensors.
        where: start of the error messages, such as "model.path=DIR".

    Attributes:
        metadata: metadata of all safetensors files, as one dict.
        tensors: `LazyTensor` by name.
        training_state: key of `TRAINING_STATES` from which a pickle's tensors were taken; "" for other files.

    Raises:
        CheckpointError: if a file is missing or damaged, or a pickle contains anything other than tensors.
    """

    def __init__(self, files: Sequence[Path], where: str) -> None:
        self.files = list(files)
        self.where = where
        self.metadata: dict[str, str] = {}
        self.training_state = ""
        self.tensors: dict[str, LazyTensor] = {}
        self._stored: dict[str, tuple[Path, Tensor | None]] = {}
        for file in self.files:
            is_pickle = file.suffix in PICKLES
            for name, value in (self._open_pickle if is_pickle else self._open_safetensors)(file).items():
                read = partial(self.read, name)
                self.tensors[name] = LazyTensor(
                    name=name, shape=tuple(value.shape), dtype=value.dtype, read=read
                )
                self._stored[name] = (file, value if is_pickle else None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU.

        Raises:
            CheckpointError: if the file is missing or damaged, or a value is NaN or infinite.
        """
        path, stored = self._stored[name]
        if stored is None:
            with open_safetensors(path, self.where) as file:
                stored = file.get_tensor(name).clone()
        check_finite(name, stored, f"{self.where}: {path}")
        return stored

    def _open_safetensors(self, path: Path) -> dict[str, Tensor]:
        with open_safetensors(path, self.where) as file:
            self.metadata |= file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict

    def _open_pickle(self, path: Path) -> Mapping[str, Tensor]:
        try:
            can_map = zipfile.is_zipfile(path)  # files of torch < 1.6 cannot be mapped
            load = partial(torch.load, path, map_location="cpu", weights_only=True, mmap=can_map)
            state = read_patiently(path, load)
        except pickle.UnpicklingError:
            raise CheckpointError(
                f"{self.where}: {path} is a pickle with objects that are not tensors, and could run code. Use a safetensors file."
            ) from None
        except (RuntimeError, OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.where}: {path} cannot be read ({one_line(error)}). Download the file again."
            ) from None
        key = next((key for key in TRAINING_STATES if isinstance(state, Mapping) and key in state), None)
        if key is not None:
            state = state[key]
            self.training_state = key
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{self.where}: {path} contains a {type(state).__name__}, not a state dict. Use a file with one state dict."
            )
        if key is not None:  # a moving average may have FSDP's names
            state = {str(name).replace("_fsdp_wrapped_module.", ""): value for name, value in state.items()}
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{self.where}: {path} contains {name}, which is not a tensor. Use a file that contains only tensors."
                )
        return state


@contextmanager
def open_safetensors(path: Path, where: str) -> Iterator[Any]:
    """Open a safetensors file for a `with` block. `where` starts the error messages.

    Raises:
        CheckpointError: if the file is missing, is damaged or is a GGUF file. The message names the file.
        DiskError: if the file system does not read the file.
    """
    try:
        with read_patiently(path, partial(_open, path)) as file:
            yield file
    except (SafetensorError, OSError) as error:
        if disk_number(error):
            raise unreadable(path, error) from error
        if is_gguf(path):
            raise CheckpointError(
                f"{where}: {path} is a GGUF file, whose quantized weights wands does not read. Use the safetensors files of the "
                "model."
            ) from None
        raise CheckpointError(
            f"{where}: {path} cannot be read ({one_line(error)}). Download the file again."
        ) from None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as missing:  # the package says so of every failed call of open()
        try:
            path.open("rb").close()
        except FileNotFoundError:
            raise missing from None
        return safe_open(path, framework="pt")


def is_gguf(path: Path) -> bool:
    """Return whether a file starts as a GGUF file, the format of llama.cpp and of quantized models for ComfyUI."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def check_finite(name: str, value: Tensor, where: str) -> None:
    """Raise CheckpointError if a weight contains NaN or infinite values, with which a model samples only black videos."""
    if not _is_finite(value):
        raise CheckpointError(
            f"{where} has NaN or infinite values in {name}, so the model would give only black videos. Use a file whose weights "
            "are all finite, such as an earlier checkpoint."
        )


def check_model(
    model: nn.Module, where: str, folder: Callable[[], Path] | None = None, stem: str = ""
) -> None:
    """Check that a loaded model on the CPU contains neither NaN nor infinite values, without reading the files again.

    `folder` returns the folder of the model's files, and `stem` is as for `find_weights`; they only serve to name the file of a
    wrong weight.

    Raises:
        CheckpointError: if a weight contains NaN or infinite values. The message names the weight and its file.
    """
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter.detach()):
            files = find_weights(folder(), stem) if folder else []
            file = next((path for path in files if name in TensorFiles([path], where).tensors), None)
            check_finite(name, parameter.detach(), f"{where}: {file}" if file else where)


def _is_finite(value: Tensor) -> bool:
    if not value.is_floating_point() or value.numel() == 0:
        return True
    # aminmax reads the values once and allocates nothing. It returns NaN if one value is NaN.
    low, high = (value.float() if value.dtype.itemsize == 1 else value).aminmax()
    return bool(low.isfinite() and high.isfinite())


def sample_digest(files: Sequence[Path], where: str) -> str:
    """Return a digest of the names, dtypes and shapes of all tensors, and of 192 bytes (start, middle and end) of each tensor.

    Changes of other bytes are not detected. The digest does not depend on the names of the files or how tensors are divided over
    them.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = dict[str, Tensor]()
    for path in files:
        with open_safetensors(path, where) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        bits = as_bytes(value)
        for start in (0, len(bits) // 2, max(len(bits) - 64, 0)):
            digest.update(bits[start : start + 64].numpy().tobytes())
    return digest.hexdigest()


def find_weights(folder: Path, stem: str) -> list[Path]:
    """Return the safetensors files of a model, empty if there are none: one file, several that an index lists, or numbered files.

    `stem` is the file name without suffix: "diffusion_pytorch_model" for a diffusers model, "model" for a transformers model.

    Raises:
        CheckpointError: if the index is damaged, or the weights are pickles.
    """
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{index} is not an index of weights in JSON ({error!r}). Download the file again."
            ) from None
    else:
        paths = sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
        paths = paths or sorted(path for path in folder.glob(f"*{stem}*") if path.suffix in PICKLES)
    if pickles := [path for path in paths if path.suffix != ".safetensors"]:
        raise CheckpointError(
            f"{pickles[0]} contains pickled weights, and opening a pickle can run any code. Use a model with safetensors files."
        )
    return paths


def write_sharded(
    folder: Path, stem: str, tensors: Sequence[LazyTensor], max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Write tensors, in this order, to safetensors files of limited size, with an index if there are several; return their paths.

    A tensor larger than `max_shard_size`, bytes or a text such as "5GB", gets a separate file. `stem` is as for `find_weights`.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_safetensors(folder / file_name, [by_name[name] for name in names])
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        text = json.dumps({"metadata": split.metadata, "weight_map": weight_map}, indent=2) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
    return [folder / file_name for file_name in split.filename_to_tensors]


def write_safetensors(
    path: Path, tensors: Sequence[LazyTensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write one safetensors file, with at most one tensor in memory at a time, and return its hash (see `hash_file`).

    The safetensors package needs all tensors in memory, and makes the file readable only for its owner; this file has the default
    permissions.
    Source: the description of the format in the README of the safetensors repository.
    """
    # Wide dtypes first, as in the safetensors package, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for tensor in ordered:
        start = end
        end = end + tensor.num_bytes
        kind = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[tensor.name] = {**kind, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb") as stream:
        chunks: Iterator[Any] = itertools.chain(
            [struct.pack("<Q", len(text)) + text], map(_checked_bytes, ordered)
        )
        for data in chunks:
            digest.update(data)
            stream.write(data)
    return digest.hexdigest()


def _checked_bytes(tensor: LazyTensor) -> memoryview:
    value = tensor.read().cpu()
    assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype), tensor.name
    return as_bytes(value).numpy().data


def hash_file(path: Path, digest: Any = xxhash.xxh3_128) -> str:
    """Return the hash of a file in hexadecimal digits. The default, XXH3 with 128 bits, finds damage but not forgery."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, digest).hexdigest()


def check_written(tensors: Sequence[LazyTensor], files: Sequence[Path], command: str) -> None:
    """Read written files again, and raise CheckpointError if they do not contain `tensors`, bit for bit."""
    written = TensorFiles(files, command)
    if written.tensors.keys() != {tensor.name for tensor in tensors}:
        raise CheckpointError(
            f"{command}: files in {files[0].parent} have wrong tensor names when read back. The disk may be faulty; use another."
        )
    for tensor in tensors:
        if not torch.equal(as_bytes(written.read(tensor.name)), as_bytes(tensor.read())):
            raise CheckpointError(
                f"{command}: {tensor.name} in {files[0].parent} is wrong when read back. The disk may be faulty; use another."
            )


def as_bytes(value: Tensor) -> Tensor:
    """Return the bytes of a tensor as flat uint8. Equal NaN bits compare as equal, unlike NaN values."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
