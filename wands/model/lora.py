"""Add a LoRA to a packed DiT with PEFT, read LoRA files, and merge LoRAs into base weights.

Letters: R rank, I in features, O out features.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn

from wands.config.recipe import LoraConfig, MergeConfig
from wands.errors import ConfigError
from wands.model.files.lora_files import LoraPair, find_lora_file, pairs_of, parse_lora, read_lora_file
from wands.model.files.tensor_files import TensorFiles
from wands.model.transformer import Fp32Linear
from wands.variants import Expert

ADAPTER = "default"
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")
_FFN = ("ffn.net.0.proj", "ffn.net.2")


def find_targets(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that get a LoRA, by module name.

    Args:
        model: model without a LoRA.
        targets: "attention": projections of self- and cross-attention; "attention+ffn": also the feed-forward; "all-linear":
            every linear layer; or a list of patterns of module names.

    Raises:
        ConfigError: if a pattern matches no linear layer.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if targets == "all-linear":
        return linears
    if isinstance(targets, str):
        ends = _ATTENTION + (_FFN if targets == "attention+ffn" else ())
        in_blocks = {name: module for name, module in linears.items() if name.startswith("blocks.")}
        return {name: module for name, module in in_blocks.items() if name.endswith(ends)}
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(
                f"lora.targets={pattern} matches no linear layer. Use attention, attention+ffn, all-linear, or patterns such as "
                "blocks.*.attn1.to_q."
            )
    return {
        name: module
        for name, module in linears.items()
        if any(fnmatchcase(name, pattern) for pattern in targets)
    }


def add_lora(
    model: nn.Module, lora: LoraConfig, seed: int, start: Mapping[str, LoraPair] | None = None
) -> None:
    """Freeze the model and add a trainable LoRA.

    lora_A is uniform as in PEFT, lora_B is zero. The values depend only on (seed, module name), so they are the same for every
    world size.

    Args:
        model: packed DiT, whose parameters ZeRO-3 may have partitioned already. The LoRA is not partitioned yet.
        lora: rank, alpha and targets.
        seed: `train.seed`.
        start: initial LoRA by module, instead of the values above.

    Raises:
        ConfigError: if a pattern matches no layer, or a module of `start` does not fit the model or the rank.
    """
    targets = find_targets(model, lora.targets)
    _check_start(targets, lora, start or {})
    alpha: Any = lora.scaled_alpha  # PEFT declares int, and only divides
    config = peft.LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(targets))
    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, base in targets.items():
        layer = model.get_submodule(name)
        # Otherwise PEFT copies the input of every layer to fp32, and autocast then casts the copy to bf16.
        layer.cast_input_dtype_enabled = False
        lora_A, lora_B = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        for linear in (lora_A, lora_B):  # PEFT uses the dtype of the base, but trained weights are fp32
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))
        if isinstance(base, Fp32Linear):  # the result of the LoRA is added to fp32 values
            lora_A.__class__ = lora_B.__class__ = Fp32Linear
        with torch.no_grad():
            lora_A.weight.copy_(_initial_lora_A(name, lora_A.weight.shape, seed))
            lora_B.weight.zero_()
            if start and name in start:
                pair = start[name]
                lora_A.weight.copy_(pair.lora_A)
                lora_B.weight.copy_(pair.lora_B.double() * (pair.scale * lora.rank / lora.scaled_alpha))


def check_lora(model: nn.Module, lora: LoraConfig, start: Mapping[str, LoraPair] | None = None) -> int:
    """Check the arguments of `add_lora` without changing the model, which may be on the meta device.

    Returns:
        Number of parameters of the LoRA.

    Raises:
        ConfigError: if `lora.targets` is empty, or in the cases of `add_lora`.
    """
    targets = find_targets(model, lora.targets)
    if not targets:
        raise ConfigError(
            f"lora.targets={lora.targets} selects no layer. Remove the key, or list patterns of layers."
        )
    _check_start(targets, lora, start or {})
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in targets.values())


def lora_pairs(state: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, LoraPair]:
    """Return the LoRA in the weights of a checkpoint, by module."""
    weights = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    alphas = {"transformer": lora.scaled_alpha}
    return parse_lora(weights, alphas=alphas, where="the checkpoint")["transformer"]


def load_lora(path: str | Path, expert: Expert, key: str) -> dict[str, LoraPair]:
    """Read the LoRA of one expert from a file in any known layout.

    Args:
        path: see `wands.model.files.lora_files.find_lora_file`.
        expert: expert of the LoRA.
        key: recipe key of the path, for errors.

    Raises:
        ConfigError: if the file does not exist or contains the LoRA of another expert.
        CheckpointError: if the file is damaged or contains no LoRA for Wan.
    """
    file = find_lora_file(Path(path), key, expert.subfolder if expert.name else None)
    with TensorFiles([file], f"{key}={file}") as files:
        loras = read_lora_file(files)
    pairs = pairs_of(loras, expert.subfolder)
    if pairs is None:
        raise ConfigError(
            f"{key}={file} contains a LoRA for {', '.join(loras)}, not for {expert.subfolder}. Set {key} to a LoRA for "
            f"{expert.subfolder}, or set model.experts."
        )
    return pairs


def load_start(lora: LoraConfig, expert: Expert) -> dict[str, LoraPair] | None:
    """Read the LoRA that `lora.init_from` names for one expert; return None if the key is not set."""
    return None if lora.init_from is None else load_lora(lora.init_from, expert, "lora.init_from")


class MergedLoras:
    """Merges LoRAs into base weights: W + sum of scale * alpha/R * lora_B @ lora_A, in float64.

    Args:
        loras: scale of each LoRA, and its pairs by module.
    """

    def __init__(self, loras: Sequence[tuple[float, Mapping[str, LoraPair]]]) -> None:
        self._loras = loras

    @classmethod
    def load(cls, merges: Sequence[MergeConfig], expert: Expert) -> MergedLoras:
        """Read the LoRA files of the recipe with `load_lora`."""
        return cls([(merge.scale, load_lora(merge.path, expert, "model.merge_loras")) for merge in merges])

    def check_fit(self, model: nn.Module) -> None:
        """Check the LoRAs against a model.

        Raises:
            ConfigError: if a module of a LoRA is not a linear layer of the model, or has another shape.
        """
        linears = find_targets(model, "all-linear")
        for _, pairs in self._loras:
            for module, pair in pairs.items():
                shape = (len(pair.lora_B), pair.lora_A.shape[1])
                linear = linears.get(module)
                if linear is None or shape != (linear.out_features, linear.in_features):
                    actual = "has no such layer" if linear is None else f"has shape {[*linear.weight.shape]}"
                    raise ConfigError(
                        f"model.merge_loras: {module} is for a weight of shape {[*shape]}, but the model {actual}. Use a LoRA "
                        "for this model."
                    )

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return a parameter with all LoRAs merged, in the dtype of `weight`."""
        module, _, leaf = name.rpartition(".")
        updates = [(scale, pairs[module]) for scale, pairs in self._loras if module in pairs]
        if leaf != "weight" or not updates:
            return weight
        return sum((scale * pair.delta() for scale, pair in updates), weight.double()).to(weight.dtype)


