"""Evaluate the loss of fixed clips with fixed noise during the training, under the run's own ZeRO stage and parallelism.

The noise depends only on seed, clip and noise level, and training never uses it. So the losses do not depend on the number of
processes, packing or restarts, and a difference between two evaluations comes from the weights.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wands.data.collate import PackingCollator, RankSlice
from wands.distributed.bootstrap import gather_objects
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.errors import WandsError
from wands.files import write_text
from wands.objectives.objective import Objective
from wands.report.page import write_report
from wands.run.append_log import continue_rows, to_line
from wands.train.batches import read_rows_of_bin
from wands.train.evaluation_plan import HELD_OUT, PLAN_FILE, TRAIN, EvaluationPlan, EvaluationSample, get_plan
from wands.train.jobs import FinishedStep, Job
from wands.train.metrics import StepLog
from wands.train.prepared_run import PreparedRun
from wands.train.training import Training
from wands.transfer import to_device
from wands.variants import DiTShape
from wands.watch.watchdog import Watchdog

EPOCH = -1
"""Epoch from which the noise of evaluations is drawn; training uses 0, 1, 2 and so on."""
_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_Z_QUANTILE = 1.959964
"""97.5 % quantile of the normal distribution; `_T_QUANTILES` has those of Student's t with 1 to 10 degrees of freedom."""

Row = dict[str, Any]


class SampleLoss(NamedTuple):
    """Loss of an evaluation sample, and of each of its chunks in causal training. A given chunk has the loss 0."""

    loss: float
    chunks: tuple[float, ...] = ()


class Verdict(NamedTuple):
    """Result of an evaluation for the training loop, equal on all ranks.

    Attributes:
        is_best: whether the held-out loss is the lowest so far.
        stops: whether `eval.patience` ends the run.
        is_left_out: whether a request to stop has ended the evaluation, so that no results are written.
    """

    is_best: bool = False
    stops: bool = False
    is_left_out: bool = False


