"""A stock transformer that is spread over ranks predicts what it predicts alone."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.support.context import groups_of
from tests.support.packs import CONFIG, IMAGE_ROWS, KINDS, randomize
from wands.attention.packed import PackedMeta
from wands.attention.ulysses import context_attention
from wands.attention.varlen import Segments, choose_backend, varlen_attention
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.model.transformer import SelfAttention
from wands.sampling.sharing import shard_transformer
from wands.variants import TEXT_LEN

HEADS = {"num_attention_heads": 4, "attention_head_dim": 12}
# 45 tokens, then 6, then 1: none a multiple of the ranks, the last fewer than them, and the first once more.
SIZES = [(3, 10, 6), (1, 4, 6), (1, 2, 2), (3, 10, 6)]
DEGREES = {3: [(3, 1)], 4: [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]}
"""World size -> (ring, Ulysses); in a world of four, two groups of two do the same."""
CONDITIONED = [kind for kind in KINDS if kind != "t2v"]
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6}


def build(dtype: torch.dtype, kind: str = "t2v") -> WanTransformer3DModel:
    """The stock model in a dtype as `from_pretrained` gives it: in bf16 some modules stay fp32."""
    diffusers.logging.set_verbosity_error()  # a notice at every `.to(dtype)`
    model = WanTransformer3DModel(**CONFIG | HEADS | KINDS[kind]).eval()
    randomize(model)
    if dtype != torch.bfloat16:
        return model.to(dtype)
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    for name, param in model.named_parameters():
        if not kept & set(name.split(".")):
            param.data = param.data.to(dtype)
    return model


def predict(model: WanTransformer3DModel, dtype: torch.dtype) -> list[Tensor]:
    """Two samples of each size with timesteps and texts of their own, called as the pipeline calls it."""
    outputs = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(sum(size))
        latents = torch.randn(2, 4, *size, generator=generator).to(dtype)
        text = torch.randn(2, TEXT_LEN, CONFIG["text_dim"], generator=generator).to(dtype)
        text[0, 7:] = 0
        with torch.no_grad(), model.cache_context("cond"):
            outputs.append(
                model(
                    hidden_states=latents,
                    timestep=torch.tensor([997.3, 301.7]),
                    encoder_hidden_states=text,
                    attention_kwargs=None,
                    return_dict=False,
                )[0]
            )
    return outputs


def predict_conditioned(model: WanTransformer3DModel, kind: str) -> list[Tensor]:
    """As above for a model that is conditioned on pictures, with what its pipeline gives it; float64."""
    outputs = []
    for size in SIZES[:2]:
        generator = torch.Generator().manual_seed(sum(size))

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator).double()

        timestep = torch.tensor([997.3, 301.7])
        image = None
        if kind == "ti2v":  # of tokens: those of the first frame are clean
            clean = torch.ones(size)
            clean[0] = 0
            timestep = timestep[:, None] * clean[:, ::2, ::2].flatten()
        if "image_dim" in KINDS[kind]:
            per_sample = (
                2 if "pos_embed_seq_len" in KINDS[kind] else 1
            )  # diffusers takes first and last one by one
            image = normal(2 * per_sample, IMAGE_ROWS // per_sample, KINDS[kind]["image_dim"])
        with torch.no_grad(), model.cache_context("cond"):
            outputs.append(
                model(
                    hidden_states=normal(2, model.config.in_channels, *size),
                    timestep=timestep,
                    encoder_hidden_states=normal(2, TEXT_LEN, CONFIG["text_dim"]),
                    encoder_hidden_states_image=image,
                    attention_kwargs=None,
                    return_dict=False,
                )[0]
            )
    return outputs


def predict_conditioned_on_ranks(degrees: tuple[int, int]) -> dict[str, list[Tensor]]:
    groups = groups_of(*degrees)
    kernel = choose_backend("auto", "cpu", torch.float64)
    attention = context_attention(kernel, groups.ulysses, groups.ring, groups.ring_grad)
    return {
        kind: predict_conditioned(shard(build(torch.float64, kind), attention, groups), kind)
        for kind in CONDITIONED
    }


def predict_with_whole_timesteps() -> list[Tensor]:
    """The mistake: each rank uses the timesteps of the first tokens for its tokens."""
    groups = groups_of(2, 1)
    kernel = choose_backend("auto", "cpu", torch.float64)
    attention = context_attention(kernel, groups.ulysses, groups.ring, groups.ring_grad)
    model = shard(build(torch.float64, "ti2v"), attention, groups)
    hooks = model.condition_embedder._forward_pre_hooks
    for handle, hook in list(hooks.items()):
        cut = hook.__self__

        def first_ones(module: object, args: tuple, options: dict, hook=hook, cut=cut) -> tuple:
            mine = cut._mine
            cut._mine = torch.arange(len(cut._mine))
            try:
                return hook(module, args, options)
            finally:
                cut._mine = mine

        hooks[handle] = first_ones
    return predict_conditioned(model, "ti2v")


def predict_on_ranks(degrees: list[tuple[int, int]]) -> list[dict[torch.dtype, list[Tensor]]]:
    found = []
    for ring, ulysses in degrees:
        groups = groups_of(ring, ulysses)
        of_degrees = {}
        for dtype in (*BOUNDS, torch.bfloat16):
            kernel = choose_backend("auto", "cpu", dtype)
            attention = context_attention(kernel, groups.ulysses, groups.ring, groups.ring_grad)
            of_degrees[dtype] = predict(shard(build(dtype), attention, groups), dtype)
        found.append(of_degrees)
    return found


def predict_without_exchange(ring: int) -> list[Tensor]:
    """The mistake: a rank's tokens attend to one another only."""
    kernel = choose_backend("auto", "cpu", torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        return varlen_attention(q, k, v, Segments.build(meta.padded_seq_lens), kernel)

    return predict(shard(build(torch.float64), attend, groups_of(ring, 1)), torch.float64)


def shard(
    model: WanTransformer3DModel, attention: SelfAttention, groups: ProcessGroups
) -> WanTransformer3DModel:
    shard_transformer(model, attention, groups.dims, groups.cp)
    return model


def rms(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).square().mean().sqrt().item()


@pytest.mark.parametrize(
    "world_size", [pytest.param(size, marks=() if size == 2 else pytest.mark.slow) for size in DEGREES]
)
def test_equals_the_stock_model(run_world, world_size: int):
    ranks = run_world(world_size, predict_on_ranks, DEGREES[world_size])
    exact = predict(build(torch.float32), torch.float32)
    for dtype in ranks[0][0]:
        alone = predict(build(dtype), dtype)
        for number, degrees in enumerate(DEGREES[world_size]):
            for place, wanted in enumerate(alone):
                first, *others = [rank[number][dtype][place] for rank in ranks]
                where = f"{dtype}, {degrees}, {SIZES[place]}"
                assert (first.shape, first.dtype) == (wanted.shape, wanted.dtype), where
                assert all(torch.equal(first, other) for other in others), where
                if dtype in BOUNDS:
                    assert (first - wanted).abs().max() <= BOUNDS[dtype] * wanted.abs().max(), where
                else:  # one other rounding, and all of bf16's roundings behind it are others: no worse ones, though
                    assert rms(first, exact[place]) <= 1.2 * rms(wanted, exact[place]), where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_with_the_stock_kernel_is_the_stock_model_bit_for_bit(dtype: torch.dtype):
    def attend(q: Tensor, k: Tensor, v: Tensor, _: PackedMeta) -> Tensor:
        rows = (x[None].transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows).transpose(1, 2)[0]

    found = predict(shard(build(dtype), attend, ProcessGroups(ParallelDims(1, 0))), dtype)
    for one, wanted in zip(found, predict(build(dtype), dtype), strict=True):
        assert torch.equal(one, wanted)


def test_a_missing_exchange_would_be_seen(run_world):
    expected = predict(build(torch.float64), torch.float64)
    found = run_world(2, predict_without_exchange, 2)[0]
    assert (found[0] - expected[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("world_size", "degrees"), [pytest.param(2, (2, 1), marks=pytest.mark.slow), (2, (1, 2)), (4, (2, 2))]
)
def test_equals_the_stock_model_of_every_kind(run_world, world_size: int, degrees: tuple[int, int]):
    ranks = run_world(world_size, predict_conditioned_on_ranks, degrees)
    for kind in CONDITIONED:
        alone = predict_conditioned(build(torch.float64, kind), kind)
        for place, wanted in enumerate(alone):
            first, *others = [rank[kind][place] for rank in ranks]
            where = f"{kind}, {SIZES[place]}"
            assert first.shape == wanted.shape, where
            assert all(torch.equal(first, other) for other in others), where
            assert (first - wanted).abs().max() <= 1e-12 * wanted.abs().max(), where


def test_timesteps_of_other_tokens_would_be_seen(run_world):
    expected = predict_conditioned(build(torch.float64, "ti2v"), "ti2v")
    found = run_world(2, predict_with_whole_timesteps)[0]
    assert (found[0] - expected[0]).abs().max() > 1e-2
