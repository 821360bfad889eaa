"""The contract of an attention kernel, two functions: forward with log-sum-exp, and backward; and its plain reading.

Letters: T rows, H heads, D head dim, S segments. All tensors are packed, [T, H, D], without a batch axis.

The backward takes ``out`` and ``lse`` instead of recomputing them, because a caller that has merged several
key blocks passes the *merged* ones: the probabilities exp(score - lse) are then the true ones of the whole
row, and each block's call yields exactly that block's share of the gradient.
Sources: Dao et al. 2022, algorithm 4; Liu et al. 2023.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from wands.attention.packed import Segments

Triple = tuple[Tensor, Tensor, Tensor]


class Backend(Protocol):
    """An attention kernel over segments."""

    @property
    def name(self) -> str:
        """As in `attention.backend`."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: [Tq, H, D].
            k: [Tk, H, D].
            v: [Tk, H, D].
            segments: who attends to whom.
            scale: factor on the scores.

        Returns:
            out [Tq, H, D] in q's dtype and lse [H, Tq], fp32 (fp64 for fp64): log of the sum of exp of the
            scaled scores. Rows that attend to nothing have out 0 and lse -inf.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> Triple:
        """Gradients of these keys' share, given the final `out` and `lse` of every row.

        Args:
            dout: [Tq, H, D], gradient of `out`.
            q: [Tq, H, D].
            k: [Tk, H, D].
            v: [Tk, H, D].
            out: [Tq, H, D], the final output, of all blocks together.
            lse: [H, Tq], the final log-sum-exp. A row with +inf has no share in any gradient.
            segments: who attends to whom.
            scale: factor on the scores.

        Returns:
            dq, dk and dv in the shapes and dtypes of q, k and v; 0 in rows without a partner.
        """
        ...


class ReferenceBackend:
    """Explicit softmax, segment by segment: any device and dtype, memory of a whole score matrix."""

    name = "reference"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=_score_dtype(q))
        with torch.autocast(q.device.type, enabled=False):  # it would take the matrix products back to bf16
            for rows_q, rows_k in segments.pairs():
                scores = _heads_first(q[rows_q]) @ _heads_first(k[rows_k]).mT * scale
                lse[:, rows_q] = scores.logsumexp(-1)
                out[rows_q] = (scores.softmax(-1) @ _heads_first(v[rows_k])).transpose(0, 1).to(q.dtype)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> Triple:
        """See Backend."""
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(q.device.type, enabled=False):
            for rows_q, rows_k in segments.pairs():
                qs, ks, vs = _heads_first(q[rows_q]), _heads_first(k[rows_k]), _heads_first(v[rows_k])
                douts, outs = _heads_first(dout[rows_q]), _heads_first(out[rows_q])
                probs = (qs @ ks.mT * scale - lse[:, rows_q, None]).exp()
                dscores = probs * (douts @ vs.mT - (douts * outs).sum(-1, keepdim=True)) * scale
                for grad, rows, value in (
                    (dq, rows_q, dscores @ ks),
                    (dk, rows_k, dscores.mT @ qs),
                    (dv, rows_k, probs.mT @ douts),
                ):
                    grad[rows] = value.transpose(0, 1).to(grad.dtype)
        return dq, dk, dv


def _score_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [H, T, D], in the dtype that scores are computed in."""
    return x.transpose(0, 1).to(_score_dtype(x))
