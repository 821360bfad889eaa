"""One folder per saved step, complete or not there at all.

DeepSpeed writes its shards under a temporary name, those of each DiT in a folder with the DiT's name; `wands_state.json` with
the size of every file follows, the folder gets its name, and `latest` is replaced last. A kill at any moment leaves the previous
checkpoint in force.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import re
import resource
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from wands.config.optimizers import state_bytes_per_param
from wands.errors import CheckpointError
from wands.files import publish, sync, write_text
from wands.train.ema import WeightAverage, average_file, has_average, load_average
from wands.train.state import TrainState

log = logging.getLogger(__name__)

STATE_FILE = "wands_state.json"
_SETTINGS = ("initial_lr", "betas", "eps", "weight_decay", "momentum")


def step_name(step: int) -> str:
    """Folder name of a step: sorts as text."""
    return f"step_{step:08d}"


def save_checkpoint(
    engines: Mapping[str, Any],
    folder: Path,
    state: TrainState,
    keep: int,
    averages: Mapping[str, WeightAverage] = MappingProxyType({}),
) -> Path:
    """Write one checkpoint; every rank must call it.

    Args:
        engines: the DeepSpeed engine of each DiT, by its name in the pipeline.
        folder: `<output_dir>/checkpoints`.
        state: what goes into `wands_state.json`; its `files` are filled in here.
        keep: newest checkpoints that stay.
        averages: of the DiTs' weights, by the same names.

    Returns:
        The finished folder.

    Raises:
        CheckpointError: the disk is full or refuses; the previous checkpoint is untouched.
    """
    rank = dist.get_rank()
    target = folder / step_name(state.step)
    partial = folder / f"{target.name}.tmp"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("step_*.tmp"):  # left by a save that was killed
            shutil.rmtree(stale)
    dist.barrier()
    _check_space(engines, folder, state, more=sum(one.num_bytes for one in averages.values()))
    try:
        # save_latest=False: DeepSpeed's own `latest` is neither atomic nor last.
        for part, engine in engines.items():
            adapters_only = state.recipe["lora"] is not None
            engine.save_checkpoint(
                str(partial), tag=part, save_latest=False, exclude_frozen_parameters=adapters_only
            )
            if part in averages:
                averages[part].save(partial / part)
        dist.barrier()
        if rank == 0:
            _finish(partial, target, state)
            _prune(target, keep)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_write_error(error):
            raise
        raise CheckpointError(
            f"checkpoint {target} could not be written ({error}); free disk space and resume."
        ) from error
    dist.barrier()
    return target


def _is_write_error(error: RuntimeError) -> bool:
    return any(
        word in str(error) for word in ("PytorchStreamWriter", "unexpected pos", "No space", "File too large")
    )


def checkpoint_bytes(
    held: int, trained: Sequence[tuple[str, Sequence[int]]], optimizer: str, zero_stage: int
) -> tuple[int, int]:
    """Size of one DiT's part of a checkpoint: the weights, and the optimizer's masters and states, over all ranks.

    Args:
        held: parameters that are saved.
        trained: names and shapes of those of them that are trained.
        optimizer: `optim.name`.
        zero_stage: without sharding the weights are the masters; at stage 3 the masters stand for the weights.
    """
    num_trained = sum(math.prod(shape) for _, shape in trained)
    states = state_bytes_per_param(optimizer, trained, zero_stage) + (4 if zero_stage else 0)
    return 4 * (held - num_trained if zero_stage == 3 else held), round(states * num_trained)


def _check_space(engines: Mapping[str, Any], folder: Path, state: TrainState, more: int) -> None:
    """Refuse before the first byte, on all ranks alike: a write that fails half way hangs the others.

    Args:
        engines: what is saved.
        folder: where.
        state: of the run.
        more: bytes that this rank writes besides.
    """
    world_size, stage = dist.get_world_size(), state.zero_stage
    sizes = []
    for engine in engines.values():
        shapes = [
            (name, tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad)
            for name, p in engine.module.named_parameters()
        ]
        trained = [(name, shape) for name, shape, is_trained in shapes if is_trained]
        # Of a LoRA the base is not saved.
        saved = shapes if state.recipe["lora"] is None else [one for one in shapes if one[2]]
        held = sum(math.prod(shape) for _, shape, _ in saved)
        sizes.append(checkpoint_bytes(held, trained, state.recipe["optim"]["name"], stage))
    needed = sum(map(sum, sizes)) + more * world_size
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    module, states = max(sizes)
    # One file per rank with its share of masters and states, and one with the weights, of which ZeRO-3 shares the frozen part.
    largest = max(states // world_size, module // world_size if stage == 3 else module)
    largest = module + states if stage == 0 else largest
    problem = None
    if needed > free:
        problem = f"needs about {needed / 1e9:.3f} GB, {free / 1e9:.3f} GB are free; free disk space or set another output_dir."
    elif limit != resource.RLIM_INFINITY and largest > limit:
        problem = f"needs files of about {largest} bytes, the file size limit (ulimit -f) is {limit}; raise the limit."
    problems: list[str | None] = [None] * world_size
    dist.all_gather_object(problems, problem)
    first = next((text for text in problems if text), None)
    if first:
        raise CheckpointError(f"output_dir: a checkpoint in {folder} {first}", agreed=True)


def _finish(partial: Path, target: Path, state: TrainState) -> None:
    files = {}
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        sync(path)
        files[str(path.relative_to(partial))] = path.stat().st_size
    write_text(partial / STATE_FILE, json.dumps(replace(state, files=files).to_json()))
    if target.exists():  # the same step saved again, after a resume from an older checkpoint
        shutil.rmtree(target)
    publish(partial, target)
    write_text(target.parent / "latest", target.name)


def list_steps(folder: Path) -> list[Path]:
    """Step folders in a checkpoints folder, oldest first; half-written and abandoned ones are not among them."""
    return sorted(
        path for path in folder.glob("step_*") if path.is_dir() and re.fullmatch(r"step_\d{8}", path.name)
    )


def _prune(newest: Path, keep: int) -> None:
    ours = [path for path in list_steps(newest.parent) if path.name <= newest.name]
    for path in ours[:-keep]:
        shutil.rmtree(path)


def abandon_newer(checkpoint: Path) -> None:
    """Set later steps aside when a run goes on from an older one: they belong to a past that is no longer this run's."""
    for path in list_steps(checkpoint.parent):
        if path.name > checkpoint.name:
            path.rename(_free_name(path))
    write_text(checkpoint.parent / "latest", checkpoint.name)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.abandoned{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def load_state(checkpoint: Path) -> TrainState:
    """Read `wands_state.json` and check that every file it lists is there in full.

    Raises:
        CheckpointError: the folder is no checkpoint, or an incomplete one.
    """
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        state = TrainState(**values)
    except OSError:
        raise CheckpointError(
            f"checkpoint={checkpoint} has no {STATE_FILE}; give a folder that wands train saved."
        ) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint={checkpoint}: {STATE_FILE} is damaged ({error}); use an older step."
        ) from None
    for name, size in state.files.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found}"
            raise CheckpointError(
                f"checkpoint={checkpoint}: {name} should have {size} bytes and {what}; use an older step."
            )
    return state


