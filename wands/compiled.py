"""Custom operators that torch.compile turns into a few kernels, each next to the plain PyTorch function that it must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class CompiledOp:
    """A function of tensors that runs either as plain PyTorch or as one custom operator with compiled code.

    A custom operator keeps the compiled code apart from ZeRO-3's hooks and from the dispatch modes of activation
    checkpointing: both see one operation. The operator has no gradient of its own. The caller is an autograd function
    whose backward pass calls another `CompiledOp`.

    Args:
        function: pure function of tensors, numbers and dtypes. Its results must be new tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        compiled = torch.compile(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor):
                    # One compiled version for all numbers of tokens, samples and timesteps; the width stays a constant.
                    for dim in range(max(1, x.dim() - 1)):
                        torch._dynamo.maybe_mark_dynamic(x, dim)
            return compiled(*args, **kwargs)

        self.function = function
        schema = torch.library.infer_schema(function, mutates_args=())
        self.operator = torch.library.custom_op(
            f"wands::{function.__name__}", run, mutates_args=(), schema=schema
        )
        self.operator.register_fake(function)

    def __call__(self, *args: Any) -> Any:
        """Return the result of the compiled operator."""
        return self.operator(*args)
