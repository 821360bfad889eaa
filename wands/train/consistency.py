"""Do all ranks train the same thing? They compare what they were given before the first step, and their weights after it.

Ranks with another recipe, another copy of the data, or weights that drifted apart do not fail by themselves: they wait for each
other for ever, or train on in silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wands import __version__
from wands.data.cache.format import first_difference
from wands.data.cache.reader import LatentCache
from wands.data.datasets import CombinedDataset
from wands.data.packing import Step
from wands.data.sampler import StepPlan
from wands.errors import ConfigError, DataError, WandsError
from wands.train.run import TrainingRun

_OTHER_CURE = (ConfigError, "start every rank with the same")
_CURES: dict[str, tuple[type[WandsError], str]] = {
    "recipe": (ConfigError, "start every node with the same recipe file and the same --set"),
    "DeepSpeed config": (ConfigError, "start every node with the same --deepspeed file"),
    "software": (ConfigError, "install the same versions on every node"),
    "model config": (ConfigError, "give every node the same model folder (model.path)"),
    "context parallelism": (
        ConfigError,
        "set parallel.ulysses_degree and parallel.ring_degree, or start as many processes on every node",
    ),
    "data": (
        DataError,
        "give every node the same cache (data.cache): one folder that all see, or whole copies of one",
    ),
    "plan": (ConfigError, "start every node from the same checkpoint, on the same data and recipe"),
}
_NUM_NAMED = 3
_CHUNK = 1 << 22
"""Elements hashed at once: a few int64 temporaries of 32 MiB, whatever the size of the parameter."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


# ---- what the ranks were given


def plan_digests(run: TrainingRun, step: int = 0) -> dict[str, str]:
    """What must be the same on all ranks before any of them builds the engine; for `check_agreement`.

    Small things are JSON objects, so that a message can name the key; what grows with the data is hashed. No key of the recipe
    may differ: paths are compared as text, so a node-local copy must have the same path everywhere.

    Args:
        run: from `prepare_run`.
        step: optimizer steps already made, when the run resumes. Asks the sampler for its epoch, so call it before
            another thread reads ahead.
    """
    epoch = run.sampler.epoch_of(step)
    plan = {
        "start_step": step,
        "total_steps": run.sampler.total_steps,
        "bins": bins_digest(run.sampler.epoch_plan(epoch).steps),
    }
    parts: dict[str, Any] = {
        "recipe": run.recipe.model_dump(mode="json"),
        "DeepSpeed config": run.ds_config,
        "software": _versions(),
        "model config": run.transformer_config,
        "context parallelism": dict(zip(("ulysses_degree", "ring_degree"), run.degrees, strict=True)),
        "data": _describe_data(run),
        "plan": plan,
    }
    return {name: json.dumps(part, sort_keys=True) for name, part in parts.items()}


def bins_digest(steps: Sequence[Step]) -> str:
    """Changes when a sample moves to another bin, place or step.

    Args:
        steps: steps -> bins -> sample indices, such as `(plan.bins,)` of one StepPlan.
    """
    bins = list(chain.from_iterable(steps))
    per_step = np.fromiter(map(len, steps), np.int64, len(steps))
    per_bin = np.fromiter(map(len, bins), np.int64, len(bins))
    return _digest(per_step, per_bin, np.fromiter(chain.from_iterable(bins), np.int64, int(per_bin.sum())))


def _describe_data(run: TrainingRun) -> dict[str, Any]:
    lengths = np.asarray(run.seq_lens, np.int64)
    names = np.frombuffer("\0".join(run.data.keys).encode("utf-8", "surrogateescape"), np.uint8)
    found = {
        "num_samples": len(run.data.keys),
        "num_tokens": int(lengths.sum()),
        "names": _digest(names),
        "lengths": _digest(lengths),
    }
    caches = [part.data for part in run.data.sources] if isinstance(run.data, CombinedDataset) else [run.data]
    for number, cache in enumerate(caches):
        if isinstance(cache, LatentCache):
            # Another encoding of the same clips has the same names and lengths; its bits have other checksums.
            index, name = cache.index, f"contents of source {number}" if number else "contents"
            found[name] = _digest(index.crc32, index.text_lens, index.null_text)
    return found