def find_checkpoint(where: Path) -> tuple[Path, TrainState]:
    """Resolve a step folder, a checkpoints folder or a run folder to its newest complete checkpoint.

    A `latest` that is missing, empty or names a damaged folder costs nothing but that step: the newest complete one is taken,
    and the log says so.

    Raises:
        CheckpointError: nothing complete was found.
    """
    if (where / STATE_FILE).is_file():
        return where, load_state(where)
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    steps = list_steps(folder)[::-1]
    latest = folder / "latest"
    named = (
        folder / latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else None
    )
    if named is not None and named in steps:
        steps = [named, *(step for step in steps if step != named)]
    elif steps:
        log.warning("%s does not name a checkpoint; taking the newest complete one", latest)
    for step in steps:
        try:
            return step, load_state(step)
        except CheckpointError as error:
            log.warning("%s", error)
    raise CheckpointError(
        f"checkpoint={where} holds no complete checkpoint; give the output_dir of a run or a step_* folder in it."
    )


def load_checkpoint(engines: Mapping[str, Any], checkpoint: Path) -> None:
    """Put weights, optimizer and learning rate schedule back into fresh engines; every rank must call it.

    What the recipe says today about learning rate, betas, eps and weight decay stays in force: DeepSpeed would silently bring
    back the values of the run that wrote the checkpoint. Unchanged settings leave every bit as it was.

    Args:
        engines: the DeepSpeed engine of each DiT, by its name in the pipeline.
        checkpoint: step folder.

    Raises:
        CheckpointError: DeepSpeed could not use the shards.
    """
    for part, engine in engines.items():
        _load_engine(engine, checkpoint, part)


