"""State of a DeepSpeed engine as named tensors and plain values, so that a checkpoint contains no pickle.

A fragment is a range of values of a flattened trained parameter. Each rank stores the fp32 master weights and the optimizer
states of the fragments that the rank owns. The tensors have names such as "blocks.0.attn1.to_q.weight/exp_avg". At every ZeRO
stage, the stored fragments cover each parameter exactly once, so a checkpoint can be read without DeepSpeed and on any number
of ranks. At ZeRO-0 every rank has the whole state, and only rank 0 stores the state.

With tensor parallelism, the fragments of a divided parameter are ranges of this rank's part of it, but they are stored with
their place in the whole parameter (see `wands.checkpoint.ranges`). Parameters that are not divided are equal on the ranks of a
tensor-parallel group, and stored by the first of them.

A flat tensor is a tensor that the optimizer updates. At ZeRO-0, each flat tensor is one parameter. At other stages, each flat
tensor contains a rank's fragments of many parameters.

Optimizer states with a value for each weight belong to fragments. The scales of 8-bit AdamW, which have a value for each block
of weights, also belong to fragments: "blocks.0.attn1.to_q.weight/absmax1". Other states, such as a step count, belong to flat
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from wands.checkpoint.checkpoint_files import FragmentFiles
from wands.checkpoint.ranges import Columns, Range
from wands.errors import CheckpointError
from wands.model.files.tensor_files import LazyTensor
from wands.model.tensor_parallel import ROWS, cut_of

MASTER = "master"
FROZEN = "frozen"
MOMENTUM = "momentum_buffer"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Fragment(NamedTuple):
    """Range of a flattened parameter that this rank owns.

    A flat tensor is a tensor that the optimizer updates. At ZeRO-1 to 3, a flat tensor contains ranges of many parameters.

    Attributes:
        name: name of the parameter.
        start: index of the first value of the range in the flattened parameter, or in the flattened `columns`.
        numel: number of values of the range.
        shape: shape of the whole parameter.
        tensor: tensor that contains the range. For a trained parameter, this is a flat tensor. For a frozen parameter, it is
            the tensor of the parameter's values on this rank.
        offset: index of the first value of the range in `tensor`.
        flat: index of the flat tensor in the order of the optimizer's parameters. For a frozen parameter, the index is 0 and
            has no meaning.
        columns: columns of the parameter that this rank has (first, end) if they are not all; see `wands.checkpoint.ranges`.
        is_copy: whether the first rank of this rank's tensor-parallel group has the same values, and stores them.
    """

    name: str
    start: int
    numel: int
    shape: list[int]
    tensor: Tensor
    offset: int = 0
    flat: int = 0
    columns: Columns | None = None
    is_copy: bool = False

    @property
    def range(self) -> Range:
        """Place of the values in the whole parameter."""
        return Range(self.start, self.shape, self.columns)

    @property
    def place(self) -> list[Any]:
        """Place of the values as a checkpoint stores it: [start, shape, flat], or [start, shape, flat, columns]."""
        return [self.start, self.shape, self.flat, *([] if self.columns is None else [list(self.columns)])]

    @property
    def place_without_flat(self) -> list[Any]:
        """Place of the values in a file without flat tensors: [start, shape], or [start, shape, 0, columns]."""
        return [self.start, self.shape] if self.columns is None else self._replace(flat=0).place

    def read(self) -> Tensor:
        """Return the current values of this range of a flattened parameter: a 1-D view, not a copy."""
        return cut_flat(self.tensor, self)


def trained_fragments(engine: Any) -> list[Fragment]:
    """Return this rank's fragments (ranges of the flattened trained parameters), without empty fragments.

    `Fragment.read` returns the current fp32 master weights of the fragment.
    """
    with _base_optimizer(engine) as base:
        order = {id(flat): number for number, flat in enumerate(_flats(base))}
        named = engine.module.named_parameters()
        found = [
            _trained_fragment(engine, name, value, order) for name, value in named if value.requires_grad
        ]
    return [fragment for fragment in found if fragment is not None and fragment.numel]


def engine_tensors(engine: Any, weights_only: bool = False) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return the state of an engine: the tensors that this rank stores, and everything else as a JSON object.

    With `weights_only`, the states of the optimizer, such as its momentum, are left out. A flat tensor is a tensor that the
    optimizer updates. The JSON object has these keys:

    - "fragments": maps the name of each trained parameter to a list [start, shape, number]. The dict contains the parameters
      of which this rank stores a range (values of the flattened parameter). `start` is the index of the range's first value.
      `shape` is the shape of the whole parameter. `number` is the index of the flat tensor that contains the range. If the
      range belongs to some of the parameter's columns, the list has a fourth entry [first column, end].
    - "frozen": a dict like "fragments", for frozen parameters. Each `number` is 0 and has no meaning. In a LoRA run, the
      dict is empty.
    - "flat_sizes": number of values of each flat tensor.
    - "optimizer" and "scheduler": state dicts of the optimizer and of the learning rate schedule, without tensors.
    - "counters": numbers of steps and samples that DeepSpeed counts.
    """
    fragments = trained_fragments(engine)
    with _base_optimizer(engine) as base:
        flats = _flats(base)
        state = base.state_dict()
        for number, own in _with_whole_momentum(engine, base, fragments).items():
            if MOMENTUM in state["state"].get(number, {}):
                state["state"][number] = _flat_momentum(state["state"][number], own, flats[number])
    if weights_only:
        state["state"] = {}
    stored = [fragment for fragment in fragments if not fragment.is_copy]
    tensors, values = _state_tensors(stored, list(_frozen_fragments(engine)), flats, state)
    values["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    values["counters"] = {name: getattr(engine, name) for name in COUNTERS}
    return tensors, values


def _state_tensors(
    fragments: Sequence[Fragment], frozen: Sequence[Fragment], flats: Sequence[Tensor], optimizer: Any
) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return (tensors, JSON object) with the state of an engine on this rank.

    The JSON object has the keys that `engine_tensors` explains, except "scheduler" and "counters".

    Args:
        fragments: this rank's fragments (ranges) of the flattened trained parameters.
        frozen: this rank's fragments of the flattened frozen parameters.
        flats: tensors that the optimizer updates, in the optimizer's order. Above ZeRO-0, each contains many parameters.
        optimizer: state dict of the torch optimizer.
    """
    tensors = [LazyTensor.of(f"{fragment.name}/{MASTER}", fragment.read()) for fragment in fragments]
    plain: dict[str, dict[str, Any]] = {}
    for number, nested in optimizer["state"].items():
        own = [fragment for fragment in fragments if fragment.flat == number]
        values = _without_nesting(nested)
        plain[str(number)] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if "/" in key:
                tensors.append(LazyTensor.of(key, value))
            elif value.is_floating_point() and value.shape == flats[number].shape:
                tensors += [LazyTensor.of(f"{each.name}/{key}", cut_flat(value, each)) for each in own]
            else:
                tensors.append(LazyTensor.of(f"flat.{number}/{key}", value))
    tensors += [LazyTensor.of(f"{fragment.name}/{FROZEN}", fragment.read()) for fragment in frozen]
    return tensors, {
        "fragments": _places(fragments),
        "frozen": _places(frozen),
        "flat_sizes": [flat.numel() for flat in flats],
        "optimizer": {"state": plain, "param_groups": optimizer["param_groups"]},
    }


def _places(fragments: Iterable[Fragment]) -> dict[str, list[Any]]:
    return {fragment.name: fragment.place for fragment in fragments}


@torch.no_grad()
def load_engine(engine: Any, files: FragmentFiles) -> None:
    """Restore the state of an engine from a checkpoint. Every rank must call this function.

    Each rank reads the ranges of parameters that it owns now. The checkpoint may come from another number of ranks or
    another ZeRO stage. If neither has changed, every bit is restored.

    The settings of the optimizer, such as the learning rate and the weight decay, come from the current recipe and DeepSpeed
    JSON, not from the checkpoint.

    Args:
        engine: new engine.
        files: the `state_rank_*` files of the DiT.

    Raises:
        CheckpointError: if a file cannot be read, if a value is missing in the files, or if an optimizer state cannot be
            divided among another number of ranks or for another ZeRO stage.
    """
    fragments = trained_fragments(engine)
    header = next(iter(files.headers.values()))
    stored = [(f, MASTER) for f in fragments] + [(f, FROZEN) for f in _frozen_fragments(engine)]
    files.read({f"{fragment.name}/{key}": (fragment.range, fragment.read()) for fragment, key in stored})
    with _base_optimizer(engine) as base:
        groups = base.state_dict()["param_groups"]
        saved = header["optimizer"]["param_groups"]
        for i, group in enumerate(groups):
            group["lr"] = saved[i if len(saved) == len(groups) else 0]["lr"]
        state = _optimizer_state(engine, base, fragments, files)
        base.load_state_dict({"state": state, "param_groups": groups})
    refresh_weights(engine)
    scheduler = engine.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        base_lrs = scheduler.base_lrs
        scheduler.load_state_dict(header["scheduler"] | {"base_lrs": base_lrs})
        for i, group in enumerate(engine.optimizer.param_groups):
            group["lr"] = base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
    elif scheduler:  # from the DeepSpeed JSON, which sets the learning rate
        scheduler.load_state_dict(header["scheduler"])
    for name in COUNTERS:
        setattr(engine, name, header["counters"][name])


@torch.no_grad()
def refresh_weights(engine: Any) -> None:
    """Copy the fp32 master weights to the weights of the model. Every rank must call this function.

    This copy is needed if the master weights were changed outside an optimizer step. At ZeRO-0 the function does nothing,
    because ZeRO-0 has no separate master weights.
    """
    optimizer = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # parameters that are kept whole between steps have the old values
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer.update_lp_params()


def _optimizer_state(
    engine: Any, base: Any, fragments: Sequence[Fragment], files: FragmentFiles
) -> dict[int, dict[str, Any]]:
    """Read the optimizer states of this rank from a checkpoint.

    Args:
        engine: the engine.
        base: the torch optimizer inside the engine's ZeRO optimizer.
        fragments: all fragments (ranges of flattened parameters) of this rank.
        files: files of the checkpoint.

    Returns:
        A dict from the index of each tensor that the optimizer updates to the states of this tensor. It is the value of the
        key "state" in the optimizer's state dict.
    """
    flats = _flats(base)
    state = dict[int, dict[str, Any]]()
    layout = _places(fragments), [flat.numel() for flat in flats]
    for fragment in fragments:
        if not state.get(fragment.flat):  # at ZeRO-0, a parameter without a gradient has no states
            state[fragment.flat] = _flat_values(fragment, layout, files)
    if hasattr(base, "join_states"):  # 8-bit AdamW
        stored = files.read_overlapping({f.name: (f.start, f.start + f.numel) for f in fragments})
        for fragment in fragments:
            if state[fragment.flat]:
                state[fragment.flat][fragment.name] = base.join_states(fragment, stored[fragment.name])
        return {number: values for number, values in state.items() if values}
    wanted = {}
    by_name = {fragment.name: fragment for fragment in fragments}
    for name, dtype in files.dtypes.items():
        owner, _, key = name.rpartition("/")
        if owner in by_name and key != MASTER:
            fragment = by_name[owner]
            values = state[fragment.flat]
            if key not in values:
                values[key] = torch.zeros(flats[fragment.flat].shape, dtype=dtype)
            wanted[name] = (fragment.range, cut_flat(values[key], fragment))
    files.read(wanted)
    for number, own in _with_whole_momentum(engine, base, fragments).items():
        if MOMENTUM in state[number]:
            dtype = state[number][MOMENTUM].dtype
            whole = {f"{f.name}/{MOMENTUM}": torch.empty(math.prod(f.shape), dtype=dtype) for f in own}
            shapes = {f"{f.name}/{MOMENTUM}": f.shape for f in own}
            files.read({name: (Range(0, shapes[name]), values) for name, values in whole.items()})
            state[number][MOMENTUM] = torch.cat([*whole.values()])
    for values in state.values():  # another class of optimizer, if the states are on another device now
        if "step" not in values:  # no update was made yet
            continue
        if isinstance(base, torch.optim.Adam):
            values["step"] = torch.tensor(float(values["step"]))
        elif type(base).__module__.startswith("deepspeed.ops.adam"):
            values["step"] = int(values["step"])
    return state


def _with_whole_momentum(engine: Any, base: Any, fragments: Sequence[Fragment]) -> dict[int, list[Fragment]]:
    """Find the parameters whose whole momentum DeepSpeed stores on this rank.

    At ZeRO-1 and 2 without CPU offload, a rank that owns a part of a parameter stores the momentum of the whole parameter if
    Muon updates this parameter.

    Args:
        engine: DeepSpeed engine.
        base: the torch optimizer inside the engine.
        fragments: this rank's fragments (ranges of flattened parameters).

    Returns:
        A dict that maps the index of each tensor that Muon updates to the fragments in this tensor. The fragments are in the
        order in which DeepSpeed stores their momentum. The dict is empty at ZeRO-0 and 3, with CPU offload, or without
        Muon.
    """
    if engine.zero_optimization_stage() not in (1, 2) or engine.zero_cpu_offload():
        return {}
    found: dict[int, list[Fragment]] = {}
    for fragment in sorted(fragments, key=lambda fragment: fragment.offset):
        # DeepSpeed has one flat tensor for each parameter group.
        if base.param_groups[fragment.flat].get("use_muon"):
            found.setdefault(fragment.flat, []).append(fragment)
    return found


def _flat_momentum(values: Mapping[str, Any], own: Sequence[Fragment], flat: Tensor) -> dict[str, Any]:
    """Cut Muon's momentum to the fragments (ranges of flattened parameters) that this rank owns.

    At ZeRO-1 and 2, a rank that owns a fragment of a parameter stores the momentum of the whole parameter.

    Args:
        values: optimizer states of a flat tensor (a tensor that the optimizer updates).
        own: this rank's fragments in the flat tensor, in the order of their offsets.
        flat: the flat tensor.

    Returns:
        A copy of `values` in which the momentum has the shape of the flat tensor.
    """
    momentum = torch.zeros(flat.shape, dtype=values[MOMENTUM].dtype)
    for fragment, whole in zip(own, values[MOMENTUM].split([math.prod(f.shape) for f in own]), strict=True):
        target = cut_flat(momentum, fragment)
        target.copy_(whole[fragment.start : fragment.start + len(target)])
    return {**values, MOMENTUM: momentum}


def _flat_values(fragment: Fragment, layout: tuple[Any, Any], files: FragmentFiles) -> dict[str, Any]:
    """Read from a checkpoint the optimizer states that belong to a whole flat tensor, such as a step count.

    A flat tensor is a tensor that the optimizer updates. The run that wrote the checkpoint may have divided the parameters into
    other flat tensors. The result contains the states of the checkpoint's flat tensor that contains the first value of
    `fragment`.

    Args:
        fragment: range of a flattened parameter that this rank owns.
        layout: values of the keys ("fragments", "flat_sizes") that `engine_tensors` returns for this rank now.
        files: files of the checkpoint.

    Raises:
        CheckpointError: if the checkpoint's flat tensors differ from `layout`, and a state is a tensor with several values.
            wands cannot divide this state for other flat tensors.
    """
    holders = [
        (Range.of_place(header["fragments"][fragment.name]), path)
        for path, header in files.headers.items()
        if fragment.name in header["fragments"]
    ]
    if not holders:
        raise files.incomplete(fragment.name)
    # The range that begins last before the first value contains it. If the columns were divided in another way, any range of the
    # parameter will do, because only states that are equal in all flat tensors can be divided in another way.
    before = [
        (stored.start, path)
        for stored, path in holders
        if stored.columns == fragment.columns and stored.start <= fragment.start
    ]
    path = max(before)[1] if before else holders[0][1]
    header = files.headers[path]
    number = header["fragments"][fragment.name][2]
    tensors = files.read_all(path, f"flat.{number}/")
    if (header["fragments"], header["flat_sizes"]) != layout:
        fixed = [key for key, value in tensors.items() if value.numel() > 1]
        if fixed:
            raise CheckpointError(
                f"--resume {path.parents[1]}: wands cannot divide the optimizer states {', '.join(fixed)} in another way among "
                "the ranks; use the number of processes and the ZeRO stage of the run that wrote the checkpoint.",
                agreed=True,
            )
    return {**header["optimizer"]["state"].get(str(number), {}), **tensors}


@contextmanager
def _base_optimizer(engine: Any) -> Iterator[Any]:
    """Context manager that yields the torch optimizer inside the engine's ZeRO optimizer.

    At ZeRO-3, the torch optimizer has parameters only in the `with` block.
    """
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


def _without_nesting(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer states of a flat tensor as one dict without nested dicts.

    A nested dict contains the states of one parameter. They get keys such as "blocks.0.attn1.to_q.weight/state1".
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= {f"{key}/{name}": state for name, state in value.items()}
        else:
            result[key] = value
    return result


def cut_flat(flat: Tensor, fragment: Fragment) -> Tensor:
    """Return a view of the values in `flat` that belong to one parameter.

    Args:
        flat: a tensor that contains values of one or more flattened parameters, or the gradient of this tensor.
        fragment: place of the parameter's values in the tensor: the index of the first value, and the number of values.
    """
    return flat.detach().view(-1)[fragment.offset : fragment.offset + fragment.numel]


def _trained_fragment(engine: Any, name: str, parameter: Any, order: Mapping[int, int]) -> Fragment | None:
    fragment = _fragment(engine, name, parameter, order)
    return None if fragment is None else _in_whole(fragment, engine, parameter)


def _in_whole(fragment: Fragment, engine: Any, parameter: Any) -> Fragment:
    """Return a range of this rank's part of a parameter as a range of the whole parameter."""
    cut = cut_of(parameter)
    if cut is None:
        return fragment._replace(is_copy=_tensor_rank(engine) > 0)
    whole = cut.whole_shape(fragment.shape)
    if cut.dim == ROWS:
        return fragment._replace(start=fragment.start + cut.rank * math.prod(fragment.shape), shape=whole)
    width = fragment.shape[-1]
    return fragment._replace(shape=whole, columns=(cut.rank * width, (cut.rank + 1) * width))


def _tensor_rank(engine: Any) -> int:
    return engine.mpu.get_model_parallel_rank() if engine.mpu else 0


def _fragment(engine: Any, name: str, parameter: Any, order: Mapping[int, int]) -> Fragment | None:
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        # safe_get_local_fp32_param would copy an offloaded master to the GPU and include the last rank's padding.
        optimizer = engine.optimizer
        group, offset, partition = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        shape = list(parameter.ds_shape)
        start, numel = _own_range(parameter, partition)
        return Fragment(
            name=name,
            start=start,
            numel=numel,
            shape=shape,
            tensor=flat,
            offset=offset,
            flat=order[id(flat)],
        )
    shape = list(parameter.shape)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2
        mapping = parameter._hp_mapping
        if mapping is None:  # other ranks own the whole parameter
            return None
        flat = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        start = mapping.lp_fragment_address.start
        place = mapping.hp_fragment_address
        return Fragment(
            name=name,
            start=start,
            numel=place.numel,
            shape=shape,
            tensor=flat,
            offset=place.start,
            flat=order[id(flat)],
        )
    return Fragment(
        name=name,
        start=0,
        numel=parameter.numel(),
        shape=shape,
        tensor=parameter,
        offset=0,
        flat=order[id(parameter)],
    )


def _own_range(parameter: Any, partition: int) -> tuple[int, int]:
    """Return (index of the first value, number of values) of this rank's part of a flattened parameter, without padding.

    Args:
        parameter: a parameter that ZeRO-3 has partitioned.
        partition: number of values of each rank's part, with padding.
    """
    start = partition * dist.get_rank(parameter.ds_process_group)
    return start, max(min(partition, parameter.ds_numel - start), 0)


def _frozen_fragments(engine: Any) -> Iterator[Fragment]:
    """Yield the fragments (ranges) of frozen parameters that this rank stores in a checkpoint.

    A LoRA run yields nothing, because its checkpoints do not contain the base weights.
    """
    if any(".lora_A." in name for name, _ in engine.module.named_parameters()):
        return
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # ZeRO-3: every rank has a part
            values = parameter.ds_tensor
            start, numel = _own_range(parameter, values.numel())
            shape = list(parameter.ds_shape)
            fragment = Fragment(name=name, start=start, numel=numel, shape=shape, tensor=values)
        elif dist.get_rank(engine.seq_data_parallel_group) == 0:
            shape = list(parameter.shape)
            fragment = Fragment(name=name, start=0, numel=parameter.numel(), shape=shape, tensor=parameter)
        else:
            continue
        fragment = _in_whole(fragment, engine, parameter)
        if not fragment.is_copy:
            yield fragment
