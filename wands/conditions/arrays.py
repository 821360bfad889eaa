"""Arrays of a sample: their names, dtypes and dimensions, from which shapes, stored bits and mock values follow.

`wands check` imports this package for the sizes of samples, so torch is imported only where tensors are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, TypeAdapter

from wands.patches import blank_other_frames, grid_size
from wands.values import check_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Dim = Annotated[int, Field(strict=True, ge=1, lt=2**31)] | Annotated[str, Field(strict=True)] | None
"""Size of one dimension: a number, a key of `NAMED_DIMS`, or None for a length that differs between samples."""
NAMED_DIMS = ("frames", "rows", "columns", "token_frames", "token_rows", "token_columns")
"""Dimensions that depend on the size of a sample: latent frames, rows and columns, and tokens along each of the three."""
DTYPES = {"bf16": "bfloat16", "uint8": "uint8", "bool": "bool"}
"""Maps each dtype of an array to the name of the dtype in torch."""


class ClipSize(NamedTuple):
    """Size of one sample in latent (frames, rows, columns). `patch_size` is the size of one token."""

    latents: tuple[int, int, int]
    patch_size: tuple[int, int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of tokens along (frame, row, column)."""
        return grid_size(self.latents, self.patch_size)

    @property
    def num_tokens(self) -> int:
        """Number of video tokens of the sample."""
        return math.prod(self.grid)


