"""Convert LoRA files to the keys of another program."""

from __future__ import annotations

from pathlib import Path

import torch

from wands.commands.convert.convert_result import ComponentSummary
from wands.errors import CheckpointError, ConfigError
from wands.model.files.lora_files import EXPERT_NAMES, LORA_FILE, experts_in, find_lora_file
from wands.model.files.lora_keys import (
    PEFT_FILE,
    alphas_of,
    is_lora,
    lora_to_comfyui,
    lora_to_diffusers,
    read_lora,
)
from wands.model.files.name_maps import COMFYUI_LORA, EXPERTS
from wands.model.files.tensor_files import LazyTensor, TensorFiles, check_written, write_safetensors


def find_loras(root: Path) -> dict[str | None, Path]:
    """Return the LoRA files of a source: {None: file}, or {expert: file} for a folder that names experts.

    Returns:
        {} if the source is not a LoRA.

    Raises:
        CheckpointError: if a file cannot be read.
        ConfigError: if an expert's folder has no LoRA or several candidates.
    """
    usual = [root] if root.is_file() else [root / name for name in (LORA_FILE, PEFT_FILE)]
    files: dict[str | None, Path] = dict([(None, path) for path in usual if path.is_file()][:1])
    if not files and not (root / "model_index.json").is_file():
        files = {expert: find_lora_file(root, "SRC", expert) for expert in experts_in(root)}
    for path in files.values():
        with TensorFiles([path], f"SRC {path}") as tensors:
            if not is_lora(tensors.shapes):
                return {}
    others = sorted(set(root.glob("*.safetensors")) - set(files.values())) if None not in files else []
    if files and others:
        raise ConfigError(
            f"SRC {root} holds LoRAs of two experts and {others[0].name} next to them; give one file."
        )
    return files


def convert_lora(
    source: Path, out: Path, *, to: str, dtype: torch.dtype | None = None, expert: str | None = None
) -> tuple[list[ComponentSummary], list[str]]:
    """Write a LoRA in other keys; two experts get a file each, because no loader reads both from one file.

    Args:
        source: file in any of the formats of `wands.model.files.lora_keys`.
        out: existing folder.
        to: "diffusers", "official" or "comfyui".
        dtype: dtype of the new file; None keeps the source's.
        expert: "transformer" or "transformer_2" if the place of the file names the expert; None if only the keys do.

    Returns:
        A summary of each file, and notes for the user.

    Raises:
        CheckpointError: if the file is not a LoRA of Wan, is the other expert's, or reads back differently.
    """
    where = f"SRC {source}"
    with TensorFiles([source], where) as files:
        state = {name: files.read(name) for name in files.shapes}
        loras = read_lora(state, alphas=alphas_of(files.metadata, source), where=where)
    if expert is not None:
        # Most files of one expert have the keys of "transformer", whichever expert they belong to.
        pairs = loras.get(expert) or (loras[EXPERTS[0]] if list(loras) == [EXPERTS[0]] else None)
        if pairs is None:
            raise CheckpointError(
                f"{where} is in the place of the LoRA of {expert} and holds a LoRA of {', '.join(loras)}; give that file alone."
            )
        loras = {expert: pairs}
    several = expert is not None or len(loras) > 1
    summaries, notes = [], []
    for name, pairs in loras.items():
        if to == "diffusers":
            keys = lora_to_diffusers({EXPERTS[0]: pairs})
        else:
            keys = lora_to_comfyui(pairs, prefix=COMFYUI_LORA if to == "comfyui" else "")
        tensors = [LazyTensor.of(key, value, dtype) for key, value in sorted(keys.items())]
        path = out / _file_name(source, to, name, several)
        write_safetensors(path, tensors)
        check_written(tensors, [path], "convert")
        folded = sum(pair.scale != 1.0 for pair in pairs.values())
        if folded:
            notes.append(
                f"alpha / rank of {folded} modules of {path.name} is multiplied into lora_B, so that alpha is the rank."
            )
        if several and name == EXPERTS[1] and to == "diffusers":
            notes.append(f"load {path.name} with load_lora_weights(..., load_into_transformer_2=True).")
        num_read = len(state) if len(loras) == 1 else sum(key.startswith(f"{name}.") for key in state)
        summaries.append(ComponentSummary.of(path.name, num_read, tensors, len(keys.keys() - state.keys())))
    return summaries, notes


def _file_name(source: Path, to: str, expert: str, several: bool) -> str:
    name, stem = EXPERT_NAMES[expert], LORA_FILE if to == "diffusers" else f"{source.stem}.safetensors"
    return f"{name}_{stem}" if several and name not in stem else stem
