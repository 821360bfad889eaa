"""A `WanPipeline` ready to sample: configs are read and judged first, weights only when everything fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

from wands.encode.pipeline import quiet_without_terminal
from wands.errors import CheckpointError, ConfigError
from wands.variants import Variant, variant_of


@dataclass(frozen=True)
class PipelineSource:
    """Where the parts of a pipeline come from, and their configs.

    Attributes:
        model: diffusers pipeline folder or Hub id.
        dit_folder: folder or Hub id that holds the transformer, and the sub-folder in it ("" for none).
        checkpoint: step folder of `wands train` whose weights the transformer gets; None for `dit_folder`'s.
        dit: config of the transformer.
        vae_stride: pixels per latent in (frames, height, width).
        variant: what the transformer's config is.
    """

    model: str
    dit_folder: tuple[str, str]
    checkpoint: Path | None
    dit: Mapping[str, Any]
    vae_stride: tuple[int, int, int]
    variant: Variant


def find_pipeline(
    model: str | Path, *, transformer: Path | None = None, checkpoint: Path | None = None
) -> PipelineSource:
    """Read the configs of a pipeline and check that its parts fit each other; no weight is read.

    Args:
        model: diffusers pipeline folder or Hub id.
        transformer: diffusers folder, of a transformer or a pipeline, that replaces the model's transformer.
        checkpoint: run or step folder of `wands train` that replaces it.

    Raises:
        ConfigError: the model is missing, no Wan text-to-video pipeline, or its parts do not fit each other.
        CheckpointError: no complete checkpoint there.
    """
    name = str(model)
    index = _pipeline_index(name)
    if transformer and checkpoint:
        raise ConfigError(
            f"infer.transformer={transformer} and infer.checkpoint={checkpoint} exclude each other; keep one."
        )
    if (transformer or checkpoint) and index.get("transformer_2", [None])[0]:
        raise ConfigError(
            f"infer.model={name} has two experts, and infer.transformer or infer.checkpoint replaces one; "
            "export both into a pipeline folder and use that as infer.model."
        )
    step: Path | None = None
    dit_folder = (name, "transformer")
    if checkpoint:
        from wands.train.checkpoint import find_checkpoint

        step, state = find_checkpoint(checkpoint)
        dit: Mapping[str, Any] = state.transformer_config
    else:
        if transformer:
            dit_folder = (str(transformer), "transformer" if (transformer / "transformer").is_dir() else "")
            if not (transformer / dit_folder[1] / "config.json").is_file():
                raise ConfigError(
                    f"infer.transformer={transformer} is no diffusers transformer folder (no config.json); "
                    "give a folder that wands export wrote, or its transformer sub-folder."
                )
        dit = _read(WanTransformer3DModel.load_config, *dit_folder)
    vae = _read(AutoencoderKLWan.load_config, name, "vae")
    chosen = transformer or checkpoint or name
    try:
        variant = variant_of(dit)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{chosen}: {error}; give a text-to-video transformer of Wan 2.1.") from None
    from transformers import UMT5Config

    text_dim = _read(UMT5Config.get_config_dict, name, "text_encoder")[0].get("d_model")
    for key, ours, part, theirs in (
        ("in_channels", variant.dit.in_channels, "its VAE's z_dim", vae.get("z_dim", 16)),
        ("text_dim", variant.dit.text_dim, "its text encoder's d_model", text_dim),
    ):
        if ours != theirs:
            raise ConfigError(
                f"infer.model={name}: {part}={theirs} must equal {key}={ours} of the transformer "
                f"of {chosen}; use the pipeline that the transformer was trained from."
            )
    # Wan 2.1's VAE configs on the Hub are older than these two keys.
    spatial = vae.get("scale_factor_spatial", 8)
    stride = (vae.get("scale_factor_temporal", 4), spatial, spatial)
    return PipelineSource(name, dit_folder, step, dit, stride, variant)


def load_pipeline(
    source: PipelineSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu", offload: str = "none"
) -> WanPipeline:
    """Load all weights and place them.

    Args:
        source: from `find_pipeline`.
        dtype: of transformer and text encoder; what diffusers keeps in fp32 stays so, and so does the VAE.
        device: where sampling runs.
        offload: "none", or accelerate's "model" or "sequential", which bring weights to `device` when needed.

    Raises:
        ConfigError: files are missing or damaged, or tensors do not fit the configs.
        CheckpointError: the checkpoint's tensors do not fit its own config.
    """
    with quiet_without_terminal():
        transformer = (
            _transformer_from_checkpoint(source, dtype)
            if source.checkpoint
            else _transformer_from_folder(source, dtype)
        )
        try:
            pipeline = WanPipeline.from_pretrained(
                source.model, transformer=transformer, dtype={"default": dtype, "vae": torch.float32}
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"infer.model={source.model} cannot be loaded ({_first_line(error)})."
            ) from error
    encoder = pipeline.text_encoder
    if not torch.equal(encoder.encoder.embed_tokens.weight, encoder.shared.weight):
        # transformers releases of late 2025 left the embedding random: fluent videos of something else.
        raise ConfigError(
            f"infer.model={source.model}: the text encoder's token embedding is not its shared weight; "
            "upgrade transformers, which loads UMT5 wrongly."
        )
    scheduler = pipeline.scheduler.config
    if not (scheduler.get("use_flow_sigmas") or "shift" in scheduler):
        raise ConfigError(
            f"infer.model={source.model}: its scheduler {type(pipeline.scheduler).__name__} does not do "
            "flow matching; give it one that does, such as UniPCMultistepScheduler with use_flow_sigmas."
        )
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def _transformer_from_folder(source: PipelineSource, dtype: torch.dtype) -> WanTransformer3DModel:
    folder, subfolder = source.dit_folder
    try:
        transformer, info = WanTransformer3DModel.from_pretrained(
            folder, subfolder=subfolder or None, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: its transformer cannot be loaded ({_first_line(error)}).") from error
    # diffusers fills what is missing with random numbers and a warning.
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise ConfigError(
            f"{folder}: the weights of its transformer do not fit its config ({len(wrong)} tensors missing "
            f"or too many, first {wrong[0]}); export it again."
        )
    return transformer


def _transformer_from_checkpoint(source: PipelineSource, dtype: torch.dtype) -> WanTransformer3DModel:
    from accelerate import init_empty_weights

    from wands.train.checkpoint import load_exported_state

    assert source.checkpoint is not None
    # No memory and no random numbers for weights that are replaced at once; RoPE's buffers are computed.
    with init_empty_weights(include_buffers=False):
        transformer = WanTransformer3DModel.from_config(source.dit)
    state = load_exported_state(source.checkpoint)
    expected = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first = (
            f"{wrong[0]} is {found.get(wrong[0], 'missing')}, should be {expected.get(wrong[0], 'absent')}"
        )
        raise CheckpointError(
            f"checkpoint={source.checkpoint}: {len(wrong)} of {len(expected)} tensors do not fit its config "
            f"({first}); use another step."
        )
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)  # as from_pretrained treats them
    for name in state:
        state[name] = state[name].to(torch.float32 if kept & set(name.split(".")) else dtype)
    transformer.load_state_dict(state, assign=True)
    return transformer.eval()


def _pipeline_index(name: str) -> Mapping[str, Any]:
    if Path(name).is_dir():
        if not (Path(name) / "model_index.json").is_file():
            raise ConfigError(
                f"infer.model={name} is not a diffusers pipeline (no model_index.json); give a folder that "
                "wands export wrote, or a Hub id."
            )
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(
            f"infer.model={name} does not exist; give a diffusers pipeline folder, or a Hub id such as "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers."
        )
    index = _read(WanPipeline.load_config, name, None)
    if index.get("_class_name") != "WanPipeline":
        raise ConfigError(
            f"infer.model={name} is a {index.get('_class_name')}, not a WanPipeline; "
            "give a Wan text-to-video pipeline."
        )
    return index


def _read(reader: Any, folder: str, subfolder: str | None) -> Any:
    try:
        return reader(folder, subfolder=subfolder) if subfolder else reader(folder)
    except (OSError, ValueError) as error:
        where = f"{folder}/{subfolder}" if subfolder else folder
        known = "" if Path(folder).is_dir() else " is neither a folder here nor a Hub id that can be read:"
        raise ConfigError(
            f"infer.model={where}{known} its config cannot be read ({_first_line(error)}); check the name, "
            "and network and login for a Hub id."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
