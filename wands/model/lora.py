"""Add a LoRA to a packed DiT with PEFT, read LoRA files, and merge LoRAs into base weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from wands.config.recipe import LoraConfig, MergeConfig
from wands.errors import ConfigError
from wands.model.files.lora_experts import (
    EXPERT_NAMES,
    EXPERT_OF,
    FoundLora,
    assign_experts,
    find_lora_files,
)
from wands.model.files.lora_files import parse_lora
from wands.model.files.lora_update import LoraPair, LoraUpdate
from wands.model.files.name_maps import shorten
from wands.model.tensor_parallel import divide_lora, own_part, whole_features
from wands.model.transformer import Fp32Linear
from wands.variants import Expert

ADAPTER = "default"
_ATTENTION = [f"blocks.*{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")]
_TARGETS = {
    "attention": _ATTENTION,
    "attention+ffn": [*_ATTENTION, "blocks.*ffn.net.0.proj", "blocks.*ffn.net.2"],
    "all-linear": ["*"],
}


def find_targets(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of a model without LoRA that get one, by name.

    `targets` is "attention" (projections of self- and cross-attention), "attention+ffn", "all-linear" (every linear layer), or a
    list of shell patterns of layer names, such as `blocks.*.attn1.to_q`.

    Raises:
        ConfigError: if a pattern matches no linear layer.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    patterns = _TARGETS[targets] if isinstance(targets, str) else targets
    for pattern in () if isinstance(targets, str) else targets:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(
                f"lora.targets={pattern} matches no linear layer. Use attention, attention+ffn, all-linear, or patterns such as "
                "blocks.*.attn1.to_q."
            )
    return {
        name: linears[name] for name in linears if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def add_lora(
    model: nn.Module, lora: LoraConfig, seed: int, start: Mapping[str, LoraPair] | None = None
) -> None:
    """Freeze the model and add a trainable LoRA.

    A layer without a pair in `start` gets lora_B zero and lora_A from PEFT's uniform distribution. The values depend only on the
    seed and the name of the layer, not on the number of GPUs. With tensor parallelism, the LoRA of a divided layer is divided as
    the layer is.

    Args:
        model: packed DiT. ZeRO-3 may have partitioned its parameters; the new LoRA parameters are not partitioned.
        lora: rank, alpha and targets.
        seed: `train.seed`.
        start: initial lora_A and lora_B by layer name.

    Raises:
        ConfigError: see `check_lora`.
    """
    targets = find_targets(model, lora.targets)
    _check_start(targets, lora, start or {})
    alpha: Any = lora.scaled_alpha  # PEFT declares an int, but only divides alpha by the rank
    config = peft.LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(targets))
    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, base in targets.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, LoraLayer)
        # Without this, PEFT copies the input of every layer to fp32, and autocast then casts the copy to bf16.
        layer.cast_input_dtype_enabled = False
        lora_A = layer.lora_A[ADAPTER]
        lora_B = layer.lora_B[ADAPTER]
        assert isinstance(lora_A, nn.Linear)
        assert isinstance(lora_B, nn.Linear)
        for linear in (lora_A, lora_B):  # PEFT uses the dtype of the base, but trained weights are fp32
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))
        if isinstance(base, Fp32Linear):  # the LoRA must compute in fp32 like its base layer
            lora_A.__class__ = lora_B.__class__ = Fp32Linear
        cut_A, cut_B = divide_lora(base, lora_A, lora_B)
        with torch.no_grad():
            in_features, _ = whole_features(base)
            lora_A.weight.copy_(
                own_part(_initial_lora_A(name, torch.Size((lora.rank, in_features)), seed), cut_A)
            )
            lora_B.weight.zero_()
            if start and name in start:
                pair = start[name]
                scaled_B = pair.lora_B.double() * (pair.scale * lora.rank / lora.scaled_alpha)
                lora_A.weight.copy_(own_part(pair.lora_A, cut_A))
                lora_B.weight.copy_(own_part(scaled_B, cut_B))


def check_lora(model: nn.Module, lora: LoraConfig, start: Mapping[str, LoraPair] | None = None) -> int:
    """Check the arguments of `add_lora` on a model, which may be on the meta device; return the number of LoRA parameters.

    Raises:
        ConfigError: if `lora.targets` selects no layer or has a pattern that matches none, or a layer of `start` is not selected,
            does not fit the model, or has a rank other than `lora.rank`.
    """
    targets = find_targets(model, lora.targets)
    if not targets:
        raise ConfigError(
            f"lora.targets={lora.targets} selects no layer. Remove the key, or list patterns of layer names."
        )
    _check_start(targets, lora, start or {})
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in targets.values())


def lora_pairs(state: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, LoraPair]:
    """Return the LoRA in the weights of a checkpoint by layer name. `lora` are the settings of the run that wrote it."""
    weights = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    settings = {"transformer": {"lora_alpha": lora.scaled_alpha}}
    return parse_lora(weights, settings=settings, where="the checkpoint")["transformer"].pairs


Trained = Literal["high", "low", "both"] | None
"""Value of model.experts: which experts of a model with two experts a run trains."""


def find_run_loras(
    path: str, key: str, expert: Expert, trained: Trained, chosen: Literal["high", "low"] | None = None
) -> list[FoundLora]:
    """Return the files of a LoRA that a recipe names, each with the DiTs that it changes.

    Args:
        path: LoRA file or folder, see `find_lora_files`.
        key: recipe key of the path, for error messages.
        expert: any DiT of the model.
        trained: `model.experts` of the recipe.
        chosen: expert that the recipe names for this LoRA.

    Raises:
        ConfigError: if the file does not exist, does not say for which of two trained experts it is, or is for an untrained
            expert.
        CheckpointError: if a file is damaged.
    """
    only = EXPERT_OF.get(trained or "")
    if chosen and not expert.name:
        raise ConfigError(f"{key}: expert={chosen} is for a model with two experts. Remove expert.")
    say_it = (
        "set expert: high or expert: low next to path"
        if key == "model.merge_loras"
        else "set model.experts to high or low"
    )
    where = f"{key}={path}"
    files = assign_experts(
        find_lora_files(Path(path), key, EXPERT_OF.get(chosen or "")),
        where,
        two_experts=bool(expert.name),
        only=only,
        ways=say_it,
    )
    if only and not any(only in file.experts for file in files):
        raise ConfigError(
            f"{where}: {files[0]}, but model.experts={trained} trains only the other. Use the LoRA of the trained expert."
        )
    return files


def load_start(lora: LoraConfig, expert: Expert, trained: Trained = None) -> dict[str, LoraPair] | None:
    """Return the initial LoRA of one DiT from `lora.init_from`, by layer name; None if it is not set.

    Raises:
        ConfigError: if the file is for another DiT, or contains full-size updates of parameters, which a LoRA run cannot train.
    """
    if lora.init_from is None:
        return None
    where = f"lora.init_from={lora.init_from}"
    files = find_run_loras(lora.init_from, "lora.init_from", expert, trained)
    file = next((file for file in files if expert.subfolder in file.experts), None)
    if file is None:
        name = EXPERT_NAMES[expert.subfolder].replace("_", "-")
        other = "low" if expert.name == "high" else "high"
        raise ConfigError(
            f"{where} contains no LoRA of the {name} expert: {files[0]}. Add a LoRA of this expert to the folder, or train only "
            f"the other expert with model.experts={other}."
        )
    update = file.read(where)[expert.subfolder]
    if update.differences:
        raise ConfigError(
            f"{where} contains full-size updates of {len(update.differences)} parameters "
            f"({shorten(update.differences, 3)}), which a LoRA run cannot train. Name the file in model.merge_loras instead."
        )
    return update.pairs


def find_merge_loras(merge: MergeConfig, expert: Expert, trained: Trained) -> list[FoundLora]:
    """Return the files of one entry of `model.merge_loras`, see `find_run_loras`."""
    return find_run_loras(merge.path, "model.merge_loras", expert, trained, merge.expert)


class MergedLoras:
    """Merges LoRAs into base weights, in float64.

    A merged weight is the base weight plus the sum of scale * update over all LoRAs. The update is alpha / rank * lora_B @
    lora_A, or a full-size tensor of the LoRA file. `loras` are (scale, update); scale is chosen by the user, 1 for the LoRA as it
    was trained.
    """

    def __init__(self, loras: Sequence[tuple[float, LoraUpdate]]) -> None:
        self._loras = loras

    @classmethod
    def load(cls, merges: Sequence[MergeConfig], expert: Expert, trained: Trained = None) -> MergedLoras:
        """Read the LoRA files of `model.merge_loras` for the DiT `expert`. `trained` is `model.experts` of the recipe."""
        loras = []
        for merge in merges:
            files = find_merge_loras(merge, expert, trained)
            where = f"model.merge_loras={merge.path}"
            updates = [
                file.read(where)[expert.subfolder] for file in files if expert.subfolder in file.experts
            ]
            loras += [(merge.scale, update) for update in updates or [LoraUpdate()]]
        return cls(loras)

    def check_fit(self, model: nn.Module) -> None:
        """Raise ConfigError if the model lacks a parameter that a LoRA changes, or has it in a different shape."""
        for number, (_, update) in enumerate(self._loras, 1):
            if missing := update.find_missing(model, where := f"model.merge_loras, entry {number}"):
                raise ConfigError(
                    f"{where}: the LoRA changes {len(missing)} parameters that the model does not have "
                    f"({shorten(missing, 3)}). Use a LoRA that was trained for this model."
                )

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return a parameter with all LoRAs merged into it, in the dtype of `weight`; `weight` itself if no LoRA changes it."""
        merged = weight
        for scale, update in self._loras:
            merged = update.merge(name, merged, scale)
        return merged.to(weight.dtype)


