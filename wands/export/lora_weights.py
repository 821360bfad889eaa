"""Write the LoRA of a DiT as two files: one for diffusers and PEFT, and one for ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from wands.errors import CheckpointError
from wands.model.files.lora_files import LORA_FILE, lora_tensors
from wands.model.files.lora_update import LoraPair
from wands.model.files.tensor_files import LazyTensor, check_written, write_safetensors

COMFYUI_FILE = "comfyui.safetensors"


def write_lora(pairs: Mapping[str, LoraPair], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the LoRA of one DiT to two files, one with the keys of diffusers and one with the keys of ComfyUI.

    Both files are read back and compared with the LoRA. The written lora_B contains the scale alpha / rank.

    Args:
        pairs: maps a diffusers module name to the LoRA of the module. All LoRAs have the same rank.
        folder: folder of the two files. It is created if it does not exist.
        dtype: dtype of the written tensors.

    Raises:
        CheckpointError: if the LoRA contains values that are not finite, or a written file differs from the LoRA when it is
            read back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = max(len(pair.lora_A) for pair in pairs.values())
    settings = {
        "transformer.r": rank,
        "transformer.lora_alpha": rank,  # the alpha of the run is folded into lora_B
        "transformer.target_modules": sorted(pairs),
    }
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    for name, layout in ((LORA_FILE, "diffusers"), (COMFYUI_FILE, "comfyui")):
        tensors = [LazyTensor.of(key, value, dtype) for key, value in lora_tensors(pairs, layout).items()]
        for tensor in tensors:
            if not torch.isfinite(tensor.read()).all():
                raise CheckpointError(
                    f"export: {tensor.name} has non-finite values, because the run has diverged. Export an earlier checkpoint."
                )
        write_safetensors(folder / name, tensors, metadata if layout == "diffusers" else {})
        check_written(tensors, [folder / name], "export")
