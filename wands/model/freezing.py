"""Which parameters of a full finetune are trained, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from wands.errors import ConfigError


def freeze_parameters(model: nn.Module, trainable: Sequence[str], frozen: Sequence[str]) -> int:
    """Leave gradients to the parameters that `trainable` names and `frozen` does not.

    Args:
        model: whose parameters are to be chosen from; works on the meta device too.
        trainable: patterns as of a shell, such as `blocks.*.attn1.*`; no pattern is all parameters.
        frozen: likewise; they win.

    Returns:
        Number of parameter tensors that are trained.

    Raises:
        ConfigError: a pattern that fits no name, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("model.trainable", trainable), ("model.freeze", frozen)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{key}={pattern} fits none of the {len(names)} parameters; write for example blocks.*.attn1.* or "
                    f"{names[0]}."
                )

    def is_trained(name: str) -> bool:
        chosen = not trainable or any(fnmatchcase(name, pattern) for pattern in trainable)
        return chosen and not any(fnmatchcase(name, pattern) for pattern in frozen)

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    count = sum(is_trained(name) for name in names)
    if not count:
        raise ConfigError(
            f"model.freeze={list(frozen)} leaves none of the parameters of model.trainable={list(trainable)}; "
            "take a pattern away."
        )
    return count
