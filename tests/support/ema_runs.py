"""Weights and plans of runs with a moving average."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Weights = dict[str, torch.Tensor]
PLAIN = ("ema.decay=0.7", "ema.warmup=false")
STEPS = ("train.max_steps=4", "train.bins_per_step=4", "checkpoint.every=2", "checkpoint.keep=3")


def averaged(series: list[Weights], decay: float) -> Weights:
    """torch's own average, of a module that has all weights."""

    def module(weights: Weights) -> torch.nn.ParameterDict:
        return torch.nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})

    average = AveragedModel(module(series[0]), multi_avg_fn=get_ema_multi_avg_fn(decay))
    for weights in series:  # its first update copies
        average.update_parameters(module(weights))
    return {name.replace("/", "."): value.detach() for name, value in average.module.items()}


def same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def parts_in(step: Path, part: str = "transformer") -> list[dict[str, torch.Tensor]]:
    """Tensors in the file of each rank."""
    return [load_file(path) for path in sorted((step / part).glob("ema_rank_*"))]
