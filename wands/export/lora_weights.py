"""Write the LoRA of a DiT as files for diffusers and PEFT, and for ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from wands.errors import CheckpointError
from wands.model.files.lora_files import LORA_FILE
from wands.model.files.lora_keys import LoraPair, lora_to_comfyui, lora_to_diffusers
from wands.model.files.tensor_files import LazyTensor, check_written, write_safetensors

COMFYUI_FILE = "comfyui.safetensors"


def write_lora(pairs: Mapping[str, LoraPair], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the LoRA of one DiT in diffusers' keys and in ComfyUI's keys, and read both files back.

    Args:
        pairs: LoRA by diffusers module, with one rank; alpha is folded into lora_B.
        folder: folder to create or fill.
        dtype: dtype of the written tensors.

    Raises:
        CheckpointError: if the LoRA is not finite, or a file read back differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pairs = {
        module: LoraPair(pair.lora_A.to(dtype), pair.folded().lora_B.to(dtype))
        for module, pair in pairs.items()
    }
    for module, pair in pairs.items():
        if not (torch.isfinite(pair.lora_A).all() and torch.isfinite(pair.lora_B).all()):
            raise CheckpointError(
                f"export: the LoRA of {module} is not finite; the run has diverged, export an older step."
            )
    rank = max(len(pair.lora_A) for pair in pairs.values())
    # Loaders know a LoRA of either expert as "transformer"; the caller of the loader chooses the expert.
    settings = {
        "transformer.r": rank,
        "transformer.lora_alpha": rank,  # the run's own alpha is folded into lora_B
        "transformer.target_modules": sorted(pairs),
    }
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    files = {
        LORA_FILE: (lora_to_diffusers({"transformer": pairs}), metadata),
        COMFYUI_FILE: (lora_to_comfyui(pairs), {}),
    }
    for name, (keys, file_metadata) in files.items():
        tensors = [LazyTensor.of(key, value) for key, value in keys.items()]
        write_safetensors(folder / name, tensors, file_metadata)
        check_written(tensors, [folder / name], "export")
