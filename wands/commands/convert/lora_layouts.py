"""Convert LoRA files to the file layout of another program: diffusers, official Wan, ComfyUI or musubi-tuner."""

from __future__ import annotations

from pathlib import Path

import torch

from wands.commands.convert.convert_result import ComponentSummary, ConvertResult
from wands.errors import CheckpointError, ConfigError
from wands.model.files import lora_files
from wands.model.files.name_maps import EXPERTS, shorten
from wands.model.files.tensor_files import LazyTensor, TensorFiles, check_written, write_safetensors


def find_loras(root: Path) -> dict[str | None, Path]:
    """Find the LoRA files in the source of a conversion.

    Args:
        root: file or folder that the user wants to convert.

    Returns:
        {None: file} for a single LoRA. {expert: file} for a folder that contains a LoRA for each expert, where the
        expert is "transformer" or "transformer_2". {} if the source is not a LoRA.

    Raises:
        CheckpointError: if a file cannot be read.
        ConfigError: if a folder has several files that could be the LoRA of an expert, or has LoRAs of experts and
            further safetensors files.
    """
    names = (lora_files.LORA_FILE, lora_files.PEFT_FILE)
    usual = [root] if root.is_file() else [root / name for name in names]
    files: dict[str | None, Path] = dict([(None, path) for path in usual if path.is_file()][:1])
    if not files and not (root / "model_index.json").is_file():
        experts = lora_files.experts_in(root)
        files = {expert: lora_files.find_lora_file(root, "SOURCE", expert) for expert in experts}
    for path in files.values():
        if not lora_files.is_lora(TensorFiles([path], f"SOURCE {path}").tensors):
            return {}
    others = sorted(set(root.glob("*.safetensors")) - set(files.values())) if None not in files else []
    if files and others:
        raise ConfigError(
            f"SOURCE={root} contains LoRAs of the experts and also {others[0].name}, which belongs to no expert. Move "
            f"{others[0].name} out of the folder, or set SOURCE to a single file."
        )
    return files


def convert_lora(
    source: Path, out: Path, result: ConvertResult, to: str, dtype: torch.dtype | None, expert: str | None
) -> None:
    """Convert a LoRA file to the file layout of diffusers, official Wan, ComfyUI or musubi-tuner.

    If the file contains the LoRAs of two experts, write two files, because no program loads both LoRAs from one file.

    Args:
        source: LoRA file in any layout that `wands.model.files.lora_files.parse_lora` supports.
        out: existing folder for the new files.
        result: receives a summary of each new file, and notes for the user.
        to: "diffusers", "official", "comfyui" or "musubi".
        dtype: dtype of the new files; None keeps the dtype of the source.
        expert: "transformer" or "transformer_2" if the path of the file names the expert, otherwise None.

    Raises:
        CheckpointError: if `source` is not a LoRA of Wan, contains no LoRA of `expert`, or contains full (not
            low-rank) changes of parameters, which the layout `to` cannot store. Also if values read back from a
            written file differ from the values in `source`.
    """
    files = TensorFiles([source], f"SOURCE {source}")
    loras, old_names = lora_files.read_lora_file(files), files.tensors.keys()
    if expert is not None:
        update = lora_files.update_of(loras, expert)
        if update is None:
            raise CheckpointError(
                f"{source} contains a LoRA for {', '.join(loras)}, but the name of this file or its folder belongs "
                f"to a LoRA for {expert}. Set SOURCE to {source}; wands then ignores the names of file and folder."
            )
        loras = {expert: update}
    several = expert is not None or len(loras) > 1
    for name, update in loras.items():
        pairs, differences = update.pairs, update.differences
        if differences and to not in ("official", "comfyui"):
            raise CheckpointError(
                f"SOURCE {source} contains full-size updates of {len(differences)} parameters ({shorten(differences, 3)}), "
                f"which a LoRA file of --to {to} cannot contain. Use --to comfyui."
            )
        state = sorted(lora_files.lora_tensors(pairs, to, differences).items())
        # alpha stays fp32
        tensors = [LazyTensor.of(key, value, dtype if value.ndim else None) for key, value in state]
        file_name = lora_files.LORA_FILE if to == "diffusers" else f"{source.stem}.safetensors"
        is_marked = not several or lora_files.EXPERT_NAMES[name] in file_name
        path = out / (file_name if is_marked else f"{lora_files.EXPERT_NAMES[name]}_{file_name}")
        write_safetensors(path, tensors)
        check_written(tensors, [path], "convert")
        num_folded = sum(pair.scale != 1.0 for pair in pairs.values())
        if num_folded and to != "musubi":
            result.notes.append(
                f"{path.name}: alpha / rank of {num_folded} modules was multiplied into lora_B, so alpha now equals the rank."
            )
        if several and name == EXPERTS[1] and to == "diffusers":
            result.notes.append(
                f"load {path.name} in diffusers with load_lora_weights(..., load_into_transformer_2=True)."
            )
        num_read = sum(len(loras) == 1 or key.startswith(f"{name}.") for key in old_names)
        num_renamed = sum(tensor.name not in old_names for tensor in tensors)
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        result.summaries.append(ComponentSummary(path.name, num_read, len(tensors), num_renamed, num_bytes))
