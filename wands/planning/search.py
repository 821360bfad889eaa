"""Search for DeepSpeed config, degrees, checkpointing and bin size that fit a machine, and rank them by speed.

Every combination is checked with the functions that a run uses (`build_ds_config`, `choose_degrees`, `estimate_memory`,
`predict`), so a combination is valid here if it is valid there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from wands.config.deepspeed import build_ds_config, offloads_optimizer
from wands.config.deepspeed_rules import offload_device
from wands.config.recipe import ParallelConfig, Recipe
from wands.distributed.dims import choose_degrees
from wands.errors import ConfigError
from wands.planning.hardware import Machine
from wands.planning.memory import CUDA_CONTEXT, Memory, estimate_memory, to_gib
from wands.planning.step_time import Prediction, Setting, predict
from wands.planning.workload import RankWorkload, Weight
from wands.variants import TEXT_LEN, DiTShape

CHECKPOINTING = ("none", "selective", "offload", "full")
SHIPPED = ("zero2", "zero3", "zero3_offload")
"""Names of the files in ds_configs/ that are tried, the least sharded first."""
HOST_SHARE = 0.9
"""Share of a node's memory that its ranks may use for offloaded tensors."""


@dataclass(frozen=True)
class Task:
    """Training task and machine.

    Attributes:
        shape: the DiT.
        weights: stored parameters of each DiT.
        num_models: number of trained DiTs.
        recipe: the recipe.
        seq_lens: int64 [N], tokens of the data's clips.
        machine: GPUs and links.
        gpus: number of ranks.
        ds_configs: name -> DeepSpeed JSON that the search tries.
        device_type: "cuda" or "cpu".
        text_len: tokens of the longest caption.
    """

    shape: DiTShape
    weights: tuple[Weight, ...]
    num_models: int
    recipe: Recipe
    seq_lens: np.ndarray
    machine: Machine
    gpus: int
    ds_configs: Mapping[str, Mapping[str, Any]]
    device_type: str = "cuda"
    text_len: int = TEXT_LEN

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return min(self.gpus, self.machine.ranks_per_node)

    @property
    def usable(self) -> float:
        """Bytes of a GPU available for tensors."""
        return self.machine.memory - (CUDA_CONTEXT if self.device_type == "cuda" else 0.0)

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
        ds_config: completed DeepSpeed config.
        recipe: recipe with this combination's keys.
        workload: sizes that determine a rank's memory.
    """

    task: Task
    ds_name: str
    ds_config: dict[str, Any]
    recipe: Recipe
    workload: RankWorkload

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory of a rank."""
        return estimate_memory(self.workload, self.recipe, self.ds_config)

    @property
    def cp(self) -> int:
        """Number of ranks that share a bin."""
        return self.workload.ulysses_degree * self.workload.ring_degree

    @property
    def host(self) -> float:
        """Bytes of a node's host memory that its ranks use."""
        return sum(self.memory.host.values()) * self.task.ranks_per_node

    @property
    def fits(self) -> bool:
        """Whether the memory of GPU and host suffices."""
        if self.task.device_type == "cpu":  # device and host share the memory
            return self.memory.needed + sum(self.memory.host.values()) <= self.task.usable
        fits_host = self.host <= HOST_SHARE * self.task.machine.host_memory
        return fits_host and self.memory.needed <= self.task.usable

    @cached_property
    def prediction(self) -> Prediction:
        """Predicted step of one DiT."""
        zero, task = self.ds_config["zero_optimization"], self.task
        setting = Setting(
            task.machine,
            self.recipe.model.checkpointing,
            self.recipe.precision.reduce,
            self.recipe.train.bins_per_step,
            zero_stage=int(zero.get("stage", 0)),
            num_trained=self.workload.trained,
            offload_optimizer=offloads_optimizer(self.ds_config),
            offload_weights=offload_device(zero, "offload_param") != "none",
        )
        lens = task.full_bin(self.recipe.packing.max_tokens)
        return predict(task.shape, lens, task.gpus, self.cp, setting)

    def changes(self) -> list[str]:
        """Return the keys that differ from the recipe, as ``key=value`` strings."""
        before, after = self.task.recipe, self.recipe
        keys = {
            "model.checkpointing": (before.model.checkpointing, after.model.checkpointing),
            "parallel.cp_size": (before.parallel.group_size, self.cp),
            "packing.max_tokens": (before.packing.max_tokens, after.packing.max_tokens),
            "train.bins_per_step": (before.train.bins_per_step, after.train.bins_per_step),
        }
        return [f"{key}={value}" for key, (old, value) in keys.items() if value != old]

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step of all DiTs."""
        return self.prediction.seconds * self.task.num_models

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all GPUs; every DiT trains on every token."""
        return self.recipe.train.bins_per_step * sum(self.prediction.plan.seq_lens) / self.seconds


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


