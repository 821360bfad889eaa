"""Noise: the algebra, and that noise depends on the sample and not on the pack."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wands.flow.noise as noise_module
from tests.support.examples import examples
from wands.config.recipe import FlowConfig
from wands.distributed.layout import ContextLayout
from wands.flow.noise import NoisyBatch, add_noise, draw_noise
from wands.flow.rng import SampleKey, philox, rng

FLOW = FlowConfig(preset="pretrain")
P = 6


def key(name: str, repeat_index: int = 0, epoch: int = 0) -> SampleKey:
    return SampleKey(name, repeat_index, epoch)


def clean_of(name: str, length: int) -> torch.Tensor:
    return torch.from_numpy(philox("clean", name).standard_normal((length, P))).float()


def add_noise_to_pack(samples: list[tuple[str, int]], seed: int = 0, epoch: int = 0) -> dict[str, tuple]:
    """Add noise to a pack of (name, length); return noisy rows, target rows, sigma and timestep of each sample."""
    names, lens = zip(*samples, strict=True)
    layout = ContextLayout.build(lens)
    tokens = torch.cat([clean_of(name, length) for name, length in samples])
    noisy = add_noise(tokens, layout, [key(name, epoch=epoch) for name in names], FLOW, seed)
    halves = zip(noisy.tokens.split(lens), noisy.target.split(lens), strict=True)
    levels = zip(noisy.sigmas.tolist(), noisy.timesteps.tolist(), strict=True)
    rows = [(*half, *level) for half, level in zip(halves, levels, strict=True)]
    return dict(zip(names, rows, strict=True))


def assert_same(a: tuple, b: tuple) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert a[2:] == b[2:]


def test_the_algebra():
    layout = ContextLayout.build((40, 25))
    clean = torch.cat([clean_of("a", 40), clean_of("b", 25)])
    noisy = add_noise(clean, layout, [key("a"), key("b")], FLOW, seed=3)
    assert {noisy.tokens.dtype, noisy.target.dtype, noisy.sigmas.dtype, noisy.timesteps.dtype} == {
        torch.float32
    }
    x, v, s = noisy.tokens.double(), noisy.target.double(), noisy.sigmas.double()[layout.segment_ids, None]
    noise = draw_noise(layout, [key("a"), key("b")], 3, P).double()
    torch.testing.assert_close(x, (1 - s) * clean.double() + s * noise, atol=1e-6, rtol=0)
    torch.testing.assert_close(v, noise - clean.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        x - s * v, clean.double(), atol=2e-6, rtol=0
    )  # the velocity leads back to the data
    torch.testing.assert_close(x + (1 - s) * v, noise, atol=2e-6, rtol=0)  # and on to the noise
    assert torch.equal(noisy.timesteps, noisy.sigmas * 1000)


def test_bf16_latents_are_corrupted_in_fp32():
    clean = clean_of("a", 30).bfloat16()
    noisy = add_noise(clean, ContextLayout.build((30,)), [key("a")], FLOW, seed=0)
    rounded = (noisy.tokens.bfloat16().float() - noisy.tokens).abs().max()
    assert noisy.target.dtype == torch.float32
    assert rounded > 0  # not bf16 numbers in fp32 clothes


@examples(40)
@given(
    lens=st.lists(st.integers(1, 20), min_size=2, max_size=6),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_a_sample_is_the_same_in_every_pack_order_and_rank(lens: list[int], data: st.DataObject, seed: int):
    samples = [(f"clip{i}", length) for i, length in enumerate(lens)]
    together = add_noise_to_pack(samples, seed)
    shuffled = add_noise_to_pack(data.draw(st.permutations(samples)), seed)
    cut = data.draw(st.integers(1, len(samples) - 1))
    apart = {**add_noise_to_pack(samples[:cut], seed), **add_noise_to_pack(samples[cut:], seed)}
    for name, _ in samples:
        assert_same(together[name], shuffled[name])
        assert_same(together[name], apart[name])


def test_a_new_epoch_occurrence_or_seed_is_new_noise():
    layout = ContextLayout.build((50,))
    keys = [key("a"), key("a", repeat_index=1), key("a", epoch=1)]
    draws = [draw_noise(layout, [k], 0, P) for k in keys] + [draw_noise(layout, [keys[0]], 1, P)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5


def test_noise_is_standard_normal():
    noise = draw_noise(ContextLayout.build((5000, 5000)), [key("a"), key("b")], 0, P)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert float((noise**4).mean()) == pytest.approx(3.0, abs=0.15)


def test_a_rank_with_part_of_the_tokens_holds_that_part_of_the_noise():
    lens, keys = (7, 6, 1), [key("a"), key("b"), key("c")]
    clean = torch.cat([clean_of("a", 7), clean_of("b", 6), clean_of("c", 1)])
    full = add_noise(clean, ContextLayout.build(lens), keys, FLOW, 0)
    num_pads = 0
    for rank in range(6):
        part = ContextLayout.build(lens, ulysses_degree=2, ring_degree=3, cp_rank=rank)
        index, valid = part.token_index, part.num_valid
        local = torch.where((index < 0)[:, None], 0.0, clean[index.clamp(min=0)])
        here = add_noise(local, part, keys, FLOW, 0)
        assert torch.equal(here.tokens[:valid], full.tokens[index[:valid]])
        assert torch.equal(here.target[:valid], full.target[index[:valid]])
        assert torch.equal(here.sigmas, full.sigmas)
        assert not here.tokens[valid:].any()
        assert not here.target[valid:].any()
        num_pads += len(index) - valid
    assert num_pads > 0


# Traps: each check is shown to fail once the bug is patched in.


def corrupt_many(count: int) -> NoisyBatch:
    layout = ContextLayout.build((2,) * count)
    return add_noise(torch.zeros(2 * count, P), layout, [key(f"clip{i}") for i in range(count)], FLOW, 0)


def check_every_sample_has_its_own_noise() -> None:
    noise = corrupt_many(8).target.reshape(8, -1)
    assert len(torch.unique(noise, dim=0)) == 8


def check_timesteps_are_not_rounded() -> None:
    # 1000 draws collide in fp32 by a chance of 1 in 30; seed 0 does not. bf16 has under 300 values to offer.
    assert len(torch.unique(corrupt_many(1000).timesteps)) == 1000


def test_every_sample_has_its_own_noise(monkeypatch: pytest.MonkeyPatch):
    check_every_sample_has_its_own_noise()
    monkeypatch.setattr(noise_module, "rng", lambda seed, key, purpose: philox(seed, key.epoch, purpose))
    with pytest.raises(AssertionError):
        check_every_sample_has_its_own_noise()


def test_sigma_is_never_bf16(monkeypatch: pytest.MonkeyPatch):
    check_timesteps_are_not_rounded()
    exact = noise_module.sample_sigma
    monkeypatch.setattr(
        noise_module, "sample_sigma", lambda *args: float(torch.tensor(exact(*args)).bfloat16())
    )
    with pytest.raises(AssertionError):
        check_timesteps_are_not_rounded()


def test_timesteps_are_never_bf16(monkeypatch: pytest.MonkeyPatch):
    class RoundedThousand:
        def __rmul__(self, sigmas: torch.Tensor) -> torch.Tensor:
            return (sigmas * 1000).bfloat16().float()

    check_timesteps_are_not_rounded()
    monkeypatch.setattr(noise_module, "NUM_TRAIN_TIMESTEPS", RoundedThousand())
    with pytest.raises(AssertionError):
        check_timesteps_are_not_rounded()


def check_ranks_draw_their_own_sigmas() -> None:
    """Noise that data-parallel ranks draw in one step, each in a separate process with the same seed."""
    bins = [[("a", 3), ("b", 4)], [("c", 3), ("d", 4)], [("e", 3), ("f", 4)], [("g", 3), ("h", 4)]]
    sigmas = [row[2] for samples in bins for row in add_noise_to_pack(samples).values()]
    assert len(set(sigmas)) == 8


def test_ranks_draw_their_own_sigmas(monkeypatch: pytest.MonkeyPatch):
    check_ranks_draw_their_own_sigmas()
    place: list[int] = []

    def by_place(seed: int, key: SampleKey, purpose: str):
        # A generator seeded alike on every rank: the n-th sample of each rank draws the same.
        place.append(0)
        return rng(seed, SampleKey(str(len(place) % 4), 0, 0), purpose)

    monkeypatch.setattr(noise_module, "rng", by_place)
    with pytest.raises(AssertionError):
        check_ranks_draw_their_own_sigmas()
