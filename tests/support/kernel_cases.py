"""Cases of attention, and kernels that are wrong."""

from __future__ import annotations

import torch

from tests.support.plain import (
    DIM,
    HEADS,
    TOLERANCE,
    make_inputs,
    plain_attention,
)
from wands.attention.kernels.contract import REFERENCE
from wands.attention.varlen import Backend, Segments

BF16 = torch.bfloat16
CASES = {
    "one": ((7,), (7,)),
    "unequal": ((5, 1, 12, 3), (5, 1, 12, 3)),
    "cross": ((5, 1, 12, 3), (9, 4, 1, 6)),
    "empty keys": ((5, 2, 3), (4, 0, 6)),
    "empty queries": ((5, 0, 3), (4, 7, 6)),
    "empty both": ((0, 5, 0, 3), (0, 4, 0, 2)),
    "nothing at all": ((2, 0), (0, 3)),
    "long and short": ((65, 3, 70, 64, 0, 130), (80, 5, 9, 64, 4, 100)),
}


def check_against_plain(backend: Backend, lens_q, lens_k, dtype, device="cpu", dim=DIM) -> None:
    q, k, v, dout = make_inputs(lens_q, lens_k, dtype, device, dim)
    segments = Segments.build(lens_q, lens_k, device=device)
    out, lse = backend.forward(q, k, v, segments, 0.3)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = plain_attention(*leaves, segments, 0.3)
    expected = torch.autograd.grad(expected_out, leaves, dout.double())
    found = backend.backward(dout, q, k, v, out, lse, segments, 0.3)
    tolerance = TOLERANCE[dtype]
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (HEADS, len(q))
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)
    for grad, right in zip(found, expected, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), right.nan_to_num(), rtol=2 * tolerance, atol=2 * tolerance)


class Wrong:
    """A kernel with one mistake, named by `mistake`; each has been seen, or is one line away, in a real one."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def forward(self, q, k, v, segments, scale):
        if self.mistake == "ignores the scale":
            scale = q.shape[-1] ** -0.5
        if self.mistake == "ignores the segments":
            segments = Segments.build([len(q)], [len(k)])
        if self.mistake == "ignores the strides":
            q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        out, lse = REFERENCE.forward(q, k, v, segments, scale)
        if self.mistake == "lse in log2":
            lse = lse / torch.tensor(2.0, dtype=lse.dtype).log()
        elif self.mistake == "lse without the scale":
            lse = REFERENCE.forward(q, k, v, segments, 1.0)[1]
        elif self.mistake == "lse in bf16":
            lse = lse.to(BF16).to(lse.dtype)
        elif self.mistake == "lse of another dtype":
            lse = lse.to(BF16)
        elif self.mistake == "lse [T, H]":
            lse = lse.T
        elif self.mistake == "lse +inf in empty rows":
            lse = lse.masked_fill(lse.isneginf(), torch.inf)
        elif self.mistake == "garbage in empty rows":
            out[lse[0].isneginf()] = 1e-3
        elif self.mistake == "nan":
            out[3] = torch.nan
        return out, lse

    def backward(self, dout, q, k, v, out, lse, segments, scale):
        if self.mistake == "backward recomputes lse":
            lse = torch.where(lse.isposinf(), lse, REFERENCE.forward(q, k, v, segments, scale)[1])
        if self.mistake == "backward recomputes out":
            out = REFERENCE.forward(q, k, v, segments, scale)[0]
        if self.mistake == "backward takes out for dout":
            dout, out = out, dout
        if self.mistake == "backward ignores the strides":
            dout = dout.as_strided(dout.shape, (dout.shape[1] * dout.shape[2], dout.shape[2], 1))
        dq, dk, dv = REFERENCE.backward(dout, q, k, v, out, lse, segments, scale)
        if self.mistake == "garbage in gradients of empty rows":
            dk[-1] = 1e-3
        if self.mistake == "dq without the scale":
            dq = dq / scale
        if self.mistake == "+inf is not a closed row":
            dv = torch.where(lse.isposinf().all(), torch.ones_like(dv), dv)
        if self.mistake == "crashes":
            raise RuntimeError("no kernel image is available")
        return dq, dk, dv
