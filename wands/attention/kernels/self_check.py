"""Does a kernel keep the contract here, on this device, in this dtype, with this head dim? Asked before it is used.

Letters: T rows, H heads, D head dim.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from wands.attention.kernels.contract import Backend, ReferenceBackend
from wands.attention.packed import Segments

# Longer than a kernel's tile and shorter, without keys, without queries; and rows behind the last segment.
LENS_Q = (130, 40, 257, 0, 5)
LENS_K = (200, 0, 33, 20, 300)
FIRST_BLOCK = (0, 0, 20, 7, 129)  # keys of each segment in the first of two blocks
SPARE_ROWS = 6
NUM_HEADS = 2

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}
"""Largest error of out and of the gradients, in parts of the right tensor's largest value."""
LSE_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12}
"""Largest error of lse, absolute: it is a relative error of every probability. Kernels keep lse in fp32."""


class KernelError(Exception):
    """A kernel is not what Backend promises."""


@torch.no_grad()
def check_backend(
    backend: Backend, device: torch.device | str, dtype: torch.dtype, head_dim: int = 128
) -> float:
    """Hold a kernel to the reference in float64, the way a ring uses it.

    Random packed rows, attended to at once, then in two blocks of keys whose results are merged; each block's
    backward is given the merged `out` and `lse`. The process's random state is left as it was.

    Args:
        backend: the kernel.
        device: where to run it. The reference runs on the CPU, whatever the device's own matmul precision.
        dtype: of q, k and v.
        head_dim: D.

    Returns:
        The largest error found: of lse absolute, of all else in parts of the tensor's largest value.

    Raises:
        KernelError: an output's shape, dtype or value is wrong; names it, with the numbers.
    """
    scale = 1.5 * head_dim**-0.5  # not the default: a kernel that ignores it is found out
    q, k, v, dout = (x.to(dtype) for x in _draw(head_dim))
    whole = Segments.build(LENS_Q, LENS_K)
    exact = ReferenceBackend()
    q64, k64, v64, dout64 = (x.double() for x in (q, k, v, dout))
    right_out, right_lse = exact.forward(q64, k64, v64, whole, scale)
    right_grads = exact.backward(dout64, q64, k64, v64, right_out, right_lse, whole, scale)

    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    compare = _Comparison(dtype)
    out, lse = backend.forward(q, k, v, whole.to(device), scale)
    compare("out", out, right_out)
    compare("lse", lse, right_lse)

    blocks = [(index.to(device), segments.to(device)) for index, segments in _blocks()]
    parts = [backend.forward(q, k[index], v[index], segments, scale) for index, segments in blocks]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = torch.zeros(q.shape, dtype=lse.dtype, device=device)
    for part, part_lse in parts:
        # Of a row without any key, -inf - -inf, it is 0.
        share = (part_lse - lse).exp().masked_fill(part_lse.isneginf(), 0)
        merged += part * share.mT[..., None]
    out = merged.to(dtype)
    compare("out merged from two blocks", out, right_out)
    compare("lse merged from two blocks", lse, right_lse)

    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=device) for x in (q, k, v))
    for index, segments in blocks:
        shares = backend.backward(dout, q, k[index], v[index], out, lse, segments, scale)
        for grad, rows, share in zip((dq, dk, dv), (slice(None), index, index), shares, strict=True):
            grad[rows] += share
    for name, grad, right in zip(("dq", "dk", "dv"), (dq, dk, dv), right_grads, strict=True):
        compare(f"{name} summed over two blocks", grad.to(dtype), right)

    shut = torch.full_like(lse, torch.inf)
    for name, grad in zip(
        ("dq", "dk", "dv"), backend.backward(dout, q, k, v, out, shut, whole.to(device), scale), strict=True
    ):
        compare(f"{name} of rows whose lse is +inf", grad, torch.zeros(grad.shape))
    single = Segments.build((len(q),), (1,))  # everybody and one key, as the pads of texts are
    pad, pad64 = ((a[:1], b[:1]) for a, b in ((k, v), (k64, v64)))
    out, lse = backend.forward(q, *pad, single.to(device), scale)
    right_out, right_lse = exact.forward(q64, *pad64, single, scale)
    compare("out of a single key", out, right_out)
    compare("lse of a single key", lse, right_lse)
    grads = backend.backward(dout, q, *pad, out, lse, single.to(device), scale)
    rights = exact.backward(dout64, q64, *pad64, right_out, right_lse, single, scale)
    compare("dv of a single key", grads[2], rights[2])  # the others are differences of equal numbers

    return compare.worst


class _Comparison:
    """Raises at the first tensor that is wrong; keeps the largest error of the others."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.worst = 0.0

    def __call__(self, name: str, found: Tensor, right: Tensor) -> None:
        is_lse = name.startswith("lse")
        dtype = torch.promote_types(self.dtype, torch.float32) if is_lse else self.dtype
        if found.shape != right.shape or found.dtype != dtype:
            raise KernelError(
                f"{name} is {found.dtype} {list(found.shape)}, must be {dtype} {list(right.shape)}"
            )
        found, right = found.double().cpu(), right.double()
        fixed = (right == 0) | right.isneginf()  # rows without a partner
        if not torch.equal(found[fixed], right[fixed]):
            raise KernelError(f"{name} holds something in rows that take part in nothing")
        found, right = found[~fixed], right[~fixed]
        if not right.numel():
            return
        error = (found - right).abs().max().item() / (1.0 if is_lse else right.abs().max().item())
        allowed = (LSE_TOLERANCE if is_lse else TOLERANCE)[self.dtype]
        if not error <= allowed:  # nan too
            raise KernelError(f"{name} is off by {error:.2g}, {allowed:g} is allowed")
        self.worst = max(self.worst, error)


def _draw(head_dim: int) -> list[Tensor]:
    """q, k, v and the gradient of out, fp32 [T, H, D], views that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    rows_q, rows_k = sum(LENS_Q) + SPARE_ROWS, sum(LENS_K) + SPARE_ROWS
    shapes = [(rows, NUM_HEADS, 2 * head_dim) for rows in (rows_q, rows_k, rows_k, rows_q)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")[..., :head_dim]
        for shape in shapes
    ]


def _blocks() -> list[tuple[Tensor, Segments]]:
    """Two blocks of keys: the rows of each, spare ones at the end, and its segments."""
    starts = [0, *accumulate(LENS_K)]
    rows: tuple[list[int], list[int]] = ([], [])
    for start, stop, cut in zip(starts, starts[1:], FIRST_BLOCK, strict=False):
        rows[0].extend(range(start, start + cut))
        rows[1].extend(range(start + cut, stop))
    spare = range(starts[-1], starts[-1] + SPARE_ROWS)
    rest = [length - cut for length, cut in zip(LENS_K, FIRST_BLOCK, strict=True)]
    return [
        (torch.tensor([*rows[0], *spare]), Segments.build(LENS_Q, FIRST_BLOCK)),
        (torch.tensor([*rows[1], *spare]), Segments.build(LENS_Q, rest)),
    ]
