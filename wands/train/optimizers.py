"""Optimizers by name: what each of them needs, and where the library's own object for DeepSpeed comes from.

AdamW is DeepSpeed's to make, from the JSON that wands completes. The others are made here, on the engine's parameters, and handed
to `deepspeed.initialize`. Each has a type in the JSON too, so that a run folder's deepspeed.json says what was used.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wands.errors import ConfigError

ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
_MOMENTUM = 0.95  # of Muon, as its author and everyone since has it
# Of bitsandbytes: values that share a scale; smaller tensors keep fp32 moments.
_BLOCK_8BIT, _MIN_8BIT = 256, 4096


@dataclass(frozen=True)
class OptimizerKind:
    """One value of `optim.name`.

    Attributes:
        type: its name in a DeepSpeed JSON.
        keys: settings of the recipe's optim section that it has.
        package: what must be installed for it, besides what wands needs anyway.
    """

    type: str
    keys: tuple[str, ...] = ADAM_KEYS
    package: str | None = None


KINDS = {
    "adamw": OptimizerKind("AdamW"),
    "adamw8bit": OptimizerKind("AdamW8bit", package="bitsandbytes"),
    "adafactor": OptimizerKind("Adafactor", ("lr", "weight_decay")),
    "muon": OptimizerKind("Muon"),
}


def kind_of(type_name: str) -> str | None:
    """`optim.name` of a type in a DeepSpeed JSON; None for one that is DeepSpeed's own."""
    return next((name for name, kind in KINDS.items() if kind.type.lower() == type_name.lower()), None)


def check_optimizer(
    name: str,
    zero: Mapping[str, Any],
    *,
    lora: bool,
    clip: float,
    scheduled: bool,
    reduced_in: str | None = None,
) -> list[str]:
    """What keeps an optimizer from being right here, each in a sentence with its cure.

    Args:
        name: `optim.name`.
        zero: the `zero_optimization` section.
        lora: whether a LoRA is trained.
        clip: largest norm of the gradient, 0 for any.
        scheduled: whether the JSON has a scheduler of its own.
        reduced_in: `communication_data_type`, where gradients are not reduced in their own.
    """
    stage, package = int(zero.get("stage", 0)), KINDS[name].package
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    problems = []
    if package and importlib.util.find_spec(package) is None:
        problems.append(
            f"optim.name={name} needs {package}, which is not installed; pip install 'wands[8bit]'."
        )
    if name == "adafactor" and stage > 0:
        problems.append(
            f"optim.name=adafactor keeps the rows and columns of whole matrices, and ZeRO-{stage} cuts them into flat shards; "
            "use zero_optimization.stage=0 (its states are hardly any), or optim.name=adamw8bit."
        )
    if name == "adamw8bit" and offload == "nvme":
        problems.append(
            "optim.name=adamw8bit has states that DeepSpeed cannot swap to NVMe; use offload_optimizer.device=cpu."
        )
    if name == "muon":
        problems += _check_muon(zero, stage, offload, lora=lora, clip=clip, scheduled=scheduled)
        if stage == 3 and reduced_in:
            problems.append(
                f"precision.reduce={reduced_in} would keep Muon's momentum in {reduced_in} at ZeRO-3; use precision.reduce=fp32, "
                "or zero_optimization.stage=2."
            )
    return problems


def _check_muon(
    zero: Mapping[str, Any], stage: int, offload: str, *, lora: bool, clip: float, scheduled: bool
) -> list[str]:
    problems = []
    if lora:
        problems.append(
            "optim.name=muon is for the matrices of a full finetune, and a LoRA trains their factors; use optim.name=adamw or "
            "adamw8bit."
        )
    if offload != "none" or zero.get("cpu_offload"):
        problems.append(
            "optim.name=muon multiplies whole matrices in its step, which belongs on the device; remove "
            "zero_optimization.offload_optimizer, or use optim.name=adamw."
        )
    if stage > 0 and clip > 0:
        problems.append(
            f"optim.grad_clip={clip} would clip Muon's update at ZeRO-{stage}, where DeepSpeed takes the norm after "
            "orthogonalising; set optim.grad_clip=0 (the size of the update does not depend on the gradient's) or use "
            "zero_optimization.stage=0."
        )
    if stage == 3 and zero.get("reduce_scatter"):
        problems.append(
            "optim.name=muon needs zero_optimization.reduce_scatter=false at ZeRO-3; leave it out."
        )
    if scheduled:
        problems.append(
            "optim.name=muon has a learning rate for each shape of matrix, and scheduler of the JSON sets one for all; remove it "
            "and use optim.schedule."
        )
    return problems


