"""Find the frozen components of a pipeline (such as the VAE), read their configs, and recognize the model variant."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from wands.disk_errors import load_patiently
from wands.errors import ConfigError, one_line
from wands.model.files.config_files import read_model_config
from wands.model.files.hub import fetch_model
from wands.model.files.loading import load_index
from wands.model.files.official import DIT_STEM
from wands.model.files.tensor_files import check_model, find_weights
from wands.variants import ExtraInput, Variant, variant_of

T = TypeVar("T")

CONFIG_FILES = ("*.json", "*.model", "*.txt")
ALL_FILES = (*CONFIG_FILES, "*.safetensors")
WEIGHT_STEMS = {"vae": DIT_STEM, "text_encoder": "model", "image_encoder": "model"}
"""Maps a frozen component to the name of its weight files without suffix, such as "model" for model.safetensors."""


def find_part(model: str | Path, part: str, patterns: Sequence[str] = ALL_FILES) -> Path:
    """Return the folder of a component, such as "vae", of a pipeline folder or Hub id; download files that match `patterns`.

    Raises:
        ConfigError: if the model does not exist, has no subfolder for the component, or names sizes that no model has.
        CheckpointError: if the weights of the component are pickles.
    """
    root = fetch_model(model, key="model", allow=[f"{part}/{pattern}" for pattern in patterns])
    if not (root / part).is_dir():
        raise ConfigError(
            f"model={model} has no {part} folder. Use a complete Wan pipeline in diffusers layout. wands convert makes such a "
            "pipeline from an official repository."
        )
    if part in WEIGHT_STEMS:
        find_weights(root / part, WEIGHT_STEMS[part])  # refuses pickles
    if part in WEIGHT_STEMS and (root / part / "config.json").is_file():
        read_config(root / part / "config.json")  # refuses sizes that no model has
    return root / part


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON config of a component; raise ConfigError if the file is missing or not a JSON object."""
    label = f"model={path.parent.parent}: {path.parent.name}/{path.name}"
    return read_model_config(path, label=label, fix="restore the file.")


def read_variant(model: str | Path, conditions: Sequence[ExtraInput] = ()) -> Variant:
    """Return the variant of a pipeline folder or Hub id, see `variant_of`; raise ConfigError if there is none."""
    config = read_config(find_part(model, "transformer", CONFIG_FILES) / "config.json")
    try:
        return variant_of(config, load_index(model, key="--model"), conditions)
    except ValueError as error:
        raise ConfigError(f"--model={model}: {error}. Use a pipeline of Wan 2.1 or 2.2.") from None


def check_part(model: nn.Module, folder: Path) -> None:
    """Raise CheckpointError, with the weight and its file, if a loaded component on the CPU contains NaN or infinite values."""
    check_model(model, f"model={folder.parent}", lambda: folder, WEIGHT_STEMS[folder.name])


def load_part(model: str | Path, part: str, load: Callable[[], T]) -> T:
    """Return the result of `load`, which loads a component of a pipeline. Log messages of libraries are hidden.

    Raises:
        ConfigError: if the component is damaged or incomplete.
        DiskError: if the file system does not read a file.
    """
    try:
        with quiet_loading():
            return load_patiently(f"model={model}: the {part}", load)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"model={model}: the {part} cannot be loaded ({one_line(error)}). Download the files of the {part} again."
        ) from None


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide notices of diffusers and transformers inside a `with` block, and progress bars if stderr is not a terminal.

    In a log file, a progress bar would write a line for each update. The notices are about unused config keys, unused tensors and
    fallbacks of image processors. Reports of missing tensors, and everything under `wands --verbose`, are still shown.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    reports = logging.getLogger("transformers.modeling_utils")
    with ExitStack() as stack:
        for part in (diffusers_logging, transformers_logging):
            if part.is_progress_bar_enabled() and not sys.stderr.isatty():
                part.disable_progress_bar()
                stack.callback(part.enable_progress_bar)
        if not logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
            # Not removeFilter, because `quiet_loading` may be nested.
            stack.callback(setattr, reports, "filters", list(reports.filters))
            reports.addFilter(_is_important)
            for notice in map(logging.getLogger, ("diffusers", "transformers.models.auto")):
                stack.callback(notice.setLevel, notice.level)
                notice.setLevel(logging.ERROR)
        yield


def _is_important(record: logging.LogRecord) -> bool:
    """Return whether to show a record of transformers' model loader.

    A load report counts only if it names a missing, mismatched or unconverted tensor.
    """
    text = record.getMessage()
    return "LOAD REPORT" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))
