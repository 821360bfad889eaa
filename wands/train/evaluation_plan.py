"""Plan the evaluations of a run: fixed clips at fixed noise levels, chosen once before the first step.

The plan depends only on the recipe, the data and the FLOPs of the planned training. It does not depend on measured times or on
the number of processes.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from wands.config.base import StrictModel
from wands.config.recipe import Recipe
from wands.data.datasets import Dataset
from wands.data.holdout import clip_name
from wands.errors import ConfigError
from wands.flow.sigmas import sigma_quantile, with_clip_shift
from wands.run.run import TrainingRun
from wands.variants import Expert, Variant

HELD_OUT, TRAIN, PLAN_FILE = "held_out", "train", "evaluation.json"
QUANTILES = {num: [(i + 1) / (num + 1) for i in range(num)] for num in (9, 5, 3, 1)}
"""Maps each allowed number of noise levels to their quantiles. For example, 9 maps to 0.1, 0.2, ... 0.9."""
USUAL_CLIPS = 4
"""Number of clips that an evaluation should have, if the budget and the data allow it. The answer whether a run learns needs a
confidence interval over clips: a single clip has none, and the interval of two or three clips is wide."""


class EvaluationClip(StrictModel):
    """A clip that each evaluation uses, and its noise levels.

    Attributes:
        key: sample id of the clip.
        side: part of the data that contains the clip, "held_out" or "train".
        num_tokens: number of video tokens.
        sigmas: maps the subfolder of each trained DiT to the noise levels at which the clip is evaluated: one noise level for
            each quantile in `EvaluationPlan.quantiles`.
    """

    key: str
    side: str
    num_tokens: int
    sigmas: dict[str, list[float]]


class EvaluationSample(NamedTuple):
    """A clip to evaluate at one noise level, with one DiT and one condition.

    Attributes:
        expert: the DiT.
        kind: condition of the sample: "text", "image" or "first frame".
        clip: index of the clip in `EvaluationPlan.clips`.
        quantile: index of the noise level's quantile in `EvaluationPlan.quantiles`.
        sigma: noise level.
        num_tokens: number of video tokens.
        row: (data set that contains the clip, index of the clip in this data set).
    """

    expert: Expert
    kind: str
    clip: int
    quantile: int
    sigma: float
    num_tokens: int
    row: tuple[Dataset, int]


class EvaluationPlan(StrictModel):
    """Clips and noise levels of all evaluations of a run, as stored in `evaluation.json`.

    Attributes:
        settings: recipe keys that determine the clips, with their values. If a value changes, a new plan is made.
        quantiles: probabilities, such as 0.1 to 0.9. An evaluation uses the noise levels at these quantiles of the recipe's
            distribution of noise levels.
        share: planned FLOPs of all evaluations / planned FLOPs of the training.
        clips: clips to evaluate, held-out clips first.
    """

    settings: dict[str, Any]
    quantiles: list[float]
    share: float
    clips: list[EvaluationClip]

    def describe(self) -> str:
        """Return a text with the numbers of clips and noise levels, and the evaluations' share of the run's FLOPs."""
        counts = {side: sum(clip.side == side for clip in self.clips) for side in (HELD_OUT, TRAIN)}
        less = "" if len(self.quantiles) == 9 else " (9 would exceed eval.max_share)"
        return (
            f"{counts[HELD_OUT]} held-out and {counts[TRAIN]} training clips at {len(self.quantiles)} noise levels{less}, "
            f"{self.share:.2%} of the run's FLOPs"
        )

    def samples(self, run: TrainingRun) -> list[EvaluationSample]:
        """Return the samples of an evaluation: each clip with each trained DiT, each condition (text, image or first frame)
        and each noise level.

        The noise levels of a clip differ between the trained DiTs: each DiT is evaluated inside the range that it trains on.
        Clips that are no longer in the data are left out. If the first frame is the condition, clips of a single frame are also
        left out.

        Args:
            run: the checked training run.
        """
        rows: dict[tuple[str, str], tuple[Dataset, int]] = {}
        for side, data in ((HELD_OUT, run.held_out), (TRAIN, run.data)):
            if data is not None:
                rows |= {(side, key): (data, i) for i, key in enumerate(data.keys)}
        return [
            EvaluationSample(expert, kind, number, quantile, sigma, clip.num_tokens, row)
            for expert in run.experts
            for kind in kinds_of(run.variant)
            for number, clip in enumerate(self.clips)
            if (row := rows.get((clip.side, clip.key)))
            and not (kind == "first frame" and row[0].latent_shape(row[1])[0] == 1)
            for quantile, sigma in enumerate(clip.sigmas[expert.subfolder])
        ]


def kinds_of(variant: Variant) -> tuple[str, ...]:
    """Return the conditions with which each clip is evaluated: "text", "image" or "first frame".

    TI2V models are evaluated twice: with text only, and with the first frame as a condition.
    """
    if "first_frame" in variant.conditions:
        return ("text", "first frame")
    return ("image",) if variant.num_images else ("text",)


def fit_plan(costs: Sequence[float], budget: float) -> tuple[int, int]:
    """Choose how many noise levels and how many clips to evaluate within a budget of FLOPs.

    If the run evaluates held-out clips and training clips, "clip" means a pair here: one held-out clip and one training clip.

    1. The function starts with `USUAL_CLIPS` clips, or with all clips if there are fewer.
    2. It chooses the largest number of noise levels (9, 5, 3 or 1) that the budget allows for these clips.
    3. If the budget does not allow these clips even at one noise level, the function repeats step 2 with one clip less.
    4. With the chosen number of noise levels, the function adds more clips as long as the budget allows them.

    Args:
        costs: FLOPs of each clip or pair at a single noise level, summed over all evaluations of the run.
        budget: largest number of FLOPs for all evaluations of the run.

    Returns:
        (number of noise levels of each clip, number of clips or pairs to use from the start of `costs`). (1, 1) if the budget
        is too small for the first clip or pair at one noise level.
    """
    sums = np.cumsum(np.array(costs, float))
    fitting = [(num, int(np.searchsorted(sums * num, budget, side="right"))) for num in QUANTILES]
    enough = range(min(USUAL_CLIPS, len(sums)), 0, -1)
    return next((pair for most in enough for pair in fitting if pair[1] >= most), (1, 1))


def num_forwards(recipe: Recipe, total_steps: int, variant: Variant, num_experts: int) -> int:
    """Return how many forward passes all evaluations of a run together make for one clip at one noise level.

    Each evaluation makes one forward pass for each trained DiT and each condition (text, image or first frame) with which the
    model is evaluated. In a run with an `ema` section, each evaluation after step 0 makes these passes twice: with the weights
    and with their moving average. `num_experts` is the number of trained DiTs.
    """
    assert recipe.eval is not None
    later = -(-total_steps // recipe.eval.every) * (1 + (recipe.ema is not None))
    return (1 + later) * len(kinds_of(variant)) * num_experts


def plan_evaluation(run: TrainingRun) -> EvaluationPlan:
    """Choose the clips and the noise levels for the evaluations of a run.

    Args:
        run: the checked training run, whose recipe has an `eval` section.
    """
    recipe, sampler = run.recipe, run.sampler
    assert recipe.eval is not None
    sides, most = {HELD_OUT: run.held_out, TRAIN: run.data}, recipe.eval.max_clips
    chosen = {side: choose_clips(run, data, most) for side, data in sides.items() if data is not None}
    pairs = list(zip(*filter(None, chosen.values()), strict=False))  # a training clip for each held-out clip
    forwards = num_forwards(recipe, sampler.total_steps, run.variant, len(run.experts))
    costs = [forwards * sum(run.shape.forward_flops([length]) for _, length in pair) for pair in pairs]
    epoch = sampler.epoch_plan(sampler.start[0])
    training = run.step_flops([bin for step in epoch.steps for bin in step]) / epoch.num_steps
    training *= sampler.total_steps
    num, num_pairs = fit_plan(costs, recipe.eval.max_share * training)
    share, quantiles = num * sum(costs[:num_pairs]) / training, QUANTILES[num]
    clips = [clip for side in chosen for clip in add_levels(run, side, chosen[side][:num_pairs], quantiles)]
    return EvaluationPlan(settings=plan_settings(recipe), quantiles=quantiles, share=share, clips=clips)


def choose_clips(run: TrainingRun, data: Dataset, most: int) -> list[tuple[str, int]]:
    """Choose clips of a data set for the evaluation.

    Return pairs (key of the clip, number of its video tokens) in the order of the choice.

    Clips that the recipe key `data.exclude` names, and clips with more than `packing.max_tokens` tokens, are left out. The
    order of the choice is pseudorandom: the clips are sorted by a hash of their keys. If several clips come from the same
    source file, one clip of every source file is chosen before a second clip of any source file.

    Args:
        run: the checked training run.
        data: clips to choose from.
        most: largest number of clips to return.
    """
    rows = zip(data.keys, data.num_tokens(run.shape.patch_size).tolist(), strict=True)
    longest, excluded = run.recipe.packing.max_tokens, run.sampler.excluded
    lengths = {key: length for key, length in rows if length <= longest and key not in excluded}
    turns, seen = {}, Counter[str]()
    for key in sorted(lengths, key=lambda key: blake2b(key.encode("utf-8", "surrogateescape")).digest()):
        turns[key] = seen[clip_name(key)]
        seen[clip_name(key)] += 1
    return [(key, lengths[key]) for key in sorted(turns, key=turns.__getitem__)[:most]]


def add_levels(
    run: TrainingRun, side: str, chosen: Sequence[tuple[str, int]], quantiles: Sequence[float]
) -> list[EvaluationClip]:
    """Return the chosen clips with the noise levels at which each trained DiT is evaluated on them.

    Args:
        run: the checked training run.
        side: part of the data that contains all chosen clips, "held_out" or "train".
        chosen: (key, number of video tokens) of each clip.
        quantiles: probabilities. The noise levels are at these quantiles of the recipe's distribution of noise levels.
    """
    clips = []
    for key, num_tokens in chosen:
        flow = with_clip_shift(run.recipe.flow, num_tokens)
        levels = {}
        for expert in run.experts:
            levels[expert.subfolder] = [sigma_quantile(flow, q, *expert.sigma_range) for q in quantiles]
        clips.append(EvaluationClip(key=key, side=side, num_tokens=num_tokens, sigmas=levels))
    return clips


def plan_cache(run: TrainingRun, most: int) -> EvaluationPlan:
    """Plan the evaluation for `wands evaluate`: at most `most` clips of the run's data, at nine noise levels.

    The plan treats these clips as held-out clips.
    """
    clips = add_levels(run, HELD_OUT, choose_clips(run, run.data, most), QUANTILES[9])
    return EvaluationPlan(settings={}, quantiles=QUANTILES[9], share=0, clips=clips)


def plan_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe keys that determine the clips of the evaluation, such as "max_clips", with their values."""
    section = recipe.eval.model_dump(include={"max_share", "max_clips", "cache"}) if recipe.eval else {}
    return section | {"holdout": recipe.data.holdout}