@dataclass(frozen=True)
class ArraySpec:
    """Description of one array of a sample.

    Attributes:
        name: name in caches, unique among the arrays of a model.
        dtype: "bf16" (stored as uint16 bits), "uint8", or "bool" (stored as packed bits).
        dims: size of each dimension, see `Dim`.
        optional: whether some samples lack the array.
        whole: whether every rank of a context-parallel group needs all frames. Otherwise, frames of other ranks' tokens are zero.
        max_len: largest size of a dimension that is None.
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    optional: bool = False
    whole: bool = False
    max_len: Annotated[int, Field(strict=True, ge=1)] | None = None

    def __post_init__(self) -> None:
        unknown = [dim for dim in self.dims if isinstance(dim, str) and dim not in NAMED_DIMS]
        if self.dtype not in DTYPES or unknown:
            raise ValueError(
                f"array {self.name} has dtype={self.dtype} and dims={self.dims}. The dtype must be one of "
                f"{', '.join(DTYPES)}, and a dimension a number, None or one of {', '.join(NAMED_DIMS)}."
            )
        if self.dtype == "bool" and None in self.dims:
            raise ValueError(
                f"array {self.name} has dtype=bool and a free length, which packed bits do not record. Use dtype=uint8."
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the array in a sample."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the array in a file."""
        return np.dtype(np.uint16 if self.dtype == "bf16" else np.uint8)

    @property
    def num_free(self) -> int:
        """Number of dimensions whose size differs between samples of one latent size."""
        return self.dims.count(None)

    @property
    def frames_axis(self) -> int | None:
        """Dimension of which a rank needs only its own frames. None if every rank needs the whole array."""
        axes = [axis for axis, dim in enumerate(self.dims) if dim in ("frames", "token_frames")]
        return axes[0] if axes and not self.whole else None

    def shape(self, size: ClipSize, lens: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the shape of the array in a sample. `lens` are the sizes of the dimensions that are None, in their order."""
        named = dict(zip(NAMED_DIMS, (*size.latents, *size.grid), strict=True))
        free = iter(lens)
        return tuple(
            next(free) if dim is None else named[dim] if isinstance(dim, str) else dim for dim in self.dims
        )

    def free_lens(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the dimensions that are None, from the shape of an array."""
        return tuple(size for dim, size in zip(self.dims, shape, strict=True) if dim is None)

    def fits(self, shape: Sequence[int], size: ClipSize) -> bool:
        """Return whether an array of a sample has a right shape."""
        if len(shape) != len(self.dims):
            return False
        lens = self.free_lens(shape)
        most = math.inf if self.max_len is None else self.max_len
        return tuple(shape) == self.shape(size, lens) and all(0 < length <= most for length in lens)

    def describe(self, size: ClipSize) -> str:
        """Return the shape that the array must have, as text such as "[1 to 512, 4096]"."""
        free = "any" if self.max_len is None else f"1 to {self.max_len}"
        sizes = self.shape(size, [-1] * self.num_free)
        return (
            f"[{', '.join(free if dim is None else str(n) for dim, n in zip(self.dims, sizes, strict=True))}]"
        )

    def frames_of(self, frames: tuple[int, int], patch_size: tuple[int, int, int]) -> tuple[int, int]:
        """Convert a range of latent frames to a range of indices along `frames_axis`."""
        per_index = patch_size[0] if "token_frames" in self.dims else 1
        return frames[0] // per_index, -(-frames[1] // per_index)

    def blank(self, array: Tensor, frames: tuple[int, int], patch_size: tuple[int, int, int]) -> Tensor:
        """Set the frames outside a range of latent frames to zero, in place. An array that ranks need whole is unchanged."""
        if self.frames_axis is None:
            return array
        return blank_other_frames(array, self.frames_of(frames, patch_size), self.frames_axis)

    def store(self, array: Tensor) -> np.ndarray:
        """Return the array as it is stored in files. Inverse of `restore`."""
        assert array.dtype == self.torch_dtype, f"{self.name} is stored as {self.dtype}, got {array.dtype}"
        if self.dtype == "bf16":
            return to_bits(array)
        values = array.detach().cpu().contiguous().numpy()
        return np.packbits(values) if self.dtype == "bool" else values

    def restore(self, stored: np.ndarray, shape: Sequence[int]) -> Tensor:
        """Return an array of a sample from its stored form. bf16 and uint8 arrays are not copied, and must be writable."""
        import torch

        if self.dtype == "bf16":
            return from_bits(stored)
        if self.dtype == "uint8":
            return torch.from_numpy(stored)
        bits = np.unpackbits(stored, count=math.prod(shape)).reshape(shape)
        return torch.from_numpy(bits.astype(np.bool_))

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored form: bytes for packed bits, otherwise `shape` itself."""
        return (-(-math.prod(shape) // 8),) if self.dtype == "bool" else tuple(shape)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size of the stored form in bytes."""
        return math.prod(self.stored_shape(shape)) * self.stored_dtype.itemsize

    def zeros(self, size: ClipSize, lens: Sequence[int] = ()) -> Tensor:
        """Return an array of zeros. Arguments as for `shape`."""
        import torch

        return torch.zeros(self.shape(size, lens), dtype=self.torch_dtype)

    def draw(self, rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
        """Return random values of the array's dtype: standard normal numbers for bf16."""
        import torch

        if self.dtype == "bf16":
            return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(torch.bfloat16)
        values = rng.integers(0, 2 if self.dtype == "bool" else 256, shape, dtype=np.uint8)
        return torch.from_numpy(values).to(self.torch_dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values. Inverse of `from_json`."""
        value: dict[str, Any] = {"name": self.name, "dtype": self.dtype, "dims": list(self.dims)}
        value |= {"optional": True} if self.optional else {}
        value |= {"whole": True} if self.whole else {}
        value |= {} if self.max_len is None else {"max_len": self.max_len}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the description that `to_json` wrote; raise ValueError if the value is damaged."""
        return check_values(TypeAdapter(cls), value)


def latents_spec(channels: int) -> ArraySpec:
    """Return the description of the clean latents, which every sample has."""
    return ArraySpec(name="latents", dtype="bf16", dims=(channels, "frames", "rows", "columns"))


def to_bits(tensor: Tensor) -> np.ndarray:
    """Return the bits of a bf16 tensor as a uint16 array, because numpy and HDF5 have no bf16."""
    import torch

    assert tensor.dtype == torch.bfloat16, f"the cache stores bf16, got {tensor.dtype}"
    return tensor.detach().cpu().contiguous().view(torch.uint16).numpy()


def from_bits(bits: np.ndarray) -> Tensor:
    """Return the bf16 tensor with the given uint16 bits, without copying; the array must be writable. Inverse of `to_bits`."""
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)
