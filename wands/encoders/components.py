"""Where the frozen parts of a pipeline lie, and the fingerprint that says which encoders made a cache."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from wands.errors import ConfigError
from wands.model.files.hub import fetch_model
from wands.model.files.loading import load_index
from wands.variants import Variant, variant_of

logger = logging.getLogger(__name__)

CONFIG_FILES = ("*.json", "*.model", "*.txt")
ALL_FILES = (*CONFIG_FILES, "*.safetensors")
# What of a config changes numbers without changing a tensor's name or shape. A list of what counts, not of
# what does not: each release of diffusers and transformers writes some more keys.
VAE_KEYS = (
    "z_dim",
    "latents_mean",
    "latents_std",
    "is_residual",
    "patch_size",
    "temperal_downsample",
    "scale_factor_temporal",
    "scale_factor_spatial",
)
TEXT_KEYS = (
    "d_model",
    "num_heads",
    "num_layers",
    "feed_forward_proj",
    "layer_norm_epsilon",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
CLIP_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
    "hidden_act",
    "layer_norm_eps",
)
PROCESSOR_KEYS = (
    "do_convert_rgb",
    "do_resize",
    "size",
    "resample",
    "do_center_crop",
    "crop_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
IMAGE_PARTS = ("image_encoder", "image_processor")
PROBE = "A cat, 2 dogs &amp; «trois» oiseaux – 一只猫 🐈 swim\n\tslowly; ÄÖÜß naïve"


def find_part(model: str | Path, part: str, patterns: Sequence[str] = ALL_FILES) -> Path:
    """The folder of one part of a pipeline, fetched from the Hub if `model` is not on disk.

    Args:
        model: diffusers pipeline folder or Hub id.
        part: sub-folder, such as "vae".
        patterns: which of its files to fetch.

    Raises:
        ConfigError: there is no such model, or it lacks the part.
    """
    root = fetch_model(model, key="model", allow=[f"{part}/{pattern}" for pattern in patterns])
    if not (root / part).is_dir():
        raise ConfigError(
            f"model={model} has no {part} folder; give a complete Wan pipeline in diffusers layout, which wands convert makes "
            "of an official one."
        )
    return root / part


def read_variant(model: str | Path) -> Variant:
    """The variant that the configs of a pipeline name.

    Args:
        model: diffusers pipeline folder or Hub id.

    Raises:
        ConfigError: there is no such model, or it is none that wands knows.
    """
    config = read_json(find_part(model, "transformer", CONFIG_FILES) / "config.json")
    try:
        return variant_of(config, load_index(model))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model={model}: {error}; give a pipeline of Wan 2.1 or 2.2.") from None


def fingerprint_pipeline(model: str | Path) -> dict[str, dict[str, str]]:
    """Name the frozen encoders of a pipeline by their content: equal fingerprints make equal caches.

    Weights are named by the SHA-256 of their files, configs by the keys that change numbers, the tokenizer by
    its vocabulary and by what it makes of one sentence. From the Hub no weight is fetched for this: the Hub
    knows the hashes of its files.

    Args:
        model: diffusers pipeline folder or Hub id.

    Returns:
        {"vae": {...}, "text_encoder": {...}, "tokenizer": {...}}, with CLIP also "image_encoder" and
        "image_processor"; parts that the model lacks are left out.

    Raises:
        ConfigError: there is no such model, or a part is damaged.
    """
    readers: dict[str, Callable[[str, Path], dict[str, str]]] = {
        "vae": _fingerprint_vae,
        "text_encoder": _fingerprint_text_encoder,
        "tokenizer": _fingerprint_tokenizer,
        "image_encoder": _fingerprint_image_encoder,
        "image_processor": _fingerprint_image_processor,
    }
    fingerprint = {}
    for part, read in readers.items():
        if Path(model).is_dir() and not (Path(model) / part).is_dir():
            continue
        # On the Hub only a part that is there can be looked at, and most models have no CLIP.
        if (
            part in IMAGE_PARTS
            and not Path(model).is_dir()
            and load_index(model).get(part, [None])[0] is None
        ):
            continue
        fingerprint[part] = read(str(model), find_part(model, part, CONFIG_FILES))
    return fingerprint


def _fingerprint_vae(model: str, folder: Path) -> dict[str, str]:
    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    config = read_json(folder / "config.json")
    kept = {key: config.get(key, defaults[key].default) for key in VAE_KEYS}
    weights = _weights_sha256(model, folder, "diffusion_pytorch_model.safetensors")
    return {"config_sha256": _sha256(kept), "weights_sha256": weights}


def _fingerprint_text_encoder(model: str, folder: Path) -> dict[str, str]:
    from transformers import UMT5Config

    return _fingerprint_encoder(model, folder, UMT5Config, TEXT_KEYS)


def _fingerprint_image_encoder(model: str, folder: Path) -> dict[str, str]:
    from transformers import CLIPVisionConfig

    return _fingerprint_encoder(model, folder, CLIPVisionConfig, CLIP_KEYS)


def _fingerprint_encoder(model: str, folder: Path, kind: Any, keys: Sequence[str]) -> dict[str, str]:
    """Of an encoder of transformers: `kind` knows the defaults of keys that its config leaves out."""
    config = kind.from_dict(read_json(folder / "config.json"))
    kept = {key: getattr(config, key) for key in keys}
    return {
        "config_sha256": _sha256(kept),
        "weights_sha256": _weights_sha256(model, folder, "model.safetensors"),
    }


def _fingerprint_tokenizer(model: str, folder: Path) -> dict[str, str]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model={model} has a tokenizer that does not load ({_brief(error)}).") from None
    return {"vocabulary_sha256": _sha256([sorted(tokenizer.get_vocab().items()), tokenizer(PROBE).input_ids])}


def _fingerprint_image_processor(model: str, folder: Path) -> dict[str, str]:
    config = read_json(folder / "preprocessor_config.json")
    kept = {key: config.get(key) for key in PROCESSOR_KEYS}
    return {"config_sha256": _sha256(kept)}


def _weights_sha256(model: str, folder: Path, single: str) -> str:
    index = folder / f"{single}.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [single]
    with ThreadPoolExecutor(4) as pool:  # hashlib lets go of the GIL: the shards of UMT5-XXL in parallel
        hashes = list(pool.map(lambda name: _file_sha256(model, folder, name), names))
    return hashes[0] if len(hashes) == 1 else _sha256(hashes)


def _file_sha256(model: str, folder: Path, name: str) -> str:
    path = folder / name
    if path.is_file():
        blob = path.resolve()
        if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            return blob.name  # the Hub's own cache names large files by their SHA-256
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if Path(model).is_dir():
        raise ConfigError(f"model={model} has no {folder.name}/{name}; restore it from the Hub.")
    try:
        etag = get_hf_file_metadata(hf_hub_url(model, f"{folder.name}/{name}")).etag
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"model={model}: the Hub does not tell of {folder.name}/{name} ({_brief(error)})."
        ) from None
    return str(etag)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide notices of diffusers and transformers while the block loads parts, and their progress bars without a terminal.

    The notices name unused config keys, unused tensors and fallbacks of image processors. Reports of missing tensors stay, and
    `wands --verbose` shows all notices. A progress bar would write one line per step into a log file.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    bars = [part for part in (diffusers_logging, transformers_logging) if part.is_progress_bar_enabled()]
    notices = [logging.getLogger(name) for name in ("diffusers", "transformers.models.auto")]
    levels = [notice.level for notice in notices]
    reports = logging.getLogger("transformers.modeling_utils")
    filters = list(reports.filters)  # blocks may be nested
    for part in bars if not sys.stderr.isatty() else []:
        part.disable_progress_bar()
    if not logger.isEnabledFor(logging.DEBUG):
        reports.addFilter(_is_important)
        for notice in notices:
            notice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reports.filters[:] = filters
        for part in bars:
            part.enable_progress_bar()
        for notice, level in zip(notices, levels, strict=True):
            notice.setLevel(level)


def _is_important(record: logging.LogRecord) -> bool:
    """Return False for transformers' report of a load in which every tensor of the model was found."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a config of a model folder.

    Raises:
        ConfigError: it is missing or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={path.parent.parent}: {path.parent.name}/{path.name} cannot be read ({_brief(error)})."
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"model={path.parent.parent}: {path.parent.name}/{path.name} is not a JSON object.")
    return value


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
