"""Every back end against plain PyTorch attention; the check that finds a wrong kernel; which kernel is chosen."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_cases import BF16, CASES, Wrong, check_against_plain
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
from wands.attention.kernels.registry import get_backend
from wands.attention.kernels.self_check import TOLERANCE as CHECK_TOLERANCE
from wands.attention.kernels.self_check import KernelError, check_backend
from wands.attention.varlen import Backend, Segments, choose_backend


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
