"""Search for DeepSpeed config, degrees, checkpointing and bin size that fit a machine, and rank them by speed.

Every combination is checked with the functions that a run uses (`build_ds_config`, `choose_degrees`, `estimate_memory`,
`predict`), so a combination is valid here if it is valid there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from wands.config.deepspeed import build_ds_config, offloads_optimizer
from wands.config.recipe import ParallelConfig, Recipe
from wands.distributed.dims import choose_degrees
from wands.errors import ConfigError
from wands.planning.hardware import Machine
from wands.planning.memory import CUDA_CONTEXT, Memory, RankWorkload, Weight, estimate_memory, to_gib
from wands.planning.step_time import Prediction, Setting, predict
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
        ds_configs: name -> DeepSpeed JSON to try.
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
        """Return lengths of clips that fill a bin like the data: the longest one, and others from the whole range."""
        spread = np.linspace(len(self.by_length) - 1, 0, 64).astype(np.int64)
        lens: list[int] = []
        for length in self.by_length[spread].tolist() * (max_tokens // max(int(self.by_length[0]), 1) + 1):
            if length <= max_tokens - sum(lens):
                lens.append(length)
            if max_tokens - sum(lens) < self.by_length[0]:
                break
        return lens

    def most_samples(self, max_tokens: int) -> int:
        """Return the number of clips in a bin of the shorter half of the data, which a balanced plan rarely exceeds."""
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
        memory: predicted memory of a rank.
    """

    task: Task
    ds_name: str
    ds_config: dict[str, Any]
    recipe: Recipe
    workload: RankWorkload
    memory: Memory

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
        if self.task.device_type == "cpu":  # there both are one
            return self.memory.needed + sum(self.memory.host.values()) <= self.task.usable
        return (
            self.memory.needed <= self.task.usable and self.host <= HOST_SHARE * self.task.machine.host_memory
        )

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
            offload_weights=(zero.get("offload_param") or {}).get("device", "none") != "none",
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
    """Return the machine of this process, with default links and peak, on which the memory does not depend.

    Args:
        device_type: "cuda" or "cpu".
        ranks_per_node: processes that share the host's memory.
    """
    import psutil

    host = float(psutil.virtual_memory().available)
    memory, name = host / ranks_per_node, "this host"
    if device_type == "cuda":
        import torch

        found = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        memory, name = float(found.total_memory), found.name
    return Machine(name=name, memory=memory, host_memory=host, ranks_per_node=ranks_per_node)


def check_memory(
    task: Task, workload: RankWorkload, ds_name: str, ds_config: Mapping[str, Any]
) -> str | None:
    """Check whether a run fits a machine.

    Args:
        task: its recipe is the run's, its `ds_configs` the run's JSON under `ds_name` and others that could help.
        workload: sizes of a rank of the run.
        ds_name: what the run starts with.
        ds_config: completed.

    Returns:
        None if the run fits; otherwise a text with the missing memory and the smallest change that fits.
    """
    run = Candidate(
        task,
        ds_name,
        dict(ds_config),
        task.recipe,
        workload,
        estimate_memory(workload, task.recipe, ds_config),
    )
    if run.fits:
        return None
    where = f"of the {to_gib(task.usable)} that {task.machine.name} has for tensors of a rank"
    host = (
        f" and {to_gib(run.host)} of the {to_gib(task.machine.host_memory)} that are free on the host"
        if run.host
        else ""
    )
    return f"this run needs about {to_gib(run.memory.needed)} {where}{host}; {find_cure(task, ds_name)}"


def search(task: Task) -> list[Candidate]:
    """Return all combinations that fit, the fastest first; equally fast ones from simple to complex.

    The bin size is the recipe's, or the largest that fits and still holds the longest clip.

    Raises:
        ConfigError: if no combination is valid; the message has the first reason.
    """
    found, refused, legal = [], None, False
    for name in task.ds_configs:
        for cp in _cp_sizes(task):
            for checkpointing in CHECKPOINTING:
                try:
                    best = _largest_bin(task, name, cp, checkpointing)
                except ConfigError as error:
                    refused = refused or error
                    continue
                legal = True
                if best is not None:
                    found.append(best)
    if not legal and refused is not None:
        raise refused
    return sorted(found, key=_rank)


def _rank(one: Candidate) -> int:
    """Return the sort key. Within two percent the search order decides, from simple to complex settings.

    Offloading must gain 15 %, because the speed of a busy host is the least certain part of the prediction.
    """
    speed = one.tokens_per_second * (0.85 if one.memory.host else 1.0)
    return -round(float(np.log(speed)) * 50)