def _versions() -> dict[str, str]:
    import deepspeed
    import diffusers

    modules = {"torch": torch, "deepspeed": deepspeed, "diffusers": diffusers, "numpy": np}
    return {"wands": __version__} | {name: str(module.__version__) for name, module in modules.items()}


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_agreement(parts: Mapping[str, str], device: torch.device) -> None:
    """Compare named texts over all ranks; every rank must call it.

    Where all is well this costs one all-gather of 32 bytes. The texts travel only when there is a difference to name.

    Args:
        parts: name -> digest, or a JSON object whose first differing key the message shall name; causes before their
            consequences. The ranks need not bring the same names.
        device: of this rank; the process group's backend can send from it.

    Raises:
        ConfigError, DataError: the same sentence on all ranks: which part differs, which ranks hold the odd one against the
            largest group, and the cure.
    """
    text = json.dumps(sorted(parts.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
    table = _all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device))
    if bool((table == table[0]).all()):
        return
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, dict(parts))
    alike: dict[str, list[str]] = {}  # how the ranks fall apart -> the parts in which they do
    for name in dict.fromkeys(chain(*found)):
        factions = _factions([brought.get(name) for brought in found])
        if len(factions) > 1:
            alike.setdefault(str(factions), []).append(name)
    problems = [_describe_difference(names, found) for names in alike.values()]
    first = next(iter(alike.values()))[0]
    raise _CURES.get(first, _OTHER_CURE)[0](
        problems[0]
        if len(problems) == 1
        else "\n".join(
            [f"{len(problems)} things differ between the ranks:", *(f"  - {p}" for p in problems)]
        ),
        agreed=True,
    )


def _describe_difference(names: Sequence[str], found: Sequence[Mapping[str, str]]) -> str:
    """One sentence for parts in which the ranks fall apart alike: the first is taken for the cause of the others."""
    name, *consequences = names
    texts = [brought.get(name) for brought in found]
    reference, *others = _factions(texts)
    odd = [
        f"of {_ranks(ranks)}{_first_key(texts[ranks[0]], texts[reference[0]])}"
        for ranks in others[:_NUM_NAMED]
    ]
    if rest := list(chain(*others[_NUM_NAMED:])):
        odd.append(f"of {len(rest)} more")
    also = f", and so {'do' if len(consequences) > 1 else 'does'} the {', the '.join(consequences)}"
    cure = _CURES.get(name, (ConfigError, f"{_OTHER_CURE[1]} {name}"))[1]
    return f"the {name} {', '.join(odd)} differs from that of {_ranks(reference)}{also if consequences else ''}; {cure}."


def _first_key(odd: str | None, usual: str | None) -> str:
    """What to say of a difference in brackets: the first key of a JSON object, nothing for a digest."""
    if odd is None or usual is None:
        return " (there is none)" if odd is None else ""
    try:
        ours, theirs = json.loads(odd), json.loads(usual)
    except ValueError:
        return ""
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ""
    if (difference := first_difference(ours, theirs)) is None:  # 1 and 1.0
        return ""
    key, here, there = difference
    return f" ({key}={_shorten(here)}, not {_shorten(there)})"


