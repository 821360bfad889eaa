"""LoRA with PEFT on a packed DiT: which layers get one, how it starts, how it leaves, and how others are merged into the base.

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
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from wands.config.recipe import LoraConfig, MergeConfig
from wands.errors import CheckpointError, ConfigError
from wands.model.files.lora_files import find_lora_file
from wands.model.files.lora_keys import LoraPair, alphas_of, read_lora
from wands.model.transformer import Fp32Linear
from wands.variants import Expert

ADAPTER = "default"
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")
_FFN = ("ffn.net.0.proj", "ffn.net.2")


def find_targets(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers that get a LoRA.

    Args:
        model: before it has one.
        targets: "attention" is the projections of self- and cross-attention; "attention+ffn" the feed-forward
            too; "all-linear" every linear layer; or patterns of module names.

    Raises:
        ConfigError: a pattern that fits no linear layer.
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
                f"lora.targets={pattern} fits no linear layer; write for example blocks.*.attn1.to_q, or attention, "
                "attention+ffn or all-linear."
            )
    return {
        name: module
        for name, module in linears.items()
        if any(fnmatchcase(name, pattern) for pattern in targets)
    }


def add_lora(
    model: nn.Module, lora: LoraConfig, seed: int, start: Mapping[str, LoraPair] | None = None
) -> None:
    """Freeze the model and give it a LoRA that alone is trained.

    A starts uniform as in PEFT and B at zero, from (seed, name) alone, so that every world starts alike.

    Args:
        model: a packed DiT; under ZeRO-3 its parameters may be partitioned already, those of the LoRA are not.
        lora: rank, alpha and targets.
        seed: `train.seed`.
        start: a LoRA to go on from, by module.

    Raises:
        ConfigError: a target or a module of `start` that does not fit.
    """
    targets = find_targets(model, lora.targets)
    _check_start(targets, lora, start or {})
    alpha: Any = lora.scaled_alpha  # PEFT says int, and only divides it
    config = peft.LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=list(targets))
    model.requires_grad_(False)
    peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, base in targets.items():
        layer = model.get_submodule(name)
        # Autocast knows better: PEFT would widen its input to the weights' fp32, a copy of it for every layer.
        layer.cast_input_dtype_enabled = False
        down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        for linear in (down, up):  # PEFT gives them the base's dtype, and what is trained is fp32
            linear.to(torch.promote_types(linear.weight.dtype, torch.float32))
        if isinstance(base, Fp32Linear):  # what adds to an fp32 region is fp32 itself
            down.__class__ = up.__class__ = Fp32Linear
        with torch.no_grad():
            down.weight.copy_(_initial_down(name, down.weight.shape, seed))
            up.weight.zero_()
            if start and name in start:
                pair = start[name]
                down.weight.copy_(pair.lora_A)
                up.weight.copy_(pair.lora_B.double() * (pair.scale * lora.rank / lora.scaled_alpha))


def check_lora(model: nn.Module, lora: LoraConfig, start: Mapping[str, LoraPair] | None = None) -> int:
    """See whether `add_lora` would work, without changing the model; works on the meta device.

    Returns:
        Parameters of the LoRA.

    Raises:
        ConfigError: as `add_lora`.
    """
    targets = find_targets(model, lora.targets)
    if not targets:
        raise ConfigError(f"lora.targets={lora.targets} chooses no layer; leave it out or name some.")
    _check_start(targets, lora, start or {})
    return sum(lora.rank * (linear.in_features + linear.out_features) for linear in targets.values())


def lora_pairs(state: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, LoraPair]:
    """The LoRA in a checkpoint's weights, by module; parameters that are not of it are left out."""
    own = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    alphas = {"transformer": lora.scaled_alpha}
    return read_lora(own, alphas=alphas, where="the checkpoint")["transformer"]


