"""`wands export`: a training checkpoint becomes a complete diffusers pipeline folder, proven by loading it again."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from wands import __version__
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.export.lora_weights import write_lora
from wands.export.model_card import LOSS_FILE, MARKER, RECORD_FILE
from wands.files import publish, write_text
from wands.model.files.hub import fetch_model
from wands.model.files.official import DIT_STEM
from wands.model.files.tensor_files import LazyTensor, write_sharded
from wands.train.checkpoint import check_average, find_checkpoint
from wands.train.checkpoint_weights import load_full_weights, lora_of
from wands.train.state import TrainState
from wands.variants import TEXT_LEN, DiTShape

log = logging.getLogger(__name__)

EXPORT_FILE = RECORD_FILE
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export(
    checkpoint: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str = "fp32",
    max_shard_size: str = "5GB",
    link: bool = True,
    merge: bool = False,
    ema: bool = False,
) -> Path:
    """Write the pipeline folder of a checkpoint, or of a LoRA run the LoRA's files.

    An earlier export keeps its name until the new one is whole. Its ``samples`` and a ``README.md`` that wands
    did not write go over into the new one.

    Args:
        checkpoint: a step folder, or a run folder (its newest complete checkpoint).
        out: folder to create; an existing one must be empty or an earlier export.
        base: pipeline folder or Hub id whose other parts are taken; None takes the run's own `model.path`.
        dtype: "fp32" or "bf16" weights.
        max_shard_size: largest safetensors file, such as "5GB"; KB, MB, GB and TB are powers of 1000.
        link: hard-link the base's files where the file system can, instead of copying.
        merge: of a LoRA run, write the whole pipeline with the LoRA merged into its weights.
        ema: write the average of what was trained instead of its last values.

    Returns:
        `out`, absolute.

    Raises:
        CheckpointError: incomplete checkpoint, or one without an average, or the reloaded weights differ.
        ConfigError: `out` holds something else or cannot be replaced, the base is another architecture, or
            `max_shard_size` is no size.
        WandsError: `out` cannot be written; nothing is left beside it.
    """
    max_shard_bytes = _bytes_of(max_shard_size)
    step_dir, state = find_checkpoint(checkpoint)
    out = out.resolve()
    partial, old = (out.with_name(f"{out.name}.{suffix}") for suffix in ("tmp", "old"))
    _check_out(out, old)
    lora = lora_of(state)
    if lora is not None and not merge and (base is not None or not link):
        raise ConfigError(
            "--base and --copy are for whole pipelines, and this run trained a LoRA; leave them out or add --merge."
        )
    if merge and lora is None:
        raise ConfigError(f"--merge is for LoRA runs, and {checkpoint} is none; leave it out.")
    if ema:
        check_average(step_dir, state)
    if base is None and (lora is None or merge):
        _check_own_base(state)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"--out {out} needs the name {partial}; delete that folder if no export is running and nothing of yours is in it."
        ) from None
    except OSError as error:
        raise WandsError(f"--out {out} cannot be made ({error.strerror}); choose another folder.") from error
    try:
        if lora is None or merge:
            _write_pipeline(step_dir, state, base, partial, _DTYPES[dtype], max_shard_bytes, link, ema)
        else:
            write_lora(step_dir, state, lora, partial, _DTYPES[dtype], ema)
        record = _record(step_dir, state, base or state.base, dtype, ema)
        write_text(partial / EXPORT_FILE, json.dumps(record, indent=2))
        _carry_over(out, partial)
        _put_in_place(partial, out, old)
    except (OSError, SafetensorError) as error:
        raise WandsError(
            f"--out {out} cannot be written ({_reason(error)}); free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _write_pipeline(
    step_dir: Path,
    state: TrainState,
    base: str | None,
    partial: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    link: bool,
    ema: bool,
) -> None:
    """The base's parts, and in the place of those that were trained their new weights, loaded again as a proof."""
    ignore = [] if lora_of(state) else [f"{part}/*.safetensors" for part in state.parts]
    base_dir = fetch_model(base or state.base, key="--base", ignore=ignore)
    _check_base(base_dir, state)
    copy = _link_or_copy if link else shutil.copy2
    shutil.copytree(base_dir, partial, ignore=_skipping(state.parts), copy_function=copy, dirs_exist_ok=True)
    for part in state.parts:
        weights, folder = load_full_weights(step_dir, part, base, ema), partial / part
        _save_transformer(weights, state.transformer_config, folder, dtype, max_shard_bytes)
        _verify(weights, folder, dtype)


def _bytes_of(size: str) -> int:
    found = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)\s*([KMGT]B)", size.strip(), re.IGNORECASE)
    num_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if num_bytes < 1:
        raise ConfigError(
            f"--max-shard-size {size} must be a number above 0 and a unit of KB, MB, GB or TB; give one such as 5GB."
        )
    return num_bytes