def _load_engine(engine: Any, checkpoint: Path, part: str) -> None:
    settings = [
        {key: group[key] for key in _SETTINGS if key in group} for group in engine.optimizer.param_groups
    ]
    scheduler = engine.lr_scheduler
    # Else the JSON's, which owns the learning rate.
    ours = isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    base_lrs = list(scheduler.base_lrs) if ours else []
    # A checkpoint of a LoRA holds nothing of the base, which has been loaded from the model's own files.
    strict = all(parameter.requires_grad for parameter in engine.module.parameters())
    try:
        path, _ = engine.load_checkpoint(str(checkpoint), tag=part, load_module_strict=strict)
    except ValueError as error:  # torch's, where groups are cut otherwise: another sub_group_size
        raise CheckpointError(
            f"checkpoint={checkpoint}: DeepSpeed cannot use its shards ({error}); use the DeepSpeed JSON of the run.",
            agreed=True,
        ) from error
    if path is None:
        raise CheckpointError(
            f"checkpoint={checkpoint}: DeepSpeed found no shards for this world; use the DeepSpeed JSON of the run.",
            agreed=True,
        )
    for number, (group, now) in enumerate(zip(engine.optimizer.param_groups, settings, strict=True)):
        group.update(now)
        if ours:
            scheduler.base_lrs[number] = base_lrs[number]
            group["lr"] = base_lrs[number] * scheduler.lr_lambdas[number](scheduler.last_epoch)


def load_exported_state(where: Path, part: str = "transformer", ema: bool = False) -> dict[str, torch.Tensor]:
    """Assemble the full fp32 weights from a checkpoint's shards, in one process, without the world that wrote them.

    Args:
        where: a step folder, or a run folder (its newest complete checkpoint).
        part: which DiT, one of the state's `parts`.
        ema: the average of what is trained instead; what is frozen stays as it is.

    Returns:
        diffusers parameter names -> fp32 CPU tensors; of a LoRA run PEFT's names of the LoRA's own parameters.

    Raises:
        CheckpointError: nothing complete is there, or no average.
    """
    checkpoint, state = find_checkpoint(where)
    if not ema:
        return _load_trained(checkpoint, state, part)
    check_average(checkpoint, state)
    average, model = load_average(checkpoint / part), state.recipe["model"]
    if not (model.get("trainable") or model.get("freeze")):
        return average
    return average | _load_trained(checkpoint, state, part, besides=average)


def check_average(checkpoint: Path, state: TrainState) -> None:
    """Refuse `--ema` where there is no average.

    Raises:
        CheckpointError: the checkpoint was saved without one.
    """
    missing = [part for part in state.parts if not has_average(state, part)]
    if missing:
        raise CheckpointError(
            f"checkpoint={checkpoint} holds no average of its weights ({missing[0]}/{average_file(0)}), because its run had no "
            "ema; leave --ema out, or train with --set ema.decay=0.9999."
        )


def _load_trained(
    checkpoint: Path, state: TrainState, part: str, besides: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The weights themselves, but for those named in `besides`."""
    adapters_only = state.recipe.get("lora") is not None
    weights: dict[str, torch.Tensor] = {}
    if state.zero_stage > 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            lazy = get_fp32_state_dict_from_zero_checkpoint(
                str(checkpoint), tag=part, exclude_frozen_parameters=adapters_only, lazy_mode=True
            )
            weights = {  # frozen ones come as they were kept
                name: tensor.contiguous().to(torch.float32, copy=True)
                for name, tensor in lazy.items()
                if name not in besides
            }
    # DeepSpeed keeps frozen weights apart only from stage 2 on.
    if state.zero_stage == 0 or (state.zero_stage == 1 and not adapters_only):
        module: Mapping[str, torch.Tensor] = torch.load(
            checkpoint / part / "mp_rank_00_model_states.pt",
            map_location="cpu",
            weights_only=False,
            mmap=True,
        )["module"]
        missing = [name for name in module if name not in weights and name not in besides]
        weights |= {name: module[name].to(torch.float32, copy=True) for name in missing}
    return weights
