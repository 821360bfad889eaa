"""State of a DeepSpeed engine as named tensors and plain values, so that a checkpoint contains no pickle.

A fragment is a range of values of a flattened parameter. Each rank stores the fp32 master weights and the optimizer states of its
fragments, under names such as "blocks.0.attn1.to_q.weight/exp_avg". At every ZeRO stage, the stored fragments cover each
parameter exactly once, so a checkpoint can be read without DeepSpeed and on any number of ranks. At ZeRO-0, only rank 0 stores
the state.

With tensor parallelism, the fragments of a divided parameter are stored with their place in the whole parameter (see
`wands.checkpoint.ranges`). The first rank of a tensor-parallel group stores the parameters that are not divided.

A flat tensor is a tensor that the optimizer updates: one parameter at ZeRO-0, a rank's fragments of many parameters at other
stages. Optimizer states with a value for each weight, and the block scales of 8-bit AdamW, belong to fragments; others, such as a
step count, to flat tensors.
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

from wands.checkpoint.fragment_files import FragmentFiles
from wands.checkpoint.ranges import Columns, Range
from wands.distributed.engine_protocol import TrainingEngine
from wands.errors import CheckpointError
from wands.model.files.tensor_files import LazyTensor
from wands.model.tensor_parallel import ROWS, cut_of

MASTER = "master"
FROZEN = "frozen"
MOMENTUM = "momentum_buffer"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Fragment(NamedTuple):
    """Range of a flattened parameter that this rank owns.

    Attributes:
        start: index of the first value in the flattened parameter, or in the flattened `columns`.
        shape: shape of the whole parameter.
        tensor: tensor that contains the range: a flat tensor, or the values of a frozen parameter on this rank.
        offset: index of the first value of the range in `tensor`.
        flat: index of the flat tensor in the order of the optimizer's parameters. It is 0 for a frozen parameter.
        columns: columns (first, end) of the parameter that this rank has, if not all.
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
        """Place of the values in a checkpoint: [start, shape, flat], or [start, shape, flat, columns]."""
        return [self.start, self.shape, self.flat, *([] if self.columns is None else [list(self.columns)])]

    @property
    def place_without_flat(self) -> list[Any]:
        """Place of the values in a file without flat tensors: [start, shape], or [start, shape, 0, columns]."""
        return [self.start, self.shape] if self.columns is None else self._replace(flat=0).place

    def read(self) -> Tensor:
        """Return the current values as a 1-D view."""
        return cut_flat(self.tensor, self)


def trained_fragments(engine: TrainingEngine) -> list[Fragment]:
    """Return this rank's fragments of the trained parameters, without empty ones. Reading one gives its fp32 master weights."""
    with _base_optimizer(engine) as base:
        order = {id(flat): number for number, flat in enumerate(_flats(base))}
        named = engine.module.named_parameters()
        found = [
            _trained_fragment(engine, name, value, order) for name, value in named if value.requires_grad
        ]
    return [fragment for fragment in found if fragment is not None and fragment.numel]


def engine_tensors(
    engine: TrainingEngine, weights_only: bool = False
) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return the state of an engine: the tensors that this rank stores, and everything else as a JSON object.

    With `weights_only`, the states of the optimizer, such as its momentum, are left out. The JSON object has these keys:

    - "fragments": `Fragment.place` of each trained parameter of which this rank stores a range.
    - "frozen": the same for frozen parameters; empty in a LoRA run.
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
    values["scheduler"] = engine.lr_scheduler.state_dict()
    values["counters"] = {name: getattr(engine, name) for name in COUNTERS}
    return tensors, values


def _state_tensors(
    fragments: Sequence[Fragment], frozen: Sequence[Fragment], flats: Sequence[Tensor], optimizer: Any
) -> tuple[list[LazyTensor], dict[str, Any]]:
    """Return the tensors and the JSON object of `engine_tensors`, the latter without "scheduler" and "counters"."""
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
def load_engine(engine: TrainingEngine, files: FragmentFiles) -> None:
    """Restore the state of a new engine from the `state_rank_*` files of its DiT. Every rank must call this function.

    Each rank reads the ranges that it owns now. The number of ranks and the ZeRO stage may have changed; if they have not, every
    bit is restored. The settings of the optimizer, such as learning rate and weight decay, come from the current recipe and
    DeepSpeed JSON.

    Raises:
        CheckpointError: if a file cannot be read, if a value is missing in the files, or if an optimizer state cannot be divided
            among another number of ranks or for another ZeRO stage.
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
    else:  # from the DeepSpeed JSON, which sets the learning rate
        scheduler.load_state_dict(header["scheduler"])
    for name in COUNTERS:
        setattr(engine, name, header["counters"][name])


@torch.no_grad()
def refresh_weights(engine: TrainingEngine) -> None:
    """Copy master weights that were changed outside a step to the model. Every rank must call it. ZeRO-0 has none to copy."""
    optimizer: Any = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # parameters that are kept whole between steps have the old values
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer.update_lp_params()


def _optimizer_state(
    engine: TrainingEngine, base: Any, fragments: Sequence[Fragment], files: FragmentFiles
) -> dict[int, dict[str, Any]]:
    """Read the value of the key "state" in this rank's state dict of the optimizer from a checkpoint."""
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


