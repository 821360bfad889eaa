"""Each kernel of a package is called as its interface asks."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.kernel_cases import BF16, CASES, check_against_plain
from tests.support.plain import (
    HEADS,
    make_inputs,
)
from wands.attention.kernels.contract import REFERENCE
from wands.attention.kernels.flash import FlashBackend, cudnn_backend
from wands.attention.kernels.registry import get_backend
from wands.attention.kernels.self_check import check_backend
from wands.attention.packed import idle_rows
from wands.attention.varlen import Segments


def kernel_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale
) -> tuple[Tensor, Tensor]:
    """Compute what the packages compute: right values in rows with keys, any values in other rows."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    segments = Segments.build(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
    assert (max_seqlen_q, max_seqlen_k) == (segments.max_seqlen_q, segments.max_seqlen_k)
    out, lse = REFERENCE.forward(q, k, v, segments, scale)
    out[lse[0].isneginf()] = torch.nan
    return out, lse.masked_fill(lse.isneginf(), torch.inf)


def kernel_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale
) -> tuple[Tensor, ...]:
    """The same for the gradients."""
    assert lse.is_contiguous()
    segments = Segments.build(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist())
    assert (max_seqlen_q, max_seqlen_k) == (segments.max_seqlen_q, segments.max_seqlen_k)
    grads = REFERENCE.backward(dout, q, k, v, out, lse, segments, scale)
    lens_q = segments.lens_q
    lens_k = segments.lens_k
    for grad, lens in zip(grads, ((lens_q, lens_k), (lens_k, lens_q), (lens_k, lens_q)), strict=True):
        for rows in idle_rows(*lens, len(grad)):
            grad[rows] = torch.nan
    return grads


class Flash2Module(ModuleType):
    """Names and order of flash-attn 2.8.3's flash_attn_interface.py."""

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
    ):
        assert dropout_p == 0.0
        assert not causal
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *kernel_forward(q, k, v, *lengths, softmax_scale), None, None

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert not causal
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        grads = kernel_backward(dout, q, k, v, out, softmax_lse, *lengths, softmax_scale)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)


class Flash3Module(ModuleType):
    """Names and order of flash-attn 3's flash_attn_interface.py (hopper/)."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *kernel_forward(q, k, v, *lengths, softmax_scale), None, None

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        grads = kernel_backward(dout, q, k, v, out, softmax_lse, *lengths, softmax_scale)
        for place, grad in zip((dq, dk, dv), grads, strict=True):
            place.copy_(grad)


class Flash4Module(ModuleType):
    """Names and order of flash-attn-4 4.0.0b36's flash_attn/cute/interface.py."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *kernel_forward(q, k, v, *lengths, softmax_scale), None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, cu_seqlens_q=None,
        cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return kernel_backward(dout, q, k, v, out, lse, *lengths, softmax_scale)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three flash-attn packages, with their interfaces and the reference's arithmetic."""
    flash_attn = ModuleType("flash_attn")
    cute = ModuleType("flash_attn.cute")
    flash_attn.flash_attn_interface = Flash2Module("flash_attn.flash_attn_interface")
    flash_attn.cute = cute
    cute.interface = Flash4Module("flash_attn.cute.interface")
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", Flash3Module("flash_attn_interface"))


@pytest.mark.parametrize("name", ["flash2", "flash3", "flash4"])
def test_flash_attn_is_called_as_its_interface_asks(name: str, packages):
    assert check_backend(get_backend(name), "cpu", BF16, head_dim=32) < 1e-2
    for lens_q, lens_k in CASES.values():
        check_against_plain(get_backend(name), lens_q, lens_k, BF16)


