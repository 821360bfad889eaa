"""Mistakes that other trainers made with Wan's variants: each is put in, and the check then fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import wands.flow.noise as corrupt_module
from tests.support.runs import make_run
from tests.support.steps import Step, optimizer_step, stock_gradients, worst, zero
from tests.support.world import WorldPool
from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.data.collate import PackedBatch, RankSlice
from wands.flow import sigmas as sigmas_module
from wands.flow.noise import NoisyBatch, add_noise
from wands.flow.rng import philox
from wands.objectives import flow_matching
from wands.variants import Variant

# ---- experts: the range in another space, the wrong one, the boundary on the wrong side


class Quantile:
    """Stands for a generator: the draw of a quantile of one's choice."""

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile

    def random(self) -> float:
        return self.quantile


def share_on_the_wrong_side(model: Path, out: Path, experts: str) -> float:
    """Share of the timesteps of one expert's training that sampling would give to the other expert.

    The smallest and the largest draw are among them, where rounding could carry a timestep over the boundary.
    """
    wrong: list[bool] = []
    for shift in (1, 3, 5, 8, 12):
        run = make_run(model, out, (f"model.experts={experts}", f"flow.flow_shift={shift}"), world_size=1)
        [expert] = run.model.experts
        batch = run.collator([run.data.read(0)], [0], 0)
        layout = ContextLayout.build(batch.seq_lens)
        for quantile in [0.0, 1.0 - 2.0**-53, *philox(shift, "traps").random(20)]:
            with mock.patch.object(
                corrupt_module, "rng", lambda seed, key, what, q=quantile: _generator(what, q)
            ):
                timesteps = add_noise(
                    batch.tokens, layout, batch.keys, run.recipe.flow, 0, sigma_range=expert.sigma_range
                ).timesteps
            # diffusers' rule: the first DiT whenever t >= boundary_ratio * 1000
            is_first = timesteps >= run.model.variant.boundary_ratio * 1000
            wrong += (is_first != (expert.subfolder == "transformer")).tolist()
    return sum(wrong) / len(wrong)


def _generator(purpose: str, quantile: float) -> Any:
    return Quantile(quantile) if purpose == "sigma" else philox("noise")


def range_before_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(
        generator: Any, flow: Any, low: float = 0.0, high: float = 1.0, stratum: float | None = None
    ) -> float:
        return sigmas_module.shift_sigma(low + (high - low) * generator.random(), flow.flow_shift)

    monkeypatch.setattr(corrupt_module, "sample_sigma", sample)


def experts_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Variant.experts.fget

    def swapped(self: Variant) -> Any:
        high, low = right(self)
        return replace(high, sigma_range=low.sigma_range), replace(low, sigma_range=high.sigma_range)

    monkeypatch.setattr(Variant, "experts", property(swapped))


def range_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    right = corrupt_module.sample_sigma
    monkeypatch.setattr(corrupt_module, "sample_sigma", lambda generator, flow, *_: right(generator, flow))


def boundary_to_the_low_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigmas_module, "_to_fp32_inside", lambda sigma, *_: sigma)


@pytest.mark.parametrize("name", [pytest.param("wan2.2-t2v-a14b", marks=pytest.mark.slow), "wan2.2-i2v-a14b"])
def test_each_expert_trains_where_it_samples(name: str, tiny_variant: Callable[[str], Path], tmp_path: Path):
    for experts in ("high", "low"):
        assert share_on_the_wrong_side(tiny_variant(name), tmp_path, experts) == 0


