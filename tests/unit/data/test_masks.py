"""Token weights in a cache: stored for samples with a mask alone, and carried by every tool; their loss, clip by clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_tools.export import export_cache
from data_tools.import_cache import import_cache
from data_tools.inspect import describe_cache
from data_tools.merge import copy_samples
from data_tools.verify import verify_cache
from tests.support.samples import with_arrays
from tests.unit.data.test_collate import SHAPE, THREE, collator
from tests.unit.data_tools.test_verify import FINGERPRINT, NULL, VARIANT, make_sample
from wands.conditions.published import published_conditions
from wands.config.recipe import FlowConfig
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.flow.loss import loss_weights, squared_errors, weighted_sum
from wands.patches import grid_size
from wands.variants import DiTShape


def weights_like(latents: torch.Tensor, seed: int) -> torch.Tensor:
    grid = grid_size(tuple(latents.shape[1:]), DiTShape.patch_size)
    return torch.rand(grid, generator=torch.Generator().manual_seed(seed)).bfloat16()


def write(path: Path, masked: set[int]) -> Path:
    with CacheWriter(path, VARIANT, FINGERPRINT) as writer:
        for number in range(4):
            sample = make_sample(number)
            meta = {"num_frames": 5, "fps": 16.0, "content": f"c{number}"}
            weights = weights_like(sample.latents, number) if number in masked else None
            arrays = sample.arrays if weights is None else {**sample.arrays, "token_weights": weights}
            writer.add(f"k{number}", arrays, meta)
        writer.commit(NULL)
    return path


def check(path: Path, masked: set[int]) -> None:
    cache = LatentCache(path, verify=True)
    for number in range(4):
        sample = cache.read(number)
        wanted = weights_like(make_sample(number).latents, number)
        if number not in masked:
            assert "token_weights" not in sample.arrays
            assert not cache.mask_sums[number].any()
            continue
        assert torch.equal(sample.arrays["token_weights"], wanted)
        sums = [float(wanted.double().sum()), float(wanted[0].double().sum())]
        assert cache.mask_sums[number].tolist() == sums
    assert not verify_cache(path).problems


def test_a_mask_goes_through_every_tool(tmp_path: Path):
    masked = {1, 3}
    check(write(tmp_path / "cache", masked), masked)
    cache = LatentCache(tmp_path / "cache")
    rank = replace(cache.read(1, (0, 0)))
    assert torch.equal(
        rank.arrays["token_weights"], cache.read(1).arrays["token_weights"]
    )  # a rank reads all weights
    copy_samples(cache, tmp_path / "copy", [(cache, i) for i in range(4)])
    check(tmp_path / "copy", masked)
    for layout in ("safetensors", "webdataset"):
        export_cache(tmp_path / "cache", tmp_path / layout, layout)
        import_cache(tmp_path / layout, tmp_path / f"from_{layout}")
        check(tmp_path / f"from_{layout}", masked)
    assert "masks         2 samples" in describe_cache(cache, 4)


def test_a_cache_without_masks_has_room_for_them(tmp_path: Path):
    check(write(tmp_path / "cache", set()), set())
    assert not LatentCache(tmp_path / "cache").index.offsets[:, -1].any()


def loss_of(samples: list, reduction: str, pred: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    batch = collator()(samples, [0] * len(samples), 0)
    segment_ids = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(batch.seq_lens))
    weights = loss_weights(batch.trained_lens, batch.weights, torch.ones(len(samples)), reduction)
    errors = squared_errors(pred, batch.tokens)
    return weighted_sum(errors, segment_ids, weights, batch.token_weights)[0]


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_the_loss_is_the_weighted_loss_of_each_clip(reduction: str):
    """Masks next to clips without one, and a source of another weight, against a loop in fp64."""
    a, b, c = THREE
    samples = [a, replace(with_arrays(b, token_weights=weights_like(b.latents, 1)), loss_weight=0.25), c]
    batch = collator()(samples, [0, 0, 0], 0)
    pred = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss_of(samples, reduction, pred).backward()
    truth = torch.zeros_like(pred, dtype=torch.float64)
    row = 0
    for sample, length in zip(samples, batch.seq_lens, strict=True):
        w = sample.arrays.get("token_weights", torch.ones(length)).flatten()
        total = float(w.double().sum()) if reduction == "sample" else 1.0
        for token in range(row, row + length):
            error = pred[token].detach().double() - batch.tokens[token].double()
            share = sample.loss_weight * float(w[token - row]) / total
            truth[token] = 2 * share * error / len(error)
        row += length
    torch.testing.assert_close(pred.grad.double(), truth, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_a_mask_of_ones_is_bitwise_no_mask(reduction: str):
    ones = [with_arrays(one, token_weights=torch.ones_like(weights_like(one.latents, 0))) for one in THREE]
    pred = torch.randn(collator()(THREE, [0] * 3, 0).tokens.shape)
    gradients = []
    for samples in (THREE, ones):
        leaf = pred.clone().requires_grad_()
        loss_of(samples, reduction, leaf).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_a_mask_of_the_given_frame_alone_gives_no_loss(reduction: str):
    b = THREE[1]
    first = torch.zeros_like(weights_like(b.latents, 0))
    first[0] = 1
    collate = replace(
        collator(),
        conditions=published_conditions(SHAPE, ("text", "first_frame")),
        flow=FlowConfig(i2v_ratio=1.0),
    )
    batch = collate([with_arrays(b, token_weights=first)], [0], 0)
    assert batch.num_cond_tokens == (4,)
    pred = torch.randn(8, 64, requires_grad=True)
    weights = loss_weights(batch.trained_lens, batch.weights, torch.ones(1), reduction)
    segment_ids = torch.zeros(8, dtype=torch.int64)
    errors = squared_errors(pred, batch.tokens[4:])
    loss, _ = weighted_sum(errors, segment_ids, weights, batch.token_weights[4:])
    loss.backward()
    assert loss == 0  # not 0 / 0
    assert not pred.grad.any()


def test_the_dropout_of_a_source_takes_the_place_of_the_global_one():
    always = [replace(one, caption_dropout=1.0) for one in THREE]
    batch = collator()(always, [0] * 3, 0)
    assert set(batch.text_lens) == {2}  # the empty caption
    never = [replace(one, caption_dropout=0.0) for one in THREE]
    assert collator(cfg_dropout=1.0)(never, [0] * 3, 0).text_lens == (3, 1, 5)
    evaluated = replace(collator(), drops_captions=False)
    assert evaluated(always, [0] * 3, 0).text_lens == (3, 1, 5)
