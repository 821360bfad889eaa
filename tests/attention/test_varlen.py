"""Every back end against plain PyTorch attention: values, log-sum-exp, gradients, empty segments, blocks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wands.attention import backends
from wands.attention.varlen import (
    Backend,
    PaddedSegments,
    Segments,
    choose_backend,
    padded_attention,
    varlen_attention,
)
from wands.errors import ConfigError

HEADS, DIM = 3, 16
CASES = {
    "one": ((7,), (7,)),
    "unequal": ((5, 1, 12, 3), (5, 1, 12, 3)),
    "cross": ((5, 1, 12, 3), (9, 4, 1, 6)),
    "empty keys": ((5, 2, 3), (4, 0, 6)),
    "empty queries": ((5, 0, 3), (4, 7, 6)),
    "empty both": ((0, 5, 0, 3), (0, 4, 0, 2)),
    "nothing at all": ((2, 0), (0, 3)),
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
CPU_DTYPES = [("reference", dtype) for dtype in TOLERANCE] + [("cpu", dtype) for dtype in TOLERANCE]


def make_inputs(lens_q, lens_k, dtype, device="cpu", dim=DIM) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    rows = (sum(lens_q), sum(lens_k), sum(lens_k), sum(lens_q))
    return [torch.randn(n, HEADS, dim, generator=generator).to(device, dtype) for n in rows]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Dense float64 attention with a block mask; rows without a key are 0 and -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    id_q = torch.repeat_interleave(torch.arange(len(segments.lens_q)), torch.tensor(segments.lens_q)).to(
        q.device
    )
    id_k = torch.repeat_interleave(torch.arange(len(segments.lens_k)), torch.tensor(segments.lens_k)).to(
        q.device
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(id_q[:, None] != id_k, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def check_backend(backend: Backend, lens_q, lens_k, dtype, device="cpu", dim=DIM) -> None:
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
    check_backend(choose_backend(name, "cpu", dtype), *CASES[case], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["torch", "flash2"])
def test_cuda_backend_is_plain_attention(name: str, case: str):
    if name == "flash2":
        pytest.importorskip("flash_attn")
    check_backend(choose_backend(name, "cuda", torch.bfloat16), *CASES[case], torch.bfloat16, "cuda", dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "flash2"])
def test_cuda_backend_takes_the_merged_result_of_blocks(name: str):
    if name == "flash2":
        pytest.importorskip("flash_attn")
    check_blocks(choose_backend(name, "cuda", torch.bfloat16), torch.bfloat16, "cuda", dim=128)


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
    """What a ring does: attend to blocks of keys, merge, give every block's backward the merged result."""
    lens, cut = (6, 3, 4), (2, 3, 0)  # the first block holds `cut` keys of each segment
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
    backend: Backend, lens_k, padded_len: int, dtype, device: str = "cpu", dim: int = DIM
) -> None:
    """Merged copies against copies that are really there."""
    lens_q, num_pads = (5, 4, 3), [padded_len - length for length in lens_k]
    q, k, v, dout = make_inputs(lens_q, lens_k, dtype, device, dim)
    pad_k, pad_v = make_inputs((1,), (1,), dtype, device, dim)[:2]
    leaves = [x.requires_grad_() for x in (q, k, v, pad_k[0], pad_v[0])]
    out = padded_attention(*leaves, PaddedSegments.build(lens_q, lens_k, padded_len, device), backend)
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "flash2"])
@PADDED
def test_cuda_padded_attention_is_attention_to_the_long_rows(name: str, lens_k, padded_len: int):
    if name == "flash2":
        pytest.importorskip("flash_attn")
    backend = choose_backend(name, "cuda", torch.bfloat16)
    check_padded(backend, lens_k, padded_len, torch.bfloat16, "cuda", dim=128)


def test_a_segment_sees_nothing_of_the_others():
    lens = (5, 4, 6)
    q, k, v, _ = make_inputs(lens, lens, torch.float32)
    backend = choose_backend("cpu", "cpu", torch.float32)
    before = varlen_attention(q, k, v, Segments.build(lens), backend)
    k[5:9], v[5:9], q[5:9] = 9.0, -9.0, 3.0
    after = varlen_attention(q, k, v, Segments.build(lens), backend)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


def test_segments_must_match_and_fit():
    with pytest.raises(AssertionError, match="2 segments of q, 1 of k"):
        Segments.build((1, 2), (3,))
    with pytest.raises(AssertionError, match="segments cover 4 rows of a tensor of 3"):
        list(Segments.build((4,)).idle_q(3))
    with pytest.raises(AssertionError, match="5 keys is longer than 4"):
        PaddedSegments.build((3, 1), (4, 5), 4)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_reach_the_scores(name: str, dtype: torch.dtype):
    q, k, v, dout = make_inputs((64,), (64,), dtype, dim=64)
    segments, backend = Segments.build((64,)), choose_backend(name, "cpu", dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = backend.forward(q, k, v, segments, 1.0)
        grads = backend.backward(dout, q, k, v, out, lse, segments, 1.0)
    _, expected = plain_attention(q, k, v, segments, 1.0)
    assert (lse.double() - expected).abs().max() < 1e-4  # bf16 scores of this size are 0.06 apart
    for found, right in zip(grads, backend.backward(dout, q, k, v, out, lse, segments, 1.0), strict=True):
        assert torch.equal(found, right)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """`gpu(8, 0)` makes the device a GPU of that compute capability; 9.0 until then."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    pretend(9, 0)
    backends._log_choice.cache_clear()
    return pretend


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "expected"),
    [
        ("cpu", torch.float32, False, "cpu"),
        ("cpu", torch.bfloat16, True, "cpu"),
        ("cuda", torch.bfloat16, False, "torch"),
        ("cuda", torch.float16, False, "torch"),
        ("cuda", torch.float32, True, "reference"),
    ],
)
def test_auto_names_its_choice(device, dtype, installed, expected, gpu, monkeypatch, caplog):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object() if installed else None)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert choose_backend("auto", device, dtype).name == expected
    assert caplog.text.count(f"attention.backend=auto: {expected}") == 1


def test_auto_prefers_flash_attn_when_installed(gpu, monkeypatch, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_backend("auto", "cuda", torch.bfloat16).name == "flash2"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "says"),
    [
        ("cpu", "cuda", torch.bfloat16, "attention.backend=cpu cannot run on cuda in bfloat16"),
        ("torch", "cpu", torch.bfloat16, "attention.backend=torch cannot run on cpu in bfloat16"),
        ("torch", "cuda", torch.float32, "attention.backend=torch cannot run on cuda in float32"),
        ("flash2", "cuda", torch.bfloat16, r"not installed\); pip install"),
    ],
)
def test_impossible_choices_are_refused(name, device, dtype, says, gpu, monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=says):
        choose_backend(name, device, dtype)


def test_an_older_gpu_gets_the_reference(gpu):
    gpu(7, 5)
    assert choose_backend("auto", "cuda", torch.float16).name == "reference"
    with pytest.raises(
        ConfigError, match=r"torch cannot run .* \(compute capability 7.5, its kernel needs 8.0\)"
    ):
        choose_backend("torch", "cuda", torch.float16)
    gpu(8, 0)
    assert choose_backend("torch", "cuda", torch.float16).name == "torch"
