"""Tensor parallelism: the ranks of a group divide the weights of each transformer block, and process the same tokens.

Each rank has some of the heads of every attention and some of the hidden channels of every feed-forward: rows of the weights
before the division (q, k, v, the first layer of the feed-forward), columns of those after it, whose outputs are added up over the
ranks. The RMS norms of q and k are over the heads of all ranks. All other parameters are equal on all ranks, because inputs of
divided layers add up their gradients over the ranks.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
Letters: L tokens, D width of the residual stream, T ranks of the group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wands.model.transformer import NormRotate, PackedWanTransformer, rotate

_ROWS = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")
_NORMS = ("norm_q", "norm_k", "norm_added_k")
ROWS = 0
COLUMNS = 1
_NAMES = {
    ROWS: re.compile(
        rf"blocks\.\d+\.(attn[12]\.({'|'.join(_ROWS)})|ffn\.net\.0\.proj)\.(weight|bias|lora_B\.weight)"
        rf"|blocks\.\d+\.attn[12]\.({'|'.join(_NORMS)})\.weight"
    ),
    COLUMNS: re.compile(r"blocks\.\d+\.(attn[12]\.to_out\.0|ffn\.net\.2)\.(weight|lora_A\.weight)"),
}


@dataclass(frozen=True)
class Cut:
    """Part `rank` of `degree` equal parts of a parameter: consecutive rows (`dim` is `ROWS`) or columns (`COLUMNS`)."""

    dim: int
    rank: int
    degree: int

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole parameter, as a view."""
        return whole.chunk(self.degree, self.dim)[self.rank]

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole parameter, from the shape of this part."""
        whole = list(shape)
        whole[self.dim] *= self.degree
        return whole


def cut_of(parameter: Any) -> Cut | None:
    """Return which part of a parameter this rank has, or None if it has the whole parameter."""
    return getattr(parameter, "wands_cut", None)


def set_cut(parameter: Any, cut: Cut | None) -> None:
    """Store which part of a whole parameter `parameter` is. None does nothing."""
    if cut is not None:
        parameter.wands_cut = cut
        # DeepSpeed adds the norms of the gradients of these parameters over the ranks of the group, and counts others once.
        parameter.model_parallel = True


def own_part(whole: Tensor, cut: Cut | None) -> Tensor:
    """Return this rank's part of a whole parameter; the whole parameter if `cut` is None."""
    return whole if cut is None else cut.part_of(whole).contiguous()


def divided_dim(name: str) -> int | None:
    """Return the dimension in which tensor parallelism divides a parameter, `ROWS` or `COLUMNS`; None if it is not divided.

    `name` is a parameter of a model without LoRA, or a layer's name followed by .lora_A.weight or .lora_B.weight.
    """
    return next((dim for dim, pattern in _NAMES.items() if pattern.fullmatch(name)), None)


def divide(model: PackedWanTransformer, group: dist.ProcessGroup) -> None:
    """Divide a model on the meta device in place. The degree must divide the heads and the hidden width of the feed-forward."""
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.heads //= group.size()
            for name in _ROWS:
                if getattr(attention, name) is not None:
                    _divide_layer(getattr(attention, name), RowsLinear, group)
            for name in _NORMS:
                if hasattr(attention, name):
                    norm = getattr(attention, name)
                    norm.__class__ = DividedNormRotate
                    norm.group = group
                    _divide_parameter(norm, "weight", Cut(ROWS, group.rank(), group.size()))
            _divide_layer(attention.to_out[0], ColumnsLinear, group)
        _divide_layer(block.ffn.net[0].proj, RowsLinear, group)
        _divide_layer(block.ffn.net[2], ColumnsLinear, group)


