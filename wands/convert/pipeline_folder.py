"""Write the files that a converted DiT needs to become a diffusers pipeline: configs, tokenizer, scheduler, model_index.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from wands.model.files.hub import check_link
from wands.variants import Variant


def build_stock(component: str, config: Mapping[str, Any]) -> Any:
    """Build the model of a component, such as "vae", on the meta device.

    Its class is from diffusers or transformers, as `config` is.
    """
    with torch.device("meta"):
        if component == "text_encoder":
            return transformers.UMT5EncoderModel(transformers.UMT5Config(**config))
        if component == "image_encoder":
            return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**config))
        stock = diffusers.AutoencoderKLWan if component == "vae" else diffusers.WanTransformer3DModel
        return stock.from_config(config)


def write_stock_config(component: str, config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json of a component, such as "vae", to an existing folder, exactly as its library would."""
    model = build_stock(component, config)
    if component in ("text_encoder", "image_encoder"):
        type(model.config)(**config).save_pretrained(folder)  # the model adds keys to its config
    else:
        model.save_config(folder)


_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.33.0.dev0",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}
"""Scheduler of Wan2.1-T2V-1.3B-Diffusers without flow_shift. FastVideo refuses keys of later releases of diffusers."""


def write_pipeline(out: Path, tokenizer_dir: Path, variant: Variant) -> None:
    """Write tokenizer, scheduler and model_index.json next to the converted models, as in the published diffusers pipelines."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=False)
    tokenizer.save_pretrained(out / "tokenizer")
    (out / "scheduler").mkdir()
    scheduler = {**_SCHEDULER, "flow_shift": variant.sampling.scheduler_shift}
    _write_json(out / "scheduler/scheduler_config.json", scheduler)
    index: dict[str, Any] = {
        "_class_name": "WanImageToVideoPipeline" if "image" in variant.conditions else "WanPipeline",
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": variant.boundary_ratio,
        "expand_timesteps": "first_frame" in variant.conditions,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", type(tokenizer).__name__],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if variant.boundary_ratio else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if "clip" in variant.conditions:
        processor = transformers.CLIPImageProcessor()
        processor.save_pretrained(out / "image_processor")
        index["image_encoder"] = ["transformers", "CLIPVisionModel"]
        index["image_processor"] = ["transformers", type(processor).__name__]
    elif "image" in variant.conditions:
        index |= {"image_encoder": [None, None], "image_processor": [None, None]}
    _write_json(out / "model_index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_path(source: Path, target: Path, model: Path) -> None:
    """Copy a file or folder of `model`; raise WandsError if a link in it leads out of the model and of the Hub cache."""

    def check(folder: str, names: list[str]) -> set[str]:
        for name in names:
            check_link(Path(folder, name), model, str(model))
        return set()

    check_link(source, model, str(model))
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=check)
    else:
        shutil.copy2(source, target)