def get_plan(run: TrainingRun) -> tuple[EvaluationPlan, bool]:
    """Return the evaluation plan of a run, and whether the plan is new.

    A resumed run continues with the plan in its folder, unless the plan cannot be read or the recipe's evaluation settings
    have changed.
    """
    with suppress(FileNotFoundError, ValidationError):  # missing, damaged, or of another version
        plan = EvaluationPlan.model_validate_json((run.output_dir / PLAN_FILE).read_bytes())
        if run.checkpoint is not None and plan.settings == plan_settings(run.recipe):
            return plan, False
    return plan_evaluation(run), True


def check_held_out(recipe: Recipe, held_out: Dataset | None) -> None:
    """Check that there are held-out clips if the recipe sets `checkpoint.keep_best` or `eval.patience`.

    Args:
        recipe: recipe of the run.
        held_out: held-out clips; None if the recipe has no `eval` section, or holds out no clip.

    Raises:
        ConfigError: if the recipe sets one of the two keys, but there are no held-out clips.
    """
    patience = recipe.eval and recipe.eval.patience
    for key, value in (("checkpoint.keep_best", recipe.checkpoint.keep_best), ("eval.patience", patience)):
        if value and held_out is None:
            raise ConfigError(
                f"{key}={str(value).lower()} needs a held-out loss; add an eval section (eval: {{}}), and set data.holdout or "
                "eval.cache."
            )
