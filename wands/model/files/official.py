"""Find the models in official Wan repositories, and translate their configs to diffusers and transformers.

Constants of the official code are not in its `config.json`: text width, patch size and the kinds of norms. wands derives them
from the names and shapes of the weights.

Sources: `wan/configs/`, `WanModel`, `vae.py`, `vae2_2.py`, `t5.py` and `clip.py` of Wan 2.1 and 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wands.errors import CheckpointError
from wands.model.files.name_maps import EXPERTS, Shapes, vae_structure
from wands.variants import DiTShape, Variant

OFFICIAL_CLASS = "WanModel"
DIFFUSERS_CLASS = "WanTransformer3DModel"
EXPERT_FOLDERS = dict(zip(EXPERTS, ("high_noise_model", "low_noise_model"), strict=True))
DIT_STEM = "diffusion_pytorch_model"
HEAD_DIM = 128
"""Number of channels of an attention head in every published DiT. The shapes of the weights do not contain this number."""
_BOUNDARY = {"t2v": 0.875, "i2v": 0.9}
# Maps a key of the official config to the diffusers key with the same value.
_SAME = {
    "num_heads": "num_attention_heads",
    "num_layers": "num_layers",
    "ffn_dim": "ffn_dim",
    "freq_dim": "freq_dim",
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "text_dim": "text_dim",
    "eps": "eps",
}
LATENTS_22 = {
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}  # fmt: skip
"""Statistics of each latent channel of the Wan 2.2 VAE. diffusers' defaults are those of the Wan 2.1 VAE (16 channels)."""


def find_expert(root: Path, expert: str) -> Path | None:
    """Return the folder of the DiT `expert`, one of `EXPERTS`, in an official Wan repository, or None if there is none."""
    folder = root / EXPERT_FOLDERS[expert]
    if (folder / "config.json").is_file():
        return folder
    is_root = expert == EXPERTS[0] and (root / "config.json").is_file()
    return root if is_root and not (root / "model_index.json").is_file() else None


def boundary_of(official_config: Mapping[str, Any]) -> float:
    """Return the boundary_ratio of a model with two experts; the high-noise expert has the timesteps from 1000 times this.

    The official code has one constant for text-to-video and one for image-to-video. Only "model_type" of `official_config` is
    read.
    """
    return _BOUNDARY.get(official_config.get("model_type", ""), _BOUNDARY["t2v"])


def dit_config(shapes: Shapes, official_config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the diffusers config of a DiT from the shapes of its weights by official name. `where` starts the errors.

    num_heads and eps come from `official_config`. Without num_heads, the head dim is its head_dim or 128, as in published models;
    without eps, eps is 1e-6.

    Raises:
        CheckpointError: if the weights lack a tensor that every Wan DiT has, the config contradicts the shapes, or the number of
            heads does not divide the model width or cannot be computed.
    """
    try:
        dim, in_channels, *patch = shapes["patch_embedding.weight"]
        sizes: dict[str, Any] = {
            "in_channels": in_channels,
            "patch_size": patch,
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "text_dim": shapes["text_embedding.0.weight"][1],
            "out_channels": shapes["head.head.weight"][0] // math.prod(patch),
        }
    except KeyError as error:
        raise CheckpointError(
            f"{where} has no tensor {error.args[0]}, which every Wan DiT has. Use a complete model of Wan 2.1 or 2.2."
        ) from None
    head_dim = official_config.get("head_dim", HEAD_DIM)
    num_heads = official_config.get("num_heads") or (0 if dim % head_dim else dim // head_dim)
    if not num_heads or dim % num_heads:
        if "num_heads" in official_config:
            raise CheckpointError(
                f"{where}: num_heads={num_heads} in config.json does not divide the model width {dim}. Use the original file."
            )
        raise CheckpointError(
            f"{where}: the number of attention heads is unknown, because the model's width {dim} is not a multiple of the "
            f"{'usual ' if head_dim == HEAD_DIM else ''}head dim {head_dim}. Put the model's config.json with num_heads next to "
            "the weights."
        )
    if image := shapes.get("img_emb.proj.0.weight"):
        sizes |= {"image_dim": image[0], "image_positions": shapes.get("img_emb.emb_pos", (0, 0))[1]}
    shape = DiTShape(num_heads, dim // num_heads, _num_blocks(shapes, "blocks."), **sizes)
    config = shape.to_config() | {
        "_class_name": DIFFUSERS_CLASS,
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "eps": official_config.get("eps", 1e-6),
        "qk_norm": "rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        "rope_max_seq_len": 1024,
    }
    expected = {old: config[new] for old, new in _SAME.items()} | {"dim": dim}
    differing = [
        f"{key}={official_config[key]} (the weights have {value})"
        for key, value in expected.items()
        if official_config.get(key, value) != value
    ]
    if differing:
        raise CheckpointError(
            f"{where} has weights that do not fit its config.json: {', '.join(differing)}. Use weights and config of one model."
        )
    return config


def to_official_config(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Return the contents of the official config.json of a DiT, from its diffusers config and variant."""
    return {
        "_class_name": OFFICIAL_CLASS,
        "_diffusers_version": "0.30.0",
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "model_type": variant.name.split("-")[1],
        "text_len": 512,
        **{old: config[new] for old, new in _SAME.items() if old != "text_dim"},
    }


def vae_config(shapes: Shapes) -> dict[str, Any]:
    """Return the `AutoencoderKLWan` config of a VAE from the shapes of its weights by official name.

    The official file lacks mean and standard deviation of the latents: they are those of the published VAE with as many channels.
    """
    base_dim, num_pixel_channels = shapes["encoder.conv1.weight"][:2]
    z_dim = shapes["conv2.weight"][0]
    num_res_blocks, nested = vae_structure(shapes, "the VAE")
    config: dict[str, Any] = {"base_dim": base_dim, "z_dim": z_dim, "num_res_blocks": num_res_blocks}
    if nested:
        config |= {"is_residual": True, "decoder_base_dim": shapes["decoder.head.2.weight"][1]}
    if num_pixel_channels == 12:
        config |= {"in_channels": 12, "out_channels": 12, "patch_size": 2}
        config |= {"scale_factor_spatial": 16, "scale_factor_temporal": 4}
    return config | (LATENTS_22 if z_dim == len(LATENTS_22["latents_mean"]) else {})


def umt5_config(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of transformers' `UMT5Config`."""
    vocab_size, d_model = shapes["token_embedding.weight"]
    num_buckets, num_heads = shapes["blocks.0.pos_embedding.embedding.weight"]
    return {
        "architectures": ["UMT5EncoderModel"],
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": shapes["blocks.0.attn.q.weight"][0] // num_heads,
        "d_ff": shapes["blocks.0.ffn.fc1.weight"][0],
        "num_layers": _num_blocks(shapes, "blocks."),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "feed_forward_proj": "gated-gelu",
    }


def clip_config(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of transformers' `CLIPVisionConfig`.

    The shapes lack the number of heads: 16, as in the published ViT-H/14.
    """
    width, _, patch, _ = shapes["visual.patch_embedding.weight"]
    side = round((shapes["visual.pos_embedding"][1] - 1) ** 0.5)
    return {
        "architectures": ["CLIPVisionModel"],
        "hidden_size": width,
        "intermediate_size": shapes["visual.transformer.0.mlp.0.weight"][0],
        "num_hidden_layers": _num_blocks(shapes, "visual.transformer."),
        "num_attention_heads": 16,
        "image_size": side * patch,
        "patch_size": patch,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    }


def _num_blocks(shapes: Shapes, prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)})