@pytest.mark.parametrize("name", ["torch", "cudnn:5:torch"])
def test_torch_kernel_is_called_as_its_interface_asks(name: str):
    """Shapes only: it has no arithmetic without CUDA."""
    rows = [torch.empty(n, HEADS, 64, device="meta", dtype=BF16) for n in (13, 9, 9)]
    segments = Segments.build((5, 6), (3, 6), "meta")
    out, lse = get_backend(name).forward(*rows, segments, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == (rows[0].shape, (HEADS, 13), torch.float32)
    grads = get_backend(name).backward(out, *rows, out, lse, segments, 0.3)
    assert [grad.shape for grad in grads] == [x.shape for x in rows]


@pytest.fixture(params=[4, 3], ids=["lse [1, H, T, 1]", "lse [1, H, T]"])
def cudnn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """cuDNN's two operators with their own arguments and the reference's arithmetic; the lengths of each dense call."""
    aten = torch.ops.aten
    calls = []
    names = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"
    arguments = [
        [argument.name for argument in getattr(aten, name).default._schema.arguments] for name in names
    ]
    assert arguments[0][:5] == ["query", "key", "value", "attn_bias", "compute_log_sumexp"]
    wanted = "logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k"
    assert arguments[1][5:13] == wanted.split()

    def rows(*tensors: Tensor) -> list[Tensor]:
        for x in tensors:
            _, heads, length, dim = x.shape
            # one plan for each pair of lengths
            assert x.stride() == (length * heads * dim, dim, heads * dim, 1)
        return [x[0].transpose(0, 1) for x in tensors]

    def forward(query, key, value, attn_bias, compute_log_sumexp, *, scale=None):
        assert attn_bias is None
        assert compute_log_sumexp
        shape = (*query.shape[:3], 1)[: request.param]
        if query.is_meta:
            return torch.empty_like(query), torch.empty(shape, device="meta"), *[None] * 7
        q, k, v = rows(query, key, value)
        calls.append((len(q), len(k)))
        out, lse = REFERENCE.forward(q, k, v, Segments.build([len(q)], [len(k)]), scale)
        return out.transpose(0, 1)[None], lse.reshape(shape), *[None] * 7

    def backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        assert attn_bias is cum_seq_q is cum_seq_k is None
        assert (max_q, max_k, dropout_p, is_causal) == (query.shape[2], key.shape[2], 0.0, False)
        assert logsumexp.shape == (*query.shape[:3], 1)[: request.param]
        assert logsumexp.is_contiguous()
        assert logsumexp.isfinite().all()
        dout, q, k, v, out = rows(grad_out, query, key, value, out)
        segments = Segments.build([len(q)], [len(k)])
        calls.append((len(q), len(k)))
        grads = REFERENCE.backward(dout, q, k, v, out, logsumexp.view(q.shape[1], -1), segments, scale)
        return tuple(grad.transpose(0, 1)[None] for grad in grads)

    for name, function in zip(names, (forward, backward), strict=True):
        monkeypatch.setattr(aten, name, function)
    return calls


def test_cudnn_is_called_as_its_operators_ask(cudnn):
    backend = get_backend("cudnn:64:cpu")
    assert check_backend(backend, "cpu", BF16, head_dim=32) < 1e-2
    assert set(cudnn) == {(130, 200), (130, 90), (130, 110)}  # all keys, and the two blocks of a ring
    for lens_q, lens_k in CASES.values():
        check_against_plain(backend, lens_q, lens_k, BF16)
    cudnn.clear()
    check_against_plain(backend, *CASES["long and short"], BF16)
    assert cudnn == 2 * [(65, 80), (64, 64), (130, 100)]


def test_short_segments_go_to_the_other_kernel_in_one_call(cudnn):
    lens_q, lens_k = CASES["long and short"]
    q, k, v, dout = make_inputs(lens_q, lens_k, BF16)
    calls = []

    def watch(run):
        return lambda *args: calls.append(args[-2]) or run(*args)

    short = FlashBackend("cpu", watch(REFERENCE.run_forward), watch(REFERENCE.run_backward), min_major=8)
    backend = cudnn_backend(64, short)
    segments = Segments.build(lens_q, lens_k)
    out, lse = backend.forward(q, k, v, segments, 0.3)
    backend.backward(dout, q, k, v, out, lse, segments, 0.3)
    pairs = [(a.stop - a.start, b.stop - b.start) for s in calls for a, b in s.pairs()]
    assert pairs == 2 * [(3, 5), (70, 9)]
    calls.clear()
    backend.forward(q[:65], k[:80], v[:80], Segments.build((65,), (80,)), 0.3)
    assert calls == []  # nothing is short


def test_a_kernel_is_not_launched_for_nothing():
    def refuse(*_):
        raise AssertionError("an empty grid")

    backend = FlashBackend("flash2", refuse, refuse, min_major=8)
    q, k, v, dout = make_inputs((2, 3), (), BF16)
    segments = Segments.build((2, 3), (0, 0))
    out, lse = backend.forward(q, k, v, segments, 1.0)
    assert not out.any()
    assert lse.isneginf().all()
    assert [grad.shape for grad in backend.backward(dout, q, k, v, out, lse, segments, 1.0)] == [
        q.shape,
        k.shape,
        v.shape,
    ]
