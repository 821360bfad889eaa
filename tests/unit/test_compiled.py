"""Operators that torch.compile compiles: how many versions of one operator PyTorch makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from wands.compiled import compiled_op


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
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=keep_graph))
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