def build_candidate(task: Task, name: str, cp: int, checkpointing: str, max_tokens: int) -> Candidate:
    """Build one combination, whether it fits or not.

    Raises:
        ConfigError: if the combination is not valid.
    """
    recipe, user = task.recipe, task.ds_configs[name]
    model = recipe.model
    if checkpointing != model.checkpointing:
        kept = {"saved_tensors": None, "offloaded_tensors": None}
        model = model.model_copy(update={"checkpointing": checkpointing, **kept})
    dp_size = task.gpus // cp
    bins = -(-recipe.train.bins_per_step // dp_size) * dp_size
    parallel = recipe.parallel
    if cp != parallel.group_size:
        parallel = ParallelConfig(cp_size=cp, fused_all_to_all=parallel.fused_all_to_all)
    recipe = recipe.model_copy(
        update={
            "model": model,
            "parallel": parallel,
            "packing": recipe.packing.model_copy(update={"max_tokens": max_tokens}),
            "train": recipe.train.model_copy(update={"bins_per_step": bins}),
        }
    )
    ds_config = build_ds_config(
        user, recipe, world_size=task.gpus, device_type=task.device_type, names=(name, "the recipe")
    )
    degrees = choose_degrees(
        recipe.parallel, num_heads=task.shape.num_heads, ranks_per_node=task.ranks_per_node, model="the model"
    )
    workload = RankWorkload(
        task.shape,
        task.weights,
        num_models=task.num_models,
        world_size=task.gpus,
        ulysses_degree=degrees.ulysses,
        ring_degree=degrees.ring,
        micro_steps=bins // dp_size if recipe.packing.enabled else 2,
        max_tokens=max_tokens if recipe.packing.enabled else task.longest,
        max_samples=task.most_samples(max_tokens) if recipe.packing.enabled else 1,
        device_type=task.device_type,
        text_len=task.text_len,
    )
    return Candidate(task, name, ds_config, recipe, workload, estimate_memory(workload, recipe, ds_config))


def _largest_bin(task: Task, name: str, cp: int, checkpointing: str) -> Candidate | None:
    longest = task.longest
    high = max(task.recipe.packing.max_tokens, longest)
    best = build_candidate(task, name, cp, checkpointing, high)
    if best.fits:
        return best
    smallest = build_candidate(task, name, cp, checkpointing, longest)
    if high == longest or not smallest.fits:
        return None
    low, found = longest, smallest
    while high - low > max(longest // 8, 1):
        middle = (low + high) // 2
        one = build_candidate(task, name, cp, checkpointing, middle)
        low, high, found = (middle, high, one) if one.fits else (low, middle, found)
    return found


def _cp_sizes(task: Task) -> Iterator[int]:
    """Yield the recipe's size if it sets one; otherwise the powers of two that divide the number of GPUs."""
    parallel = task.recipe.parallel
    if parallel != ParallelConfig(fused_all_to_all=parallel.fused_all_to_all):
        yield parallel.group_size
        return
    yield from (cp for cp in (1 << i for i in range(task.gpus.bit_length())) if task.gpus % cp == 0)


def find_cure(task: Task, ds_name: str) -> str:
    """Return the smallest change that makes a run fit, as text.

    Args:
        task: `ds_configs` contains the run's JSON under `ds_name`, and other JSONs to try.
        ds_name: name of the run's JSON.
    """
    recipe, own = task.recipe, task.recipe.model.checkpointing
    longest, cp = task.longest, recipe.parallel.group_size
    sizes = [cp]
    # Another cp_size would contradict explicit degrees.
    if not (recipe.parallel.ulysses_degree or recipe.parallel.ring_degree):
        anywhere = replace(task, recipe=recipe.model_copy(update={"parallel": ParallelConfig()}))
        sizes += [size for size in _cp_sizes(anywhere) if size > cp]
    bins = dict.fromkeys((max(recipe.packing.max_tokens, longest), longest))
    names = [ds_name, *(name for name in task.ds_configs if name != ds_name)]
    for name in names:
        for max_tokens in bins:
            for size in sizes:
                for checkpointing in dict.fromkeys((own, *CHECKPOINTING[1:])):
                    try:
                        one = build_candidate(task, name, size, checkpointing, max_tokens)
                    except ConfigError:
                        continue
                    if one.fits:
                        return _in_words(one, ds_name)
    return "no setting fits; use more or larger GPUs, shorter or smaller clips, or a LoRA with lora.quantize"


def _in_words(one: Candidate, ds_name: str) -> str:
    words = f"set {' and '.join(one.changes())}" if one.changes() else ""
    if one.ds_name != ds_name:
        words += f"{' with' if words else 'use'} --deepspeed {one.ds_name}"
    return words
