"""Activation checkpointing by tensor name.

Each block runs again in the backward pass, as with `torch.utils.checkpoint`, but the host has less work for each tensor. Random
numbers would differ in the second run, but a block draws none. Tensors that are kept by name are not recomputed: they stay on the
device (saved) or in host memory (offloaded). A dispatch mode finds them. It makes the host several times slower, so it is only
active around the linear layers and the self-attention whose results are kept. Names of tensors:

block_input       residual stream before the block; always kept, on the device or in host memory
query_proj        result of attn1.to_q, before norm and rotation
key_proj          result of attn1.to_k, before norm and rotation
value_proj        result of attn1.to_v
attn_input        q, k and v after the Ulysses all-to-all; does not exist without Ulysses
attn_output       result and log-sum-exp of the attention kernel or ring; with Ulysses, also the result of the second all-to-all
ffn_activation    hidden state of the feed-forward, before the non-linearity

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from wands.model import fp8  # noqa: F401, registers its operators
from wands.model.offload import ActivationOffloader, OffloadedTensor, detached

BLOCK_INPUT = "block_input"
PROJECTIONS = {
    "query_proj": "attn1.to_q",
    "key_proj": "attn1.to_k",
    "value_proj": "attn1.to_v",
    "ffn_activation": "ffn.net.0.proj",
}
"""Maps a tensor name to the name of the linear layer, in a block, that computes this tensor."""
_aten = torch.ops.aten
_MATMULS = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.linear.default,
        torch.ops.wands.fp8_matmul.default,
        torch.ops.wands.fp8_stored.default,
    )
)
"""Operators that compute a linear layer."""


class SelectiveCheckpoint:
    """Runs blocks under activation checkpointing and keeps the tensors that are selected by name.

    A block runs its self-attention inside `watch`. Several models can share an offloader; the backward pass of one model must
    then end before the forward pass of the next one starts.

    Args:
        blocks: their linear layers get hooks, which `close` removes.
        saved: names of tensors that stay on the device.
        offloaded: names of tensors that go to host memory.
        operators: torch operators whose result is the tensor of a name. Names in `PROJECTIONS` need no entry.
        offloader: None makes a new offloader in the first forward pass.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        saved: Sequence[str] = (),
        offloaded: Sequence[str] = (),
        operators: Mapping[str, Sequence[OpOverload]] | None = None,
        offloader: ActivationOffloader | None = None,
    ) -> None:
        operators = operators or {}
        unknown = {*saved, *offloaded} - {BLOCK_INPUT, *PROJECTIONS, *operators}
        assert not unknown, f"no tensor is called {sorted(unknown)}"
        assert BLOCK_INPUT not in saved, "block_input is always saved; remove it from the list saved"
        assert not {*saved} & {*offloaded}, "a tensor cannot be both saved and offloaded"
        self.offloader = offloader
        self._offloaded = frozenset(offloaded)
        kept = {*saved, *offloaded} - {BLOCK_INPUT}
        self._name_of = {op: name for name in kept for op in operators.get(name, ())}
        self._run: _Run | None = None  # the run of a block that is under way
        self._current_projection: str | None = None  # tensor name of the linear layer that runs now
        self._hooks: list[Any] = []
        for block, name in product(blocks, kept & PROJECTIONS.keys()):
            linear = block.get_submodule(PROJECTIONS[name])
            linear = getattr(linear, "base_layer", linear)  # of a layer with a LoRA
            self._hooks.append(linear.register_forward_pre_hook(partial(self._enter_projection, name)))
            # An exception ends the second run early.
            self._hooks.append(linear.register_forward_hook(self._leave_projection, always_call=True))

    def __call__(self, block: nn.Module, hidden: Tensor, *shared: Any) -> Tensor:
        """Run a block on `hidden` [L, D] under activation checkpointing, and return its result `block(hidden, *shared)`."""
        take_hidden: Callable[[], Tensor] = lambda: hidden  # noqa: E731
        if self._offloaded:
            self.offloader = self.offloader or ActivationOffloader(hidden.device)
            self.offloader.open_group()
            if BLOCK_INPUT in self._offloaded:
                take_hidden = partial(_take, self.offloader.put(hidden), hidden.requires_grad)
        kept: deque[Any] = deque()
        device_type = hidden.device.type
        autocast = partial(
            torch.autocast,
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

        def run_again() -> None:
            with autocast(), self._running(_Run(self, kept, is_first=False)):
                block(take_hidden(), *shared)

        saved = _RecomputedTensors(run_again)
        with saved_tensors_hooks(saved.pack, saved.unpack), self._running(_Run(self, kept, is_first=True)):
            return block(hidden, *shared)

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context manager for the part of a block that calls `operators`; outside of `__call__`, it does nothing."""
        return self._run if self._run is not None and self._name_of else nullcontext()

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter_projection(self, name: str, *_: Any) -> None:
        if self._run is not None:
            self._current_projection = name
            self._run.__enter__()

    def _leave_projection(self, *_: Any) -> None:
        if self._run is not None and self._current_projection is not None:
            self._current_projection = None
            self._run.__exit__(None, None, None)

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _kept_name(self, op: OpOverload) -> str | None:
        """Return the name of the result of `op`, such as "query_proj". Return None if the backward pass recomputes the result."""
        return self._current_projection if op in _MATMULS else self._name_of.get(op)

    def _keep(self, name: str, tensor: Tensor) -> _SavedTensor | OffloadedTensor:
        if name not in self._offloaded:
            return _SavedTensor(tensor)
        assert self.offloader is not None
        return self.offloader.put(tensor)


def _take(offloaded: OffloadedTensor, requires_grad: bool) -> Tensor:
    """Return the offloaded input of a block, for which autograd saves the same tensors as for the input itself."""
    return offloaded.take().detach().requires_grad_(requires_grad)


class _RecomputedTensors:
    """The tensors that autograd saves while a block runs, computed when the first one is needed.

    `pack` and `unpack` are hooks for saved tensors. A tensor that was taken with `unpack` is no longer referenced here.
    `run_again` runs the block again on the same input; the block then saves equal tensors in the same order.
    """

    def __init__(self, run_again: Callable[[], None]) -> None:
        self._run_again = run_again
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Note that the first run saves a tensor, and return the tensor's number."""
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def unpack(self, number: int) -> Tensor:
        """Return the tensor with this number. If it has no value, run the block until all values are known."""
        if number not in self._values:
            self._compute()
        return self._values.pop(number)

    def _compute(self) -> None:
        values: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            number = len(values)
            kind = tensor.shape, tensor.dtype
            assert kind == self._kinds[number], (
                f"the second run of a block saves {kind}, the first {self._kinds[number]}"
            )
            values[number] = tensor.detach() if tensor.requires_grad else tensor
            if len(values) == len(self._kinds):
                raise _AllComputed

        with suppress(_AllComputed), saved_tensors_hooks(pack, _refuse), torch.enable_grad():
            self._run_again()
        assert len(values) == len(self._kinds), (
            f"the second run saves {len(values)} of {len(self._kinds)} tensors"
        )
        self._values = values


class _AllComputed(Exception):
    """Ends the second run of a block when autograd has saved the last tensor."""


def _refuse(_: None) -> Tensor:
    raise AssertionError("nothing runs backward through the second run of a block")


class _SavedTensor:
    """Tensor that a block keeps on the device for its backward pass. `take` returns the tensor without its autograd graph."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detached(tensor)
        self._version = self._tensor._version

    def take(self) -> Tensor:
        assert self._tensor._version == self._version, "a saved tensor was changed in place"
        return self._tensor


class _Run(TorchDispatchMode):
    """Dispatch mode for one of the two runs of a block, active in parts of the run.

    In the first run, (operator, result) of each result to keep goes into the queue `kept`. In the second run, these results come
    from the queue, and only the other operators run.
    """

    def __init__(self, selection: SelectiveCheckpoint, kept: deque[Any], is_first: bool) -> None:
        super().__init__()
        self._selection = selection
        self._kept = kept
        self._is_first = is_first

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self._selection._kept_name(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        if self._is_first:
            result = func(*args, **(kwargs or {}))
            keep: Callable[[Tensor], Any] = partial(self._selection._keep, name)
            self._kept.append((func, tree_map_only(Tensor, keep, result)))
            return result
        assert self._kept, "the backward pass ran twice after one forward pass; run the forward pass again"
        op, value = self._kept.popleft()  # each kept result is used once and then freed
        assert op is func, f"{func} ran in the backward pass, but {op} in the forward pass"
        return tree_map_only((_SavedTensor, OffloadedTensor), lambda tensor: tensor.take(), value)
