"""Custom operators written in plain PyTorch. torch.compile turns each operator into one or two GPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RECOMPILE_LIMIT = 64
"""Largest number of versions of one operator that torch.compile compiles; PyTorch's default, 8, is too low. Each combination of
absent arguments, dtypes and widths needs one. Above the limit, a new combination runs as plain PyTorch."""
MAX_SHORTCUTS = 1024
"""Number of argument kinds for which one operator remembers the compiled code. Each bin has other lengths, so another kind."""


def compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a custom operator that runs a function of tensors, numbers and dtypes, compiled with torch.compile.

    The dispatch modes of activation checkpointing see one operation, never the compiled code inside. The operator has no
    gradient: call it in an autograd function whose backward pass calls a second operator. The function must return new tensors
    and change no argument. Only first dimensions are compiled as variable sizes, so the number of tokens should be first; each
    new size of another dimension compiles another version. The width is the first dimension of a weight [width], but is compiled
    as a constant if tokens [rows, width] are also an argument.
    """
    compiled = _CompiledFunction(function)
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)

    def run(*args: Any) -> Any:
        with torch.no_grad():  # the same mode in every call, or torch.compile would compile another version
            return compiled(*args)

    schema = torch.library.infer_schema(function, mutates_args=())
    operator = torch.library.custom_op(f"wands::{function.__name__}", run, mutates_args=(), schema=schema)
    operator.register_fake(function)

    def call(*args: Any) -> Any:
        # The host needs more time to call an operator than to call the compiled code. Only who observes operators needs one.
        return operator(*args) if _is_observed() else compiled(*args)

    return call


def _is_observed() -> bool:
    """Return whether autograd, a dispatch mode or torch.compile observes the operators that are called now."""
    is_traced = torch.compiler.is_compiling()
    return is_traced or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0


class _CompiledFunction:
    """Compiled function, run without gradients, with a shortcut from the arguments to the compiled code.

    At each call, torch.compile checks the conditions of each compiled version, which takes the host longer than starting the
    kernels. The conditions depend only on the kind of the arguments: shape, strides, dtype and device of each tensor, and the
    values of the others. The first call of a kind shows which compiled code runs; later calls run it directly.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._compiled = torch.compile(
            function, backend=self._compile, dynamic=False
        )  # only marked dimensions vary
        self._shortcuts: dict[tuple[Any, ...], _Shortcut | None] = {}
        self._graph_calls: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []

    def __call__(self, *args: Any) -> Any:
        kind: list[Any] = []
        tensors: list[Tensor] = []
        _describe(args, kind, tensors)
        device_type = tensors[0].device.type
        autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        key = (*kind, autocast, torch.are_deterministic_algorithms_enabled())
        if shortcut := self._shortcuts.get(key):
            return shortcut.call(tensors)
        args = tuple(map(_generalize, args))
        self._graph_calls.clear()
        result = self._compiled(*args)
        if key not in self._shortcuts:
            if len(self._shortcuts) == MAX_SHORTCUTS:
                self._shortcuts.clear()
            self._shortcuts[key] = _find_shortcut(self._graph_calls, args, result)
        self._graph_calls.clear()
        return result

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled = compile_graph(graph, inputs)

        def run(*args: Any) -> Any:
            outputs = compiled(*args)
            self._graph_calls.append((compiled, args, outputs))
            return outputs

        return run


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph of torch.compile with Inductor."""
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)


@dataclass(frozen=True)
class _Shortcut:
    """Call of compiled code for arguments of one kind.

    Attributes:
        compiled: function of tensors and sizes that returns a tuple of tensors.
        inputs: for each argument of `compiled`, (True, index in the tensors of the arguments) or (False, size).
        outputs: index in the results of `compiled`: of the function's result, or of each result in its tuple.
    """

    compiled: Callable[..., Any]
    inputs: tuple[tuple[bool, int], ...]
    outputs: int | tuple[int, ...]

    def call(self, tensors: list[Tensor]) -> Any:
        results = self.compiled(*[tensors[value] if is_index else value for is_index, value in self.inputs])
        if isinstance(self.outputs, int):
            return results[self.outputs]
        return tuple([results[index] for index in self.outputs])


def _find_shortcut(
    graph_calls: list[tuple[Callable[..., Any], tuple[Any, ...], Any]], args: tuple[Any, ...], result: Any
) -> _Shortcut | None:
    """Return the shortcut for arguments of the kind of `args`, or None, from the calls of compiled code that gave `result`."""
    if len(graph_calls) != 1:  # Dynamo has split the function, or runs it without compiling
        return None
    [(compiled, graph_args, graph_results)] = graph_calls
    tensors: list[Tensor] = []
    _describe(args, [], tensors)
    places = {id(tensor): index for index, tensor in enumerate(tensors)}
    results = {id(tensor): index for index, tensor in enumerate(graph_results)}
    wanted = result if isinstance(result, tuple) else (result,)
    is_known = all(isinstance(one, int) or id(one) in places for one in graph_args)
    # With one tensor in two places, Dynamo assumes that it always is one tensor.
    if not is_known or len(places) < len(tensors) or not all(id(one) in results for one in wanted):
        return None
    inputs = tuple((False, one) if isinstance(one, int) else (True, places[id(one)]) for one in graph_args)
    outputs = tuple(results[id(one)] for one in wanted)
    return _Shortcut(compiled, inputs, outputs if isinstance(result, tuple) else outputs[0])


def _describe(args: Iterable[Any], kind: list[Any], tensors: list[Tensor]) -> None:
    """Append the kind of the arguments to `kind`, and the tensors in them, also in lists and tuples, to `tensors`."""
    for arg in args:
        if isinstance(arg, Tensor):
            kind += (arg.shape, arg.stride(), arg.dtype, arg.device)
            tensors.append(arg)
        elif isinstance(arg, list | tuple):
            kind.append(len(arg))
            _describe(arg, kind, tensors)
        else:
            kind += (type(arg), arg)


def _generalize(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return tuple(map(_generalize, x))
    if not isinstance(x, Tensor):
        return x
    x = x.detach() if x.requires_grad else x  # or torch.compile would compile another version
    # One compiled version for all numbers of tokens, samples and timesteps above 1. The width, the number of heads and the
    # head dim stay constants: a GPU would otherwise divide indices by variables, which takes longer than reading the memory.
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