def state_bytes_per_param(
    name: str, parameters: Iterable[tuple[str, Sequence[int]]], zero_stage: int
) -> float:
    """Bytes of an optimizer's states, all ranks together, over the number of parameters; master weights are not among them.

    Args:
        name: `optim.name`.
        parameters: names and shapes of what is trained.
        zero_stage: 0 to 3; from 1 on the states are divided by the ranks that share them.
    """
    total, num_params = 0.0, 0
    for parameter, shape in parameters:
        numel = math.prod(shape)
        num_params += numel
        if name == "adamw8bit" and (zero_stage > 0 or numel >= _MIN_8BIT):
            total += 2 * (numel + 4 * numel / _BLOCK_8BIT)  # a byte each, and fp32 scales
        elif name == "adafactor" and len(shape) > 1:
            total += 4 * numel * (1 / shape[-1] + 1 / shape[-2])
        elif name == "adafactor":
            total += 4 * numel
        elif name == "muon" and is_hidden_matrix(parameter, shape):
            # At stages 1 and 2 DeepSpeed writes the next momentum beside the last.
            total += (8 if zero_stage in (1, 2) else 4) * numel
        else:
            total += 8 * numel
    return total / max(num_params, 1)


def build_optimizer(
    named_parameters: Iterable[tuple[str, Any]], section: Mapping[str, Any], *, fused: bool
) -> Any:
    """The optimizer that is handed to DeepSpeed.

    Args:
        named_parameters: those that are trained, in the model's order; under ZeRO-3 they may be sharded.
        section: `optimizer` of the completed DeepSpeed config.
        fused: whether AdamW beside Muon takes torch's fused kernel.

    Returns:
        A torch optimizer, or None where DeepSpeed makes its own from the section.

    Raises:
        ConfigError: its library does not load, or nothing that is trained is for it.
    """
    name, params = kind_of(section["type"]), section["params"]
    named = list(named_parameters)
    if name == "adamw8bit":
        return _bitsandbytes().optim.AdamW8bit([parameter for _, parameter in named], **params)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        # Its own schedule, and rates relative to the weights, would both take optim.lr for something else.
        fixed = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
        return Adafactor([parameter for _, parameter in named], **params, **fixed)
    return _build_muon(named, params, fused) if name == "muon" else None


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except Exception as error:  # a build for another torch or CUDA fails in its own ways
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"optim.name=adamw8bit: bitsandbytes cannot be loaded here ({reason}); pip install --upgrade 'wands[8bit]'."
        ) from error
    return bitsandbytes


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: the linear layers of the blocks, not embeddings, modulation, norms, biases or head."""
    return name.startswith("blocks.") and len(shape) == 2


def muon_ratio(rows: int, columns: int) -> float:
    """What turns AdamW's learning rate into that of Muon for a matrix.

    An orthogonal matrix has entries of 1 / sqrt(max(rows, columns)) in the mean square, AdamW's update of about 0.2. DeepSpeed
    has multiplied its update by sqrt(max(1, rows / columns)) already.

    Source: Liu et al. 2025, Muon is Scalable for LLM Training, eq. 4 (arXiv:2502.16982).
    """
    return 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))


def _build_muon(named: Sequence[tuple[str, Any]], params: Mapping[str, Any], fused: bool) -> Any:
    import torch
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    shapes: dict[tuple[int, ...], list[Any]] = {}
    others: list[Any] = []
    for name, parameter in named:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the whole one there
        parameter.use_muon = is_hidden_matrix(name, shape)
        (shapes.setdefault(shape, []) if parameter.use_muon else others).append(parameter)
    if not shapes:
        raise ConfigError(
            "optim.name=muon finds no matrix of a block that is trained (model.trainable, model.freeze); use optim.name=adamw.",
            agreed=True,
        )
    groups: list[dict[str, Any]] = []
    if others:  # first: the learning rate that is logged is that of the first group
        groups.append({"params": others, "use_muon": False, **params})
    for (rows, columns), matrices in shapes.items():
        ratio = muon_ratio(rows, columns)
        groups.append(
            {
                "params": matrices,
                "use_muon": True,
                "lr": params["lr"] * ratio,
                "weight_decay": params["weight_decay"] / ratio,  # it is multiplied by the learning rate
                "momentum": _MOMENTUM,
            }
        )
    if not fused:
        # DeepSpeed compiles the orthogonalisation; on a CPU that takes longer than any run there.
        torch.compiler.set_stance("force_eager")
    return MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True} if fused else None
    )
