"""Dropout whose masks depend only on the sample, the layer, the position of the token or timestep, and the channel.

A mask is a hash, not a stream of random numbers, so it does not depend on the other packed samples, the rank, restarts or the
device, and is the same when activation checkpointing runs a block again. The backward pass computes it again; no mask is stored.
A row holds the channels of one token or timestep. A row key is the hash that identifies the row.
Letters: N rows, C channels.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from wands.attention.packed import PackedMeta, segment_ids_of
from wands.transfer import to_device

_CHUNK = 2**24  # number of values hashed at a time, which limits temporary memory to about 100 MB
_SIDES = {"tokens": 1, "text": 2, "image": 3, "time": 4}


class RowKeys(dict[str, Tensor]):
    """Row keys of one forward pass by kind of row: "tokens" (video), "text", "image" (CLIP) and "time" (timesteps)."""

    def set(self, meta: PackedMeta, image_len: int) -> None:
        """Compute the row keys of packed samples, and replace the earlier ones.

        `meta.dropout_keys` must have one number for each sample. `image_len` is the number of CLIP tokens of each sample.
        """
        assert len(meta.dropout_keys) == len(meta.local_seq_lens), "dropout needs meta.dropout_keys"
        device = meta.segment_ids.device
        samples = to_device(torch.tensor(meta.dropout_keys, dtype=torch.int64), device)
        frame, row, column = meta.positions.unbind(1)
        timestep_samples = meta.timestep_samples or tuple(range(len(samples)))
        lens_of = {
            "text": meta.text_lens,
            "image": (image_len,) * len(samples),
            "time": tuple(timestep_samples.count(sample) for sample in range(len(samples))),
        }
        places = (frame << 42) + (row << 21) + column
        self["tokens"] = _row_keys(samples, "tokens", meta.segment_ids, places)
        for side, lens in lens_of.items():
            ids = segment_ids_of(lens)
            positions = torch.arange(len(ids)) - (torch.tensor(lens).cumsum(0) - torch.tensor(lens))[ids]
            self[side] = _row_keys(samples, side, to_device(ids, device), to_device(positions, device))


class KeyedDropout(nn.Module):
    """Dropout layer like `torch.nn.Dropout`, with hashes of row keys and the layer's name as masks.

    `keys.set` must be called before each forward pass. Layers with different names have independent masks.
    """

    def __init__(self, p: float, name: str, keys: RowKeys) -> None:
        super().__init__()
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.p = p
        self.side = side_of(name)
        self._keys = keys
        self._salt = int.from_bytes(digest, "little", signed=True)

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [..., C] in training; in evaluation, return x.

        x has one row for each row key. Text has one more row at the end, the padding that all samples share, which is never
        dropped.
        """
        if not self.training or self.p == 0:
            return x
        rows = self._keys[self.side]
        num_rows = x.numel() // x.shape[-1]
        assert len(rows) == num_rows - (self.side == "text"), (self.side, len(rows), tuple(x.shape))
        return _Drop.apply(x, rows, self._salt, self.p)


def add_dropout(model: nn.Module, p: float, lora_p: float) -> RowKeys:
    """Replace the dropout layers of a packed DiT and of its LoRA with `KeyedDropout` layers.

    Args:
        model: packed DiT.
        p: dropout probability of attention outputs and of the feed-forward's hidden states; 0 leaves the layers of the blocks.
        lora_p: dropout probability of the LoRA inputs; 0 leaves the layers of the LoRA.

    Returns:
        The row keys of all new layers. Call their method `set` before each forward pass.
    """
    keys = RowKeys()
    for name, module in list(model.named_modules()):
        if p and isinstance(module, nn.Dropout) and name.startswith("blocks."):
            model.set_submodule(name, KeyedDropout(p, name, keys))
        elif lora_p and hasattr(module, "lora_dropout"):
            for adapter in module.lora_dropout:
                module.lora_dropout[adapter] = KeyedDropout(lora_p, f"{name}.lora", keys)
    return keys


def side_of(name: str) -> str:
    """Return the kind of the rows in the input of the layer `name`, see `RowKeys`."""
    if "image_embedder" in name or ".add_k_proj" in name or ".add_v_proj" in name:
        return "image"
    if "text_embedder" in name or ".attn2.to_k" in name or ".attn2.to_v" in name:
        return "text"
    return "time" if "condition_embedder.time" in name else "tokens"


class _Drop(torch.autograd.Function):
    """Autograd function for dropout: one mask for input and gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, salt: int, p: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.salt = salt
        ctx.p = p
        return _drop(x, rows, salt, p)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _drop(dout, rows, ctx.salt, ctx.p), None, None, None


def _drop(x: Tensor, rows: Tensor, salt: int, p: float) -> Tensor:
    """Return a copy of x [..., C] with dropout in its first `len(rows)` rows."""
    out = x.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1, x.shape[-1])
    step = max(_CHUNK // x.shape[-1], 1)
    for begin in range(0, len(rows), step):
        chunk = rows[begin : begin + step]
        mask = keep_mask(chunk, salt, x.shape[-1], p)
        flat[begin : begin + len(chunk)].mul_(1 / keep_probability(p)).masked_fill_(mask.logical_not_(), 0)
    return out


def keep_probability(p: float) -> float:
    """Return the probability that a value is kept: 1 - p, rounded to a multiple of 2**-16."""
    return 1 - _threshold(p) / 2**16


def _threshold(p: float) -> int:
    return min(round(p * 2**16), 2**16 - 1)


def keep_mask(rows: Tensor, salt: int, channels: int, p: float) -> Tensor:
    """Return a mask [N, C] of the values that dropout keeps, from row keys [N] and `salt`, the hash of the layer's name.

    Each row and pair of adjacent channels has one hash of 32 bits. A value is dropped if its 16 bits are below p * 2**16.
    Source: Chris Wellons, Hash Prospector, lowbias32 (public domain).
    """
    pairs = torch.arange(-(-channels // 2), device=rows.device)
    bits = _low_word(_mix64(rows + salt))[:, None] ^ _low_word(_mix64(pairs + _signed(0x9E3779B97F4A7C15)))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        bits ^= (bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)  # clears the copies of the sign bit
        if factor is not None:
            bits *= _signed(factor, 32)
    return bits.view(torch.int16)[:, :channels] >= _threshold(p) - 2**15


def _row_keys(samples: Tensor, side: str, segment_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the row keys of one kind: hashes of the sample's key, the kind and the position of the row in its sample."""
    return _mix64(_mix64(samples + _SIDES[side])[segment_ids] + positions)


def _mix64(z: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to int64 values. It is defined for uint64; int64 gives the same bits, even on overflow.

    Source: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators.
    """
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def _low_word(z: Tensor) -> Tensor:
    return z.view(torch.int32).view(-1, 2)[:, 0]


def _signed(value: int, bits: int = 64) -> int:
    return value - 2**bits if value >= 2 ** (bits - 1) else value
