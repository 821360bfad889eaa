"""Plan the evaluations of a run: fixed clips at fixed noise levels, chosen once before the first step.

The plan depends only on recipe, data and FLOPs of the planned training, not on measured times or the number of processes.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from wands.conditions.published import conditions_of, kinds_of
from wands.config.base import StrictModel
from wands.config.recipe import FlowConfig, Recipe
from wands.data.datasets import Dataset
from wands.data.holdout import clip_name
from wands.errors import ConfigError
from wands.flow.sigmas import sigma_quantile, with_clip_shift
from wands.patches import grid_size
from wands.run.schedule import plan_clips
from wands.run.sizes import forward_flops, step_flops
from wands.texts import plural
from wands.train.prepared_run import PreparedRun
from wands.variants import Expert, Variant

HELD_OUT = "held_out"
TRAIN = "train"
PLAN_FILE = "evaluation.json"
QUANTILES = {num: [(i + 1) / (num + 1) for i in range(num)] for num in (9, 5, 3, 1)}
"""Maps each allowed number of noise levels to their quantiles."""
USUAL_CLIPS = 4
"""Number of clips that an evaluation should have, if the budget and the data allow it. Whether a run learns needs a confidence
interval over clips, which a single clip does not have, and which is wide for two or three.
"""


class EvaluationClip(StrictModel):
    """A clip that each evaluation uses, and its noise levels.

    Attributes:
        key: sample id of the clip.
        side: part of the data that contains the clip, "held_out" or "train".
        sigmas: maps the subfolder of each trained DiT to the noise level at each quantile of `EvaluationPlan.quantiles`.
    """

    key: str
    side: str
    num_tokens: int
    sigmas: dict[str, list[float]]


class EvaluationSample(NamedTuple):
    """A clip to evaluate at one noise level, with one DiT and one condition.

    Attributes:
        kind: "text", "image" or "first frame".
        clip: index of the clip in `EvaluationPlan.clips`.
        quantile: index of the noise level's quantile in `EvaluationPlan.quantiles`.
        row: (data set that contains the clip, index of the clip in this data set).
    """

    expert: Expert
    kind: str
    clip: int
    quantile: int
    sigma: float
    num_tokens: int
    row: tuple[Dataset, int]

    def grid(self, patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the number of tokens of the clip along (frame, row, column)."""
        data, i = self.row
        return grid_size(data.latent_shape(i), patch_size)


class EvaluationPlan(StrictModel):
    """Clips and noise levels of all evaluations of a run, as stored in `evaluation.json`.

    Attributes:
        settings: recipe keys that determine the clips, with their values. If a value changes, a new plan is made.
        quantiles: quantiles of the recipe's distribution of noise levels at which the clips are evaluated.
        share: planned FLOPs of all evaluations / planned FLOPs of the training.
        clips: clips to evaluate, held-out clips first.
    """

    settings: dict[str, Any]
    quantiles: list[float]
    share: float
    clips: list[EvaluationClip]

    def describe(self) -> str:
        """Return the numbers of clips and noise levels, and the evaluations' share of the run's FLOPs, as a text for the user."""
        counts = {side: sum(clip.side == side for clip in self.clips) for side in (HELD_OUT, TRAIN)}
        less = "" if len(self.quantiles) == 9 else " (9 would exceed eval.max_share)"
        levels = plural(len(self.quantiles), "noise level")
        return (
            f"{counts[HELD_OUT]} held-out and {counts[TRAIN]} training clips at {levels}{less}, "
            f"{self.share:.2%} of the run's FLOPs"
        )

    def samples(
        self, experts: Sequence[Expert], variant: Variant, data: Dataset, held_out: Dataset | None
    ) -> list[EvaluationSample]:
        """Return the samples of an evaluation: each clip with each trained DiT, each of its conditions, and each noise level.

        A DiT is evaluated inside the range of noise levels that it trains on. Clips that are no longer in the data are left out,
        and clips of a single frame where the first frame is the condition.
        """
        rows: dict[tuple[str, str], tuple[Dataset, int]] = {}
        for side, source in ((HELD_OUT, held_out), (TRAIN, data)):
            if source is not None:
                rows |= {(side, key): (source, i) for i, key in enumerate(source.keys)}
        return [
            EvaluationSample(
                expert=expert,
                kind=kind,
                clip=number,
                quantile=quantile,
                sigma=sigma,
                num_tokens=clip.num_tokens,
                row=row,
            )
            for expert in experts
            for kind in kinds_of(conditions_of(variant))
            for number, clip in enumerate(self.clips)
            if (row := rows.get((clip.side, clip.key)))
            and not (kind == "first frame" and row[0].latent_shape(row[1])[0] == 1)
            for quantile, sigma in enumerate(clip.sigmas[expert.subfolder])
        ]


