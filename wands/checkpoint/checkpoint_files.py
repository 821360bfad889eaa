"""Read the checkpoints that `wands train` saves: the state file, the trained weights, and their moving average.

Each rank stored fragments, the ranges of flattened parameters of `wands.checkpoint.ranges`. One process can read a checkpoint
that any number of ranks wrote, at any ZeRO stage. A step folder contains one checkpoint, with a folder for each DiT.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import xxhash
from pydantic import AfterValidator, Field, TypeAdapter
from torch import Tensor

from wands.checkpoint.fragment_files import FragmentFiles
from wands.checkpoint.step_folders import STATE_FILE, list_steps, named_step
from wands.config.recipe import LoraConfig, MergeConfig, Recipe
from wands.disk_errors import read_patiently
from wands.errors import CheckpointError, one_line
from wands.files import write_text
from wands.model.files.hashes import find_damaged_files
from wands.model.files.loading import load_weights
from wands.model.files.lora_update import LoraPair, LoraUpdate
from wands.model.lora import MergedLoras, lora_pairs
from wands.values import Count, FileName, Number, Text, check_values
from wands.variants import Expert

log = logging.getLogger(__name__)

EPOCH_FILE = "epoch.json"
"""File of a checkpoint with the plan of its epoch."""
OBJECTIVE_FILE = "objective.safetensors"
"""File of a checkpoint with the tensors of the objective's state, absent for an objective without state."""


def _check_part(part: str) -> str:
    if part not in ("transformer", "transformer_2"):
        raise ValueError("a part must be transformer or transformer_2")
    return part


_Part = Annotated[Text, AfterValidator(_check_part)]


def _check_objective(objective: dict[str, Any]) -> dict[str, Any]:
    if missing := {"name", "version"} - objective.keys():
        raise ValueError(f"the objective has no {missing.pop()}")
    return objective


