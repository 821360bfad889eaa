"""What backward finds of a block, and what it computes again.

Under `torch.utils.checkpoint` a block runs twice, the second time in backward. Results that were kept by name stand in for their
operators in the second run: on the device (saved) or on the host (offloaded). The names are those that users of other trainers
know; all are of self-attention and the feed-forward.

block_input       the residual stream on its way into the block, which every mode but "none" keeps; only ever offloaded
query_proj        the result of attn1.to_q, before norm and rotation; key_proj and value_proj alike
attn_input        q, k and v behind Ulysses' all-to-all; without one there is nothing to keep
attn_output       what the attention kernel or the ring returns, with its log-sum-exp, and that behind the all-to-all back
ffn_activation    the feed-forward's hidden state, before its non-linearity

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from wands.model.offload import ActivationOffloader, Stored, detached

BLOCK_INPUT = "block_input"
PROJECTIONS = {
    "query_proj": "attn1.to_q",
    "key_proj": "attn1.to_k",
    "value_proj": "attn1.to_v",
    "ffn_activation": "ffn.net.0.proj",
}
"""Names of the results of linear layers, and where in a block the layers are."""
_aten = torch.ops.aten
_PRODUCTS = frozenset((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default))
"""How a linear layer computes."""


class SelectiveCheckpoint:
    """Runs blocks so that backward computes them again, but for what is kept by name.

    Args:
        blocks: of the model; their linear layers are watched until `close`.
        saved: names that stay on the device.
        offloaded: names that wait on the host.
        operators: name -> operators whose results it stands for, beside those of the linear layers.
        store: for what is offloaded; another that runs before or after, but not between a forward and its backward, may use
            the same. By default one is made when it is needed.

    Attributes:
        store: what is on the host; None where nothing has been offloaded, unless it was given.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        saved: Sequence[str] = (),
        offloaded: Sequence[str] = (),
        operators: Mapping[str, Sequence[OpOverload]] | None = None,
        store: ActivationOffloader | None = None,
    ) -> None:
        operators = operators or {}
        unknown = {*saved, *offloaded} - {BLOCK_INPUT, *PROJECTIONS, *operators}
        assert not unknown, f"no tensor is called {sorted(unknown)}"
        assert BLOCK_INPUT not in saved, "every block's input is kept on the device, unless it is offloaded"
        assert not {*saved} & {*offloaded}, "a tensor is kept once"
        self.store = store
        self._offloaded = frozenset(offloaded)
        kept = {*saved, *offloaded} - {BLOCK_INPUT}
        self._name_of = {op: name for name in kept for op in operators.get(name, ())}
        self._inside: str | None = None  # the name of the linear layer that is being computed
        self._hooks = [
            hook
            for block in blocks
            for name in sorted(kept & PROJECTIONS.keys())
            for hook in self._watch(_base(block.get_submodule(PROJECTIONS[name])), name)
        ]

    def __call__(self, block: nn.Module, hidden: Tensor, *shared: Any) -> Tensor:
        """Run a block.

        Args:
            block: takes `hidden` and `shared`.
            hidden: [L, D], the block's input.
            shared: the rest of its arguments, the same for all blocks.
        """
        again: dict[str, Any] = {"use_reentrant": False}
        if self._name_of or self._hooks:
            again["context_fn"] = self._contexts
        if self._offloaded:
            self.store = self.store or ActivationOffloader(hidden.device)
            self.store.open_group()
        with self._input_to_host(hidden) if BLOCK_INPUT in self._offloaded else nullcontext():
            return checkpoint(block, hidden, *shared, **again)

    def close(self) -> None:
        """Watch the layers no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _watch(self, linear: nn.Module, name: str) -> Iterable[Any]:
        def enter(*_: Any) -> None:
            self._inside = name

        def leave(*_: Any) -> None:
            self._inside = None

        yield linear.register_forward_pre_hook(enter)
        yield linear.register_forward_hook(leave, always_call=True)  # the second run ends with an exception

    def _input_to_host(self, hidden: Tensor) -> AbstractContextManager[Any]:
        """Whatever is saved inside goes to the host if it is the block's input: what all blocks share stays where it is."""
        assert self.store is not None
        # The hooks live as long as the graph: they must not hold the tensor itself.
        put, where, shape = self.store.put, hidden.data_ptr(), hidden.shape

        def pack(x: Tensor) -> Tensor | Stored:
            return put(x) if x.data_ptr() == where and x.shape == shape else x

        def unpack(x: Tensor | Stored) -> Tensor:
            return x.take() if isinstance(x, Stored) else x

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        kept: deque[_Result] = deque()
        return _Each(partial(self._first_run, kept)), _Each(partial(self._second_run, kept))

    def _first_run(
        self, kept: deque[_Result], op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = op(*args, **kwargs)
        name = self._named(op)
        if name is not None:
            keep: Callable[[Tensor], Any] = partial(self._keep, name)
            kept.append(_Result(op, tree_map_only(Tensor, keep, result)))
        return result

    def _second_run(
        self, kept: deque[_Result], op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Each kept result is used once and let go."""
        if self._named(op) is None:
            return op(*args, **kwargs)
        assert kept, "backward ran twice through one forward"
        result = kept.popleft()
        assert result.op is op, f"{op} in the place of {result.op}"
        return tree_map_only((_OnDevice, Stored), lambda one: one.take(), result.value)

    def _named(self, op: OpOverload) -> str | None:
        """The name under which the result of an operator is kept, here and now."""
        return self._inside if op in _PRODUCTS else self._name_of.get(op)

    def _keep(self, name: str, tensor: Tensor) -> _OnDevice | Stored:
        if name not in self._offloaded:
            return _OnDevice(tensor)
        assert self.store is not None
        return self.store.put(tensor)


class _OnDevice:
    """A tensor of the first run, without the graph that it belongs to."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detached(tensor)
        self._version = self._tensor._version

    def take(self) -> Tensor:
        assert self._tensor._version == self._version, "a kept result was changed in place"
        return self._tensor


@dataclass(frozen=True)
class _Result:
    op: OpOverload
    value: Any


class _Each(TorchDispatchMode):
    """Gives every operator to a function, which computes it or has its result."""

    def __init__(self, compute: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._compute(func, args, kwargs or {})


def _base(layer: nn.Module) -> nn.Module:
    """Of a layer with a LoRA, the layer whose product is worth keeping."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
