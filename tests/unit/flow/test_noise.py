"""Noise: the algebra, and that noise depends on the sample and not on the pack."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wands.flow.noise as noise_module
from tests.support.examples import examples
from tests.unit.flow.test_sigmas import cdf, ks_distance
from wands.attention.layout import ContextLayout
from wands.config.recipe import FlowConfig
from wands.flow.noise import NoisyBatch, add_noise, draw_noise, draw_sigma
from wands.flow.rng import SampleKey, philox, rng
from wands.flow.sigmas import sample_sigma

FLOW = FlowConfig(preset="pretrain")
BY_SIZE = FlowConfig(shift_by_size=True, stratified=True)
P = 6


def key(name: str, repeat_index: int = 0, epoch: int = 0) -> SampleKey:
    return SampleKey(name, repeat_index, epoch)


def clean_of(name: str, length: int) -> torch.Tensor:
    return torch.from_numpy(philox("clean", name).standard_normal((length, P))).float()


def add_noise_to_pack(
    samples: list[tuple[str, int]], seed: int = 0, epoch: int = 0, flow: FlowConfig = FLOW
) -> dict[str, tuple]:
    """Add noise to a pack of (name, length); return noisy rows, target rows, sigma and timestep of each sample."""
    names, lens = zip(*samples, strict=True)
    layout = ContextLayout.build(lens)
    tokens = torch.cat([clean_of(name, length) for name, length in samples])
    noisy = add_noise(tokens, layout, [key(name, epoch=epoch) for name in names], flow, seed)
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
    x = noisy.tokens.double()
    v = noisy.target.double()
    s = noisy.sigmas.double()[layout.segment_ids, None]
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
    flow=st.sampled_from([FLOW, BY_SIZE]),
)
def test_a_sample_is_the_same_in_every_pack_order_and_rank(
    lens: list[int], data: st.DataObject, seed: int, flow: FlowConfig
):
    samples = [(f"clip{i}", length) for i, length in enumerate(lens)]
    together = add_noise_to_pack(samples, seed, flow=flow)
    shuffled = add_noise_to_pack(data.draw(st.permutations(samples)), seed, flow=flow)
    cut = data.draw(st.integers(1, len(samples) - 1))
    apart = {
        **add_noise_to_pack(samples[:cut], seed, flow=flow),
        **add_noise_to_pack(samples[cut:], seed, flow=flow),
    }
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


@pytest.mark.parametrize("flow", [FLOW, BY_SIZE], ids=["plain", "by size"])
def test_a_rank_with_part_of_the_tokens_holds_that_part_of_the_noise(flow: FlowConfig):
    lens = (7, 6, 1)
    keys = [key("a"), key("b"), key("c")]
    clean = torch.cat([clean_of("a", 7), clean_of("b", 6), clean_of("c", 1)])
    full = add_noise(clean, ContextLayout.build(lens), keys, flow, 0)
    num_pads = 0
    for rank in range(6):
        part = ContextLayout.build(lens, ulysses_degree=2, ring_degree=3, cp_rank=rank)
        index = part.token_index
        valid = part.num_valid
        local = torch.where((index < 0)[:, None], 0.0, clean[index.clamp(min=0)])
        here = add_noise(local, part, keys, flow, 0)
        assert torch.equal(here.tokens[:valid], full.tokens[index[:valid]])
        assert torch.equal(here.target[:valid], full.target[index[:valid]])
        assert torch.equal(here.sigmas, full.sigmas)
        assert not here.tokens[valid:].any()
        assert not here.target[valid:].any()
        num_pads += len(index) - valid
    assert num_pads > 0


def draw_many(flow: FlowConfig, clips: int, epochs: int) -> np.ndarray:
    keys = [[key(f"clip{i}", epoch=epoch) for epoch in range(epochs)] for i in range(clips)]
    return np.array([[draw_sigma(0, k, flow, (0.0, 1.0)) for k in row] for row in keys])


def test_the_shift_follows_the_size_of_the_whole_clip():
    sizes = {"small": 8190, "base": 32760, "large": 75600}
    drawn = add_noise_to_pack(list(sizes.items()), flow=FlowConfig(shift_by_size=True))
    for name, shift in {"small": 1.5, "base": 3.0, "large": 3.0 * math.sqrt(75600 / 32760)}.items():
        assert drawn[name][2] == draw_sigma(0, key(name), FlowConfig(flow_shift=shift), (0.0, 1.0))
    plain = add_noise_to_pack([("small", 80)], flow=FlowConfig())
    assert plain["small"][2] == sample_sigma(rng(0, key("small"), "sigma"), FlowConfig())


@pytest.mark.parametrize(
    "flow",
    [
        FlowConfig(stratified=True),
        FlowConfig(stratified=True, preset="pretrain"),
        FlowConfig(stratified=True, timestep_sampling="mode", mix_uniform=0.3),
    ],
    ids=["uniform", "pretrain", "mode"],
)
def test_stratified_draws_have_the_same_distribution(flow: FlowConfig):
    n = 600
    sigmas = draw_many(flow, n, 3)
    for epoch in range(
        3
    ):  # over clips: 1.95 / sqrt(n) is exceeded once in 1,000 draws of the right distribution
        assert ks_distance(sigmas[:, epoch], cdf(flow, 0.0, 1.0)) < 1.95 / n**0.5
    one_clip = draw_many(flow, 1, n)[0]  # over epochs: even, so much closer than random draws
    assert ks_distance(one_clip, cdf(flow, 0.0, 1.0)) < 0.2 / n**0.5
    again = draw_sigma(0, key("clip0", repeat_index=1), flow, (0.0, 1.0))
    assert again != sigmas[0, 0]


def test_stratified_draws_lower_the_variance_of_the_mean_loss():
    """The numbers are in docs/training.md."""

    def variance(flow: FlowConfig, epochs: int) -> float:
        sigmas = draw_many(flow, 300, epochs)
        losses = 0.05 + 0.3 * (1 - sigmas) ** 4 + 0.15 * sigmas**6  # high at both ends, as Wan's
        return losses.mean(axis=1).var()

    gains = [variance(FlowConfig(), n) / variance(FlowConfig(stratified=True), n) for n in (1, 2, 4, 8)]
    assert gains[0] == pytest.approx(1.0, abs=0.3)
    assert gains[1] > 1.7
    assert gains[2] > 2.5
    assert gains[3] > 6


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
