"""The folders and configs of the official Wan repositories, seen as diffusers' parts.

Official `config.json` leaves out what the official code fixes (text width, patch, norms); the shapes of the weights
say all of it, so they are asked first. Sources: `wan/configs/` and `WanModel` of Wan 2.1 and 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wands.errors import CheckpointError
from wands.model.files.names import EXPERTS
from wands.variants import Variant

OFFICIAL_CLASS = "WanModel"
DIFFUSERS_CLASS = "WanTransformer3DModel"
EXPERT_FOLDERS = dict(zip(EXPERTS, ("high_noise_model", "low_noise_model"), strict=True))
DIT_STEM = "diffusion_pytorch_model"
HEAD_DIM = 128
"""Of every published model; a bare file of weights does not say it."""
_BOUNDARY = {"t2v": 0.875, "i2v": 0.9}
# official key -> diffusers' key, where both mean the same number
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


def find_expert(root: Path, expert: str) -> Path | None:
    """The folder of a DiT in an official repository, None where the repository has no such DiT.

    Args:
        root: the repository.
        expert: "transformer" (the only DiT, or the high-noise expert) or "transformer_2".
    """
    folder = root / EXPERT_FOLDERS[expert]
    if (folder / "config.json").is_file():
        return folder
    alone = expert == EXPERTS[0] and (root / "config.json").is_file()
    return root if alone and not (root / "model_index.json").is_file() else None


def boundary_of(config: Mapping[str, Any]) -> float:
    """Where the experts of a repository of two meet, which official Wan keeps in its code.

    Args:
        config: the official config.json of either expert.
    """
    return _BOUNDARY.get(config.get("model_type", ""), _BOUNDARY["t2v"])


def config_of(
    shapes: Mapping[str, tuple[int, ...]], said: Mapping[str, Any] | None = None, *, where: str
) -> dict[str, Any]:
    """The diffusers config of a DiT from the shapes of its weights.

    Args:
        shapes: by official name.
        said: the official config.json, which alone knows heads and epsilon; None takes the published ones.
        where: what to call it in errors.

    Raises:
        CheckpointError: weights are missing that every Wan has, or the config says another shape.
    """
    said = said or {}
    try:
        dim, in_channels, *patch = shapes["patch_embedding.weight"]
        ffn_dim = shapes["blocks.0.ffn.0.weight"][0]
        freq_dim = shapes["time_embedding.0.weight"][1]
        text_dim = shapes["text_embedding.0.weight"][1]
        out = shapes["head.head.weight"][0]
    except KeyError as error:
        raise CheckpointError(
            f"{where} has no {error.args[0]}, which every Wan has; give a whole Wan 2.1 or 2.2 model."
        ) from None
    num_heads = said.get("num_heads") or dim // HEAD_DIM
    if not num_heads or dim % num_heads:
        raise CheckpointError(
            f"{where}: its width {dim} is no multiple of {num_heads or HEAD_DIM}, so the number of heads is unknown; put the "
            "model's config.json beside it."
        )
    image = shapes.get("img_emb.proj.0.weight")
    positions = shapes.get("img_emb.emb_pos")
    config = {
        "_class_name": DIFFUSERS_CLASS,
        "added_kv_proj_dim": dim if "blocks.0.cross_attn.k_img.weight" in shapes else None,
        "attention_head_dim": dim // num_heads,
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "eps": said.get("eps", 1e-6),
        "ffn_dim": ffn_dim,
        "freq_dim": freq_dim,
        "image_dim": image[0] if image else None,
        "in_channels": in_channels,
        "num_attention_heads": num_heads,
        "num_layers": len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        "out_channels": out // math.prod(patch),
        "patch_size": list(patch),
        "pos_embed_seq_len": positions[1] if positions else None,
        "qk_norm": "rms_norm_across_heads" if "blocks.0.self_attn.norm_q.weight" in shapes else None,
        "rope_max_seq_len": 1024,
        "text_dim": text_dim,
    }
    wrong = [
        f"{old}={said[old]} (weights {config[new]})"
        for old, new in _SAME.items()
        if said.get(old, config[new]) != config[new]
    ]
    if said.get("dim", dim) != dim:
        wrong.append(f"dim={said['dim']} (weights {dim})")
    if wrong:
        raise CheckpointError(
            f"{where} has weights that do not fit its config.json: {', '.join(wrong)}; use weights and config of the same model."
        )
    return config


def to_official_config(config: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """The official config.json of a diffusers config.

    Args:
        config: of the diffusers DiT.
        variant: what model it is, which official Wan calls by its task.
    """
    task = variant.name.split("-")[1]
    return {
        "_class_name": OFFICIAL_CLASS,
        "_diffusers_version": "0.30.0",
        "dim": config["num_attention_heads"] * config["attention_head_dim"],
        "eps": config["eps"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "in_dim": config["in_channels"],
        "model_type": task,
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "out_dim": config["out_channels"],
        "text_len": 512,
    }
