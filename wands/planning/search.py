"""Search for settings with which a run fits a machine, and sort them by predicted speed.

The settings are the DeepSpeed config, the context-parallel degrees, the activation checkpointing, the swapped blocks of a LoRA's
base and the bin size. Each combination is checked with the functions of a run, `build_ds_config`, `choose_degrees` and
`estimate_memory`, so the search accepts exactly what a run accepts. `predict` gives the speed.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np

from wands.config.deepspeed import build_ds_config
from wands.config.recipe import ParallelConfig, Recipe
from wands.distributed.dims import choose_degrees
from wands.errors import ConfigError
from wands.files import differences
from wands.planning.hardware import Machine
from wands.planning.memory import Memory, estimate_memory, reserved_memory, to_gib
from wands.planning.step_time import Prediction, predict
from wands.planning.workload import Weight, Workload

CHECKPOINTING = ("none", "selective", "offload", "full")
TENSOR_DEGREES = (2, 4, 8)
SHIPPED = ("zero2", "zero3", "zero3_offload")
"""Files in ds_configs/ that the search tries, from the fastest config to the config with the least GPU memory."""
OFFLOADED = {"optimizer", "weights", "activations"}
"""Components that a run can move from the device to host memory."""
HOST_SHARE = 0.9
"""Fraction of a node's host memory that its ranks may use for offloaded tensors."""
BUSY_HOST = 0.85
"""Speed of a run that offloads to the host / its computed speed, because offloading depends on how busy the host is."""
QUANTIZED_GAIN = 1.1
"""Speed from which a quantized base is chosen, as a multiple of the speed with the base as it is."""
EQUAL = 0.98
"""Settings with at least this fraction of the highest speed count as equally fast."""


