"""Attention with gradients over packed rows, plain and with merged pads; what segments must be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.plain import (
    CPU_DTYPES,
    CUDA_BACKENDS,
    TOLERANCE,
    cuda_backend,
    make_inputs,
    plain_attention,
)
from wands.attention import varlen
from wands.attention.packed import idle_rows
from wands.attention.varlen import (
    Backend,
    PaddedSegments,
    Segments,
    choose_backend,
    padded_attention,
    varlen_attention,
)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_varlen_attention_is_sdpa_per_segment(name: str):
    lens = (5, 1, 12)
    q, k, v, dout = make_inputs(lens, lens, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    backend = choose_backend(name, "cpu", torch.float64)
    out = varlen_attention(*leaves, Segments.build(lens), backend)
    parts = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1)
        for part in zip(*(x.split(lens) for x in leaves), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(parts), rtol=0, atol=1e-13)
    grads, expected = (torch.autograd.grad(y, leaves, dout) for y in (out, torch.cat(parts)))
    for found, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-13)


PADDED = pytest.mark.parametrize(("lens_k", "padded_len"), [((4, 2, 1), 512), ((4, 4, 4), 4), ((4, 0, 9), 9)])


def check_padded(
    backend: Backend,
    lens_k,
    padded_len: int,
    dtype,
    device: str = "cpu",
    dim: int = 16,
    compiled: bool = False,
) -> None:
    """Merged copies against copies that are really there."""
    lens_q = (5, 4, 3)
    num_pads = [padded_len - length for length in lens_k]
    q, k, v, dout = make_inputs(lens_q, lens_k, dtype, device, dim)
    pad_k, pad_v = make_inputs((1,), (1,), dtype, device, dim)[:2]
    leaves = [x.requires_grad_() for x in (q, k, v, pad_k[0], pad_v[0])]
    padded = PaddedSegments.build(lens_q, lens_k, padded_len, device)
    out = padded_attention(*leaves, padded, backend, compiled=compiled)
    found = torch.autograd.grad(out, leaves, dout)

    wide = [x.detach().double().requires_grad_() for x in leaves]
    pairs = [
        list(zip(rows.split(lens_k), (pad.expand(n, -1, -1) for n in num_pads), strict=True))
        for rows, pad in ((wide[1], wide[3]), (wide[2], wide[4]))
    ]
    long_k, long_v = (torch.cat([part for pair in rows for part in pair]) for rows in pairs)
    segments = Segments.build(lens_q, [padded_len] * 3, device)
    expected_out, _ = plain_attention(wide[0], long_k, long_v, segments, dim**-0.5)
    expected = torch.autograd.grad(expected_out, wide, dout.double())
    tolerance = 10 * TOLERANCE[dtype] if dtype != torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    for grad, right in zip(found, expected, strict=True):
        assert (grad.double() - right).abs().max() <= tolerance * max(1.0, right.abs().max().item())


@pytest.mark.parametrize(("name", "dtype"), CPU_DTYPES)
@PADDED
def test_padded_attention_is_attention_to_the_long_rows(
    name: str, dtype: torch.dtype, lens_k, padded_len: int
):
    check_padded(choose_backend(name, "cpu", dtype), lens_k, padded_len, dtype)


@PADDED
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_compiled_operator_is_attention_to_the_long_rows(dtype: torch.dtype, lens_k, padded_len: int):
    with torch.compiler.set_stance("force_eager"):
        check_padded(choose_backend("cpu", "cpu", dtype), lens_k, padded_len, dtype, compiled=True)


@PADDED
def test_pieces_of_the_queries_give_the_same_gradients(
    lens_k, padded_len: int, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU, the backward pass of attention to texts cuts the queries into pieces."""
    backend = choose_backend("cpu", "cpu", torch.float64)
    seen = []
    monkeypatch.setattr(varlen, "_piece_len", lambda dout: 2)
    monkeypatch.setattr(
        Backend, "backward", lambda *args, run=Backend.backward: seen.append(args[7].lens_q) or run(*args)
    )
    check_padded(backend, lens_k, padded_len, torch.float64)
    assert seen == [(2, 2, 1, 2, 2, 2, 1)]


def check_short_text(backend: Backend, device: str = "cpu", dim: int = 128) -> None:
    """A text of few tokens before hundreds of copies whose values are small: what is left for it counts all the same.

    As exact as the kernel by itself over the long rows.
    """
    lens_q = (96, 64, 32)
    lens_k = (1, 10, 50)
    padded_len = 512
    q, k, v, dout = make_inputs(lens_q, lens_k, torch.bfloat16, device, dim)
    pad_k, pad_v = make_inputs((1,), (1,), torch.bfloat16, device, dim)[:2]
    pad_v = pad_v * 0.01
    leaves = [x.detach().requires_grad_() for x in (q, k, v, pad_k[0], pad_v[0])]

    def long(rows: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        parts = [(part, pad.expand(padded_len - len(part), -1, -1)) for part in rows.split(lens_k)]
        return torch.cat([one for part in parts for one in part])

    def run(dtype: torch.dtype, merged: bool) -> list[torch.Tensor]:
        own = [x.detach().to(dtype).requires_grad_() for x in leaves]
        if merged:
            out = padded_attention(*own, PaddedSegments.build(lens_q, lens_k, padded_len, device), backend)
        elif dtype == torch.float64:
            segments = Segments.build(lens_q, [padded_len] * 3, device)
            out, _ = plain_attention(own[0], long(own[1], own[3]), long(own[2], own[4]), segments, dim**-0.5)
        else:
            segments = Segments.build(lens_q, [padded_len] * 3, device)
            out = varlen_attention(own[0], long(own[1], own[3]), long(own[2], own[4]), segments, backend)
        return [out.detach(), *torch.autograd.grad(out, own, dout.to(dtype))]

    right = run(torch.float64, False)
    merged = run(torch.bfloat16, True)
    kernel = run(torch.bfloat16, False)
    names = ("out", "dq", "dk", "dv", "dpad_k", "dpad_v")
    for name, exact, ours, theirs in zip(names, right, merged, kernel, strict=True):
        error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (ours, theirs))
        assert error <= 1.5 * allowed + 1e-3, (name, error.item(), allowed.item())


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_short_text_keeps_its_share(name: str):
    check_short_text(choose_backend(name, "cpu", torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_cuda_a_short_text_keeps_its_share(name: str):
    check_short_text(cuda_backend(name), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_BACKENDS)
@PADDED
def test_cuda_padded_attention_is_attention_to_the_long_rows(name: str, lens_k, padded_len: int):
    check_padded(cuda_backend(name), lens_k, padded_len, torch.bfloat16, "cuda", dim=128)


def test_a_segment_sees_nothing_of_the_others():
    lens = (5, 4, 6)
    q, k, v, _ = make_inputs(lens, lens, torch.float32)
    backend = choose_backend("cpu", "cpu", torch.float32)
    before = varlen_attention(q, k, v, Segments.build(lens), backend)
    k[5:9] = 9.0
    v[5:9] = -9.0
    q[5:9] = 3.0
    after = varlen_attention(q, k, v, Segments.build(lens), backend)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


def test_segments_must_match_and_fit():
    with pytest.raises(AssertionError, match="2 segments of q, but 1 segments of k"):
        Segments.build((1, 2), (3,))
    with pytest.raises(AssertionError, match="segments cover 4 rows, but the tensor has 3 rows"):
        list(idle_rows((4,), (4,), 3))
    with pytest.raises(AssertionError, match="5 keys is longer than padded_len=4"):
        PaddedSegments.build((3, 1), (4, 5), 4)