class Evaluator(Job):
    """Job that evaluates a run and writes `evaluation.json`, `evaluations.jsonl`, a line on the terminal, and curves.

    A resumed run appends to its `evaluations.jsonl`. The watchdog limits the time of each forward pass.
    """

    def __init__(self, run: PreparedRun, training: Training, step_log: StepLog, watchdog: Watchdog) -> None:
        assert run.recipe.eval is not None
        self._run = run
        self._training = training
        self._watchdog = watchdog
        self._step_log = step_log
        self._config = run.recipe.eval
        self._rows = list[Row]()
        plan = self._open() if training.rank == 0 else None
        plan = gather_objects(plan)[0]
        assert plan is not None
        self._plan = plan
        self._samples = self._plan.samples(run.model.experts, run.model.variant, run.data, run.held_out)
        if missing := len(self._plan.clips) - len({sample.clip for sample in self._samples}):
            training.log(f"evaluation: {missing} of the clips are no longer in the data, and are left out")

    def start(self, training: Training) -> None:
        if self.is_missing(training.start_step):
            self.evaluate(training.start_step)

    def is_due(self, step: FinishedStep) -> bool:
        # A resumed run makes the evaluation that a requested stop leaves out.
        return step.is_last or (self._is_multiple(step.number) and not step.stop_requested)

    def run(self, step: FinishedStep) -> None:
        verdict = self.evaluate(step.number)
        step.is_best = verdict.is_best
        step.ends_early = verdict.stops
        step.lacks_evaluation = verdict.is_left_out

    def _open(self) -> EvaluationPlan:
        """Read or make the evaluation plan, and open `evaluations.jsonl`, on rank 0."""
        run = self._run
        plan_file = run.output_dir / PLAN_FILE
        results = run.output_dir / "evaluations.jsonl"
        plan, is_new = get_plan(run)
        if is_new:
            if run.checkpoint is not None:
                # The results for other clips cannot be compared.
                for path in filter(Path.is_file, (plan_file, results)):
                    path.replace(path.with_stem(f"{path.stem}_until_{run.start_step:08d}"))
                self._training.log("a new series of evaluations begins, because eval or data.holdout changed")
                self._training.events.write("new evaluation series")
            write_text(plan_file, plan.model_dump_json(indent=1))
        start_step = run.start_step if run.checkpoint else -1
        self._rows, self._log_file = continue_rows(results, start_step, "weights", HELD_OUT, "losses")
        return plan

    def is_missing(self, step: int) -> bool:
        """Return whether this process must evaluate before its first step. The result is equal on all ranks.

        It must if `evaluations.jsonl` has no rows, or no row for `step` although an evaluation is due there.
        """
        steps = gather_objects({row["step"] for row in self._rows})[0]
        is_last = step == self._training.total_steps
        return not steps or ((is_last or self._is_multiple(step)) and step not in steps)

    def _is_multiple(self, step: int) -> bool:
        return step % self._config.every == 0

    def evaluate(self, step: int) -> Verdict:
        """Evaluate the weights after `step` steps and their moving average. Every rank must call this between two steps."""
        training = self._training
        packing = self._run.recipe.packing
        rows = list[Row]()
        for weights in training.weights_at(step):
            began = time.perf_counter()
            with training.inference(weights):
                losses = measure(
                    training.engines,
                    self._samples,
                    self._run.objective,
                    self._run.collator,
                    max_tokens=packing.max_tokens if packing.enabled else 0,
                    groups=training.groups,
                    device=training.device,
                    proceed=partial(self._proceed, step),
                )
            if losses is None:
                training.log(f"step {step}: the evaluation is left out, because the run must stop")
                return Verdict(is_left_out=True)
            base = next((row["losses"] for row in (*self._rows, *rows)), None)
            row = {"step": step, "weights": weights, **summarize(self._plan, self._samples, losses, base)}
            rows.append(row | {"seconds": round(time.perf_counter() - began, 3)})
        return gather_objects(self._report(rows) if training.rank == 0 else None)[0] or Verdict()

    def _proceed(self, step: int, failure: WandsError | None) -> bool:
        """Report progress to the watchdog, on every rank. Return False if a rank must stop or could not read its clips."""
        if failure is not None:
            self._watchdog.stop_for(failure)
        self._watchdog.begin_work(f"the evaluation of step {step}")
        stops = torch.tensor(float(self._watchdog.stop_requested), device=self._training.device)
        dist.all_reduce(stops)
        return not stops.item()

    def _report(self, rows: Sequence[Row]) -> Verdict:
        """Write the rows of an evaluation on rank 0, and judge the last one."""
        self._rows += rows
        self._step_log.held_out = rows[-1][HELD_OUT]
        self._log_file.append(*map(to_line, rows))
        self._training.log("\n".join(map(describe, rows)))
        for row in rows:
            name = "eval" if row["weights"] == "raw" else "eval_ema"
            curves = {f"{name}/{key}": row[key] for key in (HELD_OUT, TRAIN, "gap")}
            for field in row["by"].keys() & {"sigma", "chunk"}:
                curves |= {
                    f"{name}_{field}/{bucket['name']}": bucket[HELD_OUT] for bucket in row["by"][field]
                }
            finite = {key: value for key, value in curves.items() if value is not None}
            self._training.trackers.log(row["step"], finite)
        write_report(self._run.output_dir)
        weights = rows[-1]["weights"]
        patience = self._config.patience
        past = [row for row in self._rows if row["weights"] == weights and row[HELD_OUT] is not None]
        best = last_improvement(self._plan, past)
        waited = sum(row["step"] > best for row in past)
        if patience and waited >= patience:
            reason = f"eval.patience={patience}: the held-out loss has not improved since step {best}"
            self._training.log(f"{reason}; the run ends")
            self._training.events.write("early stop", best_step=best)
        lowest = min(past, key=lambda row: row[HELD_OUT], default={})
        return Verdict(lowest.get("step") == rows[-1]["step"], bool(patience) and waited >= patience)


@torch.no_grad()
def measure(
    models: Mapping[str, Callable[..., torch.Tensor]],
    samples: Sequence[EvaluationSample],
    objective: Objective,
    collator: PackingCollator,
    *,
    max_tokens: int,
    groups: ProcessGroups,
    device: torch.device,
    proceed: Callable[[WandsError | None], bool] | None = None,
) -> list[SampleLoss] | None:
    """Return the loss of each evaluation sample: a clip at one noise level, with one DiT, as text-to-video or image-to-video.

    Every rank must call this function, and gets all losses. The loss is the objective's error, averaged over the trained tokens
    and weighted by the mask of the clip if it has one. There is no dropout and no caption dropout, and the weights of data
    sources and of noise levels are not applied.

    Args:
        models: maps the subfolder of each evaluated DiT to its engine, or to a function with the arguments of the engine.
        samples: result of `EvaluationPlan.samples`.
        objective: computes the errors.
        collator: collator of the training.
        max_tokens: largest number of tokens of a forward pass; 0 for one clip in each forward pass.
        groups: process groups of this rank.
        device: device of this rank.
        proceed: function that gets the error of a failed read or None before each forward pass, and returns whether to continue;
            the result of `measure` is None if it returns False. None raises the error.
    """
    num_chunks, lens = _sizes(samples, collator)
    # A row has the loss of a sample, then of each of its chunks.
    losses = torch.zeros(len(samples), 1 + max(num_chunks, default=0), dtype=torch.float64, device=device)
    for part, bin in own_bins(samples, lens, collator.shape, max_tokens, groups.dims):
        used = [samples[i] for i in bin]
        ratio = float(any(sample.kind == "first frame" for sample in used))
        flow = collator.flow.model_copy(update={"i2v_ratio": ratio})
        of_evaluation = replace(collator, flow=flow, has_dropout=False, drops_captions=False)
        failure = None
        try:
            host_slice = read_rows_of_bin(
                of_evaluation,
                [sample.row for sample in used],
                # The quantile takes the place of the repeat index.
                repeat_indices=[sample.quantile for sample in used],
                epoch=EPOCH,
                dims=groups.dims,
            )
        except WandsError as error:
            if proceed is None:
                raise
            failure = error
        # The device still computes the last bin while this bin is read.
        if proceed is not None and not proceed(failure):
            return None
        sigmas = [sample.sigma for sample in used] or [0.5]  # an empty bin has one padding token
        prepared = objective.prepare_at(host_slice, sigmas)
        batch, prepared = to_device((host_slice, prepared), device)
        errors = objective.evaluate(models[part], batch, prepared)
        if groups.dims.tensor_rank == 0:  # the other ranks of a tensor-parallel group have the same losses
            _enter(losses, bin, errors, batch)
    dist.all_reduce(losses)  # each rank has its part of the losses of its bins, and 0 elsewhere
    return [
        SampleLoss(loss, tuple(chunks[:num]))
        for (loss, *chunks), num in zip(losses.tolist(), num_chunks, strict=True)
    ]