def _shorten(value: Any, most: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."


# ---- weights


def weights_checksums(module: torch.nn.Module, device: torch.device) -> tuple[list[str], Tensor]:
    """One number for each parameter as this rank would compute with it; every rank must call it.

    Under ZeRO-3 a parameter that this rank holds whole (DeepSpeed keeps small ones so) is read where it lies: gathering would
    replace the replica in question. The others are gathered one at a time and let go.

    Args:
        module: of the engine, at the end of a step.
        device: where the numbers go; each is computed where its parameter lies.

    Returns:
        Names, and int64 [P].
    """
    names, sums = [], []
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            names.append(name)
            if _is_sharded(parameter):
                from deepspeed import zero

                with zero.GatheredParameters([parameter]):
                    sums.append(tensor_checksum(parameter.detach()).to(device))
            else:
                sums.append(tensor_checksum(parameter.detach()).to(device))
    return names, torch.stack(sums)


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    if not hasattr(parameter, "ds_id"):
        return False
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return parameter.ds_status is not ZeroParamStatus.AVAILABLE


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Hash the bits of a tensor: int64 scalar on its device.

    Each element's bits, with its place, go through a bijection of 64-bit integers, and the results are added modulo 2^64. So one
    changed element always changes the sum; any other change, a permutation too, goes unseen with a chance of 2^-64. Integer sums
    do not depend on the order of adding, and a NaN is bits like any other.

    Args:
        tensor: any shape, elements of 1, 2, 4 or 8 bytes.

    Source: the finaliser of MurmurHash3 (Appleby), its multipliers and shifts.
    """
    bits = tensor.contiguous().flatten().view(_BITS[tensor.element_size()])
    assert bits.numel() < 1 << 32, "a place has 32 bits"
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(part), device=tensor.device)
        mixed = part.bitwise_left_shift_(32).bitwise_or_(places)
        for multiplier in (_MULTIPLIERS[0], _MULTIPLIERS[1]):
            mixed ^= _high_bits(mixed)
            mixed *= multiplier
        mixed ^= _high_bits(mixed)
        total += mixed.sum()
    return total


_MULTIPLIERS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))


def _high_bits(values: Tensor) -> Tensor:
    """The upper 31 bits, unsigned: torch shifts int64 with its sign."""
    return values.bitwise_right_shift(33).bitwise_and_((1 << 31) - 1)


def check_weights_agree(engine: Any, device: torch.device) -> int:
    """Compare every parameter over all ranks, bit by bit; every rank must call it, between two steps.

    One all-gather carries the checksums of all parameters. It changes no bit of the training and leaves nothing gathered. A
    shard that only one rank holds has nothing to be compared with, nor have the optimizer's shards.

    Args:
        engine: the DeepSpeed engine.
        device: of this rank.

    Returns:
        Number of parameters compared.

    Raises:
        ConfigError: the ranks built different models.
        DataError: weights differ; the same sentence on all ranks names parameters and ranks.
    """
    shapes = {
        name: f"{parameter.dtype} {list(getattr(parameter, 'ds_shape', parameter.shape))}{_is_sharded(parameter) * ' sharded'}"
        for name, parameter in engine.module.named_parameters()
    }
    check_agreement({"model": json.dumps(shapes)}, device)  # else the gathers below would hang
    names, sums = weights_checksums(engine.module, device)
    table = _all_gather(sums).cpu().numpy()
    columns = np.flatnonzero((table != table[0]).any(axis=0))
    if not len(columns):
        return len(names)
    by_factions: dict[str, list[str]] = {}
    for column in columns:
        reference, *others = _factions(table[:, column].tolist())
        key = f"of {_ranks(sorted(chain(*others)))} against {_ranks(reference)}"
        by_factions.setdefault(key, []).append(names[column])
    clauses = [f"{_list_names(found)} {ranks}" for ranks, found in by_factions.items()]
    raise DataError(
        f"the weights of the ranks have drifted apart ({len(columns)} of {len(names)} parameters): "
        f"{'; '.join(clauses[:_NUM_NAMED])}; go on from the last checkpoint with --resume, and if it comes back test the memory "
        "and the network of the machine of these ranks.",
        agreed=True,
    )


def check_step(engine: Any, plan: StepPlan, device: torch.device) -> int:
    """What the ranks compare between two steps: the plan of the step that is over, and the weights it left.

    The plan is handed in, for the sampler belongs to the thread that reads ahead.

    Args:
        engine: the DeepSpeed engine.
        plan: of the step just made.
        device: of this rank.

    Returns:
        Number of parameters compared.

    Raises:
        ConfigError: the ranks made different steps.
        DataError: weights differ.
    """
    done = {"step": plan.step, "bins": bins_digest((plan.bins,))}
    check_agreement({"plan": json.dumps(done)}, device)
    return check_weights_agree(engine, device)


def _list_names(names: Sequence[str]) -> str:
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# ---- ranks


def _all_gather(values: Tensor) -> Tensor:
    """Row r is rank r's: [world, *values.shape]."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def _factions(values: Sequence[Any]) -> list[list[int]]:
    """Ranks that hold the same, the largest group first; of equal groups the one with the lowest rank."""
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
