"""A base kept in codes: how far they are from the weights, what they take, and that a layer is that of the decoded ones."""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.stored_bytes import stored_bytes
from tests.support.streaming import measure_load, write_scaled
from wands.errors import ConfigError
from wands.model.files.loading import build_empty, load_config, load_transformer, load_weights
from wands.model.quantized import BLOCK_SIZE, CODECS, Codec, QuantizedLinear, load_library
from wands.model.weight_dtypes import WeightDtypePolicy

CODEC_IDS = list(CODECS)


def quantized(linear: nn.Linear, codec: Codec) -> QuantizedLinear:
    """The same layer in codes."""
    weight = linear.weight.detach()
    bias = linear.bias
    layer = nn.Linear(linear.in_features, linear.out_features, bias=bias is not None)
    QuantizedLinear.convert(layer, codec)
    assert isinstance(layer, QuantizedLinear)
    for name, value in layer.encode(weight).items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def decoded(layer: QuantizedLinear) -> nn.Linear:
    """The plain layer of the weights that it multiplies by."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight = nn.Parameter(layer.codec.decode(layer.weight, layer.scale, layer.in_features), False)
    plain.bias = layer.bias
    return plain


def test_int8_is_within_half_a_step_of_its_row():
    weight = torch.randn(50, 70) * torch.logspace(-6, 3, 50)[:, None]
    codes, scales = CODECS["int8"].encode(weight)
    error = (CODECS["int8"].decode(codes, scales, 70) - weight).abs().amax(1)
    largest = weight.abs().amax(1)
    assert (error <= largest / 254 * 1.001).all()
    assert float((error / largest).max()) > 1 / 300  # a step is what it is said to be


def test_nf4_is_within_half_the_widest_gap_of_its_block():
    weight = torch.randn(48, 96) * torch.logspace(-3, 3, 48)[:, None]
    codes, scales = CODECS["nf4"].encode(weight)
    back = CODECS["nf4"].decode(codes, scales, 96)
    largest = weight.flatten().split(BLOCK_SIZE)
    error = (back - weight).abs().flatten().split(BLOCK_SIZE)
    # The widest of the 15 gaps is from -1 to -0.696.
    assert all(
        float(e.max()) <= 0.153 * float(block.abs().max()) for e, block in zip(error, largest, strict=True)
    )
    assert len(back.unique()) > 16


@pytest.mark.parametrize("name", CODEC_IDS)
def test_rows_of_zeros_stay_zeros(name: str):
    weight = torch.randn(4, 64)
    weight[1:3] = 0
    back = CODECS[name].decode(*CODECS[name].encode(weight), 64)
    assert torch.equal(back[1:3], weight[1:3])
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CODEC_IDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_of_codes_is_that_of_the_decoded_weights(name: str, bias: bool, autocast: bool):
    layer = quantized(nn.Linear(66, 40, bias=bias), CODECS[name])
    plain = decoded(layer)
    x = torch.randn(2, 9, 66, requires_grad=True)
    dout = torch.randn(2, 9, 40)
    results = []
    for one in (layer, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = one(x)
        assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
        [grad] = torch.autograd.grad(out, x, dout.to(out.dtype))
        results.append((out, grad))
    (out, grad), (plain_out, plain_grad) = results
    assert torch.equal(out, plain_out)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-6, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("name", CODEC_IDS)
def test_only_codes_are_kept_for_backward(name: str):
    """And they are the parameters themselves, whose memory ZeRO-3 can take back."""
    layer = quantized(nn.Linear(64, 64), CODECS[name])
    kept: list[Tensor] = []
    whole: list[weakref.ref[Tensor]] = []

    def decode(*args: Any) -> Tensor:
        weight = QuantizedLinear._decode(layer, *args)
        whole.append(weakref.ref(weight))
        return weight

    layer._decode = decode

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(torch.randn(3, 64, requires_grad=True))
    assert [one() for one in whole] == [None]
    out.sum().backward()
    assert [one() for one in whole] == [None, None]
    assert {tensor.data_ptr() for tensor in kept} == {layer.weight.data_ptr(), layer.scale.data_ptr()}


@pytest.mark.parametrize(("quantize", "bytes_per_weight"), [("int8", 1.0), ("nf4", 0.5)])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_bytes_are_what_is_promised(
    weights: str, quantize: str, bytes_per_weight: float, tiny_variant: Callable[[str], Path]
):
    """Codes of all linear layers of the blocks; fp32 wherever the model computes in fp32; and the meta device knows before."""
    folder = tiny_variant("wan2.1-flf2v-14b")
    storage = WeightDtypePolicy(weights, quantize)
    model = load_transformer(folder, storage=storage)
    promised = build_empty(load_config(folder))
    shapes = {name: parameter.shape for name, parameter in promised.named_parameters()}
    storage.apply(promised)
    assert stored_bytes(model) == stored_bytes(promised)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert len(layers) == 12 * len(
        model.blocks
    )  # q, k, v, out of both attentions, k and v of pictures, two of ffn
    num_weights = sum(shapes[f"{name}.weight"].numel() for name in layers)
    code_dtype = {"int8": torch.int8, "nf4": torch.uint8}[quantize]
    assert stored_bytes(model)[code_dtype] == bytes_per_weight * num_weights
    rows = sum(one.out_features for one in layers.values())
    blocks = sum(-(-shapes[f"{name}.weight"].numel() // BLOCK_SIZE) for name in layers)
    assert sum(one.scale.nbytes for one in layers.values()) == 4 * (rows if quantize == "int8" else blocks)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    kept = torch.bfloat16 if weights == "bf16" else torch.float32
    for name, dtype in dtypes.items():
        owner, _, leaf = name.rpartition(".")
        fp32 = leaf == "scale" or any(
            part in name for part in ("norm", "time_", "scale_shift_table", "proj_out", "pos_embed")
        )
        if owner in layers and leaf == "weight":
            assert dtype == code_dtype
        else:
            assert dtype == (torch.float32 if fp32 else kept), name


@pytest.mark.parametrize(
    "storage",
    [WeightDtypePolicy("bf16"), WeightDtypePolicy(quantize="int8"), WeightDtypePolicy("bf16", "nf4")],
    ids=str,
)
def test_weights_are_stored_after_they_are_merged(storage: WeightDtypePolicy, tiny_pipeline: Path):
    plain = load_weights(tiny_pipeline)

    def merge(name: str, weight: Tensor) -> Tensor:
        assert weight.dtype == torch.float32
        return weight + 0.01 * len(name)

    model = load_transformer(tiny_pipeline, merge=merge, storage=storage)
    for name in plain:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        wanted = merge(name, plain[name])
        if isinstance(owner, QuantizedLinear) and leaf == "weight":
            for one, value in owner.encode(wanted).items():
                assert torch.equal(getattr(owner, one), value)
        else:
            found = getattr(owner, leaf)
            assert torch.equal(found, wanted.to(found.dtype))


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("bitsandbytes"):
            raise ModuleNotFoundError("No module named 'bitsandbytes'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ConfigError, match=r"lora\.quantize needs the package bitsandbytes.*pip install -e '\.\[8bit\]'"
    ):
        load_library()


@pytest.mark.full
def test_peak_memory_of_a_node(tmp_path: Path, new_world):
    """Codes are made tensor by tensor: the ranks of a node hold not much more than all codes together."""
    from tests.support.packs import build_pair

    build_pair()[0].save_pretrained(tmp_path / "small" / "transformer")
    write_scaled(tmp_path / "big")
    storage = WeightDtypePolicy("bf16", "int8")
    promised = build_empty(load_config(tmp_path / "big"))
    storage.apply(promised)
    size = sum(stored_bytes(promised).values())
    args = str(tmp_path / "small"), str(tmp_path / "big"), storage
    peak, samples = new_world(2, measure_load, *args)[0]
    assert samples > 20
    assert size < peak < 1.4 * size


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODEC_IDS)
def test_a_gpu_decodes_to_the_same_bits(name: str):
    layer = quantized(nn.Linear(256, 128), CODECS[name])
    whole = layer.codec.decode(layer.weight, layer.scale, 256)
    layer.cuda()
    assert torch.equal(layer.codec.decode(layer.weight, layer.scale, 256).cpu(), whole)
    x = torch.randn(5, 256, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        layer(x).sum().backward()
    wanted = whole.bfloat16().float().sum(0).expand(5, -1)
    torch.testing.assert_close(x.grad.cpu(), wanted, rtol=2e-2, atol=2e-2)
