"""`wands export`: write a training checkpoint as a diffusers pipeline folder, or as LoRA files."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from wands.checkpoint.checkpoint_files import TrainState, find_checkpoint, load_full_weights, load_lora_of
from wands.config.options import ExportOptions
from wands.errors import ConfigError
from wands.export.base_pipeline import carry_over, check_base, copy_base
from wands.export.export_record import RECORD_FILE
from wands.export.model_card import STRIPS_FILE
from wands.export.trained_weights import DTYPES, write_lora, write_transformer
from wands.files import atomic_folder, write_text
from wands.model.files.hashes import check_files, write_hashes
from wands.model.files.hub import fetch_model
from wands.model.files.loading import load_ignored
from wands.model.files.lora_experts import EXPERT_NAMES
from wands.report.run_data import read_run, sample_strips
from wands.run.append_log import marked_steps
from wands.sampling.contact_sheet import SheetRow, save_contact_sheet
from wands.version import __version__

log = logging.getLogger(__name__)


def export(options: ExportOptions) -> Path:
    """Write a checkpoint as a diffusers pipeline folder, or as LoRA files for a LoRA run without --merge, and return the folder.

    A complete new export replaces an earlier one in --out, but keeps its ``samples`` and the user's ``README.md``.

    Raises:
        CheckpointError: if the checkpoint or the base is damaged, written weights differ, or --ema is set without an average.
        ConfigError: if the options contradict each other or the checkpoint, --out cannot be replaced, or the base does not fit.
        WandsError: if `--out` cannot be written. In this case no incomplete export is left.
    """
    _check_size(options.max_shard_size)
    step_dir, state = checkpoint = find_checkpoint(options.checkpoint, verify=True)
    out = options.out.resolve()
    dtype = DTYPES[options.dtype]
    is_lora = state.lora is not None
    as_pipeline = options.merge or not is_lora
    if not as_pipeline and (options.base is not None or options.link):
        raise ConfigError(
            f"--base and --link are for pipelines, but {options.checkpoint} is a LoRA run. Remove these options, or add --merge."
        )
    if options.merge and not is_lora:
        raise ConfigError(
            f"--merge is for LoRA runs, and {options.checkpoint} is a checkpoint of a full finetune; leave --merge out."
        )
    if options.ema:
        checkpoint.check_average()
    base = options.base or state.base
    with atomic_folder(out, replaceable=RECORD_FILE) as partial:
        if as_pipeline:
            ignore = [] if is_lora else [f"{part}/*.safetensors" for part in state.parts]
            base_dir = fetch_model(base, key="--base", ignore=ignore)
            check_base(base_dir, state.transformer_config, state.parts, "the run's base model")
            copied = {path.name for path in base_dir.iterdir()} - set(state.parts)
            check_files(base_dir, f"--base {base}", parts=copied)
            copy_base(base_dir, partial, state.parts, link=options.link)
            for part in state.parts:
                weights = load_full_weights(step_dir, part, options.base, options.ema)
                kept = load_ignored(base_dir / part, f"--base {base}")
                folder = partial / part
                size = options.max_shard_size
                write_transformer(weights, state.transformer_config, folder, dtype, size, kept)
        else:
            for part in state.parts:
                expert = part if state.has_experts else None
                folder = partial / EXPERT_NAMES[part] if expert else partial
                write_lora(load_lora_of(step_dir, part, options.ema), folder, dtype, expert)
            if state.recipe["model"]["merge_loras"]:
                log.warning(
                    "the base of this LoRA includes other LoRAs (model.merge_loras); load these LoRAs too, or export with --merge"
                )
        write_hashes(partial)
        run = read_run(step_dir.parent.parent)
        kind = "ema" if options.ema else "raw"
        record = _export_record(step_dir, state, base, options)
        past = (row for row in run["evaluations"][kind] if row["step"] <= state.step and "held_out" in row)
        record["held_out"] = [(row["step"], row["held_out"]) for row in past]
        if strips := sample_strips(run, kind, state.step):
            rows = [SheetRow(label, [frames]) for label, frames in strips.items()]
            save_contact_sheet(partial / STRIPS_FILE, rows, frames_per_row=6)
        write_text(partial / RECORD_FILE, json.dumps(record, indent=2))
        carry_over(out, partial)
    return out


def _check_size(size: str) -> None:
    # The lookahead (?=...) refuses a size of 0.
    if not re.fullmatch(r"(?=.*[1-9])\d{1,12}(\.\d+)?\s*[KMGT]B", size.strip(), re.IGNORECASE):
        raise ConfigError(
            f"--max-shard-size {size} must be a number above 0 and a unit of KB, MB, GB or TB; write for example 5GB."
        )


def _export_record(step_dir: Path, state: TrainState, base: str, options: ExportOptions) -> dict[str, Any]:
    """Return the contents of `wands_export.json`: the facts about the run that `wands push` writes into the model card."""
    return {
        "wands_version": __version__,
        "base": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "step": state.step,
        "checkpoint": step_dir.name,
        "variant": state.variant,
        "parts": state.parts,
        "dtype": options.dtype,
        **({"ema": state.recipe["ema"]} if options.ema else {}),
        "recipe": state.recipe,
        "data": {**state.data_summary, "fingerprint": state.data_fingerprint},
        "loss": state.loss,
        "events": marked_steps(step_dir.parent.parent, state.step),
    }
