"""A model by name: a folder that is there, or a repository of the Hub of which only what is needed is fetched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from wands.errors import ConfigError


def fetch_model(
    path: str | Path,
    *,
    key: str = "model.path",
    allow: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
) -> Path:
    """Turn a folder or a Hub id into a folder.

    Args:
        path: diffusers pipeline folder or Hub id (owner/name).
        key: what the user calls it, for errors.
        allow: patterns of the files to fetch; None is all.
        ignore: patterns of files to leave on the Hub.

    Raises:
        ConfigError: neither a folder nor a Hub id, or the Hub does not give it.
    """
    name = str(path)
    if name and Path(name).is_dir():  # "" is a folder too, for pathlib: the one that we are in
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or Path(name).exists():
        raise ConfigError(f"{key}={name} is neither a folder nor a Hub id; give one of them.")
    try:
        return Path(snapshot_download(name, allow_patterns=allow, ignore_patterns=ignore))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key}={name} is no folder here and could not be fetched from the Hub ({reason}); check the name, the network "
            "and your access."
        ) from None
