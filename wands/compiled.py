"""Custom operators written in plain PyTorch. torch.compile turns each operator into one or two GPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RECOMPILE_LIMIT = 64
"""Number of versions of one operator that torch.compile may compile.

Each combination of absent arguments, dtypes and widths needs another version. Above the limit, a new combination runs as plain
PyTorch. PyTorch's default limit, 8, is too low.
"""


def compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a custom operator that runs a function of tensors, compiled with torch.compile.

    The hooks of ZeRO-3 and the dispatch modes of activation checkpointing see a custom operator as one operation, and
    never the compiled code inside. The operator has no gradient. To get a gradient, call the operator in an autograd
    function whose backward pass calls a second operator for the gradient.

    Args:
        function: function of tensors, numbers and dtypes, in plain PyTorch. The function must return new tensors, and change
            no argument. The operator has the arguments and results of the function. A size that differs between calls, such as
            the number of tokens, should be the first dimension of its tensors: only first dimensions are compiled as variable
            sizes. For each new size of another dimension, PyTorch compiles another version. The width is the first dimension of
            a weight [width], but is compiled as a constant if tokens [rows, width] are also an argument.
    """
    compiled = torch.compile(function, dynamic=False)  # only marked dimensions vary
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)

    def generalize(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return tuple(map(generalize, x))
        if not isinstance(x, Tensor):
            return x
        x = x.detach() if x.requires_grad else x  # for the same reason as no_grad below
        # One compiled version for all numbers of tokens, samples and timesteps above 1. The width, the number of heads and the
        # head dim stay constants: a GPU would otherwise divide indices by variables, which takes longer than reading the memory.
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return x

    def run(*args: Any) -> Any:
        with torch.no_grad():  # the same mode in every call, or torch.compile would compile another version
            return compiled(*map(generalize, args))

    schema = torch.library.infer_schema(function, mutates_args=())
    operator = torch.library.custom_op(f"wands::{function.__name__}", run, mutates_args=(), schema=schema)
    operator.register_fake(function)
    return operator
