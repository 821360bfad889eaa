"""What surrounds a converted DiT in a diffusers pipeline: configs, tokenizer, scheduler, index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from wands.errors import ConfigError
from wands.model.files.names import EXPERTS
from wands.variants import Variant


def write_stock_config(name: str, config: dict[str, Any], folder: Path) -> None:
    """Write config.json as the part's own class does.

    Args:
        name: of the part.
        config: of diffusers or transformers.
        folder: that exists.
    """
    if name in EXPERTS or name == "vae":
        import diffusers

        cls = diffusers.AutoencoderKLWan if name == "vae" else diffusers.WanTransformer3DModel
        with torch.device("meta"):
            cls.from_config(config).save_config(folder)
        return
    from transformers import CLIPVisionConfig, UMT5Config

    {"text_encoder": UMT5Config, "image_encoder": CLIPVisionConfig}[name](**config).save_pretrained(folder)


def check_rest(rest: Path, config: dict[str, Any], two_experts: bool) -> None:
    """Find out whether a pipeline can lend its other parts to a DiT.

    Args:
        rest: the pipeline.
        config: diffusers' of the DiT.
        two_experts: whether there are two of them.

    Raises:
        ConfigError: it is none, or of another model.
    """
    try:
        index = json.loads((rest / "model_index.json").read_text(encoding="utf-8"))
        theirs = json.loads((rest / "transformer" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--rest-of {rest} is no diffusers pipeline ({reason}); give one of the same model."
        ) from None
    differing = [
        f"{key}={theirs[key]} (here {value})"
        for key, value in config.items()
        if key[0] != "_" and key in theirs and theirs[key] != value
    ]
    if (index.get("transformer_2") or [None])[0] and not two_experts:
        differing.append("it has two experts")
    elif two_experts and not (index.get("transformer_2") or [None])[0]:
        differing.append("it has one expert")
    if differing:
        raise ConfigError(
            f"--rest-of {rest} is another model: {', '.join(differing)}; give a pipeline of the same model."
        )


def write_pipeline(out: Path, tokenizer_dir: Path, variant: Variant) -> None:
    """Write tokenizer, scheduler and index, as diffusers' conversion of the published models makes them.

    Args:
        out: folder that has the converted parts.
        tokenizer_dir: of the official repository.
        variant: what model it is.
    """
    import diffusers
    from transformers import AutoTokenizer, CLIPImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.save_pretrained(out / "tokenizer")
    family = variant.name.split("-")[1]
    shift = {"flf2v": 16.0, "ti2v": 5.0}.get(family, 3.0)
    diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    ).save_pretrained(out / "scheduler")
    index: dict[str, Any] = {
        "_class_name": "WanImageToVideoPipeline" if "image" in variant.conditions else "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": variant.boundary_ratio,
        "expand_timesteps": family == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", type(tokenizer).__name__],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if variant.boundary_ratio else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if "clip" in variant.conditions:
        processor = CLIPImageProcessor()
        processor.save_pretrained(out / "image_processor")
        index["image_encoder"] = ["transformers", "CLIPVisionModel"]
        index["image_processor"] = ["transformers", type(processor).__name__]
    elif "image" in variant.conditions:
        index |= {"image_encoder": [None, None], "image_processor": [None, None]}
    text = json.dumps(dict(sorted(index.items())), indent=2)
    (out / "model_index.json").write_text(text + "\n", encoding="utf-8")


def copy_path(source: Path, target: Path) -> None:
    """Copy a file or a folder to a place that is free; folders above it are made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
