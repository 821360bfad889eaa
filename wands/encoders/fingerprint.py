"""Fingerprint of the frozen encoders of a pipeline. Encoders with equal fingerprints make equal latent caches."""

from __future__ import annotations

import hashlib
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from diffusers import AutoencoderKLWan
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoTokenizer

from wands.encoders.components import CONFIG_FILES, WEIGHT_STEMS, find_part, load_part, read_config
from wands.errors import ConfigError, one_line
from wands.model.files.hashes import hub_sha256
from wands.model.files.loading import load_index
from wands.model.files.tensor_files import find_weights, hash_file

# fmt: off
_CONFIG_KEYS = {
    "vae": (
        "z_dim", "latents_mean", "latents_std", "is_residual", "patch_size", "temperal_downsample", "scale_factor_temporal",
        "scale_factor_spatial",
    ),
    "text_encoder": (
        "d_model", "num_heads", "num_layers", "feed_forward_proj", "layer_norm_epsilon", "relative_attention_num_buckets",
        "relative_attention_max_distance",
    ),
    "image_encoder": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size", "hidden_act", "layer_norm_eps",
    ),
    "image_processor": (
        "do_convert_rgb", "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor",
        "do_normalize", "image_mean", "image_std",
    ),
}
# fmt: on
"""Config keys by component that change its results without changing the name or shape of a tensor.

The fingerprint ignores all other keys, because new releases of diffusers and transformers add some."""
_CONFIG_CLASSES = {"text_encoder": transformers.UMT5Config, "image_encoder": transformers.CLIPVisionConfig}
PROBE = "A cat, 2 dogs &amp; «trois» oiseaux – 一只猫 🐈 swim\n\tslowly; ÄÖÜß naïve"


def fingerprint_pipeline(model: str | Path) -> dict[str, dict[str, str]]:
    """Identify the frozen encoders of a pipeline folder or Hub id by their content: {component: {name of a digest: digest}}.

    The components are "vae", "text_encoder" and "tokenizer", with CLIP also "image_encoder" and "image_processor", as far as the
    model has them. Weights on the Hub are not downloaded, because the Hub stores the SHA-256 of each file.

    Raises:
        ConfigError: if the model does not exist or a component is damaged.
    """
    fingerprint = {}
    for part in ("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"):
        if Path(model).is_dir():
            is_missing = not (Path(model) / part).is_dir()
        else:  # most models have no CLIP; find_part would fail for a missing part on the Hub
            is_missing = part.startswith("image_") and load_index(model).get(part, [None])[0] is None
        if not is_missing:
            fingerprint[part] = _fingerprint_part(str(model), part, find_part(model, part, CONFIG_FILES))
    return fingerprint


def _fingerprint_part(model: str, part: str, folder: Path) -> dict[str, str]:
    """Return the SHA-256 digests of a component by name.

    The tokenizer has "vocabulary_sha256", for the vocabulary and the tokens of a test sentence. All others have "config_sha256"
    and, with weights, "weights_sha256", which the Hub gives for files that are not in `folder`. A missing config key counts as
    null for the image processor, and as its default otherwise.
    """
    if part == "tokenizer":
        load = partial(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
        tokenizer = load_part(model, part, load)
        vocabulary = sorted(tokenizer.get_vocab().items())
        return {"vocabulary_sha256": _sha256([vocabulary, tokenizer(PROBE).input_ids])}
    name = "preprocessor_config.json" if part == "image_processor" else "config.json"
    config = read_config(folder / name)
    keys = _CONFIG_KEYS[part]
    if part == "vae":  # diffusers has no config class
        defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
        config = {key: defaults[key].default for key in keys} | config
    elif part in _CONFIG_CLASSES:
        config = _CONFIG_CLASSES[part].from_dict(config).to_dict()
    digests = {"config_sha256": _sha256({key: config.get(key) for key in keys})}
    return digests | ({"weights_sha256": _weights_sha256(model, folder)} if part in WEIGHT_STEMS else {})


def _weights_sha256(model: str, folder: Path) -> str:
    stem = WEIGHT_STEMS[folder.name]
    paths = find_weights(folder, stem) or [folder / f"{stem}.safetensors"]
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL, so threads hash files in parallel
        hashes = list(pool.map(partial(_file_sha256, model), paths))
    return hashes[0] if len(hashes) == 1 else _sha256(hashes)


def _file_sha256(model: str, path: Path) -> str:
    name = f"{path.parent.name}/{path.name}"
    if path.is_file():
        return hub_sha256(path.parent, path) or hash_file(path, "sha256")
    if Path(model).is_dir():
        raise ConfigError(f"model={model} has no {name}. Restore the file from the Hub.")
    try:
        etag = get_hf_file_metadata(hf_hub_url(model, name)).etag
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"model={model}: the Hub gives no SHA-256 of {name} ({one_line(error)}). Check the network and your "
            "access to the model."
        ) from None
    return str(etag)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