def _check_ds_config(ds_config: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(ds_config.get("optimizer"), dict | None):
        raise ValueError("the section optimizer is not an object")
    return ds_config


@dataclass(frozen=True)
class TrainState:
    """Training state saved with a checkpoint: the contents of `wands_state.json`.

    The state of random number generators is not saved, because all random numbers are functions of the step.

    Attributes:
        step: number of optimizer steps that the run has made.
        epoch: epoch of the last step, for information only.
        world_size: number of ranks that wrote the ZeRO partitions.
        variant: name of the variant, such as "wan2.1-t2v-1.3b".
        parts: subfolders of the trained DiTs in the diffusers pipeline, such as "transformer".
        transformer_config: diffusers config from which the DiT can be built again, the same for all trained DiTs.
        data_fingerprint: `DataIdentity.fingerprint` of the training data.
        data_summary: `DataIdentity.summary` of the training data, for the model card.
        recipe: the recipe of the run, with all defaults filled in.
        base: `model.path` of the run: the absolute path of a folder, or a Hub id.
        loss: (step, loss) pairs of the run so far, thinned to at most 2,000 points.
        files: maps the name of every file in the checkpoint folder, except `wands_state.json`, to its size in bytes. A checkpoint
            is complete if every listed file has its listed size.
        hashes: maps the name of every file in `files` to its hash (see `hash_file`).
        data_contents: digest of the contents of all training samples, in order.
        base_fingerprint: digest of the base weights of a LoRA run, including `model.merge_loras`; None for a full finetune and
            for random base weights.
        data_start: (epoch, step of the run) at which the run began to use its current training data and packing. This is (0, 0)
            unless the data or the packing changed when the run was resumed.
        attention: "backend" that `attention.backend=auto` chose after a measurement, and the "setup" (GPU and software) of the
            measurement. None without a measurement.
        objective: name and version of the run's objective. Its state is in `OBJECTIVE_FILE`.
        bad_steps: see `BadSteps.state`.
    """

    step: Count
    epoch: Count
    world_size: Annotated[Count, Field(ge=1)]
    zero_stage: Annotated[Count, Field(le=3)]
    variant: Text
    parts: Annotated[list[_Part], Field(min_length=1, max_length=2)]
    transformer_config: dict[str, Any]
    data_fingerprint: Text
    data_summary: dict[str, Any]
    recipe: dict[str, Any]
    base: Text
    loss: list[tuple[Count, Number]]
    files: dict[FileName, Count]
    hashes: dict[FileName, Text]
    data_contents: Text
    base_fingerprint: Text | None
    ds_config: Annotated[dict[str, Any], AfterValidator(_check_ds_config)]
    data_start: tuple[Count, Count]
    objective: Annotated[dict[str, Any], AfterValidator(_check_objective)]
    attention: dict[str, Text] | None = None
    bad_steps: dict[str, list[Count] | list[tuple[Number, Number]]] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Return whether the model has two experts. The run may train only one."""
        return self.recipe["model"]["experts"] is not None or len(self.parts) == 2

    @property
    def lora(self) -> LoraConfig | None:
        """LoRA settings of the run that wrote the checkpoint; None for a full finetune."""
        section = self.recipe["lora"]
        return None if section is None else LoraConfig.model_validate(section)

    def has_average(self, part: str) -> bool:
        return f"{part}/{average_file(0)}" in self.files

    def to_json(self) -> dict[str, Any]:
        """Return the training state for `json.dump`. The entry "hash_of_this_file" is a hash of the other entries."""
        values = asdict(self)
        return {**values, "hash_of_this_file": _hash_of(values)}

    def write(self, folder: Path, hashes: dict[str, str]) -> None:
        """Write this state to `wands_state.json` of a step folder, with the sizes and hashes of the other files there."""
        files = {name: (folder / name).stat().st_size for name in sorted(hashes)}
        write_text(folder / STATE_FILE, json.dumps(replace(self, files=files, hashes=hashes).to_json()))


_STATE = TypeAdapter(TrainState)


class Checkpoint(NamedTuple):
    """A complete checkpoint of one optimizer step: its step folder, and its state."""

    folder: Path
    state: TrainState

    def open_state(self, part: str) -> FragmentFiles:
        """Return the files with the weights and the optimizer state of the DiT `part`, such as "transformer"."""
        return FragmentFiles(self.folder / part, "state")

    def check_average(self) -> None:
        """Raise a CheckpointError if the moving average of a trained DiT is missing."""
        missing = [part for part in self.state.parts if not self.state.has_average(part)]
        if missing:
            raise CheckpointError(
                f"checkpoint={self.folder} contains no moving average (no file {missing[0]}/{average_file(0)}), because the "
                "recipe of the run has no ema section; leave --ema out, or train a new run with --set ema.decay=0.9999."
            )


# ---- folders


def load_state(checkpoint: Path) -> TrainState:
    """Read `wands_state.json` of a step folder, and check the size of every file that it lists.

    Raises:
        CheckpointError: if `wands_state.json` is missing or damaged, or a listed file is missing or has a different size.
    """
    try:
        path = checkpoint / STATE_FILE
        values = json.loads(read_patiently(path, path.read_bytes))
        digest = values.pop("hash_of_this_file", None)
        if digest != _hash_of(values):
            raise ValueError(f"hash_of_this_file={digest} is not the hash of the rest of {STATE_FILE}")
        state = check_values(_STATE, values)
        # Checked, and with the defaults of keys that this version has in addition.
        state = replace(state, recipe=Recipe.model_validate(state.recipe).model_dump(mode="json"))
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint={checkpoint} has no {STATE_FILE}; use a step_* folder that wands train saved."
        ) from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint={checkpoint}: {STATE_FILE} is damaged ({one_line(error)}); use another step_* folder of the run."
        ) from None
    for name, size in state.files.items():
        path = checkpoint / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual}"
            raise CheckpointError(
                f"checkpoint={checkpoint}: {name} should have {size} bytes but {problem}; use another step_* folder of the run."
            )
    return state


def _hash_of(values: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def find_damage(
    checkpoint: Checkpoint, share: tuple[int, int] = (0, 1), names: Collection[str] | None = None
) -> str | None:
    """Compare the files of a checkpoint with their hashes. Return a message about the first damaged file, or None.

    `share` is (rank, number of ranks): the ranks divide the files, or those in `names`, and each reads only its part.

    Raises:
        DiskError: if the file system does not read a file.
    """
    folder, state = checkpoint
    hashes = {name: value for name, value in state.hashes.items() if names is None or name in names}
    damaged = find_damaged_files(folder, hashes, share, f"its hash differs from {STATE_FILE}")
    texts = (f"{name} is damaged ({reason}); use another step_* folder." for name, reason in damaged)
    return next((f"checkpoint={folder}: {text}" for text in texts), None)


def find_checkpoint(
    where: Path, *, verify: bool = False, damaged: Mapping[Path, str] = MappingProxyType({})
) -> Checkpoint:
    """Find a usable checkpoint, and read its state.

    A checkpoint is usable if all of its files have the sizes (with `verify`, also the hashes) in `wands_state.json`, and its step
    folder is not in `damaged`. Without `verify`, only the hash of `epoch.json` is compared, because a resumed run reads it first.
    The file `latest` of a run names the checkpoint to return, or the file `next`, if the run was killed just before it replaced
    `latest`. If they name no usable checkpoint, the newest usable one is returned, with a warning.

    Args:
        where: a step folder, a file that names one (`best` or `latest`), a run folder, or the folder `checkpoints` of a run.
        verify: whether to compare the hash of every file.
        damaged: maps each step folder that is known to be damaged to an error message.

    Raises:
        CheckpointError: if `where` contains no usable checkpoint.
    """
    if where.name in ("best", "latest") and where.is_file():
        where = where.parent / read_patiently(where, where.read_bytes).decode(errors="replace").strip()
    if (where / STATE_FILE).is_file():
        return _open_step(where, verify, damaged)
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    steps = list_steps(folder)[::-1]
    if first := named_step(folder):
        steps.sort(key=lambda step: step != first)  # the named step first, then from new to old
    elif steps:
        log.warning(
            "%s is missing or names no checkpoint; using the newest complete checkpoint", folder / "latest"
        )
    for step in steps:
        try:
            return _open_step(step, verify, damaged)
        except CheckpointError as error:
            log.warning("%s", error)
    raise CheckpointError(
        f"checkpoint={where} contains no complete checkpoint; use the output_dir of a run, or one of its step_* folders."
    )


def _open_step(folder: Path, verify: bool, damaged: Mapping[Path, str]) -> Checkpoint:
    checkpoint = Checkpoint(folder, load_state(folder))
    problem = damaged.get(folder) or find_damage(checkpoint, names=None if verify else (EPOCH_FILE,))
    if problem:
        raise CheckpointError(problem)
    return checkpoint


# ---- weights


def load_exported_state(where: Path, part: str = "transformer", ema: bool = False) -> dict[str, Tensor]:
    """Read the fp32 CPU weights of a trained DiT from a step folder, or from the newest complete checkpoint of a run folder.

    The names are those of diffusers for a full finetune; for a LoRA run, PEFT's, with only the LoRA. `part` is one of
    `TrainState.parts`. With `ema`, trained weights have their moving average, and frozen weights keep their values.

    Raises:
        CheckpointError: if there is no complete checkpoint, or `ema` is set and the checkpoint contains no moving average.
    """
    checkpoint = find_checkpoint(where)
    average: dict[str, Tensor] = {}
    if ema:
        checkpoint.check_average()
        average = load_average(checkpoint.folder / part)
    files = checkpoint.open_state(part)
    return average | files.join("fragments", "/master", average) | files.join("frozen", "/frozen", average)


def load_lora_of(where: Path, part: str = "transformer", ema: bool = False) -> dict[str, LoraPair]:
    """Read the pair of LoRA matrices of each adapted module of a DiT. The arguments are those of `load_exported_state`.

    Raises:
        CheckpointError: if there is no complete checkpoint, or `ema` is set and the checkpoint contains no moving average.
    """
    lora = find_checkpoint(where).state.lora
    assert lora is not None, f"{where} belongs to a run without LoRA"
    return lora_pairs(load_exported_state(where, part, ema), lora)


def load_full_weights(
    where: Path,
    part: str = "transformer",
    base: str | Path | None = None,
    ema: bool = False,
    base_key: str = "--base",
) -> dict[str, Tensor]:
    """Return all weights of a trained DiT by their diffusers names, as fp32 CPU tensors.

    For a LoRA run, these are the weights of the base model with the trained LoRA and those of `model.merge_loras` merged in.
    `base` is its base model (None for the `model.path` of the run), which the user chose with the option `base_key`. The other
    arguments are those of `load_exported_state`.

    Raises:
        CheckpointError: if there is no complete checkpoint, the base model is damaged, or `ema` is set and the checkpoint
            contains no moving average.
        ConfigError: if the base model does not exist, or a LoRA does not fit the base model.
    """
    state = find_checkpoint(where).state
    if state.lora is None:
        return load_exported_state(where, part, ema)
    expert = {"transformer": "high", "transformer_2": "low"}[part] if state.has_experts else ""
    model = state.recipe["model"]
    merges = [MergeConfig.model_validate(item) for item in model["merge_loras"]]
    in_base = MergedLoras.load(merges, Expert(expert, part, (0.0, 1.0)), model["experts"])
    trained = MergedLoras([(1.0, LoraUpdate(load_lora_of(where, part, ema)))])

    def merge(name: str, weight: Tensor) -> Tensor:
        return trained(name, in_base(name, weight))

    init, key = ("pretrained", base_key) if base else (model["init"], "model.path")
    seed = state.recipe["train"]["seed"]
    return load_weights(base or state.base, part, init=init, seed=seed, key=key, merge=merge)


# ---- moving average


def average_file(rank: int) -> str:
    """Return the name of the file with a rank's part of the moving average."""
    return f"ema_rank_{rank:05d}.safetensors"


def state_file(rank: int) -> str:
    """Return the name of the file with a rank's part of the weights and the optimizer state."""
    return f"state_rank_{rank:05d}.safetensors"


def load_average(folder: Path) -> dict[str, Tensor]:
    """Return the moving average of each trained parameter from a DiT folder, as fp32 CPU tensors. One file is open at a time.

    Raises:
        CheckpointError: if a file cannot be read, or the fragments do not cover every element of a parameter.
    """
    return FragmentFiles(folder, "ema").join("fragments", "")
