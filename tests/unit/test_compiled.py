"""Operators that torch.compile compiles: how many versions of one operator PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import wands.compiled
from wands.compiled import _CompiledFunction, compiled_op


def scale_and_add_for_test(x: Tensor, y: Tensor | None, scales: list[Tensor], factor: float) -> Tensor:
    total = x * scales[0] * factor
    return total if y is None else total + y


GRAPHS: list[torch.fx.GraphModule] = []


def keep_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that compiles nothing."""
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tensor]]:
    """An operator that Dynamo traces as always, and that then runs without Inductor."""
    monkeypatch.setattr(wands.compiled, "compile_graph", keep_graph)
    operator = compiled_op(scale_and_add_for_test)
    GRAPHS.clear()
    torch._dynamo.reset()
    yield operator
    torch._dynamo.reset()


def test_more_versions_are_compiled_than_torch_compiles_by_default(operator: Callable[..., Tensor]):
    cases = list(product((torch.float16, torch.float32, torch.float64), (False, True), (1, 2, 3)))
    for dtype, has_y, num_scales in cases:
        x = torch.ones(7, 4, dtype=dtype)
        assert torch.equal(operator(x, x if has_y else None, [x] * num_scales, 2.0), x * (2 + has_y))
    assert len(GRAPHS) == len(cases) > 8


def test_one_version_serves_all_lengths_with_and_without_gradients(operator: Callable[..., Tensor]):
    for length, needs_gradient in product((5, 7, 11), (False, True)):
        x, y, scale = (torch.ones(length, 4, requires_grad=needs_gradient) for _ in range(3))
        assert operator(x, y, [scale.detach()], 1.0).sum() == 2 * 4 * length
    assert len(GRAPHS) == 1


def test_only_the_number_of_tokens_varies(operator: Callable[..., Tensor]):
    """Kernels with a head dim that varies divide every index by it."""
    for head_dim in (3, 6):  # also after a call with another head dim, such as the test call of `use_compile`
        operator(torch.ones(5, 1, head_dim, 2), None, [torch.ones(5, 1, head_dim, 2)], 1.0)
    values = [node.meta["example_value"] for node in GRAPHS[-1].graph.nodes if node.op == "placeholder"]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    assert len(shapes) == 2
    for num_tokens, *others in shapes:
        assert isinstance(num_tokens, torch.SymInt)
        assert others == [1, 6, 2]
        assert all(isinstance(size, int) for size in others)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Iterator[_CompiledFunction]:
    """The function of `operator`; `_compiled` counts the calls that go through torch.compile."""
    monkeypatch.setattr(wands.compiled, "compile_graph", keep_graph)
    function = _CompiledFunction(scale_and_add_for_test)
    function._compiled = mock.Mock(wraps=function._compiled)
    torch._dynamo.reset()
    with torch.no_grad():
        yield function
    torch._dynamo.reset()


def random_args(length: int, dtype: torch.dtype, has_y: bool, num_scales: int, transposed: bool) -> list[Any]:
    x, y, *scales = (torch.randn(length, length).to(dtype) for _ in range(2 + num_scales))
    return [x.mT if transposed else x, y if has_y else None, scales]


@pytest.mark.slow
def test_torch_compile_is_asked_once_for_each_kind_of_arguments(function: _CompiledFunction):
    kinds = list(product((5, 7), (torch.float32,), (False, True), (1, 2), (False, True)))
    for _ in range(3):  # other values each time
        for kind, factor in product(kinds, (2.0, 3.0)):
            args = [*random_args(*kind), factor]
            assert torch.equal(function(*args), scale_and_add_for_test(*args)), (kind, factor)
    assert function._compiled.call_count == 2 * len(kinds)


@pytest.mark.parametrize("first_is_shared", [False, True])
def test_a_tensor_in_two_places_does_not_stand_for_two(function: _CompiledFunction, first_is_shared: bool):
    """Dynamo passes it to the compiled code once."""
    for is_shared in (first_is_shared, not first_is_shared) * 2:
        x, y, scales = random_args(5, torch.float32, True, 1, False)
        y = x if is_shared else y
        assert torch.equal(function(x, y, scales, 2.0), scale_and_add_for_test(x, y, scales, 2.0))


def test_autocast_has_code_of_its_own(function: _CompiledFunction):
    args = [*random_args(5, torch.bfloat16, True, 1, False), 2.0]
    for _ in range(2):
        function(*args)
        with torch.autocast("cpu", torch.bfloat16):
            function(*args)
    assert function._compiled.call_count == 2


def test_old_kinds_are_forgotten(function: _CompiledFunction, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wands.compiled, "MAX_SHORTCUTS", 3)
    for length in (2, 3, 4, 5, 6, 5):
        function(*random_args(length, torch.float32, True, 1, False), 2.0)
        assert len(function._shortcuts) <= 3
    assert function._compiled.call_count == 5


def test_a_gradient_that_the_operator_lacks_is_an_error(operator: Callable[..., Tensor]):
    for _ in range(2):
        out = operator(torch.ones(3, 4, requires_grad=True), None, [torch.ones(3, 4)], 1.0)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            out.sum().backward()


def test_a_dispatch_mode_sees_one_operator(operator: Callable[..., Tensor]):
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    args = torch.ones(3, 4), None, [torch.ones(3, 4)], 1.0
    with torch.no_grad():
        operator(*args)
        with Mode():
            operator(*args)
    assert seen == ["wands.scale_and_add_for_test.default"]
