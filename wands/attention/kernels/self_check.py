"""Check an attention kernel on the device, dtype and head dim of the run, before it is used.

Letters: T rows, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wands.attention.kernels.contract import REFERENCE, Backend
from wands.attention.packed import Segments
from wands.transfer import to_device

# Number of rows of each segment. Segments are longer or shorter than a kernel's tile; one has no keys, and one has no queries.
LENS_Q = (130, 40, 257, 0, 5)
LENS_K = (200, 0, 33, 20, 300)
FIRST_BLOCK = (90, 0, 20, 7, 0)  # number of keys of each segment in the first of two blocks
SPARE_ROWS = 6  # rows after the last segment
NUM_HEADS = 2

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}
"""Largest allowed error of the output and the gradients, relative to the largest value of the exact tensor."""
LSE_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12}
"""Largest allowed absolute error of the log-sum-exp, which kernels compute in fp32.

An absolute error of the lse is a relative error of every attention probability.
"""


class KernelError(Exception):
    """Error of an attention kernel whose results violate the interface of `Backend`."""


@torch.no_grad()
def check_backend(
    backend: Backend, device: torch.device | str, dtype: torch.dtype, head_dim: int = 128
) -> float:
    """Compare a kernel with the reference kernel in float64 on a CPU, and return the largest error.

    The kernel attends to all keys at once; to two blocks of keys whose results are merged, as in ring attention; and to a single
    key. With an lse of +inf, all gradients must be 0. The error is absolute for lse, and relative to the tensor's largest value
    for the other tensors. The global random state does not change.

    Raises:
        KernelError: if the shape, dtype or values of a result are wrong.
    """
    scale = 1.5 * head_dim**-0.5  # not the default scale, so that a kernel that ignores the scale fails
    q, k, v, dout = _draw(head_dim, dtype, device)
    whole = Segments.build(LENS_Q, LENS_K)
    q64, k64, v64, dout64 = (x.double().cpu() for x in (q, k, v, dout))
    exact_out, exact_lse = REFERENCE.forward(q64, k64, v64, whole, scale)
    exact_grads = REFERENCE.backward(dout64, q64, k64, v64, exact_out, exact_lse, whole, scale)

    compare = _Comparer(dtype)
    out, lse = backend.forward(q, k, v, to_device(whole, device), scale)
    compare("out", out, exact_out)
    compare("lse", lse, exact_lse)

    blocks = to_device(_blocks(), device)
    parts = [backend.forward(q, k[index], v[index], segments, scale) for index, segments in blocks]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = torch.zeros(q.shape, dtype=lse.dtype, device=device)
    for part, part_lse in parts:
        # The formula of the papers, not the more accurate weights of ring.py: the check is independent of what it checks.
        # Rows without keys get the weight 0, because -inf - -inf is nan.
        weight = (part_lse - lse).exp().masked_fill(part_lse.isneginf(), 0)
        merged += part * weight.mT[..., None]
    out = merged.to(dtype)
    compare("out merged from two blocks", out, exact_out)
    compare("lse merged from two blocks", lse, exact_lse)

    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=device) for x in (q, k, v))
    for index, segments in blocks:
        part_q, part_k, part_v = backend.backward(dout, q, k[index], v[index], out, lse, segments, scale)
        dq += part_q
        dk[index] += part_k
        dv[index] += part_v
    for name, grad, exact in zip(("dq", "dk", "dv"), (dq, dk, dv), exact_grads, strict=True):
        compare(f"{name} summed over two blocks", grad.to(dtype), exact)

    closed = torch.full_like(lse, torch.inf)
    grads = backend.backward(dout, q, k, v, out, closed, to_device(whole, device), scale)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(f"{name} of rows whose lse is +inf", grad, torch.zeros(grad.shape))
    single = Segments.build((len(q),), (1,))  # all rows and one key
    pad, pad64 = ((a[:1], b[:1]) for a, b in ((k, v), (k64, v64)))
    out, lse = backend.forward(q, *pad, to_device(single, device), scale)
    exact_out, exact_lse = REFERENCE.forward(q64, *pad64, single, scale)
    compare("out of a single key", out, exact_out)
    compare("lse of a single key", lse, exact_lse)
    grads = backend.backward(dout, q, *pad, out, lse, to_device(single, device), scale)
    exact_grads = REFERENCE.backward(dout64, q64, *pad64, exact_out, exact_lse, single, scale)
    # The exact dq and dk are 0, so their results are only rounding error.
    compare("dv of a single key", grads[2], exact_grads[2])

    return compare.worst


class _Comparer:
    """Compare results with exact results, and keep the largest error in `worst`. Raise KernelError if an error is too large."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.worst = 0.0

    def __call__(self, name: str, result: Tensor, exact: Tensor) -> None:
        is_lse = name.startswith("lse")
        dtype = torch.promote_types(self.dtype, torch.float32) if is_lse else self.dtype
        if result.shape != exact.shape or result.dtype != dtype:
            raise KernelError(
                f"{name} is {result.dtype} {list(result.shape)}, but must be {dtype} {list(exact.shape)}"
            )
        result = result.double().cpu()
        exact = exact.double()
        idle = (exact == 0) | exact.isneginf()  # rows of q without keys, or of k without queries
        if not torch.equal(result[idle], exact[idle]):
            value = "-inf" if is_lse else "0"
            raise KernelError(
                f"{name} must be {value} where the exact result is {value}, for example in rows of q that attend to no key"
            )
        result = result[~idle]
        exact = exact[~idle]
        if not exact.numel():
            return
        error = (result - exact).abs().max().item() / (1.0 if is_lse else exact.abs().max().item())
        allowed = (LSE_TOLERANCE if is_lse else TOLERANCE)[self.dtype]
        if not error <= allowed:  # also true for nan
            kind = "absolute" if is_lse else "relative"
            raise KernelError(f"{name} is off by {error:.2g} ({kind} error), at most {allowed:g} is allowed")
        self.worst = max(self.worst, error)


def _draw(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """Return random q, k, v and dout, each [rows, heads, head dim], as views that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    rows_q = sum(LENS_Q) + SPARE_ROWS
    rows_k = sum(LENS_K) + SPARE_ROWS
    shapes = [(rows, NUM_HEADS, 2 * head_dim) for rows in (rows_q, rows_k, rows_k, rows_q)]
    wide = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes]
    return [x.to(device, dtype)[..., :head_dim] for x in wide]  # cut last: a cast makes a view contiguous


def _blocks() -> list[tuple[Tensor, Segments]]:
    """Split the keys into two blocks, as in ring attention: (indices of the rows of k, segments) of each.

    Each block ends with all `SPARE_ROWS` padding rows of k.
    """
    lens = list(zip(LENS_K, FIRST_BLOCK, strict=True))
    is_first = torch.cat([torch.arange(length) < cut for length, cut in lens])
    spare = torch.arange(sum(LENS_K), sum(LENS_K) + SPARE_ROWS)
    rest = [length - cut for length, cut in lens]
    return [
        (torch.cat([mask.nonzero().squeeze(1), spare]), Segments.build(LENS_Q, block))
        for mask, block in ((is_first, FIRST_BLOCK), (~is_first, rest))
    ]