def _check_out(out: Path, old: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; choose a folder.")
    if os.path.ismount(out):
        raise ConfigError(
            f"--out {out} is a mount point, which the finished folder cannot replace; give a folder in it, such as "
            f"{out / 'export'}."
        )
    if out.exists() and any(out.iterdir()) and not (out / EXPORT_FILE).is_file():
        raise ConfigError(f"--out {out} holds files that are no export of wands; choose an empty folder.")
    if old.exists():
        raise ConfigError(
            f"--out {out} needs the name {old}, which an export that was killed may have left; delete that folder, "
            f"or rename it to {out.name} if that is missing."
        )


def _check_own_base(state: TrainState) -> None:
    """An older checkpoint has `model.path` as it was typed: from another folder nobody knows whether it is a Hub id."""
    if state.base_on_hub is None and state.base.startswith(".") and not Path(state.base).is_dir():
        raise ConfigError(
            f"--base is not given, and the run's model.path={Path(state.base)} is no folder from here and perhaps no Hub id "
            "(older checkpoints do not say); give --base with that folder, or with the id if it is one."
        )


def _carry_over(earlier: Path, partial: Path) -> None:
    """Take along what people added: samples, and a README.md of their own with the plot that it may show."""
    if (earlier / "samples").is_dir():
        shutil.copytree(earlier / "samples", partial / "samples", copy_function=_link_or_copy)
    card = earlier / "README.md"
    if card.is_file() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        for path in (card, earlier / LOSS_FILE):
            if path.is_file():
                _link_or_copy(str(path), str(partial / path.name))


def _put_in_place(partial: Path, out: Path, old: Path) -> None:
    """Swap by two renames: whenever the process dies, a whole export lies under `out` or `old`."""
    if not out.exists():
        publish(partial, out)
        return
    os.replace(out, old)
    try:
        publish(partial, out)
    except OSError:
        if not out.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old)


def _reason(error: Exception) -> str:
    """Why a write failed, on one line; copytree gathers the reasons of all its files."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _skipping(parts: Sequence[str]) -> Callable[[str, list[str]], set[str]]:
    """For copytree: the base's own weights of `parts`, its repository card and hidden files stay behind."""
    replaced = {*parts, "README.md", EXPORT_FILE, LOSS_FILE, "samples"}

    def skip(folder: str, names: list[str]) -> set[str]:
        top = (Path(folder) / "model_index.json").is_file()
        return {name for name in names if name.startswith(".") or (top and name in replaced)}

    return skip


def _link_or_copy(source: str, target: str) -> str:
    real = os.path.realpath(source)  # a Hub cache holds links into its blobs
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
    return target


def _check_base(base_dir: Path, state: TrainState) -> None:
    if not (base_dir / "model_index.json").is_file():
        raise ConfigError(
            f"--base {base_dir} has no model_index.json; give --base with a diffusers pipeline folder or Hub id (wands convert "
            "makes one of an official repository)."
        )
    ours = {k: v for k, v in state.transformer_config.items() if not k.startswith("_")}
    for part in state.parts:
        config = _read_object(base_dir, base_dir / part / "config.json")
        differing = [key for key, value in ours.items() if key in config and config[key] != value]
        if differing:
            what = ", ".join(f"{key}={config[key]} (checkpoint {ours[key]})" for key in differing)
            raise ConfigError(
                f"--base {base_dir} is another model: {what}; give the pipeline that the run started from."
            )


def _read_object(base_dir: Path, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--base {base_dir}: {path} cannot be read ({reason}); give a whole diffusers pipeline."
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"--base {base_dir}: {path} holds no JSON object; give a whole diffusers pipeline.")
    return config


def _save_transformer(
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(config)
    expected = set(dict(model.named_parameters()))
    if expected != set(weights):
        missing, extra = sorted(expected - set(weights)), sorted(set(weights) - expected)
        raise CheckpointError(
            f"checkpoint: parameters missing {missing[:3]}, unexpected {extra[:3]}; it belongs to another model."
        )
    # diffusers keeps these in fp32 when it loads bf16 weights; storing them so loses nothing.
    keep = tuple(model._keep_in_fp32_modules)
    entries = []
    for name, tensor in weights.items():
        stored = tensor.dtype if any(part in name.split(".") for part in keep) else dtype
        entries.append(LazyTensor(name, tuple(tensor.shape), stored, functools.partial(tensor.to, stored)))
    folder.mkdir()
    model.save_config(folder)
    # Not save_pretrained, whose files only their owner may read, whatever the umask is.
    write_sharded(folder, DIT_STEM, entries, max_shard_bytes)


def _verify(weights: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Load what was written with stock diffusers, compare every tensor, and run one forward."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(folder, dtype=dtype)
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.detach(), weights[name].to(parameter.dtype)):
            raise CheckpointError(
                f"export: {name} read back from {folder} differs from the checkpoint; write to another disk."
            )
    shape = DiTShape.from_config(model.config)
    image = torch.randn(1, shape.image_len, shape.image_dim, dtype=dtype) if shape.image_dim else None
    if image is not None and shape.image_positions:  # diffusers takes the two pictures of a sample one by one
        image = image.unflatten(1, (2, -1)).flatten(0, 1)
    with torch.no_grad():
        output = model(
            hidden_states=torch.randn(1, shape.in_channels, 1, 4, 4, dtype=dtype),
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=torch.randn(1, TEXT_LEN, shape.text_dim, dtype=dtype),
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
    if not torch.isfinite(output).all():
        raise CheckpointError(
            "export: a forward of the exported model is not finite; the run has diverged, export an older step."
        )


def _record(step_dir: Path, state: TrainState, base: str, dtype: str, ema: bool) -> dict[str, Any]:
    averaged = {"ema": state.recipe["ema"]} if ema else {}
    return {
        "wands_version": __version__,
        "base": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "step": state.step,
        "checkpoint": step_dir.name,
        "variant": state.variant,
        "parts": state.parts,
        "dtype": dtype,
        **averaged,
        "recipe": state.recipe,
        "data": {**state.data_summary, "fingerprint": state.data_fingerprint},
        "loss": state.loss,
    }
