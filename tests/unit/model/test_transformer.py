"""The packed model is the stock diffusers model, sample by sample: values, gradients, and nothing leaks."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.support.packs import (
    CONFIG,
    KINDS,
    Pack,
    build_pair,
    make_pack,
    run_packed,
    run_stock,
    set_attention,
)
from wands.attention.varlen import Segments, varlen_attention
from wands.model import transformer
from wands.model.transformer import PackedWanTransformer, rotations_of


def max_error(pack: Pack, dtype: torch.dtype = torch.float64, kind: str = "t2v") -> float:
    """Largest difference between the packed model and the stock one."""
    stock, packed = build_pair(dtype, kind)
    with torch.no_grad():
        return (run_packed(packed, pack) - run_stock(stock, pack)).abs().max().item()


def weighted_grads(model: torch.nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss in which every output number has a different weight."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_float64_outputs_equal_the_stock_model(num_samples: int, kind: str):
    assert max_error(make_pack(num_samples, torch.float64, kind=kind), kind=kind) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_float32_outputs_equal_the_stock_model(kind: str):
    for num_samples in (1, 2, 7):
        assert max_error(make_pack(num_samples, kind=kind), torch.float32, kind) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_every_gradient_equals_the_stock_model(num_samples: int, kind: str):
    stock, packed = build_pair(torch.float64, kind)
    pack = make_pack(num_samples, torch.float64, kind=kind)
    expected = weighted_grads(stock, run_stock(stock, pack))
    found = weighted_grads(packed, run_packed(packed, pack))
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert grad.abs().max() > 0, f"{name} is not exercised"
        error = (found[name] - grad).abs().max()
        assert error <= 1e-5 * max(grad.abs().max(), 1e-3 * largest), name


def test_a_timestep_for_each_token_is_one_for_each_sample():
    """Stock Wan 2.2 expands the timesteps of text-to-video samples too: that changes nothing, so neither do we."""
    stock, packed = build_pair(torch.float64)
    pack = make_pack(3, torch.float64)
    with torch.no_grad():
        error = (run_packed(packed, pack) - run_stock(stock, pack, per_token=True)).abs().max()
    assert error <= 1e-12


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("latents", "t2v"),
        ("texts", "t2v"),
        ("timesteps", "t2v"),
        ("images", "i2v with clip"),
        ("images", "flf2v"),
        ("latents", "ti2v"),
        ("timesteps", "ti2v"),
    ],
)
def test_a_change_in_one_sample_leaves_the_others_bitwise(part: str, kind: str):
    _, packed = build_pair(kind=kind)
    pack = make_pack(7, kind=kind)
    changed = 4
    value = getattr(pack, part)[changed]
    other = pack.replaced(changed, **{part: value + 1 if part == "timesteps" else torch.randn_like(value)})
    with torch.no_grad():
        before = run_packed(packed, pack)
        after = run_packed(packed, other)
    mine = pack.meta.segment_ids == changed
    assert torch.equal(before[~mine], after[~mine])
    assert not torch.isclose(before[mine], after[mine]).all()


def test_order_of_samples_does_not_matter():
    """The same samples in another order give the same predictions in that order."""
    from tests.support.packs import make_meta

    _, packed = build_pair(torch.float64)
    pack = make_pack(3, torch.float64)
    order = [2, 0, 1]
    grids = [(x.shape[1], x.shape[2] // 2, x.shape[3] // 2) for x in pack.latents]
    shuffled = Pack(
        [pack.latents[i] for i in order],
        [pack.texts[i] for i in order],
        pack.timesteps[order],
        make_meta([grids[i] for i in order], [len(pack.texts[i]) for i in order]),
    )
    with torch.no_grad():
        expected = run_packed(packed, pack).split(pack.meta.local_seq_lens)
        found = run_packed(packed, shuffled).split(shuffled.meta.local_seq_lens)
    for place, sample in enumerate(order):
        torch.testing.assert_close(found[place], expected[sample], rtol=0, atol=1e-12)


def test_bf16_autocast_is_near_the_fp32_stock_model():
    stock, packed = build_pair()
    pack = make_pack(7)
    with torch.no_grad():
        expected = run_stock(stock, pack)
        with torch.autocast("cpu", torch.bfloat16):
            found = run_packed(packed, pack)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_bf16_autocast_keeps_in_fp32_what_must_be(monkeypatch: pytest.MonkeyPatch):
    _, packed = build_pair()
    normed = []
    rms_norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm", lambda x, *args: normed.append(x.dtype) or rms_norm(x, *args)
    )
    outputs: dict[str, torch.dtype] = {}
    for name, module in packed.named_modules():
        module.register_forward_hook(
            lambda _, __, out, name=name: outputs.__setitem__(
                name, tuple(x.dtype for x in out) if isinstance(out, tuple) else out.dtype
            )
        )
    seen = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, meta: transformer.PackedMeta) -> Tensor:
        seen.update(q=q.dtype, k=k.dtype, v=v.dtype)
        return varlen_attention(
            q, k, v, Segments.build(meta.chunk_lens[0]), packed.blocks[0].attn2.processor.backend
        )

    packed.set_attention(attention, packed.blocks[0].attn2.processor.backend)
    with torch.autocast("cpu", torch.bfloat16):
        run_packed(packed, make_pack(2))
    embedder = "condition_embedder."
    fp32 = [
        embedder + "timesteps_proj",
        embedder + "time_embedder",
        embedder + "time_proj",
        "proj_out",
        "blocks.0",
        "blocks.2",
    ]
    assert {name: outputs[name] for name in fp32} == dict.fromkeys(fp32, torch.float32)
    assert outputs["norm_out"] == (torch.float32, torch.float32)
    norms = [f"blocks.{i}.{norm}" for i in (0, 2) for norm in ("norm1", "norm2", "norm3")]
    assert {outputs[name] for name in norms} == {
        (torch.float32, torch.bfloat16)
    }  # (residual stream, input of a layer)
    assert set(normed) == {torch.float32}
    bf16 = ["blocks.1.attn1.to_q", "blocks.1.attn2.to_v", "blocks.1.ffn", embedder + "text_embedder"]
    assert {name: outputs[name] for name in bf16} == dict.fromkeys(bf16, torch.bfloat16)
    assert set(seen.values()) == {torch.bfloat16}


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_runs_blocks_twice_and_changes_nothing(autocast: bool):
    pack = make_pack(2)
    grads = []
    runs = []
    for checkpointing in (False, True):
        _, packed = build_pair()
        if checkpointing:
            packed.enable_gradient_checkpointing()
        count = [0]
        packed.blocks[0].ffn.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run_packed(packed, pack)
        grads.append(weighted_grads(packed, output))
        runs.append(count[0])
    assert runs == [1, 2]
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_backward_is_deterministic():
    pack = make_pack(7)
    first, second = (
        weighted_grads(model, run_packed(model, pack)) for _, model in (build_pair(), build_pair())
    )
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name


def test_no_tensor_of_modulation_per_token():
    """The modulation of a pack is one row per sample: no saved tensor has 6 rows per token."""
    _, packed = build_pair()
    pack = make_pack(7)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        run_packed(packed, pack)
    num_tokens = len(pack.tokens)
    dim = packed.config.num_attention_heads * packed.config.attention_head_dim
    assert (num_tokens, dim) in shapes
    assert max(torch.Size(shape).numel() for shape in shapes) < num_tokens * 6 * dim


def test_saves_and_loads_as_the_stock_model(tmp_path):
    stock, packed = build_pair()
    packed.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
    reloaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert type(reloaded) is WanTransformer3DModel
    again = PackedWanTransformer.from_pretrained(tmp_path)
    set_attention(again, torch.float32)
    for name, value in stock.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], value), name
        assert torch.equal(again.state_dict()[name], value), name
    pack = make_pack(2)
    with torch.no_grad():
        assert torch.equal(run_packed(again, pack), run_packed(packed, pack))
    assert again.config["num_layers"] == CONFIG["num_layers"]


def test_low_precision_timesteps_are_refused():
    _, packed = build_pair()
    pack = make_pack(1)
    with pytest.raises(AssertionError, match="bf16 represents only 294 of 1000"):
        packed(pack.tokens, pack.meta, pack.timesteps.bfloat16(), pack.text_embeds)


# Traps: mistakes that other trainers made. With the bug patched in, the check must fail.


def pads_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    def embed(self: PackedWanTransformer, text_embeds: Tensor) -> Tensor:
        return self.condition_embedder.text_embedder(torch.cat([text_embeds, text_embeds[-1:]]))

    monkeypatch.setattr(PackedWanTransformer, "_embed_text", embed)


def pads_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q, k, v, pad_k, pad_v, padded, backend, compiled):
        return varlen_attention(q, k, v, padded.segments, backend)

    monkeypatch.setattr(transformer, "padded_attention", attend)


def text_padded_to_226(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "TEXT_LEN", 226)


def _patch_timesteps(monkeypatch: pytest.MonkeyPatch, change) -> None:
    embed = PackedWanTransformer._embed_timesteps
    monkeypatch.setattr(PackedWanTransformer, "_embed_timesteps", lambda self, t: embed(self, change(t)))


def timesteps_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    _patch_timesteps(monkeypatch, lambda timesteps: timesteps.bfloat16().float())


def one_timestep_per_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    _patch_timesteps(monkeypatch, lambda timesteps: timesteps[:1].expand_as(timesteps))


def positions_continue_across_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotation(rope, positions):
        # The pack as one long video of the first sample's size (moving a whole sample would change nothing).
        _, height, width = (positions[:12].amax(0) + 1).tolist()
        index = torch.arange(len(positions))
        return rotations_of(
            rope, torch.stack([index // (height * width), index // width % height, index % width], 1)
        )

    monkeypatch.setattr(transformer, "rotations_of", rotation)


def positions_of_another_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformer, "rotations_of", lambda rope, positions: rotations_of(rope, positions.flip(0))
    )


def attention_across_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_leaky(self: PackedWanTransformer, _, backend) -> None:
        def attend(q, k, v, meta):
            return varlen_attention(q, k, v, Segments.build([len(q)]), backend)

        original(self, attend, backend)

    original = PackedWanTransformer.set_attention
    monkeypatch.setattr(PackedWanTransformer, "set_attention", set_leaky)


def input_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformer.PatchLinear.forward
    reorder = lambda tokens: tokens.unflatten(1, (4, 4)).mT.flatten(1)  # noqa: E731
    monkeypatch.setattr(
        transformer.PatchLinear, "forward", lambda self, tokens: forward(self, reorder(tokens))
    )


def output_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PackedWanTransformer.forward
    monkeypatch.setattr(
        PackedWanTransformer, "forward", lambda *args: forward(*args).unflatten(1, (4, 4)).mT.flatten(1)
    )


@pytest.mark.parametrize(
    "bug",
    [
        pads_not_zeroed,
        pads_masked,
        text_padded_to_226,
        timesteps_in_bf16,
        one_timestep_per_pack,
        positions_continue_across_samples,
        positions_of_another_sample,
        attention_across_samples,
        input_channels_last,
        output_channels_last,
    ],
)
def test_parity_notices(bug, monkeypatch: pytest.MonkeyPatch):
    pack = make_pack(2, torch.float64)
    assert max_error(pack) <= 1e-12
    bug(monkeypatch)
    assert max_error(pack) > 1e-4
