"""State of a DeepSpeed engine as named tensors and plain values, so that a checkpoint contains no pickle.

Each rank stores the fragments that it owns. A fragment is a range of a flattened trained parameter: its fp32 master weights
and its optimizer states, each [N]. The tensors have names such as "blocks.0.attn1.to_q.weight/exp_avg". At every ZeRO stage
the fragments of all ranks cover each parameter exactly once, so a reader needs neither DeepSpeed nor the number of ranks.
At ZeRO-0 every rank has the whole state, and only rank 0 stores it.

8-bit AdamW has states for each fragment, so the names also contain the parameter: "blocks.0.attn1.to_q.weight/absmax1". Other
states that are not one value for each weight, such as a step count, belong to a flat tensor: the tensor that the optimizer
updates. At ZeRO-0 it is a parameter, otherwise a rank's partition of many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wands.errors import CheckpointError
from wands.model.files.tensor_files import LazyTensor

MASTER, FROZEN = "master", "frozen"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Fragment(NamedTuple):
    """Range of a flattened parameter that this rank owns.

    Attributes:
        name: name of the parameter.
        start: index of the first value in the flattened parameter.
        shape: shape of the whole parameter.
        flat: number of the flat tensor that contains the values, in the order of the optimizer.
        offset: index of the first value in the flat tensor.
        read: function that returns the current values, [N], as a view.
    """

    name: str
    start: int
    shape: list[int]
    flat: int
    offset: int
    read: Callable[[], Tensor]


def trained_fragments(engine: Any) -> list[Fragment]:
    """Return this rank's fragments of all trained parameters, without empty fragments.

    `Fragment.read` returns the fp32 master weights after the last update.
    """
    with _base_optimizer(engine) as base:
        order = {id(flat): number for number, flat in enumerate(_flats(base))}
        found = [
            _fragment(engine, name, parameter, order)
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad
        ]
    return [fragment for fragment in found if fragment is not None and fragment.read().numel()]


def fragments_by_flat(engine: Any) -> dict[Tensor, list[Fragment]]:
    """Return this rank's fragments of all trained parameters by the flat tensor that contains them."""
    fragments = trained_fragments(engine)
    with _base_optimizer(engine) as base:
        return {
            flat: [fragment for fragment in fragments if fragment.flat == number]
            for number, flat in enumerate(_flats(base))
        }


def engine_tensors(engine: Any) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return the state of an engine: the tensors that this rank stores, and everything else as JSON values.

    The JSON object has the keys "fragments" (name -> [start, shape]), "frozen" (the same for frozen parameters; empty with a
    LoRA), "flat_sizes", "optimizer" and "scheduler" (their state dicts without tensors) and "counters".
    """
    with _base_optimizer(engine) as base:
        flats, state = _flats(base), base.state_dict()
    scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    counters = {name: getattr(engine, name) for name in COUNTERS}
    return state_tensors(
        trained_fragments(engine), list(_frozen_fragments(engine)), flats, state, scheduler, counters
    )


def state_tensors(
    fragments: Sequence[Fragment],
    frozen: Sequence[Fragment],
    flats: Sequence[Tensor],
    optimizer: Mapping[str, Any],
    scheduler: Any,
    counters: Mapping[str, int],
) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return the result of `engine_tensors` for a state that is given by its parts.

    Args:
        fragments: this rank's fragments of the trained parameters.
        frozen: this rank's fragments of the frozen parameters.
        flats: the flat tensors, in the order of the optimizer.
        optimizer: state dict of the torch optimizer.
        scheduler: state dict of the learning rate schedule; None without a schedule.
        counters: maps each name in `COUNTERS` to its value.
    """
    tensors = [_lazy(f"{fragment.name}/{MASTER}", fragment.read()) for fragment in fragments]
    plain: dict[str, dict[str, Any]] = {}
    for number, nested in optimizer["state"].items():
        own = [fragment for fragment in fragments if fragment.flat == number]
        values = _without_nesting(nested, [fragment.name for fragment in own])
        plain[str(number)] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for key, value in values.items():
            if isinstance(value, Tensor) and "/" not in key and _is_flat(value, flats[number]):
                tensors += [_lazy(f"{fragment.name}/{key}", cut_flat(value, fragment)) for fragment in own]
            elif isinstance(value, Tensor):
                tensors.append(_lazy(key if "/" in key else f"flat.{number}/{key}", value))
    tensors += [_lazy(f"{fragment.name}/{FROZEN}", fragment.read()) for fragment in frozen]
    return tensors, {
        "fragments": _places(fragments),
        "frozen": _places(frozen),
        "flat_sizes": [flat.numel() for flat in flats],
        "optimizer": {"state": plain, "param_groups": optimizer["param_groups"]},
        "scheduler": scheduler,
        "counters": dict(counters),
    }


