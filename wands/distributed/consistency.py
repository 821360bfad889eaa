"""Compare values across ranks, bit by bit, and name the ranks that differ.

Without these checks, ranks with different configurations, data or weights hang, or train with wrong results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wands.distributed.bootstrap import gather_objects
from wands.errors import ConfigError, DataError
from wands.files import first_difference

NUM_NAMED = 3
_CHUNK = 1 << 22
"""Number of elements that are hashed at a time, which limits the temporary int64 tensors to a few times 32 MiB."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_MULTIPLIERS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))


def check_agreement(
    parts: Mapping[str, str], device: torch.device, fixes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that texts, such as the recipe as JSON or a digest of the data, are equal on all ranks.

    Every rank must call this function. If all agree, it costs one all-gather of 32 bytes; the texts are sent only if they differ.

    Args:
        parts: digests or JSON objects by name. The error names the first that differs as the cause, and its first key that
            differs, so put a value before those that are computed from it. A missing value counts as different.
        device: device whose tensors the process group's backend can send.
        fixes: end of the error message by name. The default is "start every rank with the same NAME".

    Raises:
        ConfigError: if a text differs. All ranks raise the same message: the name, the ranks that differ from most, and the fix.
    """
    text = json.dumps(sorted(parts.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    table = all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device))
    if bool((table == table[0]).all()):
        return
    rank_parts = gather_objects(dict(parts))
    # Maps a grouping of the ranks to the names of the texts that are equal inside each group.
    by_groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(chain(*rank_parts)):
        groups = group_ranks([texts.get(name) for texts in rank_parts])
        if len(groups) > 1:
            by_groups.setdefault(str(groups), []).append(name)
    messages = []
    for name, *consequences in by_groups.values():
        fix = fixes.get(name, f"start every rank with the same {name}")
        messages.append(f"{_describe(name, consequences, [texts.get(name) for texts in rank_parts])}; {fix}.")
    raise ConfigError(messages, agreed=True)


def _describe(name: str, consequences: Sequence[str], texts: Sequence[str | None]) -> str:
    """Return a clause about a value that differs, such as "the recipe of rank 3 (train.seed=3, not 0) differs from the recipe of
    ranks 0-2, and so does the data". The `consequences` are other values that differ between the same ranks.
    """
    reference, *others = group_ranks(texts)
    odd = [f"of {name_ranks(ranks)}{_first_key(texts[ranks[0]], texts[reference[0]])}" for ranks in others]
    if rest := list(chain(*others[NUM_NAMED:])):
        odd[NUM_NAMED:] = [f"of {len(rest)} more"]
    also = f", and so {'do' if len(consequences) > 1 else 'does'} the {', the '.join(consequences)}"
    return f"the {name} {', '.join(odd)} differs from the {name} of {name_ranks(reference)}{also if consequences else ''}"


def _first_key(odd: str | None, usual: str | None) -> str:
    """Return the first key that differs, such as " (train.seed=3, not 0)"; " (missing)" if `odd` is None; "" without a key."""
    if odd is None or usual is None:
        return " (missing)" if odd is None else ""
    try:
        found = first_difference(json.loads(odd), json.loads(usual))
    except ValueError:
        return ""
    key, here, there = found or ("", None, None)  # no difference: equal values such as 1 and 1.0
    return f" ({key}={shorten_value(here)}, not {shorten_value(there)})" if key else ""


def shorten_value(value: Any, most: int = 60) -> str:
    """Return a JSON value as a text, cut to `most` characters and "..."."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]}..."


def check_tensors_agree(
    names: Sequence[str], checksums: Tensor, num_parts: Sequence[int] | None = None
) -> None:
    """Check that the checksums of tensors (int64 [N], of `tensor_checksum`) are equal on all ranks, which must all call it.

    The process group's backend must be able to send `checksums`. `num_parts` is the number of consecutive ranks that have
    different parts of each tensor; only ranks with the same part are then compared.

    Raises:
        DataError: if a checksum differs. All ranks raise the same message with the names of the tensors and the ranks.
    """
    table = all_gather(checksums).cpu().numpy()
    if num_parts is not None and max(num_parts, default=1) > 1:
        rows = np.arange(len(table))[:, None] % np.array(num_parts)
        equals_first = table == np.take_along_axis(
            table, rows, axis=0
        )  # the first rank that has the same part
        table = np.where((np.array(num_parts) > 1) & equals_first, 0, table)
    columns = np.flatnonzero((table != table[0]).any(axis=0))
    if not len(columns):
        return
    # Maps a description of ranks to the names of the tensors that differ between these ranks.
    by_groups: dict[str, list[str]] = {}
    for column in columns:
        reference, *others = group_ranks(table[:, column].tolist())
        key = f"between {name_ranks(sorted(chain(*others)))} and {name_ranks(reference)}"
        by_groups.setdefault(key, []).append(names[int(column)])
    clauses = []
    for ranks, differing in by_groups.items():
        rest = len(differing) - NUM_NAMED
        listed = ", ".join(differing[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        clauses.append(f"{listed} {ranks}")
    raise DataError(
        f"the weights differ between ranks ({len(columns)} of {len(names)} parameters): {'; '.join(clauses[:NUM_NAMED])}. "
        "Continue from the last checkpoint with --resume. If the error returns, test the memory and the network of the "
        "machines that run these ranks.",
        agreed=True,
    )


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Hash the bits of a tensor, with elements of 1, 2, 4 or 8 bytes, to an int64 scalar on the tensor's device.

    Each integer of at most 32 bits and its position (32 bits) form a 64-bit number, which a one-to-one function scrambles. The
    hash is the sum modulo 2^64: it does not depend on the order of addition, and changes whenever exactly one integer changes.
    Tensors that differ in more have equal hashes with probability 2^-64. NaNs are hashed by their bits.

    Source: the finalizer of MurmurHash3 (Appleby), with its multipliers and shifts.
    """
    bits = tensor.contiguous().flatten().view(_BITS[tensor.element_size()])
    assert bits.numel() < 1 << 32, "a tensor must have fewer than 2**32 elements"
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start, start + len(part), device=tensor.device)
        mixed = part.bitwise_left_shift_(32).bitwise_or_(positions)
        for multiplier in _MULTIPLIERS:
            mixed ^= _high_bits(mixed)
            mixed *= multiplier
        mixed ^= _high_bits(mixed)
        total += mixed.sum()
    return total


def _high_bits(values: Tensor) -> Tensor:
    """Return the upper 31 bits of each int64 value as a non-negative number. A plain right shift would copy the sign bit."""
    return values.bitwise_right_shift(33).bitwise_and_((1 << 31) - 1)


def all_gather(values: Tensor) -> Tensor:
    """Gather a tensor of the same shape from every rank into one tensor [world_size, *values.shape]."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def group_ranks(values: Sequence[Any]) -> list[list[int]]:
    """Group the ranks that have equal values: the largest group first, then by the lowest rank."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text for ranks in ascending order, such as "rank 3" or "ranks 0-2, 7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