def fit_plan(costs: Sequence[float], budget: float) -> tuple[int, int]:
    """Return (number of noise levels, number of clips) for evaluations within a budget of FLOPs.

    The result has the largest number of noise levels (9, 5, 3 or 1) that the budget allows for `USUAL_CLIPS` clips, or for all if
    there are fewer, and then as many clips as the budget allows. If it does not allow these clips at one level, the same is tried
    with one clip less, and so on; the result is at least (1, 1).

    `costs` has the FLOPs of each clip at one noise level, summed over all evaluations of the run. A clip means a pair of a
    held-out clip and a training clip if the run evaluates both.
    """
    sums = np.cumsum(np.array(costs, float))
    fitting = [(num, int(np.searchsorted(sums * num, budget, side="right"))) for num in QUANTILES]
    enough = range(min(USUAL_CLIPS, len(sums)), 0, -1)
    return next((pair for most in enough for pair in fitting if pair[1] >= most), (1, 1))


def num_forwards(recipe: Recipe, total_steps: int, variant: Variant, num_experts: int) -> int:
    """Return the number of forward passes that all evaluations of a run make for one clip at one noise level.

    An evaluation makes one for each trained DiT and condition; with an `ema` section twice that, except at step 0.
    """
    assert recipe.eval is not None
    later = -(-total_steps // recipe.eval.every) * (1 + (recipe.ema is not None))
    return (1 + later) * len(kinds_of(conditions_of(variant))) * num_experts


def plan_evaluation(run: PreparedRun) -> EvaluationPlan:
    """Choose the clips and the noise levels for the evaluations of a run with an `eval` section."""
    recipe = run.recipe
    model = run.model
    sampler = run.schedule.sampler
    assert recipe.eval is not None
    chosen = {}
    sources = {side: data for side, data in ((HELD_OUT, run.held_out), (TRAIN, run.data)) if data is not None}
    for side, data in sources.items():
        chosen[side] = choose_clips(
            data,
            recipe.eval.max_clips,
            patch_size=model.shape.patch_size,
            fits=_fits(run, data),
            excluded=sampler.excluded,
        )
    chosen = {side: of_side for side, of_side in chosen.items() if of_side}
    pairs = list(zip(*chosen.values(), strict=False))  # a training clip for each held-out clip
    forwards = num_forwards(recipe, sampler.total_steps, model.variant, len(model.experts))
    flops = {side: dict(_forward_flops(run, data)) for side, data in sources.items()}
    costs = [
        forwards * sum(flops[side][key] for side, (key, _) in zip(chosen, pair, strict=True))
        for pair in pairs
    ]
    epoch = sampler.epoch_plan(sampler.start[0])
    bins = [bin for step in epoch.steps for bin in step]
    training = step_flops(model, run.schedule, bins) / epoch.num_steps
    training *= sampler.total_steps
    num, num_pairs = fit_plan(costs, recipe.eval.max_share * training)
    quantiles = QUANTILES[num]
    clips = []
    for side, of_side in chosen.items():
        clips += add_levels(side, of_side[:num_pairs], quantiles, recipe.flow, model.experts)
    return EvaluationPlan(
        settings=plan_settings(recipe),
        quantiles=quantiles,
        share=num * sum(costs[:num_pairs]) / training,
        clips=clips,
    )


def choose_clips(
    data: Dataset,
    most: int,
    *,
    patch_size: tuple[int, int, int],
    fits: Sequence[bool],
    excluded: Collection[str],
) -> list[tuple[str, int]]:
    """Return (key, number of video tokens) of up to `most` clips for the evaluation, in the order of the choice.

    Clips that are excluded or do not fit into a forward pass (`fits`) are left out. The clips are sorted by a hash of their keys,
    and one clip of every source file comes before a second clip of any.
    """
    rows = zip(data.keys, data.num_tokens(patch_size).tolist(), fits, strict=True)
    lengths = {key: length for key, length, is_usable in rows if is_usable and key not in excluded}
    turns = {}
    seen = Counter[str]()
    for key in sorted(lengths, key=lambda key: blake2b(key.encode("utf-8", "surrogateescape")).digest()):
        turns[key] = seen[clip_name(key)]
        seen[clip_name(key)] += 1
    return [(key, lengths[key]) for key in sorted(turns, key=turns.__getitem__)[:most]]


def _forward_flops(run: PreparedRun, data: Dataset) -> Iterator[tuple[str, int]]:
    """Yield (key, FLOPs of one forward pass) for each clip of the data."""
    costs = run.objective.costs(plan_clips(data, run.model.shape.patch_size, 0.0))
    for key, tokens, pairs in zip(data.keys, costs.tokens.tolist(), costs.pairs.tolist(), strict=True):
        yield key, forward_flops(run.model.shape, [tokens], pairs)


def _fits(run: PreparedRun, data: Dataset) -> list[bool]:
    """Return for each clip of the data whether the model's sequence for it has at most `packing.max_tokens` tokens."""
    seen = run.objective.costs(plan_clips(data, run.model.shape.patch_size, 0.0)).tokens
    return (seen <= run.recipe.packing.max_tokens).tolist()


def add_levels(
    side: str,
    chosen: Sequence[tuple[str, int]],
    quantiles: Sequence[float],
    flow: FlowConfig,
    experts: Sequence[Expert],
) -> list[EvaluationClip]:
    """Return the chosen (key, number of video tokens) pairs with the noise levels at which each trained DiT is evaluated.

    The levels are `quantiles` of the recipe's distribution of noise levels. `side` is "held_out" or "train".
    """
    clips = []
    for key, num_tokens in chosen:
        of_clip = with_clip_shift(flow, num_tokens)
        levels = {}
        for expert in experts:
            levels[expert.subfolder] = [sigma_quantile(of_clip, q, *expert.sigma_range) for q in quantiles]
        clips.append(EvaluationClip(key=key, side=side, num_tokens=num_tokens, sigmas=levels))
    return clips


def plan_cache(run: PreparedRun, most: int) -> EvaluationPlan:
    """Plan the evaluation for `wands evaluate`: at most `most` clips of the run's data, held out, at nine noise levels."""
    chosen = choose_clips(
        run.data,
        most,
        patch_size=run.model.shape.patch_size,
        fits=_fits(run, run.data),
        excluded=run.schedule.sampler.excluded,
    )
    clips = add_levels(HELD_OUT, chosen, QUANTILES[9], run.recipe.flow, run.model.experts)
    return EvaluationPlan(settings={}, quantiles=QUANTILES[9], share=0, clips=clips)


def plan_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe keys that determine the clips of the evaluation, with their values."""
    section = recipe.eval.model_dump(include={"max_share", "max_clips", "cache"}) if recipe.eval else {}
    return section | {"holdout": recipe.data.holdout}


def get_plan(run: PreparedRun) -> tuple[EvaluationPlan, bool]:
    """Return the evaluation plan of a run, and whether the plan is new.

    A resumed run continues with the plan in its folder, unless it cannot be read or the evaluation settings have changed.
    """
    with suppress(FileNotFoundError, ValidationError):  # missing or damaged
        plan = EvaluationPlan.model_validate_json((run.output_dir / PLAN_FILE).read_bytes())
        if run.checkpoint is not None and plan.settings == plan_settings(run.recipe):
            return plan, False
    return plan_evaluation(run), True


def check_held_out(recipe: Recipe, held_out: Dataset | None) -> None:
    """Raise a ConfigError if `checkpoint.keep_best` or `eval.patience` is set, but there are no held-out clips."""
    patience = recipe.eval and recipe.eval.patience
    for key, value in (("checkpoint.keep_best", recipe.checkpoint.keep_best), ("eval.patience", patience)):
        if value and held_out is None:
            raise ConfigError(
                f"{key}={str(value).lower()} needs a held-out loss; add an eval section (eval: {{}}), and set data.holdout or "
                "eval.cache."
            )