def _places(fragments: Iterable[Fragment]) -> dict[str, list[Any]]:
    return {fragment.name: [fragment.start, fragment.shape] for fragment in fragments}


@torch.no_grad()
def load_engine(engine: Any, file: Any, values: Mapping[str, Any], label: str) -> None:
    """Restore the state of an engine. Every rank must call this function.

    Args:
        engine: a new engine with the same partition of the weights as the engine whose state was stored.
        file: open safetensors file with the tensors of `engine_tensors`.
        values: JSON values of `engine_tensors`.
        label: start of error messages, such as "--resume runs/default".

    Raises:
        CheckpointError: if this run divides the weights differently among the ranks.
    """
    fragments = trained_fragments(engine)
    with _base_optimizer(engine) as base:
        flat_sizes = [flat.numel() for flat in _flats(base)]
    if (values["fragments"], values["flat_sizes"]) != (_places(fragments), flat_sizes):
        raise CheckpointError(
            f"{label}: the checkpoint divides the weights differently among the ranks; use the DeepSpeed JSON of the run that "
            "wrote the checkpoint.",
            agreed=True,
        )
    keys: dict[str, list[str]] = {}
    for name in file.keys():  # noqa: SIM118, not a dict
        owner, _, key = name.rpartition("/")
        keys.setdefault(owner, []).append(key)
    optimizer = engine.optimizer
    is_zero = engine.zero_optimization_stage() > 0
    gathers = hasattr(
        optimizer, "checkpoint_event_prologue"
    )  # ZeRO-3 keeps some parameters whole between steps
    if gathers:
        optimizer.checkpoint_event_prologue()
    for fragment, key in [(f, MASTER) for f in fragments] + [(f, FROZEN) for f in _frozen_fragments(engine)]:
        fragment.read().copy_(file.get_tensor(f"{fragment.name}/{key}"))
    with _base_optimizer(engine) as base:
        flats, has_fragments = _flats(base), hasattr(base, "fragments")
        state = {int(number): dict(plain) for number, plain in values["optimizer"]["state"].items()}
        for fragment in fragments:
            for key in set(keys[fragment.name]) - {MASTER}:
                value = file.get_tensor(f"{fragment.name}/{key}")
                if has_fragments:
                    state[fragment.flat].setdefault(fragment.name, {})[key] = value
                    continue
                flat = flats[fragment.flat]
                if key not in state[fragment.flat]:
                    state[fragment.flat][key] = torch.zeros(flat.shape, dtype=value.dtype)
                cut_flat(state[fragment.flat][key], fragment).copy_(value)
        for number in state:
            state[number] |= {
                key: file.get_tensor(f"flat.{number}/{key}") for key in keys.get(f"flat.{number}", ())
            }
        loaded = {"state": state, "param_groups": values["optimizer"]["param_groups"]}
        if not is_zero:
            base.load_state_dict(loaded)
    if is_zero:
        # DeepSpeed's own function also copies the masters to the weights. Its tree refers to the masters filled above.
        tree = optimizer.state_dict()
        tree["optimizer_state_dict" if "optimizer_state_dict" in tree else "base_optimizer_state"] = loaded
        optimizer.load_state_dict({dist.get_rank(): tree}, load_from_fp32_weights=True)
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        if gathers:
            optimizer.checkpoint_event_epilogue()
    if engine.lr_scheduler:
        engine.lr_scheduler.load_state_dict(values["scheduler"])
    for name in COUNTERS:
        setattr(engine, name, values["counters"][name])


