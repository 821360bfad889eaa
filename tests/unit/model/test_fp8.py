"""fp8: the casts are those of a float64 emulation, and a layer is its three products."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.fp8 import cast_rows, e4m3_values, needs_products, product, product_error
from wands.errors import ConfigError
from wands.model import fp8
from wands.model.fp8 import (
    E4M3,
    Fp8Linear,
    cast_fp8_columns,
    cast_fp8_rows,
    check_fp8,
    fp8_matmul,
    fp8_stored,
    fp8_stored_backward,
)
from wands.model.quantized import CODECS, QuantizedLinear, StoredFp8Linear

BF16_ROUNDING = 2.0**-8


def awkward_rows() -> Tensor:
    """Rows around every edge: all values of e4m3 and what lies between, powers of two and their neighbors, tiny and huge."""
    values = e4m3_values().float()
    between = (values[1:] + values[:-1]) / 2
    steps = [values, values * 3, values * 2.0**-20, values * 2.0**60]
    ties = [torch.cat([between, torch.tensor([448.0])]), torch.cat([between, torch.tensor([449.0])])]
    powers = [torch.full((127,), 2.0**exponent) for exponent in (-149, -130, -118, -9, 0, 8, 127)]
    neighbors = [torch.nextafter(row, row * 2) for row in powers[1:-1]]
    edges = [torch.full((127,), 448.0 * 2.0**exponent) for exponent in (-30, 0, 30)]
    after = [torch.nextafter(row, row * 2) for row in edges]
    zeros = [torch.zeros(127), -torch.zeros(127)]
    noise = [*torch.randn(8, 127, generator=torch.Generator().manual_seed(0)) * 16]
    rows = torch.stack([*steps, *ties, *powers, *neighbors, *edges, *after, *zeros, *noise])
    signs = torch.ones(127)
    signs[::2] = -1
    return rows * signs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cast_of_a_row_is_that_of_the_emulation(dtype: torch.dtype):
    x = awkward_rows().to(dtype)
    x = x[x.isfinite().all(1)]
    codes, scale = cast_fp8_rows(x)
    expected, expected_scale = cast_rows(x)
    assert torch.equal(scale.double(), expected_scale)
    assert torch.equal(codes.double(), expected)
    assert torch.equal(codes.float().signbit(), expected.signbit())


def test_the_scale_is_the_smallest_power_of_two_that_clips_nothing():
    x = awkward_rows()
    _, scale = cast_fp8_rows(x)
    largest = x.abs().amax(1, keepdim=True).double()
    assert (largest <= 448 * scale.double()).all()
    free = scale > 2.0**-126
    assert (largest > 448 * scale.double() / 2)[free].all()
    assert (scale.frexp().mantissa == 0.5).all()


@pytest.mark.parametrize("num_rows", [1, 15, 16, 33])
def test_columns_are_the_rows_of_the_transpose_and_padded(num_rows: int):
    x = awkward_rows()[:num_rows]
    codes, scale = cast_fp8_columns(x)
    expected, expected_scale = cast_fp8_rows(x.t())
    assert codes.shape == (127, math.ceil(num_rows / 16) * 16)
    assert torch.equal(codes[:, :num_rows].float(), expected.float())
    assert not codes[:, num_rows:].float().any()
    assert torch.equal(scale, expected_scale)
    assert codes.is_contiguous()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_has_no_scale(bad: float):
    x = torch.randn(5, 32)
    x[2, 7] = bad
    _, scale = cast_fp8_rows(x)
    assert scale.isnan().flatten().tolist() == [False, False, True, False, False]
    _, columns = cast_fp8_columns(x)
    assert columns.isnan().flatten().nonzero().tolist() == [[7]]


@needs_products
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_makes_its_products_nan(bad: float):
    x = torch.randn(5, 32)
    weight = torch.randn(16, 32)
    x[2, 7] = bad
    out = fp8_matmul(x, weight, None, False, False, False)
    assert out.isnan().all(1).tolist() == [False, False, True, False, False]
    assert fp8_matmul(weight, x, None, False, False, False).isnan().all(0)[2]
    by_columns = fp8_matmul(x, torch.randn(5, 16), None, True, True, False)
    assert by_columns.isnan().any(1).nonzero().tolist() == [[7]]


@pytest.mark.slow
def test_compiled_casts_change_no_bit():
    x = awkward_rows()
    for plain, compiled in ((cast_fp8_rows, fp8._cast_rows_op), (cast_fp8_columns, fp8._cast_columns_op)):
        for rows in (x, x.bfloat16(), x[:7]):
            for one, other in zip(plain(rows), compiled(rows), strict=True):
                assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


SCALES = (1.0, 16.0)


@needs_products
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("columns", [(False, False), (False, True), (True, True)])
def test_a_product_is_that_of_the_emulation(columns: tuple[bool, bool], scale: float):
    torch.manual_seed(0)
    a = (torch.randn(37, 64) * scale).exp2().bfloat16()
    b = torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    out = fp8_matmul(
        a.t() if columns[0] else a, b.t() if columns[1] else b, None, columns[0], columns[1], False
    )
    expected = product(a, b)
    assert out.dtype == torch.bfloat16
    # fp32 sums of 64 terms, then one rounding to bf16.
    size = a.double().abs() @ b.double().abs().t()
    assert ((out.double() - expected).abs() <= BF16_ROUNDING * expected.abs() + 1e-5 * size).all()
    bound = product_error(a, b) * (1 + BF16_ROUNDING) + BF16_ROUNDING * size
    error = (out.double() - a.double() @ b.double().t()).abs()
    assert (error <= bound).all()


def layers(bias: bool, in_features: int = 64, out_features: int = 48) -> tuple[Fp8Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(in_features, out_features, bias=bias)
    layer = nn.Linear(in_features, out_features, bias=bias)
    layer.load_state_dict(plain.state_dict())
    layer.__class__ = Fp8Linear
    assert isinstance(layer, Fp8Linear)
    return layer, plain


def close(actual: Tensor, expected: Tensor, size: Tensor) -> bool:
    return bool(((actual.double() - expected).abs() <= BF16_ROUNDING * expected.abs() + 1e-5 * size).all())


@needs_products
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bf16_grad_weight", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_a_layer_is_its_three_products(bias: bool, bf16_grad_weight: bool, scale: float):
    """Tokens of very different sizes, channels of very different sizes, so that a scale of another axis would be seen."""
    layer, _ = layers(bias)
    layer.bf16_grad_weight = bf16_grad_weight
    spread = torch.logspace(-3, 3, 21)[:, None] * torch.logspace(-2, 2, 64)
    x = (torch.randn(21, 64) * spread * scale).bfloat16().requires_grad_()
    dout = (torch.randn(21, 48) * torch.logspace(3, -3, 21)[:, None] * torch.logspace(-2, 2, 48)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.backward(dout)
    weight = layer.weight.detach()
    size = x.detach().double().abs() @ weight.double().abs().t()
    expected = product(x.detach(), weight)
    if bias:
        expected = expected + layer.bias.detach().bfloat16().double()
    assert close(out.detach(), expected, size)
    assert close(x.grad, product(dout, weight.t()), dout.double().abs() @ weight.double().abs())
    assert layer.weight.grad.dtype == torch.float32
    pair = dout.t(), x.detach().t()
    expected = pair[0].double() @ pair[1].double().t() if bf16_grad_weight else product(*pair)
    assert close(layer.weight.grad, expected, pair[0].double().abs() @ pair[1].double().abs().t())
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), dout.double().sum(0), rtol=2**-7, atol=1e-3)


@needs_products
def test_the_bf16_gradient_of_a_weight_is_nearer_to_the_true_one():
    layer, _ = layers(True)
    x = torch.randn(80, 64)
    errors = []
    for bf16_grad_weight in (False, True):
        layer.bf16_grad_weight = bf16_grad_weight
        layer.weight.grad = None
        dout = torch.randn(80, 48, generator=torch.Generator().manual_seed(1))
        layer(x).backward(dout.bfloat16())
        true = dout.bfloat16().double().t() @ x.double()
        errors.append(float((layer.weight.grad - true).norm() / true.norm()))
    assert errors[1] < 0.004 < 0.02 < errors[0] < 0.06


@needs_products
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (2, 9, 64)])
def test_any_number_of_tokens_has_gradients(shape: tuple[int, ...]):
    layer, _ = layers(True)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == (*shape[:-1], 48)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any() == (x.numel() > 0)


@needs_products
def test_a_layer_keeps_its_input_and_its_parameter_and_no_copy_of_a_weight():
    layer, _ = layers(True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(21, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    weights = [tensor for tensor in kept if tensor.shape == layer.weight.shape]
    assert len(weights) == 1
    assert weights[0] is layer.weight
    assert [tensor.dtype for tensor in kept if tensor.shape == x.shape] == [torch.bfloat16]


@needs_products
def test_the_input_of_a_frozen_layer_is_not_kept():
    layer, _ = layers(True)
    layer.requires_grad_(False)
    x = torch.randn(21, 64).bfloat16()
    x.requires_grad_()
    rows = (x * 1).view_as(x)
    held = weakref.ref(rows)
    out = layer(rows)
    del rows
    assert held() is None
    out.sum().backward()
    assert x.grad is not None


def stored(layer: nn.Linear) -> StoredFp8Linear:
    result = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    StoredFp8Linear.convert(result, CODECS["fp8"])
    assert isinstance(result, StoredFp8Linear)
    for name, value in result.encode(layer.weight.detach()).items():
        setattr(result, name, nn.Parameter(value, requires_grad=False))
    result.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
    return result


@needs_products
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", SCALES)
def test_a_stored_weight_is_multiplied_as_its_codes_say(bias: bool, scale: float):
    _, plain = layers(bias)
    with torch.no_grad():
        plain.weight.mul_(torch.logspace(-3, 3, 48)[:, None])
    layer = stored(plain)
    decoded = layer.codec.decode(layer.weight, layer.scale, 64)
    x = (torch.randn(21, 64) * torch.logspace(-3, 3, 21)[:, None] * scale).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    dout = torch.randn(21, 48).bfloat16()
    out.backward(dout)
    expected = product(x.detach(), decoded)
    size = x.detach().double().abs() @ decoded.double().abs().t()
    if bias:
        expected = expected + plain.bias.detach().bfloat16().double()
    assert close(out.detach(), expected, size)
    codes, scales = cast_rows(dout.float() * layer.scale)
    expected = (codes * scales) @ (decoded / layer.scale[:, None]).double()
    assert close(x.grad, expected, dout.double().abs() @ decoded.double().abs())


@needs_products
def test_a_stored_weight_is_that_of_the_layer_that_decodes_it():
    """The dumb reference: decode, then multiply in bf16. It differs by the cast of the inputs alone."""
    _, plain = layers(True)
    layer = stored(plain)
    reference = stored(plain)
    reference.__class__ = QuantizedLinear
    x = torch.randn(21, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        expected = reference(x)
    decoded = layer.codec.decode(layer.weight, layer.scale, 64)
    bound = product_error(x, decoded) + 2**-7 * (x.double().abs() @ decoded.double().abs().t() + 1)
    assert ((out.double() - expected.double()).abs() <= bound).all()
    assert not torch.equal(out, expected)


@needs_products
def test_products_are_counted():
    x = torch.randn(21, 64)
    weight = torch.randn(48, 64)
    codes, scale = CODECS["fp8"].encode(weight)
    calls = (
        lambda: fp8_matmul(x, weight, None, False, False, False),
        lambda: fp8_matmul(x, torch.randn(21, 48), None, True, True, False),
        lambda: fp8_stored(x, codes, scale, None, False),
        lambda: fp8_stored_backward(torch.randn(21, 48), codes, scale, False),
    )
    for call in calls:
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * 21 * 64 * 48


def test_the_codes_of_a_stored_weight_are_bytes():
    codes, scales = CODECS["fp8"].encode(torch.randn(48, 64))
    assert codes.dtype == torch.uint8
    assert torch.equal(codes.view(E4M3).float() * scales[:, None], CODECS["fp8"].decode(codes, scales, 64))


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"A100 has 8\.0; set precision\.linears=bf16"):
        check_fp8(torch.device("cuda"))