def _sizes(samples: Sequence[EvaluationSample], collator: PackingCollator) -> tuple[list[int], list[int]]:
    """Return the number of chunks of each sample (0 without chunks), and of the tokens that the model sees."""
    rule = collator.unit_rule
    if rule is None:
        return [0] * len(samples), [sample.num_tokens for sample in samples]
    units = [rule(sample.grid(collator.shape.patch_size)) for sample in samples]
    return [own[-1].chunk + 1 for own in units], [sum(unit.num_tokens for unit in own) for own in units]


def _enter(losses: Tensor, bin: Sequence[int], errors: Tensor, part: RankSlice) -> None:
    """Enter the errors of a bin's samples into the rows `bin` of `losses`."""
    lens = torch.tensor(
        [entry.trained_len for entry in part.entries], dtype=torch.float64, device=errors.device
    )
    for entry, error, of_entry in zip(part.entries, errors, errors / lens, strict=True):
        if entry.sample < len(bin):  # an empty bin has one padding token
            row = losses[bin[entry.sample]]
            if entry.chunk is None:
                row[0] = of_entry
            else:
                row[0] += error / part.trained_lens[entry.sample]
                row[1 + entry.chunk] = of_entry


def own_bins(
    samples: Sequence[EvaluationSample],
    lens: Sequence[int],
    shape: DiTShape,
    max_tokens: int,
    dims: ParallelDims,
) -> list[tuple[str, list[int]]]:
    """Return (subfolder of a DiT, indices into `samples`) for each forward pass of this rank.

    `lens` is the number of tokens of each sample that the model sees. ZeRO-3 needs the same number of forward passes of each DiT
    on every rank, so a rank with fewer samples also makes passes without samples, whose lists of indices are empty.
    """
    own = []
    for (expert, _), group in groupby(enumerate(samples), key=lambda item: (item[1].expert, item[1].kind)):
        bins = list[list[int]]()
        room = 0
        for i, _ in group:
            if lens[i] > room:
                bins.append([])
                room = max_tokens
            bins[-1].append(i)
            room -= lens[i]
        bins.sort(key=lambda bin: -shape.forward_flops([lens[i] for i in bin]))
        bins += [[] for _ in range(-len(bins) % dims.dp_size)]
        own += [(expert.subfolder, bin) for bin in bins[dims.dp_rank :: dims.dp_size]]
    return own