@dataclass(frozen=True)
class Task:
    """Training run for which the search looks for settings, and the machine that it must fit.

    Attributes:
        workload: model and current settings of the run.
        seq_lens: number of tokens of each clip in the data, int64 [N].
        machine: GPUs and links.
        ds_configs: the DeepSpeed JSONs to try, by name.
        margin: fraction of the usable device memory that the settings must leave free.
        quantize: function that returns the weights with a base of this `lora.quantize`; None if no other base may be tried.
        asked: recipe that the user gave, if the recipe of `workload` has another base.
    """

    workload: Workload
    seq_lens: np.ndarray
    machine: Machine
    ds_configs: Mapping[str, Mapping[str, Any]]
    margin: float = 0.0
    quantize: Callable[[str], Sequence[Weight]] | None = None
    asked: Recipe | None = None

    def with_base(self, codec: str) -> Task:
        """Return the task with its base quantized by a codec, such as "int8"."""
        assert self.quantize is not None
        recipe = self.workload.recipe
        assert recipe.lora is not None
        lora = recipe.lora.model_copy(update={"quantize": codec})
        changed = recipe.model_copy(update={"lora": lora})
        workload = replace(self.workload, recipe=changed, weights=self.quantize(codec))
        return replace(self, workload=workload, quantize=None, asked=recipe)

    def bases(self) -> Iterator[Task]:
        """Yield the task, and then the task with each quantized base that may be tried, from the most exact."""
        yield self
        if self.quantize is not None:
            yield from map(self.with_base, ("int8", "nf4"))

    @property
    def ranks_per_node(self) -> int:
        return min(self.workload.world_size, self.machine.ranks_per_node)

    @cached_property
    def by_length(self) -> np.ndarray:
        """Number of tokens of each clip, int64 [N], in ascending order."""
        return np.sort(self.seq_lens)

    @property
    def longest(self) -> int:
        return int(self.by_length[-1])

    def full_bin(self, max_tokens: int) -> list[int]:
        """Return the clip lengths of a typical full bin: the longest clip, and others from the whole range of lengths."""
        spread = np.linspace(len(self.by_length) - 1, 0, 64).astype(np.int64)
        lens: list[int] = []
        for length in self.by_length[spread].tolist() * (max_tokens // max(int(self.by_length[0]), 1) + 1):
            if length <= max_tokens - sum(lens):
                lens.append(length)
            if max_tokens - sum(lens) < self.by_length[0]:
                break
        return lens

    def most_samples(self, max_tokens: int) -> int:
        """Estimate the largest number of clips in a bin: `max_tokens` / the mean length of the shorter half of the clips."""
        shorter = self.by_length[: max(len(self.by_length) // 2, 1)]
        return max(min(int(max_tokens // max(shorter.mean(), 1)), len(self.by_length)), 1)


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, which may fit the machine or not.

    Attributes:
        task: the run and the machine.
        ds_name: name of the DeepSpeed JSON in `task.ds_configs`.
        workload: `task.workload` with the settings of this combination.
    """

    task: Task
    ds_name: str
    workload: Workload

    @cached_property
    def memory(self) -> Memory:
        return estimate_memory(self.workload)

    @property
    def usable(self) -> float:
        """Bytes of one device's memory that tensors can use."""
        return (1 - self.task.margin) * (self.task.machine.memory - reserved_memory(self.workload))

    @property
    def usable_host(self) -> float:
        """Bytes of a node's host memory that its ranks can use together."""
        return HOST_SHARE * self.task.machine.host_memory

    @property
    def host(self) -> float:
        """Bytes of host memory that all ranks of a node need together."""
        return sum(self.memory.host.values()) * self.task.ranks_per_node

    @property
    def fits(self) -> bool:
        """Whether the device memory and the host memory of the machine are large enough."""
        if self.workload.device_type == "cpu":  # device and host share the memory
            return self.memory.needed + sum(self.memory.host.values()) <= self.usable
        return self.host <= self.usable_host and self.memory.needed <= self.usable

    def describe_memory(self) -> str:
        """Return a text with the memory that a run needs, and the memory that the machine has."""
        machine = self.task.machine
        host = f" and {self.describe_host()} per node" if self.host else ""
        device = f"{machine.name}: {to_gib(self.usable)} available"
        return f"{to_gib(self.memory.needed)} of device memory per rank ({device}){host}"

    def describe_host(self) -> str:
        """Return a text with the host memory that a node needs and has. A tenth is left to the system."""
        total = to_gib(self.task.machine.host_memory)
        return f"{to_gib(self.host)} of host memory ({to_gib(self.usable_host)} available, {HOST_SHARE:.0%} of {total})"

    @property
    def uses_host(self) -> bool:
        """Whether the run moves tensors between the device and host memory in every step."""
        return bool(self.memory.host.keys() & OFFLOADED)

    @cached_property
    def prediction(self) -> Prediction:
        lens = self.task.full_bin(self.workload.recipe.packing.max_tokens)
        return predict(self.workload, self.task.machine, lens)

    def changes(self) -> list[str]:
        """Return the recipe keys that this combination changes, as ``key=value`` strings with the new values."""
        asked = self.task.asked or self.task.workload.recipe
        changed = differences(asked.model_dump(), self.workload.recipe.model_dump())
        return [f"{key}={'null' if new is None else new}" for key, _, new in changed]

    @property
    def _speed(self) -> float:
        return BUSY_HOST if self.uses_host else 1.0

    @property
    def mfu(self) -> float:
        """Predicted fraction of the device's peak that the step reaches."""
        return self.prediction.mfu * self._speed

    @property
    def seconds(self) -> float:
        """Predicted seconds of an optimizer step, summed over the DiTs that the run trains."""
        return self.prediction.seconds * self.workload.num_models / self._speed

    @property
    def tokens_per_second(self) -> float:
        """Predicted video tokens per second over all GPUs. A token that two DiTs train on counts once."""
        tokens = self.workload.recipe.train.bins_per_step * sum(self.prediction.plan.seq_lens)
        return tokens / self.seconds


def machine_here(device_type: str, ranks_per_node: int) -> Machine:
    """Return a `Machine` with the total GPU memory and the available host memory of this machine.

    Use it only to predict memory: its bandwidths and FLOP/s are the defaults of `Machine`.
    """
    import psutil

    host = float(psutil.virtual_memory().available)
    memory = host / ranks_per_node
    name = "this host"
    if device_type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        memory = float(gpu.total_memory)
        name = gpu.name
    return Machine(name=name, memory=memory, host_memory=host, ranks_per_node=ranks_per_node)


def check_memory(task: Task, ds_name: str) -> str | None:
    """Return None if a run with the DeepSpeed JSON `ds_name` fits the machine, else a text with the memory it needs and a fix.

    The fix is a change of settings with which the run fits, or other GPUs, smaller clips or a LoRA.
    """
    run = Candidate(task, ds_name, task.workload)
    if run.fits:
        return None
    return f"this run needs about {run.describe_memory()}; {_find_cure(task, ds_name)}"


def settle_swapping(task: Task, ds_name: str) -> int:
    """Return the number of blocks to swap for `model.swap_blocks: auto`: the smallest with which the run fits the machine.

    If no number is enough, all blocks that may be swapped are.
    """
    run = _swap_less(Candidate(task, ds_name, task.workload))
    return run.workload.recipe.model.num_swapped(run.workload.shape.num_layers)


def search(task: Task) -> list[Candidate]:
    """Return all combinations of settings with which the run fits the machine, sorted by tokens per second.

    Only the first is the simplest of those that are as fast as the fastest (see `EQUAL`).

    A combination consists of a DeepSpeed JSON, a number of context-parallel ranks, a kind of activation checkpointing and swapped
    blocks. If it does not fit with the recipe's bin size, a smaller one is used that has space for the longest clip and is close
    to the largest that fits. The list is empty if no valid combination fits.

    A quantized base is tried if nothing fits without host memory. The first that is `QUANTIZED_GAIN` times as fast is kept.

    Raises:
        ConfigError: if every combination is invalid, with the reason of the first.
    """
    best: list[Candidate] = []
    for of_base in task.bases():
        found: list[Candidate] = []
        with suppress(*([] if of_base is task else [ConfigError])):
            found = _search_base(of_base)
        if not best or (found and found[0].tokens_per_second > QUANTIZED_GAIN * best[0].tokens_per_second):
            best = _sort([*found, *best])
        if best and not best[0].uses_host:
            break
    return best


def _search_base(task: Task) -> list[Candidate]:
    """Return the combinations of `search` with the base of the task's recipe."""
    candidates: list[Candidate | None] = []
    errors = []
    cp_sizes = _cp_sizes(task.workload.recipe.parallel, task.workload.world_size)
    swaps = _swap_settings(task.workload.recipe)
    for name, cp, mode, swap in product(task.ds_configs, cp_sizes, CHECKPOINTING, swaps):
        try:
            candidates.append(_largest_bin(task, name, cp, mode, swap))
        except ConfigError as error:
            errors.append(error)
    if errors and not candidates:
        raise errors[0]
    settled = (_recompute_less(_swap_less(candidate)) for candidate in candidates if candidate)
    # A combination with "auto" may have turned out to need no swapped block.
    unique = {(one.ds_name, *one.changes()): one for one in settled}
    return _sort(list(unique.values()))


def _swap_settings(recipe: Recipe) -> tuple[int | str, ...]:
    """Return the values of `model.swap_blocks` to try: the recipe's own, and swapping if the base of a LoRA may need it."""
    own = recipe.model.swap_blocks
    return (own, "auto") if recipe.lora and own == 0 else (own,)


def _swap_less(candidate: Candidate) -> Candidate:
    """Return a copy of a candidate with the fewest swapped blocks that the memory allows, if the number is "auto"."""
    if candidate.workload.recipe.model.swap_blocks != "auto":
        return candidate
    most = candidate.workload.recipe.model.num_swapped(candidate.workload.shape.num_layers)
    swap = partial(_with_model, candidate, "swap_blocks")
    number = bisect_left(range(most), True, key=lambda number: swap(number).fits)
    return swap(number)


def _with_model(candidate: Candidate, key: str, value: int) -> Candidate:
    """Return a copy of a candidate with another value of a key of the recipe's section `model`."""
    recipe = candidate.workload.recipe
    model = recipe.model.model_copy(update={key: value})
    return replace(
        candidate, workload=replace(candidate.workload, recipe=recipe.model_copy(update={"model": model}))
    )


def fastest_with_tensor(task: Task, max_tokens: int) -> Candidate | None:
    """Return the fastest settings with tensor parallelism and bins of `max_tokens`, or None if none fits the machine.

    The task's recipe has no tensor parallelism. Unlike in `search`, `model.checkpoint_blocks` is not searched.
    """
    recipe = task.workload.recipe
    found: list[Candidate] = []
    for degree in TENSOR_DEGREES:
        if task.workload.world_size % degree or degree > task.ranks_per_node:
            continue
        parallel = recipe.parallel.model_copy(update={"tensor_degree": degree})
        divided = replace(task.workload, recipe=recipe.model_copy(update={"parallel": parallel}))
        of_degree = replace(task, workload=divided)
        cp_sizes = _cp_sizes(parallel, task.workload.world_size)
        found += build_candidates(of_degree, task.ds_configs, [max_tokens], cp_sizes, CHECKPOINTING)
    return max((one for one in found if one.fits), key=lambda one: one.tokens_per_second, default=None)


def _recompute_less(candidate: Candidate) -> Candidate:
    """Return a copy of a candidate that recomputes as few blocks as the memory allows, if the number is "auto"."""
    model = candidate.workload.recipe.model
    if model.checkpointing == "none" or model.checkpoint_blocks != "auto":
        return candidate
    recompute = partial(_with_model, candidate, "checkpoint_blocks")
    least = model.num_swapped(candidate.workload.shape.num_layers)  # a swapped block is recomputed
    numbers = range(max(least, 1), candidate.workload.shape.num_layers)
    index = bisect_left(numbers, True, key=lambda num_blocks: recompute(num_blocks).fits)
    return recompute(numbers[index]) if index < len(numbers) else candidate


def _sort(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return combinations sorted by speed, except for the first. They are given in the order from simple to complex."""
    by_speed = sorted(candidates, key=lambda one: -one.tokens_per_second)
    limit = EQUAL * by_speed[0].tokens_per_second if by_speed else 0.0
    simplest = next((one for one in candidates if one.tokens_per_second >= limit), None)
    return by_speed if simplest is None else [simplest, *(one for one in by_speed if one is not simplest)]


def build_candidates(
    task: Task, names: Iterable[str], max_tokens: Iterable[int], cp_sizes: Iterable[int], modes: Iterable[str]
) -> Iterator[Candidate]:
    """Yield all valid combinations of the given settings, including those that need too much memory."""
    swaps = _swap_settings(task.workload.recipe)
    for swap, name, tokens, cp, mode in product(swaps, names, max_tokens, cp_sizes, modes):
        with suppress(ConfigError):
            yield _swap_less(_build_candidate(task, name, cp, mode, swap, tokens))


def _build_candidate(
    task: Task, name: str, cp: int, checkpointing: str, swap: int | str, max_tokens: int
) -> Candidate:
    base = task.workload
    recipe = task.workload.recipe
    model = recipe.model.model_copy(update={"swap_blocks": swap})
    parallel = recipe.parallel
    if checkpointing != model.checkpointing:
        kept = {"saved_tensors": None, "offloaded_tensors": None, "checkpoint_blocks": "auto"}
        model = model.model_copy(update={"checkpointing": checkpointing, **kept})
    dp_size = base.world_size // (cp * parallel.tensor_degree)
    bins = -(-recipe.train.bins_per_step // dp_size) * dp_size
    if cp != parallel.context_size:
        parallel = ParallelConfig(cp_size=cp, tensor_degree=parallel.tensor_degree)
    packing = recipe.packing.model_copy(update={"max_tokens": max_tokens})
    train = recipe.train.model_copy(update={"bins_per_step": bins})
    changes = {"model": model, "parallel": parallel, "packing": packing, "train": train}
    recipe = recipe.model_copy(update=changes)
    build = partial(build_ds_config, world_size=base.world_size, device_type=base.device_type)
    ds_config = build(task.ds_configs[name], recipe, names=(name, "the recipe"))
    degrees = choose_degrees(
        parallel, num_heads=base.shape.num_heads, ranks_per_node=task.ranks_per_node, model="the model"
    )
    sizes: dict[str, Any] = {"ulysses_degree": degrees.ulysses, "ring_degree": degrees.ring}
    if packing.enabled:
        most_samples = task.most_samples(max_tokens)
        sizes |= {"micro_steps": bins // dp_size, "max_tokens": max_tokens, "max_samples": most_samples}
    else:
        sizes |= {"micro_steps": 2, "max_tokens": task.longest, "max_samples": 1}
    return Candidate(task, name, replace(base, recipe=recipe, ds_config=ds_config, **sizes))


def _largest_bin(task: Task, name: str, cp: int, checkpointing: str, swap: int | str) -> Candidate | None:
    """Return the settings with about the largest bins that fit, up to the recipe's size; None if the longest clip does not."""
    build = partial(_build_candidate, task, name, cp, checkpointing, swap)
    low = task.longest
    high = max(task.workload.recipe.packing.max_tokens, task.longest)
    best = build(high)
    if best.fits:
        return best
    best = build(low)
    if not best.fits:
        return None
    while high - low > max(task.longest // 8, 1):
        middle = (low + high) // 2
        candidate = build(middle)
        low, high, best = (middle, high, candidate) if candidate.fits else (low, middle, best)
    return best


def _cp_sizes(parallel: ParallelConfig, gpus: int) -> list[int]:
    """Return the values of `parallel.cp_size` to try.

    They are the powers of two that divide the number of GPUs / the tensor degree, or only the recipe's own size if it sets one.
    """
    if parallel.cp_size or parallel.ulysses_degree or parallel.ring_degree:
        return [parallel.context_size]
    groups = gpus // parallel.tensor_degree
    return [1 << i for i in range(groups.bit_length()) if groups % (1 << i) == 0]


def _find_cure(task: Task, ds_name: str) -> str:
    """Return the end of an error message: a change of settings that makes a run fit, or other GPUs, smaller clips or a LoRA."""
    recipe = task.workload.recipe
    longest = task.longest
    sizes = [recipe.parallel.context_size]
    # A new cp_size would contradict degrees that the recipe sets.
    if not (recipe.parallel.ulysses_degree or recipe.parallel.ring_degree):
        parallel = ParallelConfig(tensor_degree=recipe.parallel.tensor_degree)
        sizes += [size for size in _cp_sizes(parallel, task.workload.world_size) if size > sizes[0]]
    names = dict.fromkeys((ds_name, *task.ds_configs))
    max_tokens = dict.fromkeys((max(recipe.packing.max_tokens, longest), longest))
    checkpointing = dict.fromkeys((recipe.model.checkpointing, *CHECKPOINTING[1:]))
    for candidate in build_candidates(task, names, max_tokens, sizes, checkpointing):
        if candidate.fits:
            changes = candidate.changes()
            steps = [f"set {' and '.join(changes)}"] if changes else []
            steps += [f"use --deepspeed {candidate.ds_name}"] if candidate.ds_name != ds_name else []
            return " and ".join(steps)
    smaller = "" if recipe.lora and recipe.lora.quantize != "none" else ", or a LoRA with lora.quantize"
    return (
        f"no setting fits; use more or larger GPUs, {'or ' * (not smaller)}shorter or smaller clips{smaller}"
    )
