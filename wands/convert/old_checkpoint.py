"""Convert checkpoints of earlier versions of wands, which contain DeepSpeed's pickles, to the format without pickles.

Opening a pickle can run any code. `wands convert RUN --trust-pickle` therefore runs this module in a subprocess, and no
other module of wands opens pickles of DeepSpeed.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wands.checkpoint.checkpoint_files import TrainState, load_state, state_file
from wands.checkpoint.engine_state import COUNTERS, MOMENTUM, Fragment, flat_momentum, state_tensors
from wands.checkpoint.step_folders import list_steps
from wands.config.deepspeed import offloads_optimizer
from wands.config.optimizer_kinds import is_hidden_matrix
from wands.config.recipe import ModelConfig
from wands.errors import CheckpointError
from wands.files import publish, sync
from wands.model.files.tensor_files import hash_file, write_safetensors
from wands.model.freezing import is_trained


def convert_run(run: str) -> str:
    """Convert all pickled checkpoints of a run in a subprocess. Return one line of text for each converted checkpoint.

    Args:
        run: run folder, its folder `checkpoints`, or a step folder (folder of one checkpoint).

    Raises:
        CheckpointError: if there is no pickled checkpoint, or a checkpoint cannot be converted.
    """
    done = subprocess.run([sys.executable, "-m", __name__, run], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise CheckpointError(
            f"SOURCE={run} cannot be converted: {reason.rstrip('.')}. No pickle was changed. "
            "Fix the cause, and run the command again."
        )
    return done.stdout.strip()


def main(run: Path) -> None:
    """Convert the pickled checkpoints of a run, and write one line about each converted checkpoint to stdout.

    The old checkpoint folder `step_*` with the pickles is renamed to `step_*.pickles`. The converted checkpoint is a new
    folder with the old name `step_*`.

    Args:
        run: run folder, its folder `checkpoints`, or a step folder (folder of one checkpoint).

    Raises:
        CheckpointError: if there is no pickled checkpoint, or a checkpoint lacks files.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    for old in folder.glob("step_*.pickles"):
        if not old.with_suffix("").exists():  # the conversion was killed
            old.rename(old.with_suffix(""))
    steps = list_steps(run)
    found = [(step, state) for step in steps if (state := load_state(step)).files and not state.hashes]
    if not found:
        raise CheckpointError(
            f"{run} contains no checkpoint with pickles, so there is nothing to convert. Use the checkpoints as they are."
        )
    for step, state in found:
        unfinished = step.with_name(f"{step.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        _convert_step(step, state, unfinished)
        old = step.with_name(f"{step.name}.pickles")
        step.rename(old)
        publish(unfinished, step)
        sys.stdout.write(f"converted {step}; you can delete {old}\n")


def _convert_step(step: Path, state: TrainState, out: Path) -> None:
    hashes = {}
    for part in state.parts:
        (out / part).mkdir(parents=True)
        starts: dict[str, int] = {}  # values of each parameter that lower ranks have
        for rank in range(state.world_size if state.zero_stage else 1):
            tensors, values = _read_rank(step / part, state, rank, starts)
            name = f"{part}/{state_file(rank)}"
            hashes[name] = write_safetensors(out / name, tensors, {"wands_state": json.dumps(values)})
    for name in state.files:
        if name.endswith(".safetensors"):  # the moving average
            shutil.copyfile(step / name, out / name)
            hashes[name] = hash_file(out / name)
    for name in hashes:
        sync(out / name)
    state.write(out, hashes)


def _read_rank(folder: Path, state: TrainState, rank: int, starts: dict[str, int]) -> Any:
    """Read the pickles of a rank, and return the contents of the new file that replaces these pickles.

    DeepSpeed 0.19 defines the layout of the pickles in stage_1_and_2.py, stage3.py and zero_to_fp32.py.

    Args:
        folder: folder with the pickles of one DiT.
        state: training state of the checkpoint.
        rank: rank whose pickles are read.
        starts: maps each parameter to the number of its elements that the ranks below `rank` store. The function adds the
            number of elements that `rank` stores. Used only at ZeRO-1 and ZeRO-2.

    Returns:
        (tensors, values): the tensors of the new file, and a dict with the state that is not a tensor (see
        `engine_tensors`).
    """
    stage = state.zero_stage
    prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
    model = _load(folder, f"{prefix}mp_rank_00_model_states.pt")
    optim_states = f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    zero = _load(folder, optim_states)["optimizer_state_dict"] if stage else {}
    module = model["module"] if stage != 3 else {}
    model_config = ModelConfig.model_validate(state.recipe["model"])
    trains = partial(is_trained, trainable=model_config.trainable, frozen=model_config.freeze)
    if stage == 3:
        flats, optimizer = zero["fp32_flat_groups"], zero["optimizer_state_dict"]
        fragments = _partitions(model["param_shapes"], flats, rank, state.world_size)
    elif stage:
        flats, optimizer = zero["single_partition_of_fp32_groups"], zero["base_optimizer_state"]
        shapes = {name: list(shape) for group in model["param_shapes"] for name, shape in group.items()}
        fragments = []
        for number, slices in enumerate(zero["param_slice_mappings"]):
            for name, place in slices.items():
                start = starts.get(name, 0)
                starts[name] = start + place.numel
                rest = place.numel, shapes[name], flats[number], place.start, number
                fragments.append(Fragment(name, start, *rest))
    else:
        names = _in_optimizer_order([name for name in module if trains(name)], state, module)
        flats, optimizer = [module[name] for name in names], model["optimizer"]
        fragments = [
            Fragment(name, 0, value.numel(), list(value.shape), value, 0, number)
            for number, (name, value) in enumerate(zip(names, flats, strict=True))
        ]
    frozen = []
    if state.recipe.get("lora") is None and (stage == 3 or rank == 0):
        if stage >= 2:
            stored, shapes = model["frozen_param_fragments"], model["frozen_param_shapes"]
        else:
            stored, shapes = {name: value for name, value in module.items() if not trains(name)}, {}
        for name, value in stored.items():
            start, shape = value.numel() * rank if stage == 3 else 0, list(shapes.get(name, value.shape))
            numel = max(min(value.numel(), math.prod(shape) - start), 0)
            frozen.append(Fragment(name, start, numel, shape, value))
    if stage in (1, 2) and not (state.ds_config and offloads_optimizer(state.ds_config)):
        for number, group in enumerate(optimizer["param_groups"]):
            values, own = optimizer["state"].get(number, {}), [f for f in fragments if f.flat == number]
            if group.get("use_muon") and MOMENTUM in values:
                optimizer["state"][number] = flat_momentum(values, own, flats[number])
    tensors, values = state_tensors(fragments, frozen, flats, optimizer)
    counters = {name: model[name] for name in COUNTERS}
    return tensors, values | {"scheduler": model["lr_scheduler"], "counters": counters}


def _load(folder: Path, pattern: str) -> Any:
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise CheckpointError(f"{folder} must contain 1 file {pattern}, not {len(paths)}. Copy it again.")
    return torch.load(paths[0], map_location="cpu", weights_only=False)


def _partitions(
    shapes: list[Mapping[str, Any]], flats: list[torch.Tensor], rank: int, world_size: int
) -> list[Fragment]:
    """Return the fragments (parts of parameters) that a rank stores at ZeRO-3.

    At ZeRO-3, each parameter is padded and divided into equal parts, one for each rank.

    Args:
        shapes: for each parameter group, the shapes of its parameters by name.
        flats: flat tensors that together contain this rank's values of all parameters, in the order of `shapes`.
        rank: rank whose fragments are returned.
        world_size: number of ranks.
    """
    fragments, number, offset = [], 0, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        partition = math.ceil(math.prod(shape) / world_size)
        if offset == flats[number].numel():
            number, offset = number + 1, 0
        start = partition * rank
        numel = max(min(partition, math.prod(shape) - start), 0)
        if numel:
            fragments.append(Fragment(name, start, numel, list(shape), flats[number], offset, number))
        offset += partition
    return fragments


def _in_optimizer_order(names: list[str], state: TrainState, module: Mapping[str, Any]) -> list[str]:
    if state.recipe["optim"].get("name") != "muon":
        return names
    shapes: dict[tuple[int, ...], list[str]] = {}
    others: list[str] = []
    for name in names:
        shape = tuple(module[name].shape)
        (shapes.setdefault(shape, []) if is_hidden_matrix(name, shape) else others).append(name)
    return [*others, *(name for group in shapes.values() for name in group)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
