"""Custom operators written in plain PyTorch. torch.compile turns each operator into one or two GPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a custom operator that runs a function of tensors, compiled with torch.compile.

    The hooks of ZeRO-3 and the dispatch modes of activation checkpointing see a custom operator as one operation, and
    never the compiled code inside. The operator has no gradient. Call it in an autograd function whose backward pass calls
    another operator of this kind.

    Args:
        function: function of tensors, numbers and dtypes, in plain PyTorch. The function must return new tensors, and change
            no argument. The operator has the same arguments and results.
    """
    compiled = torch.compile(function)

    def run(*args: Any, **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                # One compiled version for all numbers of tokens, samples and timesteps; the width stays a constant.
                for dim in range(max(1, x.dim() - 1)):
                    torch._dynamo.maybe_mark_dynamic(x, dim)
        return compiled(*args, **kwargs)

    schema = torch.library.infer_schema(function, mutates_args=())
    operator = torch.library.custom_op(f"wands::{function.__name__}", run, mutates_args=(), schema=schema)
    operator.register_fake(function)
    return operator