def summarize(
    plan: EvaluationPlan,
    samples: Sequence[EvaluationSample],
    losses: Sequence[SampleLoss],
    base: Sequence[float | None] | None = None,
) -> Row:
    """Return the mean losses of an evaluation: a row of `evaluations.jsonl` without "step", "weights" and "seconds".

    `losses` is the result of `measure`, and `base` the value of the key `losses` in the first evaluation (None if this is the
    first). A mean without losses is None.

    Returns:
        A dict with these keys.
        `held_out`, `train`, `gap`: mean loss of the held-out clips, of the training clips, and the first minus the second.
        `change`, `train_change`: `paired_change` since the first evaluation; None in the first evaluation.
        `by`: maps each grouping to a list of groups: "sigma" (by expert and quantile of the noise level), "expert", "kind" (by
        condition), "length" (by number of tokens) and, in causal training, "chunk" (by number of the chunk). A group has the keys
        "name", "held_out", "train" and "sigma" (its mean noise level).
        `losses`: mean loss of each clip of the plan over its samples; None for a clip without samples.
    """
    of_clips: list[list[float]] = [[] for _ in plan.clips]
    for sample, loss in zip(samples, losses, strict=True):
        of_clips[sample.clip].append(loss.loss)
    values = [float(np.mean(of_clip)) if of_clip else None for of_clip in of_clips]
    whole = _means(plan, [(i, value) for i, value in enumerate(values) if value is not None])
    buckets = defaultdict[tuple[str, str], list[tuple[EvaluationSample, float]]](list)
    for sample, loss in sorted(zip(samples, losses, strict=True), key=lambda pair: pair[0].num_tokens):
        level = f"{sample.expert.name} {plan.quantiles[sample.quantile]:.2g}".strip()
        shortest = 1 << (sample.num_tokens.bit_length() - 1)  # such as 4,096 of 4,096 to 8,191
        length = f"{shortest:,} to {2 * shortest - 1:,} tokens"
        names = level, sample.expert.name or "all", sample.kind, length
        for bucket in zip(("sigma", "expert", "kind", "length"), names, strict=True):
            buckets[bucket].append((sample, loss.loss))
    for sample, loss in zip(samples, losses, strict=True):
        for number, of_chunk in enumerate(loss.chunks):
            if of_chunk:  # a given chunk has none
                buckets["chunk", f"chunk {number}"].append((sample, of_chunk))
    by = defaultdict[str, list[Row]](list)
    for (field, name), pairs in buckets.items():
        means = _means(plan, [(sample.clip, loss) for sample, loss in pairs])
        by[field].append({"name": name, **means, "sigma": fmean(sample.sigma for sample, _ in pairs)})
    gap = None if None in whole.values() else whole[HELD_OUT] - whole[TRAIN]
    change, train_change = (base and paired_change(plan, side, values, base) for side in (HELD_OUT, TRAIN))
    changes = {"change": change, "train_change": train_change}
    return {**whole, "gap": gap, **changes, "by": dict(by), "losses": values}


def _means(plan: EvaluationPlan, losses: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return the mean loss of each side from (index of the clip in the plan, loss) pairs."""
    sides = {side: [loss for i, loss in losses if plan.clips[i].side == side] for side in (HELD_OUT, TRAIN)}
    return {side: float(np.mean(found)) if found else None for side, found in sides.items()}


def paired_change(
    plan: EvaluationPlan, side: str, values: Sequence[float | None], base: Sequence[float | None]
) -> dict[str, float | None] | None:
    """Return the mean change of the clips' losses between two evaluations, with its 95 % confidence interval.

    `values` and `base` are the new and the old loss of each clip in `plan.clips`, or None. The result has the keys "mean", "low"
    and "high"; the interval comes from Student's t distribution, and is None for a single clip. The result is None if no clip of
    the side was evaluated both times.
    """
    rows = zip(plan.clips, values, base, strict=True)
    differences = [a - b for clip, a, b in rows if clip.side == side and a is not None and b is not None]
    num = len(differences)
    z = _Z_QUANTILE
    mean = float(np.mean(differences)) if num else 0.0
    if num < 2:
        return {"mean": mean, "low": None, "high": None} if num else None
    degrees = num - 1
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t = _T_QUANTILES[degrees - 1] if degrees <= len(_T_QUANTILES) else t
    half = t * float(np.std(differences, ddof=1)) / math.sqrt(num)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def last_improvement(plan: EvaluationPlan, rows: Sequence[Row]) -> int:
    """Return the step of the last evaluation that clearly improved the held-out loss, or else of the first row; 0 without rows.

    Each row is compared with the last earlier row that clearly improved the loss, or else with the first. The loss improves
    clearly if the 95 % confidence interval of its change is below 0; for a single clip, if the change is. All rows must be for
    the same weights, in the order of the steps.
    """
    best: Row = rows[0] if rows else {"step": 0}
    for row in rows[1:]:
        change = paired_change(plan, HELD_OUT, row["losses"], best["losses"])
        bounds = [value for value in change.values() if value is not None] if change else [0.0]
        best = row if max(bounds) < 0 else best
    return best["step"]


def describe(row: Row) -> str:
    """Return an evaluation's results as one line for the user."""
    words = [f"{name} {row[key]:.5f}" for key, name in ((HELD_OUT, "held-out"), (TRAIN, "train")) if row[key]]
    words += [f"gap {row['gap']:+.5f}"] if row["gap"] is not None else []
    if change := row["change"] or row["train_change"]:
        interval = "" if change["low"] is None else f" ({change['low']:+.5f} to {change['high']:+.5f})"
        words.append(f"change {change['mean']:+.5f}{interval}")
    name = "" if row["weights"] == "raw" else ", moving average"
    return f"evaluation of step {row['step']}{name}: {', '.join(words)}, {row['seconds']:.1f} s"
