"""Resume a run: find the checkpoint, check that the checkpoint fits the run, and restore the engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from safetensors.torch import load

from wands.checkpoint.checkpoint_files import OBJECTIVE_FILE, Checkpoint, TrainState, find_checkpoint
from wands.checkpoint.engine_state import load_engine
from wands.checkpoint.old_steps import set_aside
from wands.checkpoint.step_folders import list_steps
from wands.disk_errors import read_patiently
from wands.distributed.consistency import shorten_value
from wands.distributed.engine_protocol import Engines
from wands.errors import CheckpointError, ConfigError, failed_rules, one_line
from wands.files import differences, write_text
from wands.objectives.objective import Objective
from wands.planning.weights import differing_keys
from wands.texts import Log
from wands.variants import check_extra

# Maps a reason to the recipe keys that a resumed run may not change for this reason. The first keys decide which samples
# form step n.
_FIXED_KEYS = {
    "because the key decides which samples a step contains": (
        *("train.seed", "train.bins_per_step"),
        *("packing.max_tokens", "packing.level_bins", "packing.buffer_size", "packing.plan"),
    ),
    "because the checkpoint contains the states of this optimizer": ("optim.name", "optim.decay_norms"),
    "because the checkpoint's weights depend on this key": (
        *("lora.rank", "lora.alpha", "lora.targets", "lora.quantize"),
        *("model.trainable", "model.freeze", "precision.weights"),
    ),
}
# Keys that a resumed LoRA run may not change, because a LoRA checkpoint does not contain the base weights. Checkpoints with a
# fingerprint of the base weights allow other paths.
_BASE_KEYS = ("model.init", "model.path", "model.merge_loras")


def find_resume(
    output_dir: str, resume: str | None, damaged: Mapping[Path, str] = MappingProxyType({})
) -> Checkpoint | None:
    """Return the checkpoint that the option `--resume` names; None for a new run.

    "auto" is the newest checkpoint of the run folder, or a new run without one. In a run folder, checkpoints in `damaged` are
    skipped.

    Raises:
        ConfigError: if the path does not exist, or is a checkpoint that was renamed to `*.abandoned`. Also if the run folder
            contains checkpoints, and `resume` is None or names a checkpoint of another run folder.
        CheckpointError: if the folder has no complete checkpoint. An empty run folder is no error with "auto".
    """
    folder = Path(output_dir) / "checkpoints"
    has_checkpoints = bool(list_steps(folder))
    if resume is None and has_checkpoints:
        raise ConfigError(
            f"output_dir={output_dir} contains checkpoints of an earlier run; add --resume to continue that run, or set another "
            "output_dir."
        )
    if resume is None or (resume == "auto" and not has_checkpoints):
        return None
    where = Path(output_dir if resume == "auto" else resume)
    if not where.exists():
        raise ConfigError(
            f"--resume {resume} does not exist; pass a run folder or a step folder. If {resume} is the recipe, write {resume} "
            "before --resume."
        )
    checkpoint = find_checkpoint(where, damaged=damaged)
    name = checkpoint.folder.name
    if ".abandoned" in name:
        raise ConfigError(
            f"--resume {resume} was abandoned when the run resumed from an older step; to resume from {resume}, move the folder "
            f"{name.partition('.')[0]} and all later steps away, then rename {name} to {name.partition('.')[0]}."
        )
    if has_checkpoints and checkpoint.folder.parent.resolve() != folder.resolve():
        raise ConfigError(
            f"output_dir={output_dir} contains checkpoints of a different run than --resume {checkpoint.folder}; set another "
            "output_dir."
        )
    return checkpoint


def check_resumable(saved: TrainState, current: TrainState, label: str) -> None:
    """Check that a run with the `build_state` result `current` can resume from a checkpoint. The steps are not compared.

    Raises:
        CheckpointError: if the checkpoint has no optimizer states, or settings differ that must not. `label` begins each message.
    """
    try:
        check_extra(saved.transformer_config, current.transformer_config, "the checkpoint")
    except ValueError as error:
        raise CheckpointError(f"{label}: {error}.") from None
    new_run = "export the checkpoint and start a new run from it"
    changed = differing_keys(saved.transformer_config, current.transformer_config)
    same_keys = current.data_fingerprint == saved.data_fingerprint
    knows_base = saved.base_fingerprint is not None
    types = [(state.ds_config.get("optimizer") or {}).get("type") for state in (current, saved)]
    objectives = ["{name} (version {version})".format(**state.objective) for state in (current, saved)]
    experts, saved_experts = (state.recipe["model"]["experts"] for state in (current, saved))
    rules: dict[str, object] = {
        "the checkpoint contains no optimizer states, because checkpoint.weights_only was true; use another checkpoint, or "
        f"{new_run}.": saved.recipe["checkpoint"]["weights_only"],
        f"model.experts={experts} must equal the checkpoint's value {saved_experts}; restore that value, or "
        f"{new_run}.": current.parts != saved.parts,
        f"model.path names a model with a different {', '.join(changed)} than the checkpoint's model; set model.path to "
        f"{saved.base}.": changed,
        "the training samples have the same names as the checkpoint's samples but different contents, so they were encoded "
        f"again; use the cache of the checkpoint's run, or {new_run}.": same_keys
        and current.data_contents != saved.data_contents,
        f"model.path={current.recipe['model']['path']} (with model.merge_loras) contains different weights than the base "
        f"of the checkpoint's LoRA; set model.path to {saved.base}.": knows_base
        and current.base_fingerprint != saved.base_fingerprint,
        f"the objective {objectives[0]} must equal the checkpoint's {objectives[1]}; pass that objective, or "
        f"{new_run}.": objectives[0] != objectives[1],
        f"the optimizer {types[0]} must equal the checkpoint's {types[1]}; use the DeepSpeed JSON and the plugin of the "
        f"checkpoint's run, or {new_run}.": None not in types and types[0] != types[1],
    }
    fixed_keys = [(name, reason) for reason, names in _FIXED_KEYS.items() for name in names]
    if saved.recipe["lora"]:
        keys = _BASE_KEYS[: 1 if knows_base else None]
        fixed_keys += [(name, "because a LoRA checkpoint contains no base weights") for name in keys]
    for name, reason in fixed_keys:
        value = _recipe_value(current.recipe, name)
        saved_value = _recipe_value(saved.recipe, name)
        rule = f"{name}={value} must equal the checkpoint's value {saved_value}, {reason}; restore that value, or {new_run}"
        rules[f"{rule} (for a LoRA, set lora.init_from)."] = value != saved_value
    if problems := failed_rules(rules):
        raise CheckpointError([f"{label}: {difference_and_fix}" for difference_and_fix in problems])


def list_changes(saved: TrainState, current: TrainState) -> list[str]:
    """Return the settings that a resumed run changes, as texts such as "optim.lr=0.1 (checkpoint: 0.2)"."""
    changes = differences(current.recipe, saved.recipe)
    changes += differences(current.ds_config, saved.ds_config, "DeepSpeed")
    if current.world_size != saved.world_size:
        changes.insert(0, ("number of processes", current.world_size, saved.world_size))
    return [f"{key}={shorten_value(new)} (checkpoint: {shorten_value(old)})" for key, new, old in changes]


def _recipe_value(recipe: Mapping[str, Any], name: str) -> Any:
    section, key = name.split(".")
    value = recipe[section][key] if recipe[section] else None
    if name == "model.path" and value:
        return PurePath(value).name  # the folder may have moved
    # In train, packing and optim, 0 is a value. In model, precision and lora, 0, [] and None all mean "not set".
    return value if section in ("train", "packing", "optim") else value or None


def restore(checkpoint: Checkpoint, output_dir: Path, engines: Engines, rank: int, log: Log) -> float | None:
    """Load a checkpoint into new engines. Every rank must call this function.

    If the checkpoint is in the run folder, rank 0 also renames the folders of all later steps, which the run makes again, to
    `*.abandoned`. Return the learning rate of the next step in the schedule of the checkpoint's run, or None if a DeepSpeed JSON
    sets the schedule.
    """
    lr = None
    for part, engine in engines.items():
        files = checkpoint.open_state(part)
        load_engine(engine, files)
        schedule = next(iter(files.headers.values()))["scheduler"] or {}
        lr = schedule.get("_last_lr", [None])[0]
    log(f"resumed from {checkpoint.folder} at step {checkpoint.state.step}")
    steps = checkpoint.folder.parent
    if rank != 0 or steps.resolve() != (output_dir / "checkpoints").resolve():
        return lr
    for path in list_steps(steps):
        if path.name > checkpoint.folder.name:  # the resumed run will make this step again
            set_aside(path)
    write_text(steps / "latest", checkpoint.folder.name)
    best = steps / "best"
    if best.is_file() and not (steps / best.read_text()).is_dir():
        best.unlink()
    return lr


def check_objective(checkpoint: Checkpoint, objective: Objective) -> None:
    """Raise a ConfigError if a checkpoint was trained with another objective."""
    saved = checkpoint.state.objective
    if saved != {"name": objective.name, "version": objective.version}:
        raise ConfigError(
            f"checkpoint={checkpoint.folder} was trained with the objective {saved['name']} (version {saved['version']}), not "
            f"with {objective.name} (version {objective.version}); add --import with the code of that objective."
        )


def restore_objective(checkpoint: Checkpoint, objective: Objective) -> None:
    """Load the objective's state. `check_resumable` has compared the names and versions.

    Raises:
        CheckpointError: if the objective does not accept the state.
    """
    path = checkpoint.folder / OBJECTIVE_FILE
    is_saved = OBJECTIVE_FILE in checkpoint.state.files
    state = read_patiently(path, lambda: load(path.read_bytes())) if is_saved else {}
    try:
        objective.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"--resume {checkpoint.folder}: the objective {objective.name} does not accept its state ({one_line(error)}); resume "
            "with the code of the objective that wrote the checkpoint, or raise its version and start a new run."
        ) from error
