"""Dropout whose masks depend on the sample, the layer, the row's place in its sample and the channel, and on nothing else.

A mask is a hash and not a stream of random numbers: a clip has the same one in any pack, on any rank of any grid, when a block
runs again in backward, after a restart, and on a CPU as on a GPU. Backward works it out again, so none is kept.

Letters: N rows, C channels, L tokens, T text rows, S samples, I rows of each sample's pictures, M timesteps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wands.attention.packed import PackedMeta, segment_ids_of

_CHUNK = 2**24  # channels hashed at a time: what is in between takes some 100 MB at most
_SIDES = {"tokens": 1, "text": 2, "image": 3, "time": 4}


class RowKeys:
    """What the rows of one forward are hashed by; all dropout layers of a model look here."""

    def __init__(self) -> None:
        self._keys: Mapping[str, Tensor] = {}

    def __getitem__(self, side: str) -> Tensor:
        """int64 [N], the keys of the rows of one side: "tokens", "text", "image" or "time"."""
        return self._keys[side]

    def set(self, meta: PackedMeta, image_len: int) -> None:
        """Take the rows of a pack; they stay for its backward, until the next forward.

        Args:
            meta: with a key for each sample.
            image_len: rows of each sample's pictures, 0 for none.
        """
        assert len(meta.dropout_keys) == len(meta.local_seq_lens), "dropout needs meta.dropout_keys"
        device = meta.segment_ids.device
        samples = torch.tensor(meta.dropout_keys, dtype=torch.int64).to(device, non_blocking=True)
        frame, row, column = meta.positions.unbind(1)
        owners = meta.timestep_samples or tuple(range(len(samples)))
        counts = {
            "text": meta.text_lens,
            "image": (image_len,) * len(samples),
            "time": tuple(owners.count(sample) for sample in range(len(samples))),
        }
        keys = {
            "tokens": _row_keys(samples, "tokens", meta.segment_ids, (frame << 42) + (row << 21) + column)
        }
        for side, lens in counts.items():
            owner = segment_ids_of(lens)
            place = torch.arange(len(owner)) - (torch.tensor(lens).cumsum(0) - torch.tensor(lens))[owner]
            keys[side] = _row_keys(
                samples, side, *(one.to(device, non_blocking=True) for one in (owner, place))
            )
        self._keys = keys


class KeyedDropout(nn.Module):
    """Zeroes a share `p` of its input in training and scales the rest, as `torch.nn.Dropout` does.

    Args:
        p: share of the values.
        name: of the layer; those of two names are independent.
        keys: of the rows.
    """

    def __init__(self, p: float, name: str, keys: RowKeys) -> None:
        super().__init__()
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.p = p
        self.side = side_of(name)
        self._salt = int.from_bytes(digest, "little", signed=True)
        self._keys = keys

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> the same; rows are all dimensions but the last, in the order of the keys.

        The row behind all text, which stands for every zero pad of every sample, belongs to none of them and stays whole.
        """
        if not self.training or self.p == 0:
            return x
        rows, num_rows = self._keys[self.side], x.numel() // x.shape[-1]
        assert len(rows) == num_rows - (self.side == "text"), (self.side, len(rows), tuple(x.shape))
        return _Drop.apply(x, rows, self._salt, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, side={self.side}"


def add_dropout(model: nn.Module, p: float, lora_p: float) -> RowKeys:
    """Put dropout layers into a packed DiT's blocks, and before its LoRA.

    Args:
        model: with its LoRA, if any.
        p: share of the results of the attentions and of the hidden states of the feed-forwards.
        lora_p: share of the inputs of the LoRA.

    Returns:
        Where the layers look for the keys of their rows.
    """
    keys = RowKeys()
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if p and isinstance(module, nn.Dropout) and name.startswith("blocks."):
            model.get_submodule(parent)[int(leaf)] = KeyedDropout(p, name, keys)  # they stand in lists
        elif lora_p and hasattr(module, "lora_dropout"):
            for adapter in module.lora_dropout:
                module.lora_dropout[adapter] = KeyedDropout(lora_p, f"{name}.lora", keys)
    return keys


def side_of(name: str) -> str:
    """Which rows a layer works on, by its name in the model."""
    if "image_embedder" in name or ".add_k_proj" in name or ".add_v_proj" in name:
        return "image"
    if "text_embedder" in name or ".attn2.to_k" in name or ".attn2.to_v" in name:
        return "text"
    return "time" if "condition_embedder.time" in name else "tokens"


class _Drop(torch.autograd.Function):
    """Mask and scale; backward does the same to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, salt: int, p: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.salt, ctx.p = salt, p
        return _drop(x, rows, salt, p)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return _drop(dout, rows, ctx.salt, ctx.p), None, None, None


def _drop(x: Tensor, rows: Tensor, salt: int, p: float) -> Tensor:
    """[..., C] with the mask of its first len(rows) rows; those behind them stay."""
    out = x.clone(memory_format=torch.contiguous_format)
    flat, step = out.view(-1, x.shape[-1]), max(_CHUNK // x.shape[-1], 1)
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        kept = keep_mask(some, salt, x.shape[-1], p)
        flat[begin : begin + len(some)].mul_(1 / keep_share(p)).masked_fill_(kept.logical_not_(), 0)
    return out


def keep_share(p: float) -> float:
    """Share of the values that are kept: 1 - p in steps of 2**-16."""
    return 1 - _threshold(p) / 2**16


def _threshold(p: float) -> int:
    return min(round(p * 2**16), 2**16 - 1)


def keep_mask(rows: Tensor, salt: int, channels: int, p: float) -> Tensor:
    """Which values a layer keeps, bool [N, C].

    Each pair of channels shares 32 bits: of the row's hash and the pair's, mixed.

    Args:
        rows: keys, int64 [N].
        salt: of the layer.
        channels: C.
        p: share that is dropped.

    Source: Chris Wellons, Hash Prospector, lowbias32 (public domain).
    """
    pairs = torch.arange(-(-channels // 2), device=rows.device)
    bits = _low_word(_mix64(rows + salt))[:, None] ^ _low_word(_mix64(pairs + _signed(0x9E3779B97F4A7C15)))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        bits ^= (bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)  # the sign must not be shifted in
        if factor is not None:
            bits *= _signed(factor, 32)
    return bits.view(torch.int16)[:, :channels] >= _threshold(p) - 2**15


def _row_keys(samples: Tensor, side: str, owner: Tensor, place: Tensor) -> Tensor:
    """int64 [N]: a hash of each row's sample, side and place."""
    return _mix64(_mix64(samples + _SIDES[side])[owner] + place)


def _mix64(z: Tensor) -> Tensor:
    """The finalizer of splitmix64 on int64, which wraps as unsigned numbers do.

    Source: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators.
    """
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def _low_word(z: Tensor) -> Tensor:
    """The lower 32 bits, int32."""
    return z.view(torch.int32).view(-1, 2)[:, 0]


def _signed(value: int, bits: int = 64) -> int:
    return value - 2**bits if value >= 2 ** (bits - 1) else value
