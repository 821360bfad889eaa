"""Custom operators whose plain PyTorch code torch.compile turns into one or two kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class CompiledOp:
    """Custom operator that runs a function of tensors, compiled with torch.compile.

    The hooks of ZeRO-3 and the dispatch modes of activation checkpointing see a custom operator as one operation, and
    never the compiled code inside. The operator has no gradient. Call it in an autograd function whose backward pass calls
    another `CompiledOp`.

    Args:
        function: function of tensors, numbers and dtypes, in plain PyTorch. The function must return new tensors, and change
            no argument.
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

        schema = torch.library.infer_schema(function, mutates_args=())
        self.operator = torch.library.custom_op(
            f"wands::{function.__name__}", run, mutates_args=(), schema=schema
        )
        self.operator.register_fake(function)

    def __call__(self, *args: Any) -> Any:
        """Call the operator with the arguments of the function, and return the result of the function."""
        return self.operator(*args)
