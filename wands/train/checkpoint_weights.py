"""The whole weights of a checkpoint, whether it holds all of them or only a LoRA."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from wands.config.recipe import LoraConfig, MergeConfig
from wands.model.files.loading import load_weights
from wands.model.files.lora_keys import LoraPair
from wands.model.lora import MergedLoras, lora_pairs
from wands.train.checkpoint import find_checkpoint, load_exported_state
from wands.train.state import TrainState
from wands.variants import Expert


def lora_of(state: TrainState) -> LoraConfig | None:
    """The LoRA settings of the run that wrote a checkpoint; None where it trained the weights themselves."""
    section = state.recipe.get("lora")
    return None if section is None else LoraConfig.model_validate(section)


def load_lora_of(where: Path, part: str = "transformer", ema: bool = False) -> dict[str, LoraPair]:
    """The LoRA that a checkpoint of a LoRA run holds, by module.

    Args:
        where: a step folder, or a run folder (its newest complete checkpoint).
        part: which DiT, one of the state's `parts`.
        ema: its average.

    Raises:
        CheckpointError: nothing complete is there, or no average.
    """
    _, state = find_checkpoint(where)
    lora = lora_of(state)
    assert lora is not None, f"{where} is of a run without LoRA"
    return lora_pairs(load_exported_state(where, part, ema), lora)


def load_full_weights(
    where: Path, part: str = "transformer", base: str | Path | None = None, ema: bool = False
) -> dict[str, Tensor]:
    """All weights of a DiT as a checkpoint leaves them: its own, or the base's with the LoRA merged in.

    Args:
        where: a step folder, or a run folder (its newest complete checkpoint).
        part: which DiT, one of the state's `parts`.
        base: model whose weights a LoRA is merged into; the run's own `model.path` by default.
        ema: the average of what was trained instead.

    Returns:
        diffusers parameter names -> fp32 CPU tensors.

    Raises:
        CheckpointError: nothing complete is there, or no average, or the base is damaged.
        ConfigError: there is no such base, or a LoRA does not fit it.
    """
    _, state = find_checkpoint(where)
    if lora_of(state) is None:
        return load_exported_state(where, part, ema)
    name = {"transformer": "high", "transformer_2": "low"}[part] if _has_experts(state) else ""
    expert = Expert(name, part, (0.0, 1.0))
    before = [MergeConfig.model_validate(one) for one in state.recipe["model"].get("merge_loras", [])]
    merges = MergedLoras.load(before, expert), MergedLoras([(1.0, load_lora_of(where, part, ema))])
    path, init = base or state.base, state.recipe["model"]["init"]
    weights = load_weights(
        path, part, init="pretrained" if base else init, seed=state.recipe["train"]["seed"]
    )
    for key in weights:
        for merged in merges:
            weights[key] = merged(key, weights[key])
    return weights


def _has_experts(state: TrainState) -> bool:
    return state.recipe["model"].get("experts") is not None or len(state.parts) == 2
