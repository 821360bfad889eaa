"""The command `wands evaluate`: measure the loss of a run or a model on the clips of a cache, with fixed noise."""

import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wands.checkpoint.checkpoint_files import Checkpoint, find_checkpoint, load_exported_state
from wands.checkpoint.epoch_files import trained_samples
from wands.checkpoint.resume import check_objective, restore_objective
from wands.config.options import EvaluateOptions
from wands.config.recipe import Recipe
from wands.distributed.bootstrap import init_process_group, start_together
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import attention_backend, build_model
from wands.errors import CheckpointError, ConfigError
from wands.files import write_text
from wands.plugin import load_plugins
from wands.texts import plural
from wands.train.evaluation import Row, SampleLoss, measure, summarize
from wands.train.evaluation_plan import HELD_OUT, EvaluationPlan, plan_cache
from wands.train.prepare import prepare_run
from wands.train.prepared_run import PreparedRun
from wands.variants import check_extra


def evaluate(options: EvaluateOptions) -> str | None:
    """Measure the loss of a run or a model on the clips of a cache. Return a table as text on rank 0, and None on other ranks.

    Under a launcher, the clips are divided among the ranks, and every rank has the whole model.

    Raises:
        WandsError: if the model or the cache cannot be used.
    """
    where = Path(options.model)
    rank = int(os.environ.get("RANK", "0"))
    with start_together():
        is_run = where.is_file() or where.match("step_*") or (where / "checkpoints").is_dir()
        checkpoint = find_checkpoint(where) if is_run else None
        if options.ema and checkpoint is None:
            raise ConfigError(f"--ema needs a training run, but MODEL={where} is not a run; leave --ema out.")
        ds_user = {"zero_optimization": {"stage": 0}}
        plugin = load_plugins(options.imports)
        run = prepare_run(_recipe(options, checkpoint), ds_user, plugin=plugin)
        if checkpoint is not None:
            check_objective(checkpoint, run.objective)
            restore_objective(checkpoint, run.objective)
            try:
                check_extra(checkpoint.state.transformer_config, run.model.config, f"MODEL={where}")
            except ValueError as error:
                raise ConfigError(f"{error}.") from None
    _, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    dtype = run.recipe.precision.compute
    backend = attention_backend(run.recipe, run.model.shape.head_dim, device)
    plan = plan_cache(run, options.max_clips)
    samples_of = partial(plan.samples, variant=run.model.variant, data=run.data, held_out=run.data)
    losses: list[SampleLoss] = []
    for expert in run.model.experts:  # one after the other: only one needs memory
        model = build_model(
            run.recipe,
            run.ds_config,
            expert,
            groups=groups,
            device=device,
            backend=backend,
            config=run.model.config,
        )
        if checkpoint is not None:
            state = load_exported_state(checkpoint.folder, expert.subfolder, options.ema)
            model.load_state_dict(state, strict=False)
        model.to(device).eval()
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16", cache_enabled=False):
            measured = measure(
                {expert.subfolder: model},
                samples_of([expert]),
                run.objective,
                run.collator,
                max_tokens=0,  # each clip alone, however long
                groups=groups,
                device=device,
            )
        losses += measured or []
    row = summarize(plan, samples_of(run.model.experts), losses)
    if rank != 0:
        return None
    if options.json_path is not None:
        step = checkpoint.state.step if checkpoint else None
        facts = {"step": step, "weights": "ema" if options.ema else "raw", **row}
        write_text(options.json_path, json.dumps(facts | plan.model_dump(include={"clips"})))
    known = _trained_clips(checkpoint, run, plan) if checkpoint else set()
    return _loss_table(row, len(plan.clips), len(known))


def _trained_clips(checkpoint: Checkpoint, run: PreparedRun, plan: EvaluationPlan) -> set[str]:
    """Return the keys of the evaluated clips that the run of a checkpoint trains on, empty if its list of samples is damaged."""
    trained: set[tuple[str, int]] = set()
    with suppress(CheckpointError):
        trained = trained_samples(checkpoint)
    samples = zip(run.data.keys, run.data.checksums.tolist(), strict=True)
    return {clip.key for clip in plan.clips} & {key for key, crc32 in samples if (key, crc32) in trained}


def _recipe(options: EvaluateOptions, checkpoint: Checkpoint | None) -> Recipe:
    """Return the recipe of the evaluation. A run gives its seed and the sections that decide the loss."""
    values: dict[str, Any] = {"model": {"path": options.model}, "train": {}}
    if checkpoint is not None:
        keys = ("model", "lora", "flow", "loss", "attention", "precision")
        saved = checkpoint.state.recipe
        values = {key: saved[key] for key in keys}
        values["objective"] = saved.get("objective", {})  # missing in early checkpoints
        values["train"] = {"seed": saved["train"]["seed"]}
        values["model"] = saved["model"] | {"path": checkpoint.state.base}
        if values["lora"]:
            values["lora"] = values["lora"] | {"init_from": None}
        else:
            values["precision"] = saved["precision"] | {"weights": "fp32"}
    values["data"] = {"cache": options.data}
    values["packing"] = {"enabled": False, "max_tokens": 1 << 20}  # each clip alone, however long
    values["train"]["bins_per_step"] = int(os.environ.get("WORLD_SIZE", "1"))
    return Recipe.model_validate(values)


def _loss_table(row: Row, num_clips: int, num_trained: int) -> str:
    lines = [f"loss {row[HELD_OUT]:.5f} of {plural(num_clips, 'clip')}"]
    if num_trained:
        lines.append(
            f"WARNING: the run trains on {num_trained:,} of these clips, so that the loss does not show whether it learns more "
            "than these clips; evaluate a cache of other clips"
        )
    for field, buckets in row["by"].items():
        for bucket in buckets:
            name = f"{bucket['name']} (sigma {bucket['sigma']:.3f})"
            lines.append(f"  {field:<7} {name:<32} {bucket[HELD_OUT]:.5f}")
    return "\n".join(lines)
