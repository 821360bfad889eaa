"""Packing samples into a batch, dropping captions, and taking a rank's shard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wands.data.collate as collate_module
from tests.support.examples import examples
from tests.support.samples import sample_of
from wands.attention.layout import ContextLayout
from wands.conditions.published import Text
from wands.config.recipe import FlowConfig, MockConfig
from wands.data.collate import PackingCollator, Sample
from wands.data.datasets import MockDataset
from wands.errors import DataError
from wands.flow.rng import SampleKey, philox
from wands.patches import unpatchify
from wands.variants import DiTShape

SHAPE = DiTShape(
    num_heads=2, head_dim=12, num_layers=2, ffn_dim=32, in_channels=16, out_channels=16, text_dim=8
)
NULL = torch.full((2, 8), -5.0, dtype=torch.bfloat16)


def sample(name: str, grid: tuple[int, int, int] = (2, 2, 3), text_len: int = 4) -> Sample:
    normal = philox("sample", name)
    latents = torch.from_numpy(normal.standard_normal((16, grid[0], 2 * grid[1], 2 * grid[2]))).bfloat16()
    text = torch.from_numpy(normal.standard_normal((text_len, 8))).bfloat16()
    return sample_of(name, latents, text)


def collator(cfg_dropout: float = 0.0, seed: int = 0) -> PackingCollator:
    return PackingCollator(
        shape=SHAPE, flow=FlowConfig(cfg_dropout=cfg_dropout), seed=seed, null_text_embeds=NULL
    )


THREE = [sample("a", (1, 1, 2), 3), sample("b", (3, 2, 2), 1), sample("c", (2, 1, 1), 5)]


def test_a_batch_is_the_samples_end_to_end():
    batch = collator()(THREE, [0, 2, 0], epoch=4)
    assert batch.seq_lens == (2, 12, 2)
    assert batch.cu_seqlens.tolist() == [0, 2, 14, 16]
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_text.dtype == torch.int32
    assert batch.grid_sizes.tolist() == [[1, 1, 2], [3, 2, 2], [2, 1, 1]]
    assert batch.text_lens == (3, 1, 5)
    assert batch.keys == (SampleKey("a", 0, 4), SampleKey("b", 2, 4), SampleKey("c", 0, 4))
    assert batch.weights.tolist() == [1, 1, 1]
    assert batch.tokens.dtype == torch.float32
    for one, rows, text in zip(
        THREE, batch.tokens.split(batch.seq_lens), batch.text_embeds.split(batch.text_lens), strict=True
    ):
        f, h, w = one.latents.shape[1:]
        assert torch.equal(unpatchify(rows, (f, h // 2, w // 2), 16, (1, 2, 2)), one.latents.float())
        assert torch.equal(text, one.text_embeds)


def test_an_empty_bin_is_one_zero_token_of_no_weight():
    batch = collator()([], [], epoch=1)
    assert batch.seq_lens == (1,)
    assert batch.weights.tolist() == [0.0]
    assert batch.grid_sizes.tolist() == [[1, 1, 1]]
    assert not batch.tokens.any()
    assert batch.tokens.shape == (1, 64)
    assert torch.equal(batch.text_embeds, NULL)
    shard = batch.rank_slice(ContextLayout.build(batch.seq_lens))
    assert shard.meta.positions.tolist() == [[0, 0, 0]]


def test_the_shard_of_a_lone_rank_is_the_whole_batch():
    batch = collator()(THREE, [0, 0, 0], 0)
    shard = batch.rank_slice(ContextLayout.build(batch.seq_lens))
    assert torch.equal(shard.tokens, batch.tokens)
    assert shard.meta.local_seq_lens == (2, 12, 2)
    assert shard.meta.text_lens == (3, 1, 5)
    assert shard.meta.chunk_lens == ((2, 12, 2),)
    assert shard.meta.segment_ids.tolist() == [0] * 2 + [1] * 12 + [2] * 2
    assert shard.meta.positions[:2].tolist() == [[0, 0, 0], [0, 0, 1]]
    assert shard.meta.positions[2:14].tolist() == [
        [f, r, c] for f in range(3) for r in range(2) for c in range(2)
    ]
    assert shard.meta.positions[14:].tolist() == [[0, 0, 0], [1, 0, 0]]  # every sample starts again


def test_a_shard_takes_the_layouts_tokens_and_zeroes_pads():
    batch = collator()([THREE[1]], [0], 0)
    layout = ContextLayout.build((12,), ring_degree=5, cp_rank=2)  # rows of 3, 3, 2, 2 and 2 tokens
    assert layout.token_index.tolist() == [6, 7, -1]
    shard = batch.rank_slice(layout)
    assert torch.equal(shard.tokens[:2], batch.tokens[6:8])
    assert not shard.tokens[2].any()
    assert shard.meta.positions[:2].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert torch.equal(shard.text_embeds, batch.text_embeds)


def test_a_layout_of_another_batch_is_a_programmer_mistake():
    with pytest.raises(AssertionError):
        collator()(THREE, [0, 0, 0], 0).rank_slice(ContextLayout.build((16,)))


# Dropping captions.


def dropped(pack: PackingCollator, names: list[str], epoch: int = 0) -> list[bool]:
    batch = pack([sample(name) for name in names], [0] * len(names), epoch)
    return [torch.equal(text, NULL) for text in batch.text_embeds.split(batch.text_lens)]


def check_captions_are_dropped_at_the_rate_asked_for() -> None:
    names = [f"clip{i}" for i in range(800)]
    assert sum(dropped(collator(0.1), names)) / 800 == pytest.approx(0.1, abs=0.04)
    assert not any(dropped(collator(0.0), names))
    assert all(dropped(collator(1.0), names))


def test_captions_are_really_dropped(monkeypatch: pytest.MonkeyPatch):
    check_captions_are_dropped_at_the_rate_asked_for()
    # Elsewhere the option exists and nothing reads it.
    monkeypatch.setattr(Text, "dropout_rate", lambda self, flow, of_source: 0.0)
    with pytest.raises(AssertionError):
        check_captions_are_dropped_at_the_rate_asked_for()


@examples(20)
@given(order=st.permutations(range(12)), cut=st.integers(0, 12))
def test_who_is_dropped_does_not_depend_on_the_pack(order: list[int], cut: int):
    names = [f"clip{i}" for i in range(12)]
    pack = collator(0.5, seed=3)
    expected = dict(zip(names, dropped(pack, names), strict=True))
    for part in (order[:cut], order[cut:]):
        if part:
            mine = [names[i] for i in part]
            assert dropped(pack, mine) == [expected[name] for name in mine]


def test_who_is_dropped_changes_with_epoch_occurrence_and_seed():
    names = [f"clip{i}" for i in range(60)]
    first = dropped(collator(0.5), names)
    assert dropped(collator(0.5), names, epoch=1) != first
    assert dropped(collator(0.5, seed=1), names) != first
    again = collator(0.5)([sample(name) for name in names], [1] * 60, 0)
    assert [torch.equal(text, NULL) for text in again.text_embeds.split(again.text_lens)] != first


def test_dropping_does_not_shift_noise(monkeypatch: pytest.MonkeyPatch):
    """Each purpose has a separate generator."""
    asked = []
    rng = collate_module.rng
    monkeypatch.setattr(collate_module, "rng", lambda *args: asked.append(args[2]) or rng(*args))
    dropped(collator(0.5), ["a", "b"])
    assert asked == ["cfg_dropout", "cfg_dropout"]


# Refusals.


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            sample_of("x", torch.zeros(4, 1, 2, 2), torch.zeros(1, 8)),
            r"sample=x has latents of shape \[4, 1, 2, 2\].* takes 16 channels",
        ),
        (
            sample_of("x", torch.zeros(16, 2, 2), torch.zeros(1, 8)),
            r"sample=x has latents of shape \[16, 2, 2\]",
        ),
        (
            sample_of("x", torch.zeros(16, 1, 3, 2), torch.zeros(1, 8)),
            r"has latents of shape \[16, 1, 3, 2\].* divisible by \(1, 2, 2\)",
        ),
        (
            sample_of("x", torch.zeros(16, 0, 2, 2), torch.zeros(1, 8)),
            r"has latents of shape \[16, 0, 2, 2\].* divisible by",
        ),
        (
            sample_of("x", torch.zeros(16, 1, 2, 2), torch.zeros(1, 9)),
            r"text_embeds of shape \[1, 9\].*\[1 to 512, 8\]",
        ),
        (sample_of("x", torch.zeros(16, 1, 2, 2), torch.zeros(513, 8)), r"text_embeds of shape \[513, 8\]"),
        (sample_of("x", torch.zeros(16, 1, 2, 2), torch.zeros(0, 8)), r"text_embeds of shape \[0, 8\]"),
    ],
)
def test_samples_that_do_not_fit_the_model_are_named(bad: Sample, words: str):
    with pytest.raises(DataError, match=words):
        collator()([THREE[0], bad], [0, 0], 0)


def test_a_null_caption_of_another_encoder_is_refused():
    with pytest.raises(DataError, match="the empty caption"):
        PackingCollator(shape=SHAPE, flow=FlowConfig(), seed=0, null_text_embeds=torch.zeros(2, 9))


# Mock data.

MOCK = MockConfig(num_samples=5, shapes=[(1, 2, 4), (3, 4, 2)], text_lens=[7, 1, 3])


def test_mock_data_look_like_a_cache():
    data = MockDataset(MOCK, SHAPE, seed=0)
    assert len(data.keys) == len(set(data.keys)) == 5
    assert data.num_tokens((1, 2, 2)).tolist() == [2, 6, 2, 6, 2]
    batch = PackingCollator(
        shape=SHAPE, flow=FlowConfig(cfg_dropout=0.0), seed=0, null_text_embeds=data.null_text_embeds
    )([data.read(i) for i in range(5)], [0] * 5, 0)
    assert batch.seq_lens == (2, 6, 2, 6, 2)
    assert batch.text_lens == (7, 1, 3, 7, 1)
    assert [key.sample_id for key in batch.keys] == data.keys
    assert data.read(0).latents.dtype == torch.bfloat16


def test_mock_samples_are_stable_and_different():
    a = MockDataset(MOCK, SHAPE, seed=0)
    b = MockDataset(MOCK, SHAPE, seed=0)
    assert torch.equal(a.read(3).latents, b.read(3).latents)
    assert not torch.equal(a.read(1).latents, a.read(3).latents)
    assert not torch.equal(a.read(3).latents, MockDataset(MOCK, SHAPE, seed=1).read(3).latents)


def test_mock_shapes_must_divide_into_patches():
    with pytest.raises(DataError, match=r"data\.mock\.shapes=\[1, 3, 4\].*\[1, 2, 2\]"):
        MockDataset(MockConfig(num_samples=1, shapes=[(1, 3, 4)]), SHAPE, 0)
