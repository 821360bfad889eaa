"""Write trained weights and check the written files: a DiT as a diffusers folder, or a LoRA for diffusers and ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from torch import Tensor

from wands.errors import CheckpointError, one_line
from wands.model.files.lora_experts import EXPERT_KEY, EXPERT_NAMES
from wands.model.files.lora_files import LORA_FILE, lora_tensors
from wands.model.files.lora_update import LoraPair
from wands.model.files.name_maps import check_fit
from wands.model.files.official import DIT_STEM
from wands.model.files.tensor_files import LazyTensor, check_written, write_safetensors, write_sharded
from wands.model.weight_dtypes import stock_dtype

COMFYUI_FILE = "comfyui.safetensors"
DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of the written weights for each value of --dtype. Without the option, the value is None, which is not a key."""


def write_transformer(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: str,
    kept: Mapping[str, Tensor] | None = None,
) -> None:
    """Write one DiT as a diffusers folder, load it with diffusers, compare every tensor with `weights`, and run a forward pass.

    Layers that diffusers keeps in fp32 stay fp32. `kept` are further tensors to write, which diffusers ignores.

    Raises:
        CheckpointError: if the weights do not fit the config, the written weights differ, or the output is not finite.
    """
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_fit({name: tuple(value.shape) for name, value in weights.items()}, expected, "the checkpoint")
    written = {**weights, **(kept or {})}
    tensors = [LazyTensor.of(name, value, stock_dtype(name, dtype)) for name, value in written.items()]
    folder.mkdir()
    model.save_config(folder)
    # save_pretrained is not used, because it ignores the umask and makes files that only their owner can read.
    write_sharded(folder, DIT_STEM, tensors, max_shard_size)
    _verify(weights, folder, dtype)


def _verify(weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    try:
        model = WanTransformer3DModel.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    except SafetensorError as error:
        raise CheckpointError(
            f"export: the written folder {folder} cannot be read back ({one_line(error)}). Set --out to a folder on another disk."
        ) from None
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter.detach(), weights[name].to(parameter.dtype)):
            raise CheckpointError(
                f"export: {name} was written to {folder}, but reading the file returns other values. The disk may be faulty: set "
                "--out to a folder on another disk."
            )
    if not torch.isfinite(stock_forward(model, dtype)).all():
        raise CheckpointError(
            "export: the model's output is not finite: the run diverged. Export an earlier checkpoint (RUN/checkpoints/step_*)."
        )


def stock_forward(model: WanTransformer3DModel, dtype: torch.dtype) -> Tensor:
    """Return the output of a diffusers `WanTransformer3DModel` for random inputs, which are the same in every call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    image = None
    config = model.config
    if config.image_dim:
        rows = config.pos_embed_seq_len  # tokens of two images, which diffusers takes as a batch of two
        image = normal(2, rows // 2, config.image_dim) if rows else normal(1, 257, config.image_dim)
    with torch.no_grad():
        output: Tensor = model(
            hidden_states=normal(1, config.in_channels, 1, 4, 4),
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=normal(1, 8, config.text_dim),
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
    return output


def write_lora(
    pairs: Mapping[str, LoraPair], folder: Path, dtype: torch.dtype = torch.float32, expert: str | None = None
) -> None:
    """Write the LoRA of one DiT with the keys of diffusers and with the keys of ComfyUI, and read both files back.

    All LoRAs in `pairs` have the same rank. The written lora_B is multiplied by the scale alpha / rank, so a program that loads a
    file needs no alpha. `expert` is "transformer" or "transformer_2" of a model with two experts, for the metadata.

    Raises:
        CheckpointError: if the LoRA is not finite, or a written file differs from it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = max(len(pair.lora_A) for pair in pairs.values())
    settings = {
        "transformer.r": rank,
        "transformer.lora_alpha": rank,  # the alpha of the run is folded into lora_B
        "transformer.target_modules": sorted(pairs),
    }
    named = {EXPERT_KEY: EXPERT_NAMES[expert]} if expert else {}
    metadata = named | {"lora_adapter_metadata": json.dumps(settings)}
    for name, layout in ((LORA_FILE, "diffusers"), (COMFYUI_FILE, "comfyui")):
        tensors = [LazyTensor.of(key, value, dtype) for key, value in lora_tensors(pairs, layout).items()]
        for tensor in tensors:
            if not torch.isfinite(tensor.read()).all():
                raise CheckpointError(
                    f"export: {tensor.name} is not finite: the run diverged. Export an earlier step (RUN/checkpoints/step_*)."
                )
        write_safetensors(folder / name, tensors, metadata if layout == "diffusers" else named)
        check_written(tensors, [folder / name], "export")
