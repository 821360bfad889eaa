"""A checkpoint of a LoRA run as LoRA files, in the keys of diffusers and PEFT and in those of ComfyUI."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from wands.config.recipe import LoraConfig
from wands.errors import CheckpointError
from wands.model.files.lora_files import EXPERT_NAMES, LORA_FILE
from wands.model.files.lora_keys import LoraPair, lora_to_comfyui, lora_to_diffusers
from wands.model.files.tensor_files import LazyTensor, write_safetensors
from wands.train.checkpoint_weights import load_lora_of
from wands.train.state import TrainState

log = logging.getLogger(__name__)

COMFYUI_FILE = "comfyui.safetensors"


def write_lora(
    step_dir: Path, state: TrainState, lora: LoraConfig, out: Path, dtype: torch.dtype, ema: bool = False
) -> None:
    """Write the LoRA of each DiT that was trained; of two experts each in a folder of its own.

    Args:
        step_dir: checkpoint.
        state: its state.
        lora: settings of its run.
        out: folder to fill.
        dtype: of the tensors.
        ema: write its average.

    Raises:
        CheckpointError: the LoRA is not finite, or what was written does not come back as it is.
    """
    in_folders = state.recipe["model"].get("experts") is not None or len(state.parts) == 2
    for part in state.parts:
        folder = out / EXPERT_NAMES[part] if in_folders else out
        folder.mkdir(parents=True, exist_ok=True)
        pairs = {
            module: LoraPair(pair.lora_A.to(dtype), pair.folded().lora_B.to(dtype))
            for module, pair in load_lora_of(step_dir, part, ema).items()
        }
        _check_finite(pairs)
        # A LoRA of either expert is one of "transformer" to its loaders: they are told where it goes when it is loaded.
        metadata = {
            "lora_adapter_metadata": json.dumps(
                {
                    "transformer.r": lora.rank,
                    "transformer.lora_alpha": lora.rank,  # the run's own alpha is in lora_B
                    "transformer.target_modules": sorted(pairs),
                }
            ),
        }
        _save(lora_to_diffusers({"transformer": pairs}), folder / LORA_FILE, metadata)
        _save(lora_to_comfyui(pairs), folder / COMFYUI_FILE, {})
    if state.recipe["model"].get("merge_loras"):
        log.warning(
            "the LoRA was trained on a base with other LoRAs merged in; load those as well, or export with --merge"
        )


def _save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    entries = [
        LazyTensor(name, tuple(tensor.shape), tensor.dtype, tensor.contiguous)
        for name, tensor in tensors.items()
    ]
    write_safetensors(path, entries, metadata)  # save_file would leave a file that only its owner may read
    back = load_file(path)
    if back.keys() != tensors.keys() or any(not torch.equal(back[name], tensors[name]) for name in tensors):
        raise CheckpointError(f"export: {path} read back differs from the checkpoint; write to another disk.")


def _check_finite(pairs: Mapping[str, LoraPair]) -> None:
    for module, pair in pairs.items():
        if not (torch.isfinite(pair.lora_A).all() and torch.isfinite(pair.lora_B).all()):
            raise CheckpointError(
                f"export: the LoRA of {module} is not finite; the run has diverged, export an older step."
            )
