"""Amount of evaluation, and its share of the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.commands import plan
from tests.support.evaluated import EVAL, STEPS
from tests.support.runs import make_run, run_training
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.data.collate import RankSlice
from wands.distributed.dims import ParallelDims
from wands.errors import ConfigError
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import Prepared
from wands.plugin import Plugin
from wands.train.evaluation import own_bins, paired_change
from wands.train.evaluation_plan import (
    HELD_OUT,
    TRAIN,
    EvaluationClip,
    EvaluationPlan,
    fit_plan,
    plan_evaluation,
)

# ---- the plan


def test_the_budget_decides_how_much(tiny_pipeline: Path, tmp_path: Path):
    def plan_with(*overrides: str, world_size: int = 1) -> EvaluationPlan:
        out = tmp_path / "run"
        return plan_evaluation(
            make_run(tiny_pipeline, out, (*EVAL[:2], *STEPS, *overrides), world_size=world_size)
        )

    whole = plan_with("eval.max_share=1000")
    assert (len(whole.quantiles), len(whole.clips)) == (9, 4)
    shares = []
    for share in (1000, 0.9 * whole.share, whole.share / 3, whole.share / 4, whole.share / 9, 1e-9):
        limited = plan_with(f"eval.max_share={share}")
        sides = [clip.side for clip in limited.clips]
        assert sides.count(HELD_OUT) == sides.count(TRAIN) >= 1
        assert limited.share <= share or (len(limited.quantiles), len(limited.clips)) == (1, 2)
        shares.append((len(limited.quantiles), len(limited.clips)))
    assert shares[0] == (9, 4)
    assert shares[1] == (5, 4)  # all clips at fewer noise levels
    assert shares[-1] == (1, 2)
    assert shares == sorted(shares, reverse=True)
    assert whole == plan_with("eval.max_share=1000", "packing.enabled=false", world_size=2)
    assert plan_with("eval.max_share=1000", "ema={}").share == pytest.approx(
        whole.share * 5 / 3
    )  # at steps 2 and 4
    assert len(plan_with("eval.max_share=1000", "eval.max_clips=1").clips) == 2
    assert {clip.side for clip in plan_with("eval.max_share=1000", "data.holdout=0").clips} == {TRAIN}


@pytest.mark.parametrize(
    ("num_clips", "budget", "plan"),
    [
        (10, 90, (9, 10)),
        (10, 36, (9, 4)),
        (10, 35.9, (5, 7)),  # 9 noise levels would be 3 clips
        (10, 15, (3, 5)),  # 9 noise levels would be a single clip, without a confidence interval
        (10, 3, (1, 3)),
        (10, 0.5, (1, 1)),
        (2, 17, (5, 2)),
        (1, 9, (9, 1)),
    ],
)
def test_enough_clips_come_before_noise_levels(num_clips: int, budget: float, plan: tuple[int, int]):
    assert fit_plan([1.0] * num_clips, budget) == plan


def test_every_rank_has_the_same_number_of_forward_passes(tiny_pipeline: Path, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, (*EVAL, *STEPS), world_size=2)
    model = run.model
    samples = plan_evaluation(run).samples(model.experts, model.variant, run.data, run.held_out)[:13]
    for packs in (True, False):
        max_tokens = 24 if packs else 0
        ranks = [
            own_bins(
                samples,
                [sample.num_tokens for sample in samples],
                model.shape,
                max_tokens,
                ParallelDims(world_size=2, rank=rank, ulysses_degree=1, ring_degree=1),
            )
            for rank in range(2)
        ]
        assert len(ranks[0]) == len(ranks[1])
        assert sorted(i for own in ranks for _, bin in own for i in bin) == list(range(13))
        bins = [bin for own in ranks for _, bin in own]
        assert max(sum(samples[i].num_tokens for i in bin) for bin in bins) <= 24
        assert (max(map(len, bins)) > 1) == packs


class CountsEvaluations(FlowMatching):
    """The default objective, which adds up the FLOPs of its evaluations."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter
        self.flops = 0

    def evaluate(self, model: Any, part: RankSlice, prepared: Prepared) -> torch.Tensor:
        before = self._counter.get_total_flops()
        errors = super().evaluate(model, part, prepared)
        self.flops += self._counter.get_total_flops() - before
        return errors


def measured_share(*args: Any) -> float:
    """FLOPs of all evaluations / FLOPs of all steps, counted by torch."""
    with FlopCounterMode(display=False) as counter:
        objective = CountsEvaluations(counter)
        run_training(*args, plugin=Plugin(objective=objective))
    return objective.flops / (counter.get_total_flops() - objective.flops)


@pytest.mark.slow
def test_the_planned_share_is_measured(tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool):
    long = "data.mock={num_samples: 10, shapes: [[4,16,16]], text_lens: [64]}"  # else small layers count most
    settings = (*EVAL, *STEPS, long, "packing.max_tokens=512")
    share = worlds[1].run(measured_share, tiny_pipeline, tmp_path, settings, zero(0))[0]
    assert json.loads((tmp_path / "evaluation.json").read_text())["share"] == pytest.approx(share, rel=0.1)


def test_wands_plan_has_the_share_of_the_plan(tiny_pipeline: Path, tmp_path: Path):
    """All clips are equal, the held-out ones are as many as eval.max_clips, and each bin has one clip."""
    data = "data.mock={num_samples: 10, shapes: [[4,16,16]], text_lens: [64]}"
    settings = (data, *EVAL, *STEPS, "eval.max_clips=2", "ema={}", "packing.max_tokens=256")
    run = make_run(tiny_pipeline, tmp_path, settings, world_size=2)
    report = plan(None, gpus=2, overrides=(f"model.path={tiny_pipeline}", *settings, "train.bins_per_step=2"))
    share = float(re.search(r"eval +([\d.]+)% of the time, every 2 steps", report)[1]) / 100
    assert share == pytest.approx(plan_evaluation(run).share, rel=0.1)


def test_a_held_out_loss_that_is_needed_must_exist(tiny_pipeline: Path, tmp_path: Path):
    for overrides in (
        ("checkpoint.keep_best=true",),
        ("eval.patience=2",),
        ("eval={}", "checkpoint.keep_best=true"),
    ):
        with pytest.raises(ConfigError, match=r"needs a held-out loss; add an eval section"):
            make_run(tiny_pipeline, tmp_path, overrides, world_size=1)


def plan_of(clips: list[EvaluationClip]) -> EvaluationPlan:
    return EvaluationPlan(settings={}, quantiles=[], share=0, clips=clips)


def test_the_interval_is_students():
    clips = [EvaluationClip(key=str(i), side=HELD_OUT, num_tokens=8, sigmas={}) for i in range(64)]
    generator = np.random.default_rng(0)
    for num, quantile in ((2, 12.706), (5, 2.776), (11, 2.228), (12, 2.201), (31, 2.042), (64, 1.998)):
        plan = plan_of(clips[:num])
        values = generator.normal(size=num)
        change = paired_change(plan, HELD_OUT, values.tolist(), [0.5] * num)
        half = quantile * values.std(ddof=1) / num**0.5
        assert change is not None
        assert change["mean"] == pytest.approx(values.mean() - 0.5)
        assert change["high"] - change["mean"] == pytest.approx(half, rel=2e-3)
        assert change["mean"] - change["low"] == pytest.approx(half, rel=2e-3)
    one = plan_of(clips[:1])
    assert paired_change(one, HELD_OUT, [1.0], [0.25]) == {"mean": 0.75, "low": None, "high": None}
    assert paired_change(one, TRAIN, [1.0], [0.25]) is None
