"""Read the config.json of a model, and refuse sizes that no model has.

diffusers and transformers build every layer that a config names, so a wrong number of layers would run for hours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wands.errors import ConfigError
from wands.files import read_json_object

MOST_LAYERS = 1000
"""Largest number of layers, heads or blocks that a config may name. The largest Wan model has 40 layers."""
MOST_CHANNELS = 10_000_000
"""Largest width, length or vocabulary that a config may name. The vocabulary of UMT5 has 256,384 tokens."""
_COUNTS = (
    "num_layers",
    "num_hidden_layers",
    "num_decoder_layers",
    "num_attention_heads",
    "num_heads",
    "num_res_blocks",
)
_WIDTHS = (
    *("attention_head_dim", "ffn_dim", "text_dim", "freq_dim", "image_dim", "added_kv_proj_dim"),
    *("in_channels", "out_channels", "pos_embed_seq_len", "rope_max_seq_len", "patch_size"),
    *("in_dim", "out_dim", "dim"),
    *("base_dim", "decoder_base_dim", "z_dim", "dim_mult"),
    *("d_model", "d_kv", "d_ff", "vocab_size"),
    *("hidden_size", "intermediate_size", "image_size"),
)


def read_model_config(path: Path, *, label: str = "", fix: str = "fix the file.") -> dict[str, Any]:
    """Read the config of a DiT, a VAE or an encoder, and check the sizes in it.

    Error messages start with `label` (default: the path) and end with `fix`.

    Raises:
        ConfigError: if the file is missing or not a JSON object, or a size in it is not a whole number in its range.
    """
    config = read_json_object(path, label=label, fix=fix)
    nested = config.get("vision_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        _check_sizes(part, label or str(path), fix)
    return config


def _check_sizes(config: dict[str, Any], label: str, fix: str) -> None:
    for keys, most in ((_COUNTS, MOST_LAYERS), (_WIDTHS, MOST_CHANNELS)):
        for key in keys:
            value = config.get(key)
            for size in value if isinstance(value, list) else [value]:
                if size is not None and not (type(size) is int and 1 <= size <= most):
                    raise ConfigError(
                        f"{label} has {key}={value}, which must be a whole number from 1 to {most:,}; {fix}"
                    )