def check_memory(
    task: Task, workload: RankWorkload, ds_name: str, ds_config: Mapping[str, Any]
) -> str | None:
    """Check whether a run fits a machine.

    Args:
        task: recipe and machine of the run. `ds_configs` has the run's JSON under `ds_name`, and others to suggest.
        workload: sizes of a rank of the run.
        ds_name: name of the run's DeepSpeed JSON.
        ds_config: completed DeepSpeed config of the run.

    Returns:
        None if the run fits; otherwise a text with the missing memory and the smallest change that fits.
    """
    run = Candidate(task, ds_name, dict(ds_config), task.recipe, workload)
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
    for combination in product(task.ds_configs, _cp_sizes(task), CHECKPOINTING):
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


def build_candidate(task: Task, name: str, cp: int, checkpointing: str, max_tokens: int) -> Candidate:
    """Build one combination, whether it fits or not.

    Raises:
        ConfigError: if the combination is not valid.
    """
    recipe, model, parallel = task.recipe, task.recipe.model, task.recipe.parallel
    if checkpointing != model.checkpointing:
        kept = {"saved_tensors": None, "offloaded_tensors": None}
        model = model.model_copy(update={"checkpointing": checkpointing, **kept})
    dp_size = task.gpus // cp
    bins = -(-recipe.train.bins_per_step // dp_size) * dp_size
    if cp != parallel.group_size:
        parallel = ParallelConfig(cp_size=cp, fused_all_to_all=parallel.fused_all_to_all)
    packing = recipe.packing.model_copy(update={"max_tokens": max_tokens})
    train = recipe.train.model_copy(update={"bins_per_step": bins})
    recipe = recipe.model_copy(
        update={"model": model, "parallel": parallel, "packing": packing, "train": train}
    )
    world: dict[str, Any] = {"world_size": task.gpus, "device_type": task.device_type}
    ds_config = build_ds_config(task.ds_configs[name], recipe, **world, names=(name, "the recipe"))
    degrees = choose_degrees(
        parallel, num_heads=task.shape.num_heads, ranks_per_node=task.ranks_per_node, model="the model"
    )
    workload = RankWorkload(
        task.shape,
        task.weights,
        num_models=task.num_models,
        **world,
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        micro_steps=bins // dp_size if packing.enabled else 2,
        max_tokens=max_tokens if packing.enabled else task.longest,
        max_samples=task.most_samples(max_tokens) if packing.enabled else 1,
        text_len=task.text_len,
    )
    return Candidate(task, name, ds_config, recipe, workload)


def _largest_bin(task: Task, name: str, cp: int, checkpointing: str) -> Candidate | None:
    """Return the candidate with the recipe's bin size, or with the largest smaller size that fits; None if none fits."""
    low, high = task.longest, max(task.recipe.packing.max_tokens, task.longest)
    best = build_candidate(task, name, cp, checkpointing, high)
    if best.fits:
        return best
    best = build_candidate(task, name, cp, checkpointing, low)
    if not best.fits:
        return None
    while high - low > max(task.longest // 8, 1):
        middle = (low + high) // 2
        candidate = build_candidate(task, name, cp, checkpointing, middle)
        low, high, best = (middle, high, candidate) if candidate.fits else (low, middle, best)
    return best


def _cp_sizes(task: Task) -> list[int]:
    """Return the recipe's size if the recipe sets the size; otherwise the powers of two that divide the number of GPUs."""
    parallel = task.recipe.parallel
    if parallel != ParallelConfig(fused_all_to_all=parallel.fused_all_to_all):
        return [parallel.group_size]
    return [1 << i for i in range(task.gpus.bit_length()) if task.gpus % (1 << i) == 0]


def find_cure(task: Task, ds_name: str) -> str:
    """Return the smallest change that makes a run fit, as text.

    Args:
        task: `ds_configs` contains the run's JSON under `ds_name`, and other JSONs to try.
        ds_name: name of the run's JSON.
    """
    recipe, longest, cp = task.recipe, task.longest, task.recipe.parallel.group_size
    sizes = [cp]
    # Another cp_size would contradict explicit degrees.
    if not (recipe.parallel.ulysses_degree or recipe.parallel.ring_degree):
        any_size = replace(task, recipe=recipe.model_copy(update={"parallel": ParallelConfig()}))
        sizes += [size for size in _cp_sizes(any_size) if size > cp]
    names = dict.fromkeys((ds_name, *task.ds_configs))
    max_tokens = dict.fromkeys((max(recipe.packing.max_tokens, longest), longest))
    checkpointing = dict.fromkeys((recipe.model.checkpointing, *CHECKPOINTING[1:]))
    for name, tokens, size, mode in product(names, max_tokens, sizes, checkpointing):
        try:
            candidate = build_candidate(task, name, size, mode, tokens)
        except ConfigError:
            continue
        if candidate.fits:
            changes = candidate.changes()
            words = [f"set {' and '.join(changes)}"] if changes else []
            if name != ds_name:
                words.append(f"{'with' if changes else 'use'} --deepspeed {name}")
            return " ".join(words)
    return "no setting fits; use more or larger GPUs, shorter or smaller clips, or a LoRA with lora.quantize"
