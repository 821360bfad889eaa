"""Resume: find the checkpoint, check that it fits the run, and restore the engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from wands.errors import CheckpointError, ConfigError
from wands.files import write_text
from wands.model.files.checkpoint_files import Checkpoint, TrainState, find_checkpoint, list_steps
from wands.train.checkpoint import load_checkpoint, with_absolute_paths

# Recipe keys that decide which samples form step n.
_POSITION_KEYS = (
    "train.seed",
    "train.bins_per_step",
    "packing.max_tokens",
    "packing.level_bins",
    "packing.buffer_size",
)
_WEIGHT_KEYS = (
    *("lora.rank", "lora.alpha", "lora.targets", "lora.quantize"),
    *("model.trainable", "model.freeze", "precision.weights"),
)
# A LoRA checkpoint does not contain its base.
_BASE_KEYS = ("model.path", "model.init", "model.merge_loras")
# Values for recipes that are older than the key.
_OLD_DEFAULTS = {"precision.weights": "fp32", "lora.quantize": "none", "optim.name": "adamw"}


def find_resume(output_dir: str, resume: str | None) -> Checkpoint | None:
    """Resolve `--resume` to a checkpoint.

    Args:
        output_dir: the run folder.
        resume: None for a new run, "auto" for the newest checkpoint of the run folder if there is one, or a path.

    Returns:
        The checkpoint, or None for a new run.

    Raises:
        ConfigError: if the run folder has checkpoints that the run would mix with its own.
        CheckpointError: if there is no complete checkpoint.
    """
    folder = Path(output_dir) / "checkpoints"
    has_checkpoints = bool(list_steps(folder))
    if resume is None and has_checkpoints:
        raise ConfigError(
            f"output_dir={output_dir} holds checkpoints of an earlier run; add --resume to continue it, or choose another "
            "output_dir."
        )
    if resume is None or (resume == "auto" and not has_checkpoints):
        return None
    where = Path(output_dir if resume == "auto" else resume)
    if not where.exists():
        raise ConfigError(
            f"--resume {resume} does not exist; write --resume after the recipe, or give a run or step folder."
        )
    checkpoint = find_checkpoint(where)
    name = checkpoint.folder.name
    if ".abandoned" in name:
        raise ConfigError(
            f"--resume {resume} was set aside when its run resumed from an older step; rename the folder to "
            f"{name.partition('.')[0]} to resume from it, after moving that step and all later ones away."
        )
    if has_checkpoints and checkpoint.folder.parent.resolve() != folder.resolve():
        raise ConfigError(
            f"output_dir={output_dir} holds checkpoints of another run than --resume {checkpoint.folder}; choose another "
            "output_dir."
        )
    return checkpoint


def check_resumable(
    state: TrainState,
    *,
    where: str,
    world_size: int,
    zero_stage: int,
    recipe: dict[str, Any],
    parts: list[str],
    transformer_config: dict[str, Any],
    data_fingerprint: str,
) -> None:
    """Check that a run can continue exactly where a checkpoint stopped.

    Args:
        state: of the checkpoint.
        where: the checkpoint's path, for the messages.
        world_size: number of ranks of the run.
        zero_stage: ZeRO stage of the run.
        recipe: the run's recipe as JSON.
        parts: subfolders of the run's trained DiTs.
        transformer_config: diffusers config of the run's DiT.
        data_fingerprint: fingerprint of the run's data.

    Raises:
        CheckpointError: for every difference that would change the run, in one report.
    """
    new_run = "export the checkpoint and start a new run from it"
    problems = []
    if world_size != state.world_size:
        problems.append(
            f"world_size={world_size} must equal the {state.world_size} that wrote the checkpoint; start {state.world_size} "
            f"processes, or {new_run}."
        )
    if zero_stage != state.zero_stage:
        problems.append(
            f"zero_optimization.stage={zero_stage} must equal the {state.zero_stage} that wrote the checkpoint; use the same "
            f"DeepSpeed JSON, or {new_run}."
        )
    if parts != state.parts:
        problems.append(
            f"model.experts={recipe['model']['experts']} must equal the checkpoint's {state.recipe['model'].get('experts')}; "
            f"set it back, or {new_run}."
        )
    names = (*_WEIGHT_KEYS, *(_BASE_KEYS if state.recipe.get("lora") else ()))
    for keys, reason in (
        (_POSITION_KEYS, "or the position in the data is lost"),
        (("optim.name",), "because the checkpoint contains its states"),
        (names, "or the checkpoint's weights would be wrong for this model"),
    ):
        for name in keys:
            value, saved = _recipe_value(recipe, name), _recipe_value(state.recipe, name)
            if value != saved:
                problems.append(
                    f"{name}={value} must equal the checkpoint's {saved}, {reason}; set it back, or {new_run} (a LoRA "
                    "continues with lora.init_from)."
                )
    changed = [
        key
        for key, value in state.transformer_config.items()
        if key[0] != "_" and transformer_config.get(key) != value
    ]
    if changed:
        problems.append(
            f"model.path is another model than the checkpoint's ({', '.join(changed)} differ); set it back to {state.base}."
        )
    if data_fingerprint != state.data_fingerprint:
        problems.append(
            f"the data has changed (fingerprint {data_fingerprint}, checkpoint {state.data_fingerprint}); use the same cache, "
            f"or {new_run}."
        )
    if problems:
        raise CheckpointError([f"--resume {where}: {problem}" for problem in problems])


def _recipe_value(recipe: Mapping[str, Any], name: str) -> Any:
    section, key = name.split(".")
    value = (recipe.get(section) or {}).get(key, _OLD_DEFAULTS.get(name))
    if name == "model.merge_loras":
        value = with_absolute_paths(value or [])
    if name == "model.path" and value:
        return PurePath(value).name  # the folder may have moved
    return value if section in ("train", "packing") else value or None


def restore(
    engines: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    output_dir: Path,
    rank: int,
    log: Callable[[str], None],
) -> None:
    """Load a checkpoint into new engines and set later steps of the same run folder aside; a collective call."""
    if checkpoint is None:
        return
    load_checkpoint(engines, checkpoint.folder)
    log(f"resumed from {checkpoint.folder} at step {checkpoint.state.step}")
    if rank == 0 and checkpoint.folder.parent.resolve() == (output_dir / "checkpoints").resolve():
        _abandon_newer(checkpoint.folder)


def _abandon_newer(checkpoint: Path) -> None:
    """Rename later steps: the resumed run will make these steps again."""
    for path in list_steps(checkpoint.parent):
        if path.name > checkpoint.name:
            names = (path.with_name(f"{path.name}.abandoned{number or ''}") for number in itertools.count())
            path.rename(next(name for name in names if not name.exists()))
    write_text(checkpoint.parent / "latest", checkpoint.name)