def load_lora(path: str | Path, expert: Expert, key: str) -> dict[str, LoraPair]:
    """Read a LoRA file of any known layout.

    Args:
        path: see `wands.model.files.lora_files.find_lora_file`.
        expert: whose LoRA is wanted.
        key: what the user calls it, for errors.

    Raises:
        ConfigError: there is no such file, or it holds another expert's.
        CheckpointError: it is damaged, or no LoRA of Wan.
    """
    file = find_lora_file(Path(path), key, expert.subfolder if expert.name else None)
    try:
        with safe_open(file, framework="pt") as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
            alphas = alphas_of(opened.metadata(), str(file))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{key}={file} cannot be read ({error}); fetch it again.") from None
    loras = read_lora(state, alphas=alphas, where=f"{key}={file}")
    if expert.subfolder in loras:
        return loras[expert.subfolder]
    if list(loras) == ["transformer"] and expert.name:  # most files of one expert do not say which
        return loras["transformer"]
    raise ConfigError(
        f"{key}={file} holds a LoRA of {', '.join(loras)}, not of {expert.subfolder}; give that one's, or set model.experts."
    )


def load_start(lora: LoraConfig, expert: Expert) -> dict[str, LoraPair] | None:
    """The LoRA that `lora.init_from` names, for one expert; see `load_lora`."""
    return None if lora.init_from is None else load_lora(lora.init_from, expert, "lora.init_from")


class MergedLoras:
    """How weights change when LoRAs are merged into them: W + sum of scale * alpha/R * B @ A, in float64.

    Args:
        loras: scale, and pairs by module, of each.
    """

    def __init__(self, loras: Sequence[tuple[float, Mapping[str, LoraPair]]]) -> None:
        self._loras = loras

    @classmethod
    def load(cls, merges: Sequence[MergeConfig], expert: Expert) -> MergedLoras:
        """Read the files; see `load_lora`."""
        return cls([(merge.scale, load_lora(merge.path, expert, "model.merge_loras")) for merge in merges])

    def check_fit(self, model: nn.Module) -> None:
        """See that every module is a linear layer of the model, of the right shape.

        Raises:
            ConfigError: one is not.
        """
        linears = find_targets(model, "all-linear")
        for _, pairs in self._loras:
            for module, pair in pairs.items():
                found = (len(pair.lora_B), pair.lora_A.shape[1])
                linear = linears.get(module)
                if linear is None or found != (linear.out_features, linear.in_features):
                    what = "no linear layer here" if linear is None else f"of {[*linear.weight.shape]} here"
                    raise ConfigError(
                        f"model.merge_loras has {module} for a weight of {[*found]}, which is {what}; give a LoRA of this model."
                    )

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """One parameter with what there is for it, in its own dtype."""
        module, _, leaf = name.rpartition(".")
        found = [(scale, pairs[module]) for scale, pairs in self._loras if module in pairs]
        if leaf != "weight" or not found:
            return weight
        return sum((scale * pair.delta() for scale, pair in found), weight.double()).to(weight.dtype)


def _check_start(targets: Mapping[str, nn.Linear], lora: LoraConfig, start: Mapping[str, LoraPair]) -> None:
    others = sorted(set(start) - set(targets))
    if others:
        raise ConfigError(
            f"lora.init_from={lora.init_from} holds {len(others)} modules that lora.targets={lora.targets} leaves out (first "
            f"{others[0]}); use the targets that it was trained with."
        )
    for name, pair in start.items():
        linear = targets[name]
        wanted = (lora.rank, linear.in_features), (linear.out_features, lora.rank)
        if (tuple(pair.lora_A.shape), tuple(pair.lora_B.shape)) != wanted:
            raise ConfigError(
                f"lora.init_from={lora.init_from}: {name} is of rank {len(pair.lora_A)} for {pair.lora_A.shape[1]} to "
                f"{len(pair.lora_B)} features, wanted is lora.rank={lora.rank} for {linear.in_features} to "
                f"{linear.out_features}; set lora.rank to its rank, or give a LoRA of this model."
            )


def _initial_down(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Kaiming's uniform values with a = sqrt(5), which are within 1/sqrt(I): PEFT's start, keyed."""
    digest = hashlib.blake2b(f"{seed}/{name}/lora_A".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