def _check_start(targets: Mapping[str, nn.Linear], lora: LoraConfig, start: Mapping[str, LoraPair]) -> None:
    others = sorted(set(start) - set(targets))
    if others:
        raise ConfigError(
            f"lora.init_from={lora.init_from} contains {len(others)} layers that lora.targets={lora.targets} excludes (the first "
            f"is {others[0]}). Set lora.targets to the targets that the LoRA was trained with."
        )
    for name, pair in start.items():
        in_features, out_features = whole_features(targets[name])
        expected = (lora.rank, in_features), (out_features, lora.rank)
        if (tuple(pair.lora_A.shape), tuple(pair.lora_B.shape)) != expected:
            raise ConfigError(
                f"lora.init_from={lora.init_from}: {name} has rank {len(pair.lora_A)}, {pair.lora_A.shape[1]} inputs and "
                f"{len(pair.lora_B)} outputs; expected lora.rank={lora.rank}, {in_features} inputs and "
                f"{out_features} outputs. Set lora.rank={len(pair.lora_A)}, or use a LoRA for this model."
            )


def _initial_lora_A(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draw lora_A from `seed` and the layer name, as PEFT does: Kaiming uniform with a = sqrt(5), within 1/sqrt(in features)."""
    digest = hashlib.blake2b(f"{seed}/{name}/lora_A".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