@pytest.mark.parametrize(
    "bug",
    [
        *(
            pytest.param(bug, marks=pytest.mark.slow)
            for bug in (range_before_the_shift, experts_swapped, range_ignored)
        ),
        boundary_to_the_low_expert,
    ],
)
def test_an_expert_in_the_wrong_range_is_noticed(
    bug: Callable[[pytest.MonkeyPatch], None],
    tiny_variant: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    model = tiny_variant("wan2.2-t2v-a14b")
    bug(monkeypatch)
    assert max(share_on_the_wrong_side(model, tmp_path, experts) for experts in ("high", "low")) > 0


# ---- given frames and pictures: what a step makes of them


def first_frame_noised() -> Any:
    return mock.patch.object(
        corrupt_module, "_cond_mask", lambda layout, _: torch.zeros(layout.num_tokens, dtype=torch.bool)
    )


def _with_noisy(change: Callable[[NoisyBatch, ContextLayout], NoisyBatch]) -> Any:
    def bent(tokens: Any, layout: ContextLayout, *args: Any, **settings: Any) -> NoisyBatch:
        return change(add_noise(tokens, layout, *args, **settings), layout)

    return mock.patch.object(flow_matching, "add_noise", bent)


def loss_on_the_first_frame() -> Any:
    return _with_noisy(lambda noisy, layout: replace(noisy, trained=slice(layout.num_valid)))


def first_frame_in_the_denominator() -> Any:
    return mock.patch.object(PackedBatch, "trained_lens", property(lambda self: self.seq_lens))


def one_timestep_for_all_tokens() -> Any:
    """Every given first frame at its sample's timestep."""

    def raised(noisy: NoisyBatch, _: ContextLayout) -> NoisyBatch:
        later = noisy.timesteps.roll(-1)
        return replace(noisy, timesteps=torch.where(noisy.timesteps == 0, later, noisy.timesteps))

    return _with_noisy(raised)


def timesteps_of_tokens_shifted() -> Any:
    """The broadcast that went wrong for more than one sample: rows of one sample at another's timestep."""
    return _with_noisy(lambda noisy, _: replace(noisy, timesteps=noisy.timesteps.roll(1)))


def clean_rows_not_told_apart() -> Any:
    right = PackedBatch._meta

    def meta(self: PackedBatch, layout: ContextLayout) -> PackedMeta:
        made = right(self, layout)
        backwards = tuple(reversed(made.timestep_lens))
        return replace(made, timestep_lens=backwards)

    return mock.patch.object(PackedBatch, "_meta", meta)


def _with_conditions(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    right = RankSlice.model_inputs

    def inputs(self: RankSlice, noisy: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        return right(self, noisy, timesteps) | {"tokens": change(noisy, self.condition_channels)}

    return mock.patch.object(RankSlice, "model_inputs", inputs)


def conditions_noised() -> Any:
    return _with_conditions(lambda noisy, given: torch.cat([noisy, given + 0.3 * torch.ones_like(given)], 1))


def conditions_before_the_latents() -> Any:
    return _with_conditions(lambda noisy, given: torch.cat([given, noisy], 1))


def mask_left_out() -> Any:
    def change(noisy: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given = given.clone()
        given[:, :16] = 0  # 4 channels of a patch of 4
        return torch.cat([noisy, given], 1)

    return _with_conditions(change)


def picture_of_another_sample() -> Any:
    right = PackedBatch.rank_slice
    return mock.patch.object(
        PackedBatch,
        "rank_slice",
        lambda self, layout: (lambda s: replace(s, image_embeds=s.image_embeds.roll(1, 0)))(
            right(self, layout)
        ),
    )


FIRST_FRAME = (
    first_frame_noised,
    loss_on_the_first_frame,
    first_frame_in_the_denominator,
    one_timestep_for_all_tokens,
    timesteps_of_tokens_shifted,
    clean_rows_not_told_apart,
)
PICTURES = (conditions_noised, conditions_before_the_latents, mask_left_out, picture_of_another_sample)
BUGS = [("wan2.2-ti2v-5b", bug) for bug in FIRST_FRAME] + [("wan2.1-i2v-14b", bug) for bug in PICTURES]


def step_with(bug: Callable[[], Any], *args: Any) -> Step:
    with bug():
        return optimizer_step(*args)


@cache
def _truth(model: Path, out: Path, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return stock_gradients(model, make_run(model, out, settings, world_size=1))


@pytest.mark.parametrize(
    ("name", "bug"), [*BUGS[:3], *(pytest.param(*row, marks=pytest.mark.slow) for row in BUGS[3:])]
)
def test_a_given_frame_gone_wrong_is_noticed(
    name: str,
    bug: Callable[[], Any],
    tiny_variant: Callable[[str], Path],
    worlds: WorldPool,
    tmp_path_factory,
):
    """Without the bug every gradient is the stock one: `train/test_variants.py`."""
    settings = ("train.bins_per_step=2", *(["flow.i2v_ratio=0.6"] if "ti2v" in name else []))
    model = tiny_variant(name)
    out = tmp_path_factory.getbasetemp()
    args = (model, out, settings, zero(2), torch.float64)
    ours = worlds[1].run(step_with, bug, *args)[0].gradients
    error = worst(ours, _truth(model, out, settings))
    assert error > 1e-3
