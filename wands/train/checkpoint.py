"""Save and load checkpoints. The folder of a saved step is either complete or does not exist.

A save has these stages. First, each rank writes its part of the weights and of the optimizer states into a folder with
a temporary name, with a subfolder for each DiT. Then rank 0 writes `wands_state.json`, which contains the size and the
hash of every file. Then the folder gets its final name. Last, the file `latest` is replaced. If the process is killed at
any moment, the previous checkpoint stays valid.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from wands.config.optimizer_kinds import state_bytes_per_param
from wands.config.recipe import Recipe
from wands.data.sampler import StepPlan
from wands.distributed.bootstrap import gather_objects
from wands.errors import CheckpointError, WandsError, one_line
from wands.files import publish, sync, write_text
from wands.model.files.checkpoint_files import (
    STATE_FILE,
    STATE_METADATA,
    FragmentFiles,
    TrainState,
    average_file,
    list_steps,
    state_file,
    step_name,
)
from wands.model.files.tensor_files import hash_file, write_safetensors
from wands.planning.workload import Weight
from wands.train.changed_data import EPOCH_FILE, epoch_values
from wands.train.ema import WeightAverage
from wands.train.engine_state import engine_tensors, load_engine
from wands.train.metrics import thin
from wands.train.run import TrainingRun


def build_state(run: TrainingRun, step: int, epoch: int, history: list[tuple[int, float]]) -> TrainState:
    """Build the training state for a checkpoint.

    Args:
        run: the checked training run.
        step: number of optimizer steps that the run has made.
        epoch: epoch of the last step that the run has made.
        history: (step, loss) pairs of the run so far.
    """
    base, recipe = run.recipe.model.path, run.recipe.model_dump(mode="json")
    for merge in recipe["model"]["merge_loras"]:
        merge["path"] = str(Path(merge["path"]).resolve())
    is_folder = Path(base).is_dir()
    # A clip counts once, however often an epoch repeats it.
    lengths = dict(zip(run.data.keys, run.seq_lens.tolist(), strict=True))
    lengths = {key: length for key, length in lengths.items() if key not in run.sampler.excluded}
    return TrainState(
        step=step,
        epoch=epoch,
        world_size=run.world_size,
        zero_stage=run.zero_stage,
        variant=run.variant.name,
        parts=[expert.subfolder for expert in run.experts],
        transformer_config=run.transformer_config,
        data_fingerprint=run.data_fingerprint(),
        data_summary={"num_samples": len(lengths), "num_tokens": sum(lengths.values())},
        recipe=recipe,
        base=str(Path(base).resolve()) if is_folder else base,
        loss=thin(history),
        files={},
        base_on_hub=not is_folder,
        data_contents=run.data_contents,
        base_fingerprint=run.base_fingerprint,
        ds_config=run.ds_config,
        data_start=run.sampler.start,
    )


def save_checkpoint(
    run: TrainingRun,
    engines: Mapping[str, Any],
    state: TrainState,
    plan: StepPlan,
    averages: Mapping[str, WeightAverage] = MappingProxyType({}),
) -> Path:
    """Write a checkpoint, then delete the oldest checkpoints until `checkpoint.keep` checkpoints remain.

    Every rank must call this function.

    Args:
        run: the checked training run.
        engines: maps the subfolder of each trained DiT to its DeepSpeed engine.
        state: training state for `wands_state.json`. This function adds the sizes and hashes of the files to the state.
        plan: plan of the last step.
        averages: maps the subfolder of each trained DiT to the moving average of its weights; empty without `ema`.

    Returns:
        The folder of the finished checkpoint.

    Raises:
        CheckpointError: if the disk is full or not writable. The previous checkpoint does not change.
    """
    rank, folder = dist.get_rank(), run.output_dir / "checkpoints"
    target = folder / step_name(state.step)
    partial = folder / f"{target.name}.tmp"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("step_*.tmp"):  # left by a save that was killed
            shutil.rmtree(stale)
    dist.barrier()
    _check_space(run, folder, more=sum(average.num_bytes for average in averages.values()))
    hashes = gather_objects(_write_files(run, engines, plan, averages, partial))
    problem: str | None = next((found for found in hashes if isinstance(found, str)), None)
    if rank == 0 and not problem:
        files = {name: digest for own in hashes if isinstance(own, dict) for name, digest in own.items()}
        try:
            _finish(partial, target, replace(state, hashes=files), run.recipe.checkpoint.keep)
        except (OSError, WandsError) as error:
            problem = one_line(error)
    if problem := next(filter(None, gather_objects(problem)), None):
        shutil.rmtree(partial, ignore_errors=True)  # a full disk may be full of these files
        raise CheckpointError(
            f"checkpoint {target} could not be written ({problem}); free disk space and continue the run with --resume.",
            agreed=True,
        )
    return target


def _write_files(
    run: TrainingRun,
    engines: Mapping[str, Any],
    plan: StepPlan,
    averages: Mapping[str, WeightAverage],
    folder: Path,
) -> dict[str, str] | str:
    """Write the files of this rank. Return the hash of each file by name, or the reason why a file cannot be written."""
    rank, hashes = dist.get_rank(), {}
    try:
        for part, engine in engines.items():
            (folder / part).mkdir(parents=True, exist_ok=True)
            if rank == 0 or run.zero_stage:
                name = f"{part}/{state_file(rank)}"
                tensors, values = engine_tensors(engine)
                hashes[name] = write_safetensors(folder / name, tensors, {STATE_METADATA: json.dumps(values)})
            if part in averages:
                hashes[f"{part}/{average_file(rank)}"] = averages[part].save(folder / part)
        if rank == 0:
            (folder / EPOCH_FILE).write_text(json.dumps(epoch_values(run, plan)), encoding="utf-8")
            hashes[EPOCH_FILE] = hash_file(folder / EPOCH_FILE)
    except OSError as error:
        return one_line(error)
    return hashes


def checkpoint_bytes(weights: Sequence[Weight], recipe: Recipe, zero_stage: int) -> tuple[int, int]:
    """Return the number of bytes that one DiT needs in a checkpoint, summed over all ranks.

    Args:
        weights: parameters of the DiT. A LoRA run saves only the trained parameters.
        recipe: recipe of the run, with its optimizer and LoRA.
        zero_stage: ZeRO stage.

    Returns:
        (bytes of the frozen weights, bytes of the trained fp32 weights and of the optimizer states).
    """
    trained = [(weight.name, weight.shape) for weight in weights if weight.trained]
    num_trained = sum(weight.numel for weight in weights if weight.trained)
    num_frozen = 0 if recipe.lora else sum(weight.numel for weight in weights) - num_trained
    states = state_bytes_per_param(recipe.optim.name, trained, zero_stage)
    return 4 * num_frozen, round((4 + states) * num_trained)


def _check_space(run: TrainingRun, folder: Path, more: int) -> None:
    """Check that the disk has space for a checkpoint, before anything is written. All ranks raise the same error.

    Without this check, a rank whose write fails would leave the other ranks waiting.

    Args:
        run: the checked training run.
        folder: folder of the checkpoints.
        more: bytes of this rank's moving averages.

    Raises:
        CheckpointError: on all ranks, if any rank has too little free space or a file size limit that is too small.
    """
    world_size, stage = run.world_size, run.zero_stage
    weights, states = checkpoint_bytes(run.weights, run.recipe, stage)
    needed = len(run.experts) * (weights + states) + more * world_size
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    # Each rank writes a file. At stage 0, rank 0 writes everything. Below stage 3, rank 0 writes the frozen weights.
    largest = states // (world_size if stage else 1) + weights // (world_size if stage == 3 else 1)
    problem = None
    if needed > free:
        problem = f"needs about {needed / 1e9:.3f} GB, but {free / 1e9:.3f} GB are free"
    elif limit != resource.RLIM_INFINITY and largest > limit:
        problem = f"needs files of about {largest} bytes, but the file size limit (ulimit -f) is {limit}"
    if first_problem := next(filter(None, gather_objects(problem)), None):
        raise CheckpointError(
            f"output_dir={run.output_dir}: a checkpoint {first_problem}. Free disk space, raise the limit, or change output_dir.",
            agreed=True,
        )


def _finish(partial: Path, target: Path, state: TrainState, keep: int) -> None:
    """Write `wands_state.json`, give the folder its final name, and delete old steps."""
    files = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(partial))] = path.stat().st_size
    write_text(partial / STATE_FILE, json.dumps(replace(state, files=files).to_json()))
    if target.exists():  # the same step saved again, after a resume from an older checkpoint
        shutil.rmtree(target)
    publish(partial, target)
    write_text(target.parent / "latest", target.name)
    older = [path for path in list_steps(target.parent) if path.name <= target.name]
    abandoned = sorted(target.parent.glob("step_*.abandoned*"), key=lambda path: path.stat().st_mtime)
    for path in older[:-keep] + abandoned[:-keep]:
        shutil.rmtree(path)


def load_checkpoint(engines: Mapping[str, Any], checkpoint: Path) -> None:
    """Restore the weights, the optimizer and the learning rate schedule of new engines. Every rank must call this function.

    The learning rate, betas, eps and weight decay come from the current recipe. DeepSpeed alone would silently restore
    the values of the run that wrote the checkpoint. If the settings did not change, every bit is restored.

    Args:
        engines: maps the subfolder of each trained DiT to its DeepSpeed engine.
        checkpoint: folder of the step.

    Raises:
        CheckpointError: if a state of the optimizer cannot be divided differently among the ranks.
    """
    for part, engine in engines.items():
        _load_engine(engine, checkpoint, part)


def _load_engine(engine: Any, checkpoint: Path, part: str) -> None:
    keys = ("initial_lr", "betas", "eps", "weight_decay", "momentum")
    settings = [{key: group[key] for key in keys if key in group} for group in engine.optimizer.param_groups]
    scheduler = engine.lr_scheduler
    # If the scheduler comes from the DeepSpeed JSON, it is not a LambdaLR, and the JSON controls the learning rate.
    is_ours = isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    base_lrs = list(scheduler.base_lrs) if is_ours else []
    load_engine(engine, FragmentFiles(checkpoint / part, "state_rank_*", STATE_METADATA))
    if is_ours:
        scheduler.base_lrs = base_lrs
    for i, (group, current) in enumerate(zip(engine.optimizer.param_groups, settings, strict=True)):
        group.update(current)
        if is_ours:
            group["lr"] = base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)
