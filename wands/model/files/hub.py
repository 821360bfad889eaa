"""Find the local folder of a model that the user gives as a folder or as a Hugging Face Hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from wands.errors import ConfigError, WandsError, one_line
from wands.model.files.name_maps import EXPERTS
from wands.model.files.official import DIT_STEM
from wands.model.files.tensor_files import find_weights, is_gguf
from wands.variants import VARIANTS


def is_hub_id(name: str) -> bool:
    """Return whether a text has the form owner/name of a Hub repository, and is not the path of an existing file or folder."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def published_name(model: str) -> str | None:
    """Return wands' name of a Hub id in `VARIANTS`, else None: "wan2.1-t2v-1.3b" for "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"."""
    pattern = rf"wan-ai/({'|'.join(map(re.escape, VARIANTS))})(-\d+p)?-diffusers"
    match = re.fullmatch(pattern, model.lower())
    return match[1] if match and is_hub_id(model) else None


def is_downloaded(model: str) -> bool:
    """Return whether the Hub cache on this machine contains all weights in the folder `transformer` of a pipeline.

    Raises:
        CheckpointError: if the cached index of the weights is damaged.
    """
    for end in ("", ".index.json"):
        cached = try_to_load_from_cache(model, f"{EXPERTS[0]}/{DIT_STEM}.safetensors{end}")
        if isinstance(cached, str):
            return all(path.is_file() for path in find_weights(Path(cached).parent, DIT_STEM))
    return False


def fetch_model(
    path: str | Path,
    *,
    key: str = "model.path",
    allow: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
) -> Path:
    """Return the local folder of a model. For a Hub id, download the files that match the glob patterns `allow` but not `ignore`.

    `key` is the option or recipe key that the user typed.

    Raises:
        ConfigError: if `path` is neither a folder nor a Hub id, or the download fails. For one file of weights, the message names
            the command that makes a folder from it.
    """
    name = str(path)
    if name and Path(name).is_dir():  # for pathlib "" is the current folder
        return Path(name)
    if Path(name).is_file():
        fix = f"wands convert {name} --to diffusers --base DIR --out OUT makes such a folder from one file of weights"
        if is_gguf(Path(name)):
            fix = "use the safetensors files of the model, because wands does not read GGUF files"
        raise ConfigError(
            f"{key}={name} is a file, but {key} must be the folder or the Hub id of a model; {fix}."
        )
    if not is_hub_id(name):
        raise ConfigError(
            f"{key}={name} is neither a folder nor a Hub id; set {key} to an existing folder or a Hub id (owner/name)."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=allow, ignore_patterns=ignore))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        offline = "no connection to the Hub, and no copy in the local Hub cache"
        reason = offline if isinstance(error, LocalEntryNotFoundError) else one_line(error)
        raise ConfigError(
            f"{key}={name} is not a folder and cannot be downloaded from the Hub ({reason}); check the name, the "
            "network and your access."
        ) from None


def check_link(path: Path, folder: Path, name: str) -> None:
    """Check that a file or folder of a model may be copied or uploaded: no link may lead out of the model's folder.

    Links to files of the Hub cache are allowed, because a downloaded model consists of them. `name` is that of `folder` in the
    error.

    Raises:
        WandsError: if `path` leads to another place, or is a link to a folder that contains the link.
    """
    real = Path(os.path.realpath(path))
    if path.is_symlink() and path.is_dir() and path.parent.resolve().is_relative_to(real):
        raise WandsError(f"{path} is a link to a folder that contains the link; remove the link.")
    root = Path(os.path.realpath(folder))
    roots = [root, Path(os.path.realpath(constants.HF_HUB_CACHE))]
    if root.parent.name == "snapshots":  # a Hub cache in another place; `blobs` itself must not be a link
        roots.append(root.parent.parent / "blobs")
    if not any(map(real.is_relative_to, roots)):
        raise WandsError(
            f"{path} leads to {real}, which is outside {name} and outside the Hub cache; replace the link by a copy."
        )
