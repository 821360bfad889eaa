"""Search for DeepSpeed config, degrees, checkpointing and bin size that fit a machine, and rank them by speed.

Every combination is checked with the functions that a run uses (`build_ds_config`, `choose_degrees`, `estimate_memory`,
`predict`), so a combination is valid here if it is valid there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from wands.config.deepspeed import build_ds_config
from wands.config.recipe import ParallelConfig
from wands.distributed.dims import choose_degrees
from wands.errors import ConfigError
from wands.planning.hardware import Machine
from wands.planning.memory import CUDA_CONTEXT, Memory, estimate_memory, to_gib
from wands.planning.step_time import Prediction, predict
from wands.planning.workload import Workload

CHECKPOINTING = ("none", "selective", "offload", "full")
SHIPPED = ("zero2", "zero3", "zero3_offload")
"""Names of the files in ds_configs/ that are tried, the least sharded first."""
HOST_SHARE = 0.9
"""Share of a node's memory that its ranks may use for offloaded tensors."""


@dataclass(frozen=True)
class Task:
    """Training run whose settings are searched, and its machine.

    Attributes:
        workload: the run. The search replaces recipe keys, DeepSpeed config, degrees and bin size.
        seq_lens: int64 [N], tokens of the data's clips.
        machine: GPUs and links.
        ds_configs: name -> DeepSpeed JSON that the search tries.
    """

    workload: Workload
    seq_lens: np.ndarray
    machine: Machine
    ds_configs: Mapping[str, Mapping[str, Any]]

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return min(self.workload.world_size, self.machine.ranks_per_node)

    @property
    def usable(self) -> float:
        """Bytes of a GPU available for tensors."""
        return self.machine.memory - (CUDA_CONTEXT if self.workload.device_type == "cuda" else 0.0)

    @cached_property
    def by_length(self) -> np.ndarray:
        """Lengths in ascending order."""
        return np.sort(self.seq_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest clip."""
        return int(self.by_length[-1])

    def full_bin(self, max_tokens: int) -> list[int]:
        """Return lengths of clips that fill a bin like the data: the longest clip, and others from the whole range."""
        spread = np.linspace(len(self.by_length) - 1, 0, 64).astype(np.int64)
        lens: list[int] = []
        for length in self.by_length[spread].tolist() * (max_tokens // max(int(self.by_length[0]), 1) + 1):
            if length <= max_tokens - sum(lens):
                lens.append(length)
            if max_tokens - sum(lens) < self.by_length[0]:
                break
        return lens

    def most_samples(self, max_tokens: int) -> int:
        """Return the number of clips in a bin that only has clips of the shorter half; a balanced plan rarely exceeds it."""
        shorter = self.by_length[: max(len(self.by_length) // 2, 1)]
        return max(min(int(max_tokens // max(shorter.mean(), 1)), len(self.by_length)), 1)


@dataclass(frozen=True)
class Candidate:
    """One combination of settings.

    Attributes:
        task: the task.
        ds_name: name of the DeepSpeed JSON.
        workload: the run with this combination's settings.
    """

    task: Task
    ds_name: str
    workload: Workload

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory of a rank."""
        return estimate_memory(self.workload)

    @property
    def host(self) -> float:
        """Bytes of a node's host memory that its ranks use."""
        return sum(self.memory.host.values()) * self.task.ranks_per_node

    @property
    def fits(self) -> bool:
        """Whether the memory of GPU and host suffices."""
        if self.workload.device_type == "cpu":  # device and host share the memory
            return self.memory.needed + sum(self.memory.host.values()) <= self.task.usable
        fits_host = self.host <= HOST_SHARE * self.task.machine.host_memory
        return fits_host and self.memory.needed <= self.task.usable

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted step of one DiT."""
        lens = self.task.full_bin(self.workload.recipe.packing.max_tokens)
        return predict(self.workload, self.task.machine, lens)

    def changes(self) -> list[str]:
        """Return the keys that differ from the recipe, as ``key=value`` strings."""
        before, after = self.task.workload.recipe, self.workload.recipe
        keys = {
            "model.checkpointing": (before.model.checkpointing, after.model.checkpointing),
            "parallel.cp_size": (before.parallel.group_size, self.workload.cp_size),
            "packing.max_tokens": (before.packing.max_tokens, after.packing.max_tokens),
            "train.bins_per_step": (before.train.bins_per_step, after.train.bins_per_step),
        }
        return [f"{key}={value}" for key, (old, value) in keys.items() if value != old]

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step of all DiTs."""
        return self.prediction.seconds * self.workload.num_models

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all GPUs; every DiT trains on every token."""
        tokens = self.workload.recipe.train.bins_per_step * sum(self.prediction.plan.seq_lens)
        return tokens / self.seconds


def machine_here(device_type: str, ranks_per_node: int) -> Machine:
    """Return the machine of this process. Links and peak are defaults, because the memory does not depend on them.

    Args:
        device_type: "cuda" or "cpu".
        ranks_per_node: processes that share the host's memory.
    """
    import psutil

    host = float(psutil.virtual_memory().available)
    memory, name = host / ranks_per_node, "this host"
    if device_type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        memory, name = float(gpu.total_memory), gpu.name
    return Machine(name=name, memory=memory, host_memory=host, ranks_per_node=ranks_per_node)


def check_memory(task: Task, ds_name: str) -> str | None:
    """Check whether a run fits a machine.

    Args:
        task: the run, with the DeepSpeed config and the bins that it uses. `ds_configs` has JSONs to suggest.
        ds_name: name of the run's JSON in `ds_configs`.

    Returns:
        None if the run fits; otherwise a text with the missing memory and the smallest change that fits.
    """
    run = Candidate(task, ds_name, task.workload)
    if run.fits:
        return None
    host = ""
    if run.host:
        available = to_gib(task.machine.host_memory)
        host = f" and {to_gib(run.host)} of the {available} that are free on the host"
    return (
        f"this run needs about {to_gib(run.memory.needed)} of the {to_gib(task.usable)} that {task.machine.name} has for tensors "
        f"of a rank{host}; {find_cure(task, ds_name)}"
    )


def search(task: Task) -> list[Candidate]:
    """Return all combinations that fit, the fastest first; equally fast combinations from simple to complex.

    The bin size is the recipe's size, or the largest smaller size that fits and still has room for the longest clip.

    Raises:
        ConfigError: if no combination is valid; the message has the first reason.
    """
    candidates: list[Candidate | None] = []
    errors = []
    cp_sizes = _cp_sizes(task.workload.recipe.parallel, task.workload.world_size)
    for combination in product(task.ds_configs, cp_sizes, CHECKPOINTING):
        try:
            candidates.append(_largest_bin(task, *combination))
        except ConfigError as error:
            errors.append(error)
    if errors and not candidates:
        raise errors[0]
    return sorted(filter(None, candidates), key=_sort_key)


def _sort_key(candidate: Candidate) -> int:
    """Return the sort key. Within two percent of speed, the search order decides, from simple to complex settings.

    Offloading must gain 15 %, because the speed of a busy host is the least certain part of the prediction.
    """
    speed = candidate.tokens_per_second * (0.85 if candidate.memory.host else 1.0)
    return -round(float(np.log(speed)) * 50)


def build_candidates(
    task: Task, names: Iterable[str], max_tokens: Iterable[int], cp_sizes: Iterable[int], modes: Iterable[str]
) -> Iterator[Candidate]:
    """Yield all valid combinations, whether a combination fits or not.

    Args:
        task: the task.
        names: names of JSONs in `task.ds_configs`.
        max_tokens: values of `packing.max_tokens`.
        cp_sizes: numbers of ranks that share a bin.
        modes: values of `model.checkpointing`.
    """
    for name, tokens, cp, mode in product(names, max_tokens, cp_sizes, modes):
        with suppress(ConfigError):
            yield _build_candidate(task, name, cp, mode, tokens)


def _build_candidate(task: Task, name: str, cp: int, checkpointing: str, max_tokens: int) -> Candidate:
    base, recipe = task.workload, task.workload.recipe
    model, parallel = recipe.model, recipe.parallel
    if checkpointing != model.checkpointing:
        kept = {"saved_tensors": None, "offloaded_tensors": None}
        model = model.model_copy(update={"checkpointing": checkpointing, **kept})
    dp_size = base.world_size // cp
    bins = -(-recipe.train.bins_per_step // dp_size) * dp_size
    if cp != parallel.group_size:
        parallel = ParallelConfig(cp_size=cp, fused_all_to_all=parallel.fused_all_to_all)
    packing = recipe.packing.model_copy(update={"max_tokens": max_tokens})
    train = recipe.train.model_copy(update={"bins_per_step": bins})
    recipe = recipe.model_copy(
        update={"model": model, "parallel": parallel, "packing": packing, "train": train}
    )
    ds_config = build_ds_config(
        task.ds_configs[name],
        recipe,
        world_size=base.world_size,
        device_type=base.device_type,
        names=(name, "the recipe"),
    )
    degrees = choose_degrees(
        parallel, num_heads=base.shape.num_heads, ranks_per_node=task.ranks_per_node, model="the model"
    )
    workload = replace(
        base,
        recipe=recipe,
        ds_config=ds_config,
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        micro_steps=bins // dp_size if packing.enabled else 2,
        max_tokens=max_tokens if packing.enabled else task.longest,
        max_samples=task.most_samples(max_tokens) if packing.enabled else 1,
    )
    return Candidate(task, name, workload)


def _largest_bin(task: Task, name: str, cp: int, checkpointing: str) -> Candidate | None:
    """Return the candidate with the recipe's bin size, or with the largest smaller size that fits; None if none fits."""
    low, high = task.longest, max(task.workload.recipe.packing.max_tokens, task.longest)
    best = _build_candidate(task, name, cp, checkpointing, high)
    if best.fits:
        return best
    best = _build_candidate(task, name, cp, checkpointing, low)
    if not best.fits:
        return None
    while high - low > max(task.longest // 8, 1):
        middle = (low + high) // 2
        candidate = _build_candidate(task, name, cp, checkpointing, middle)
        low, high, best = (middle, high, candidate) if candidate.fits else (low, middle, best)
    return best


def _cp_sizes(parallel: ParallelConfig, gpus: int) -> list[int]:
    """Return the recipe's size if the recipe sets the size; otherwise the powers of two that divide the number of GPUs."""
    if parallel != ParallelConfig(fused_all_to_all=parallel.fused_all_to_all):
        return [parallel.group_size]
    return [1 << i for i in range(gpus.bit_length()) if gpus % (1 << i) == 0]


def find_cure(task: Task, ds_name: str) -> str:
    """Return the smallest change that makes a run fit, as text.

    Args:
        task: `ds_configs` contains the run's JSON under `ds_name`, and other JSONs to try.
        ds_name: name of the run's JSON.
    """
    recipe, longest = task.workload.recipe, task.longest
    sizes = [recipe.parallel.group_size]
    # Another cp_size would contradict explicit degrees.
    if not (recipe.parallel.ulysses_degree or recipe.parallel.ring_degree):
        sizes += [size for size in _cp_sizes(ParallelConfig(), task.workload.world_size) if size > sizes[0]]
    names = dict.fromkeys((ds_name, *task.ds_configs))
    max_tokens = dict.fromkeys((max(recipe.packing.max_tokens, longest), longest))
    checkpointing = dict.fromkeys((recipe.model.checkpointing, *CHECKPOINTING[1:]))
    for candidate in build_candidates(task, names, max_tokens, sizes, checkpointing):
        if candidate.fits:
            changes = candidate.changes()
            words = [f"set {' and '.join(changes)}"] if changes else []
            if candidate.ds_name != ds_name:
                words.append(f"{'with' if changes else 'use'} --deepspeed {candidate.ds_name}")
            return " ".join(words)
    return "no setting fits; use more or larger GPUs, shorter or smaller clips, or a LoRA with lora.quantize"