def divide_lora(base: nn.Linear, lora_A: nn.Linear, lora_B: nn.Linear) -> tuple[Cut | None, Cut | None]:
    """Divide the LoRA of a divided layer as the layer is divided, in place. The matrices must already have their sizes.

    Returns:
        (part of lora_A, part of lora_B) that this rank has; None for a matrix that is whole on every rank.
    """
    if not isinstance(base, (RowsLinear, ColumnsLinear)):
        return None, None
    divided, dim = (lora_B, ROWS) if isinstance(base, RowsLinear) else (lora_A, COLUMNS)
    divided.__class__ = type(base)
    assert isinstance(divided, type(base))
    divided.group = base.group
    cut = Cut(dim, base.group.rank(), base.group.size())
    set_cut(divided.weight, cut)
    return (None, cut) if isinstance(base, RowsLinear) else (cut, None)


def whole_features(linear: nn.Linear) -> tuple[int, int]:
    """Return (number of in features, number of out features) of the whole layer of which this rank has a part or all."""
    cut = cut_of(linear.weight)
    rows = linear.out_features
    columns = linear.in_features
    if cut is not None:
        rows, columns = cut.whole_shape((rows, columns))
    return columns, rows


class RowsLinear(nn.Linear):
    """Linear layer with some of the rows of the weight, and therefore some of the out features.

    Its input is equal on all ranks of the group. The gradient of the input is the sum over the ranks.
    """

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply this rank's part of the layer to x [..., in features], and return [..., out features / T]."""
        return F.linear(sum_gradients(x, self.group), self.weight, self.bias)


class ColumnsLinear(nn.Linear):
    """Linear layer with some of the columns of the weight, and the whole bias. The output is the sum over the ranks."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [..., in features / T], this rank's part of the input, and return [..., out features]."""
        out = sum_outputs(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class DividedNormRotate(NormRotate):
    """`NormRotate` of this rank's heads, over the heads of all ranks. `model.compile` does not change this module."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """Normalize x [L, D / T] in at least fp32, rotate it, and return it in the dtype of x. See `NormRotate`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_outputs(wide.square().sum(-1, keepdim=True), self.group)
        assert self.eps is not None
        # Each rank uses the sum for its heads only, so its gradient is the sum over the ranks, too.
        mean = sum_gradients(squares, self.group) / (x.shape[-1] * self.group.size())
        normed = wide * torch.rsqrt(mean + self.eps) * self.weight
        if rotation is not None:
            normed = rotate(normed.unflatten(1, (-1, 2 * rotation.shape[-1])), rotation).flatten(1)
        return normed.to(x.dtype)


class _SumOutputs(torch.autograd.Function):
    """Sum over the ranks of a group. All ranks use the sum in the same way, so the gradient of each term is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous()
        if total is x:
            ctx.mark_dirty(x)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """The tensor itself, whose gradient is the sum over the ranks of a group. Each rank uses the tensor for its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_outputs(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the ranks of a group, in the memory of x if x is contiguous. x must be a fresh result."""
    return _SumOutputs.apply(x, group)


def sum_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x. In the backward pass, its gradient is summed over the ranks of a group."""
    return _SumGradients.apply(x, group)


def _divide_layer(
    linear: nn.Linear, divided: type[RowsLinear] | type[ColumnsLinear], group: dist.ProcessGroup
) -> None:
    cut = Cut(ROWS if divided is RowsLinear else COLUMNS, group.rank(), group.size())
    linear.__class__ = divided
    assert isinstance(linear, divided)
    linear.group = group
    _divide_parameter(linear, "weight", cut)
    if cut.dim == ROWS and linear.bias is not None:
        _divide_parameter(linear, "bias", cut)
    linear.out_features, linear.in_features = linear.weight.shape


def _divide_parameter(owner: nn.Module, name: str, cut: Cut) -> None:
    """Replace a parameter on the meta device by a part of it."""
    whole = getattr(owner, name)
    part = nn.Parameter(torch.empty_like(cut.part_of(whole)), requires_grad=whole.requires_grad)
    set_cut(part, cut)
    setattr(owner, name, part)