def _check_start(targets: Mapping[str, nn.Linear], lora: LoraConfig, start: Mapping[str, LoraPair]) -> None:
    others = sorted(set(start) - set(targets))
    if others:
        raise ConfigError(
            f"lora.init_from={lora.init_from} contains {len(others)} modules that lora.targets={lora.targets} excludes (first "
            f"{others[0]}). Set lora.targets to the targets that the LoRA was trained with."
        )
    for name, pair in start.items():
        linear = targets[name]
        expected = (lora.rank, linear.in_features), (linear.out_features, lora.rank)
        if (tuple(pair.lora_A.shape), tuple(pair.lora_B.shape)) != expected:
            raise ConfigError(
                f"lora.init_from={lora.init_from}: {name} has rank {len(pair.lora_A)} for {pair.lora_A.shape[1]} to "
                f"{len(pair.lora_B)} features, expected lora.rank={lora.rank} for {linear.in_features} to "
                f"{linear.out_features}. Set lora.rank={len(pair.lora_A)}, or use a LoRA for this model."
            )


def _initial_lora_A(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draw PEFT's initial values (Kaiming uniform with a = sqrt(5), bound 1/sqrt(I)), keyed by seed and module name."""
    digest = hashlib.blake2b(f"{seed}/{name}/lora_A".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
