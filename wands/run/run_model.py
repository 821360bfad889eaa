"""The model of a run: its variant, the DiTs that are trained, and their parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wands.config.recipe import Recipe
from wands.model.files.loading import sample_weights
from wands.model.files.tensor_files import sample_digest
from wands.model.lora import find_merge_loras
from wands.planning.workload import Weight
from wands.variants import DiTShape, Expert, Variant


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """Model of a run.

    Attributes:
        config: diffusers config of the DiT.
        experts: the trained DiTs. Each step updates them one after the other.
        weights: parameters of one trained DiT, equal for all trained DiTs.
        has_files: False in a dry run of a model that is not downloaded.
    """

    config: dict[str, Any]
    variant: Variant
    experts: tuple[Expert, ...]
    weights: tuple[Weight, ...]
    has_files: bool = True

    @property
    def shape(self) -> DiTShape:
        return self.variant.dit

    @cached_property
    def num_trained(self) -> int:
        """Number of trained parameter elements in one trained DiT."""
        return sum(weight.numel for weight in self.weights if weight.trained)


def base_fingerprint(recipe: Recipe, experts: Sequence[Expert]) -> str | None:
    """Return a digest of some base weights and of the merged LoRAs, by which a resumed LoRA run notices that they have changed.

    None for random base weights, and for a full finetune, whose checkpoints contain all weights.
    """
    model = recipe.model
    if recipe.lora is None or model.init == "random":
        return None
    parts = []
    for expert in experts:
        parts.append(sample_weights(model.path, expert.subfolder))
        for merge in model.merge_loras:
            for file in find_merge_loras(merge, expert, model.experts):
                if expert.subfolder in file.experts:
                    parts.append(f"{merge.scale}*{sample_digest([file.path], 'model.merge_loras')}")
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()