@contextmanager
def _base_optimizer(engine: Any) -> Iterator[Any]:
    """Yield the torch optimizer inside an engine's optimizer, with its parameters. ZeRO-3 sets them only for an update."""
    optimizer = engine.optimizer
    in_update = getattr(optimizer, "_set_fp32_optimizer_param_groups", None)
    if in_update:
        in_update()
    try:
        yield getattr(optimizer, "optimizer", optimizer)
    finally:
        if in_update:
            optimizer._clear_fp32_optimizer_param_groups()


def _flats(base: Any) -> list[Tensor]:
    return [parameter for group in base.param_groups for parameter in group["params"]]


def _without_nesting(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the states of a flat tensor without nested dicts.

    The key of a state of one fragment contains a slash: "blocks.0.attn1.to_q.weight/state1". Earlier versions of wands
    used bitsandbytes' own optimizer, which wraps its states in one dict.
    """
    result = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for owner, states in values.items():
        if isinstance(states, dict):
            prefix = f"{owner}/" if owner in names else ""
            result |= {f"{prefix}{key}": value for key, value in states.items()}
    return result


def _is_flat(value: Tensor, flat: Tensor) -> bool:
    """Return whether a state has one floating-point value for each value of a flat tensor."""
    return value.is_floating_point() and value.shape == flat.shape


def cut_flat(flat: Tensor, fragment: Fragment) -> Tensor:
    """Return the values of a fragment, [N], in its flat tensor or in a tensor of the same shape, such as the gradient."""
    return flat.detach().reshape(-1)[fragment.offset : fragment.offset + fragment.read().numel()]


def _lazy(name: str, value: Tensor) -> LazyTensor:
    return LazyTensor(name, tuple(value.shape), value.dtype, value.detach().cpu)


def _fragment(engine: Any, name: str, parameter: Any, order: Mapping[int, int]) -> Fragment | None:
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        # safe_get_local_fp32_param would copy an offloaded master to the GPU and include the last rank's padding.
        optimizer = engine.optimizer
        group, offset, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = partition * dist.get_rank(parameter.ds_process_group)
        own = max(min(partition, parameter.ds_numel - start), 0)
        masters = optimizer.fp32_partitioned_groups_flat
        return Fragment(
            name,
            start,
            list(parameter.ds_shape),
            order[id(masters[group])],
            offset,
            lambda: masters[group].narrow(0, offset, own),
        )
    shape = list(parameter.shape)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks own the whole parameter
            return None
        flat = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        return Fragment(
            name,
            mapping.lp_fragment_address.start,
            shape,
            order[id(flat)],
            mapping.hp_fragment_address.start,
            lambda: parameter._hp_mapping.hp_fragment,
        )
    return Fragment(name, 0, shape, order[id(parameter)], 0, lambda: parameter.detach().view(-1))


def _frozen_fragments(engine: Any) -> Iterator[Fragment]:
    """Yield this rank's fragments of frozen parameters. A LoRA run has none, because its base is not stored."""
    if any(".lora_A." in name for name, _ in engine.module.named_parameters()):
        return
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # ZeRO-3: every rank has a part
            values = parameter.ds_tensor
            start = values.numel() * dist.get_rank(parameter.ds_process_group)
            own = max(min(values.numel(), parameter.ds_numel - start), 0)
            yield Fragment(
                name, start, list(parameter.ds_shape), 0, 0, partial(values.detach().narrow, 0, 0, own)
            )
        elif dist.get_rank() == 0:
            yield Fragment(name, 0, list(parameter.shape), 0, 0, partial(parameter.detach().view, -1))
