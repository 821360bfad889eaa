"""Every back end against plain PyTorch attention; the check that finds a wrong kernel; which kernel is chosen."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.plain import (
    CPU_DTYPES,
    CUDA_BACKENDS,
    DIM,
    HEADS,
    TOLERANCE,
    cuda_backend,
    make_inputs,
    plain_attention,
)
from wands.attention.kernels import registry as backends
from wands.attention.kernels.contract import REFERENCE
from wands.attention.kernels.flash import FlashBackend, cudnn_backend
from wands.attention.kernels.registry import get_backend
from wands.attention.kernels.self_check import TOLERANCE as CHECK_TOLERANCE
from wands.attention.kernels.self_check import KernelError, check_backend
from wands.attention.packed import idle_rows
from wands.attention.varlen import Backend, Segments, choose_backend
from wands.errors import ConfigError

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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "dtype"), CPU_DTYPES)
def test_backend_is_plain_attention(name: str, dtype: torch.dtype, case: str):
    check_against_plain(choose_backend(name, "cpu", dtype), *CASES[case], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_cuda_backend_is_plain_attention(name: str, case: str):
    check_against_plain(cuda_backend(name), *CASES[case], torch.bfloat16, "cuda", dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_cuda_backend_takes_the_merged_result_of_blocks(name: str):
    check_blocks(cuda_backend(name), torch.bfloat16, "cuda", dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_cuda_backend_keeps_the_contract(name: str, head_dim: int, dtype: torch.dtype):
    assert check_backend(cuda_backend(name), "cuda", dtype, head_dim) > 0


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_rows_behind_the_last_segment_attend_to_nothing(name: str):
    backend = choose_backend(name, "cpu", torch.float32)
    q, k, v, dout = make_inputs((6,), (5,), torch.float32)
    segments = Segments.build((4,), (3,))
    out, lse = backend.forward(q, k, v, segments, 1.0)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))
    assert torch.equal(lse[:, 4:], torch.full_like(lse[:, 4:], -torch.inf))
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, segments, 1.0)
    assert not dq[4:].any()
    assert not dk[3:].any()
    assert not dv[3:].any()
    assert dq[:4].all()


def check_blocks(backend: Backend, dtype: torch.dtype, device: str = "cpu", dim: int = DIM) -> None:
    """Use a kernel as a ring does: attend to blocks of keys, merge, and pass the merged result to the backward of every block."""
    # the first block holds `cut` keys of each segment
    lens = (6, 3, 4)
    cut = (2, 3, 0)
    q, k, v, dout = make_inputs(lens, lens, dtype, device, dim)
    whole = Segments.build(lens, device=device)
    rest = tuple(a - b for a, b in zip(lens, cut, strict=True))
    keys, values = (x.split([n for pair in zip(cut, rest, strict=True) for n in pair]) for x in (k, v))
    out = torch.zeros(q.shape, dtype=torch.float64, device=device)
    lse = torch.full((HEADS, len(q)), -torch.inf, dtype=torch.float64, device=device)
    blocks = []
    for start, lens_k in ((0, cut), (1, rest)):
        block = (torch.cat(keys[start::2]), torch.cat(values[start::2]), Segments.build(lens, lens_k, device))
        part, part_lse = backend.forward(q, *block, 0.3)
        total = torch.logaddexp(lse, part_lse.double())
        keep, take = ((x - total).exp().nan_to_num().T[..., None] for x in (lse, part_lse))  # -inf - -inf
        out = out * keep + part * take
        lse = total
        blocks.append(block)
    expected_out, expected_lse = backend.forward(q, k, v, whole, 0.3)
    expected = backend.backward(dout, q, k, v, expected_out, expected_lse, whole, 0.3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected_out.double(), rtol=tolerance, atol=tolerance)
    grads = [
        backend.backward(dout, q, kb, vb, out.to(dtype), lse.to(expected_lse.dtype), seg, 0.3)
        for kb, vb, seg in blocks
    ]
    dq = sum(grad[0].double() for grad in grads)
    torch.testing.assert_close(dq, expected[0].double(), rtol=2 * tolerance, atol=2 * tolerance)
    for index in (1, 2):
        first, second = (grad[index].split(seg.lens_k) for grad, (*_, seg) in zip(grads, blocks, strict=True))
        joined = torch.cat([part for pair in zip(first, second, strict=True) for part in pair])
        torch.testing.assert_close(joined, expected[index], rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("name", "dtype"), CPU_DTYPES)
def test_backward_takes_the_merged_result_of_blocks(name: str, dtype: torch.dtype):
    check_blocks(choose_backend(name, "cpu", dtype), dtype)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_reach_the_scores(name: str, dtype: torch.dtype):
    q, k, v, dout = make_inputs((64,), (64,), dtype, dim=64)
    segments = Segments.build((64,))
    backend = choose_backend(name, "cpu", dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = backend.forward(q, k, v, segments, 1.0)
        grads = backend.backward(dout, q, k, v, out, lse, segments, 1.0)
    _, expected = plain_attention(q, k, v, segments, 1.0)
    assert (lse.double() - expected).abs().max() < 1e-4  # bf16 scores of this size are 0.06 apart
    for found, right in zip(grads, backend.backward(dout, q, k, v, out, lse, segments, 1.0), strict=True):
        assert torch.equal(found, right)


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


MISTAKES = {
    "ignores the scale": "out is off by",
    "ignores the segments": "out must be 0 where the exact result is 0",
    "ignores the strides": "out is off by",
    "backward ignores the strides": "d[qkv] summed over two blocks is off by",
    "lse in log2": "lse is off by",
    "lse without the scale": "lse is off by",
    "lse in bf16": "lse is off by",
    "lse of another dtype": "lse is torch.bfloat16",
    "lse [T, H]": "lse is torch.float32 .438, 2., but must be torch.float32 .2, 438.",
    "lse +inf in empty rows": "lse must be -inf where the exact result is -inf",
    "garbage in empty rows": "out must be 0 where the exact result is 0",
    "nan": "out is off by nan",
    "backward recomputes lse": "d[qkv] summed over two blocks is off by",
    "backward recomputes out": "d[qkv] summed over two blocks is off by",
    "backward takes out for dout": "d[qkv] summed over two blocks is off by",
    "garbage in gradients of empty rows": "dk summed over two blocks must be 0 where the exact result is 0",
    "dq without the scale": "dq summed over two blocks is off by",
    "+inf is not a closed row": "dv of rows whose lse is .inf",
}


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_finds(mistake: str, dtype: torch.dtype):
    with pytest.raises(KernelError, match=MISTAKES[mistake]):
        check_backend(Wrong(mistake), "cpu", dtype, head_dim=32)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_check_lets_right_kernels_pass(name: str, dtype: torch.dtype, head_dim: int):
    before = torch.get_rng_state()
    worst = check_backend(get_backend(name), "cpu", dtype, head_dim)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.finfo(dtype).eps / 8 < worst < CHECK_TOLERANCE[dtype] / 3  # rounding, and room for a GPU's


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
    assert arguments[1][5:13] == [
        *(
            "logsumexp",
            "philox_seed",
            "philox_offset",
            "attn_bias",
            "cum_seq_q",
            "cum_seq_k",
            "max_q",
            "max_k",
        ),
    ]

    def rows(*tensors: Tensor) -> list[Tensor]:
        for x in tensors:
            _, heads, length, dim = x.shape
            assert x.stride() == (
                length * heads * dim,
                dim,
                heads * dim,
                1,
            )  # one plan for each pair of lengths
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


class FakeGpu:
    """A GPU that runs nothing: its compute capability, the packages installed, what the check says of each kernel."""

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.installed: set[str] = set()
        self.faults: dict[str, Exception] = {}
        self.checked: list[tuple[str, str, torch.dtype, int]] = []

    def check(self, backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
        self.checked.append((backend.name, str(device), dtype, head_dim))
        if backend.name in self.faults:
            raise self.faults[backend.name]
        return 1e-3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(backends, "_installed", lambda package: package in fake.installed)
    monkeypatch.setattr(backends, "check_backend", fake.check)
    for cached in (backends._fault, backends._log_once):
        cached.cache_clear()
    yield fake
    backends._fault.cache_clear()


ALL = {"flash-attn", "flash-attn-3", "flash-attn-4"}


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "expected"),
    [
        ("cpu", torch.float32, (9, 0), set(), "cpu"),
        ("cpu", BF16, (9, 0), ALL, "cpu"),
        ("cuda", torch.float32, (9, 0), ALL, "reference"),
        ("cuda", BF16, (9, 0), set(), "cudnn"),
        ("cuda", torch.float16, (9, 0), {"flash-attn"}, "cudnn"),
        ("cuda", BF16, (9, 0), {"flash-attn", "flash-attn-3"}, "flash3"),
        ("cuda", BF16, (9, 0), {"flash-attn-4"}, "flash4"),
        ("cuda", BF16, (9, 0), ALL, "flash3"),
        ("cuda:1", BF16, (10, 0), ALL, "flash4"),
        ("cuda", BF16, (10, 0), {"flash-attn-3"}, "cudnn"),
        ("cuda", BF16, (8, 0), ALL, "flash2"),
        ("cuda", BF16, (8, 0), set(), "torch"),
        ("cuda", BF16, (13, 0), ALL, "flash2"),
        ("cuda", BF16, (7, 5), ALL, "reference"),
        ("mps", BF16, (9, 0), ALL, "reference"),
    ],
)
def test_auto_names_its_choice(device, dtype, capability, installed, expected, gpu, caplog):
    gpu.capability = capability
    gpu.installed = installed
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choose_backend("auto", device, dtype).name == expected
    assert caplog.text.count(f"attention.backend=auto: {expected} ({torch.device(device).type} in") == 1
    checked = {"cudnn": "cudnn:64:torch"}.get(expected, expected)
    assert gpu.checked == ([] if expected in ("cpu", "reference") else [(checked, device, dtype, 128)])
    assert ("memory grows with the square of a clip's tokens" in caplog.text) is (expected == "reference")


def test_auto_goes_on_to_the_next_kernel_and_says_why(gpu, caplog):
    gpu.installed = ALL
    gpu.faults = {
        "cudnn:64:torch": RuntimeError("No valid execution plans built."),
        "flash4": TypeError("_flash_attn_fwd() got an unexpected keyword argument 'return_lse'\nand more"),
        "flash3": ImportError("libcudart.so.12: cannot open shared object file"),
        "flash2": KernelError("dk summed over two blocks is off by 0.9, the largest allowed error is 0.02"),
    }
    for _ in range(2):
        assert choose_backend("auto", "cuda", BF16, head_dim=64).name == "torch"
    loss = (
        ". Without cudnn, flash3 and flash4, attention on a Hopper GPU is expected to take 1.7 times as long."
    )
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "attention.backend=auto skips flash3, which fails the check of its results "
        f"(ImportError: libcudart.so.12: cannot open shared object file){loss}",
        "attention.backend=auto skips flash4, which fails the check of its results "
        f"(TypeError: _flash_attn_fwd() got an unexpected keyword argument 'return_lse'){loss}",
        "attention.backend=auto skips cudnn, which fails the check of its results "
        f"(RuntimeError: No valid execution plans built.){loss}",
        "attention.backend=auto skips flash2, which fails the check of its results "
        f"(KernelError: dk summed over two blocks is off by 0.9, the largest allowed error is 0.02){loss}",
    ]
    order = ["flash3", "flash4", "cudnn:64:torch", "flash2", "torch"]
    assert [name for name, *_ in gpu.checked] == order  # once each
    gpu.faults["torch"] = RuntimeError("")
    assert choose_backend("auto", "cuda", BF16).name == "reference"  # another head dim is another check
    assert gpu.checked[5:] == [(name, "cuda", BF16, 128) for name in order]


def test_a_named_kernel_that_is_wrong_is_refused_with_the_numbers(gpu):
    gpu.installed = ALL
    gpu.faults = {"flash3": KernelError("lse is off by 2.1, the largest allowed error is 0.002")}
    with pytest.raises(
        ConfigError,
        match=r"flash3 fails on cuda in bfloat16: .*lse is off by 2.1, .* is 0.002",
    ):
        choose_backend("flash3", "cuda", BF16)
    assert choose_backend("flash4", "cuda", BF16).name == "flash4"


@pytest.mark.parametrize("mistake", ["crashes", "backward recomputes lse"])
def test_the_real_check_stands_before_the_choice(mistake: str, gpu, monkeypatch):
    """On the CPU in the GPU's place: the check's own arithmetic, not a stand-in for it."""
    monkeypatch.setattr(
        backends, "check_backend", lambda backend, device, *rest: check_backend(backend, "cpu", *rest)
    )
    right = REFERENCE
    wrong = Wrong(mistake)
    monkeypatch.setitem(
        backends.BACKENDS, "torch", FlashBackend("torch", right.forward, right.backward, min_major=8)
    )
    monkeypatch.setitem(
        backends.BACKENDS, "flash4", FlashBackend("flash4", wrong.forward, wrong.backward, min_major=8)
    )
    assert choose_backend("auto", "cuda", BF16, head_dim=16).name == "torch"
    with pytest.raises(ConfigError, match=r"flash4 fails on cuda in bfloat16"):
        choose_backend("flash4", "cuda", BF16, head_dim=16)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "capability", "says"),
    [
        ("cpu", "cuda", BF16, (9, 0), "attention.backend=cpu cannot run on cuda in bfloat16"),
        ("torch", "cpu", BF16, (9, 0), "attention.backend=torch cannot run on cpu in bfloat16"),
        ("torch", "cuda", torch.float32, (9, 0), "attention.backend=torch cannot run on cuda in float32"),
        (
            "flash2",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn is not installed. Run pip install -e '.\[flash2\]' in the folder of wands, or use",
        ),
        (
            "flash3",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn-3 is not installed. Run pip install flash-attn-3 --index-url https://download.pytorch",
        ),
        (
            "flash4",
            "cuda",
            BF16,
            (9, 0),
            r"flash-attn-4 is not installed. Run pip install -e '.\[flash4\]' in the folder of wands, or use",
        ),
        ("torch", "cuda", BF16, (7, 5), r"the GPU has compute capability 7.5, the kernel needs 8.0 or newer"),
        (
            "flash3",
            "cuda",
            BF16,
            (10, 0),
            r"the GPU has compute capability 10.0, the kernel needs 9.0 to 9.x",
        ),
        ("flash4", "cuda", BF16, (8, 0), r"the GPU has compute capability 8.0, the kernel needs 9.0 to 12.x"),
    ],
)
def test_impossible_choices_are_refused(name, device, dtype, capability, says, gpu):
    gpu.capability = capability
    with pytest.raises(ConfigError, match=says):
        choose_backend(name, device, dtype)
    assert gpu.checked == []


def test_reference_runs_anywhere_unchecked(gpu):
    assert choose_backend("reference", "cuda", torch.float32).name == "reference"
    assert gpu.checked == []


def test_an_installed_package_is_known_by_its_distribution(monkeypatch, tmp_path):
    folder = tmp_path / "flash_attn_3-3.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n")
    assert not backends._installed("flash-attn-3")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends._installed("flash-attn-3")
    assert not backends._installed("flash-attn-4")


def test_the_config_knows_every_backend():
    from wands.config.recipe import AttentionConfig

    for name in ("auto", *backends.BACKENDS):
        assert AttentionConfig(backend=name).backend == name
    assert all(get_backend(name).name == name for name in backends.BACKENDS)
