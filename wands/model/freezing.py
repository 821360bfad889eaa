"""Select the trainable parameters of a full finetune by patterns of parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from wands.errors import ConfigError


def freeze_parameters(model: nn.Module, trainable: Sequence[str], frozen: Sequence[str]) -> int:
    """Set `requires_grad` of each parameter by shell patterns such as `blocks.*.attn1.*`; return the number of trainable tensors.

    No pattern in `trainable` means all parameters. A parameter that matches both lists is frozen. The model may be on the meta
    device.

    Raises:
        ConfigError: if a pattern matches no parameter, or no parameter is trainable.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("model.trainable", trainable), ("model.freeze", frozen)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{key}={pattern} matches none of the parameters ({names[0]}, ...). Use a pattern such as blocks.*.attn1.*."
                )

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trainable, frozen))
    count = sum(is_trained(name, trainable, frozen) for name in names)
    if not count:
        raise ConfigError(
            f"model.freeze={list(frozen)} freezes all parameters of model.trainable={list(trainable)}, so nothing is trained. "
            "Remove a pattern from model.freeze."
        )
    return count


def is_trained(name: str, trainable: Sequence[str], frozen: Sequence[str]) -> bool:
    """Return whether the parameter `name` is trained, see `freeze_parameters`."""
    is_trainable = not trainable or any(fnmatchcase(name, pattern) for pattern in trainable)
    return is_trainable and not any(fnmatchcase(name, pattern) for pattern in frozen)