def _with_whole_momentum(
    engine: TrainingEngine, base: Any, fragments: Sequence[Fragment]
) -> dict[int, list[Fragment]]:
    """Return the fragments in each flat tensor that Muon updates, in the order in which DeepSpeed stores their momentum.

    At ZeRO-1 and 2 without CPU offload, a rank that owns a part of such a parameter stores the momentum of the whole parameter.
    In all other cases, the result is empty.
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
    """Return optimizer states with Muon's momentum cut to this rank's fragments `own`, in the order of their offsets."""
    momentum = torch.zeros(flat.shape, dtype=values[MOMENTUM].dtype)
    for fragment, whole in zip(own, values[MOMENTUM].split([math.prod(f.shape) for f in own]), strict=True):
        target = cut_flat(momentum, fragment)
        target.copy_(whole[fragment.start : fragment.start + len(target)])
    return {**values, MOMENTUM: momentum}


def _flat_values(fragment: Fragment, layout: tuple[Any, Any], files: FragmentFiles) -> dict[str, Any]:
    """Read the optimizer states that belong to a whole flat tensor, such as a step count, from a checkpoint.

    They are taken from the checkpoint's flat tensor that contains the first value of `fragment`. `layout` is (fragments, flat
    sizes) of `engine_tensors` on this rank now.

    Raises:
        CheckpointError: if the checkpoint has other flat tensors, and a state is a tensor with several values.
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
def _base_optimizer(engine: TrainingEngine) -> Iterator[Any]:
    """Yield the torch optimizer inside the ZeRO optimizer. At ZeRO-3, it has parameters only in the `with` block."""
    optimizer: Any = engine.optimizer
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
    """Return optimizer states with the nested dicts of parameters flattened, to keys such as "blocks.0.attn1.to_q.weight/state1".

    The nested dicts come from 8-bit AdamW.
    """
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= {f"{key}/{name}": state for name, state in value.items()}
        else:
            result[key] = value
    return result


def cut_flat(flat: Tensor, fragment: Fragment) -> Tensor:
    """Return a view of a fragment's values in a flat tensor or in its gradient."""
    return flat.detach().view(-1)[fragment.offset : fragment.offset + fragment.numel]


def _trained_fragment(
    engine: TrainingEngine, name: str, parameter: Any, order: Mapping[int, int]
) -> Fragment | None:
    fragment = _fragment(engine, name, parameter, order)
    return None if fragment is None else _in_whole(fragment, engine, parameter)


def _in_whole(fragment: Fragment, engine: TrainingEngine, parameter: Any) -> Fragment:
    """Return a range of this rank's part of a parameter as a range of the whole parameter."""
    cut = cut_of(parameter)
    if cut is None:
        return fragment._replace(is_copy=_tensor_rank(engine) > 0)
    whole = cut.whole_shape(fragment.shape)
    if cut.dim == ROWS:
        return fragment._replace(start=fragment.start + cut.rank * math.prod(fragment.shape), shape=whole)
    width = fragment.shape[-1]
    return fragment._replace(shape=whole, columns=(cut.rank * width, (cut.rank + 1) * width))


def _tensor_rank(engine: TrainingEngine) -> int:
    return engine.mpu.get_model_parallel_rank() if engine.mpu else 0


def _fragment(engine: TrainingEngine, name: str, parameter: Any, order: Mapping[int, int]) -> Fragment | None:
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        # safe_get_local_fp32_param would copy an offloaded master to the GPU and include the last rank's padding.
        optimizer: Any = engine.optimizer
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
        optimizer = engine.optimizer
        flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
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
    """Return (first index, length) of this rank's part of a parameter that ZeRO-3 has partitioned, without padding."""
    start = partition * dist.get_rank(parameter.ds_process_group)
    return start, max(min(partition, parameter.ds_numel - start), 0)


def _frozen_fragments(engine: TrainingEngine) -> Iterator[Fragment]:
    """Yield the fragments of frozen parameters that this rank stores; none in a LoRA run, which stores no base weights."""
    if any(".lora_A." in name for name, _ in engine.module.named_parameters()):
        return
    named: Iterable[tuple[str, Any]] = engine.module.named_parameters()  # ZeRO-3 adds attributes
    for name, parameter in named:
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
