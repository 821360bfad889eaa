"""Find the frozen parts of a pipeline folder, read their configs and the variant."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wands.errors import ConfigError
from wands.files import read_json
from wands.model.files.hub import fetch_model
from wands.model.files.loading import load_index
from wands.variants import Variant, variant_of

logger = logging.getLogger(__name__)

CONFIG_FILES = ("*.json", "*.model", "*.txt")
ALL_FILES = (*CONFIG_FILES, "*.safetensors")


def find_part(model: str | Path, part: str, patterns: Sequence[str] = ALL_FILES) -> Path:
    """Return the folder of a pipeline's part, downloading it if `model` is a Hub id.

    Args:
        model: diffusers pipeline folder or Hub id.
        part: sub-folder, such as "vae".
        patterns: patterns of the files to download.

    Raises:
        ConfigError: if the model does not exist or lacks the part.
    """
    root = fetch_model(model, key="model", allow=[f"{part}/{pattern}" for pattern in patterns])
    if not (root / part).is_dir():
        raise ConfigError(
            f"model={model} has no {part} folder; give a complete Wan pipeline in diffusers layout, which wands convert makes "
            "from an official one."
        )
    return root / part


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON config of a pipeline's part.

    Raises:
        ConfigError: if the file is missing or not a JSON object.
    """
    label = f"model={path.parent.parent}: {path.parent.name}/{path.name}"
    value = read_json(path, label=label, fix="restore the file.")
    if not isinstance(value, dict):
        raise ConfigError(f"{label} is not a JSON object; restore the file.")
    return value


def read_variant(model: str | Path) -> Variant:
    """Return the variant that the configs of a pipeline name.

    Args:
        model: diffusers pipeline folder or Hub id.

    Raises:
        ConfigError: if the model does not exist or is not a supported variant.
    """
    config = read_config(find_part(model, "transformer", CONFIG_FILES) / "config.json")
    try:
        return variant_of(config, load_index(model))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model={model}: {error}; give a pipeline of Wan 2.1 or 2.2.") from None


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
