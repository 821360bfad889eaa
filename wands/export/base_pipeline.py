"""Copy the parts of a base pipeline, and of an earlier export, into the folder of an export."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wands.errors import ConfigError
from wands.export.model_card import LOSS_FILE, MARKER, RECORD_FILE
from wands.files import read_json_object


def check_base(base_dir: Path, transformer_config: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Check that a base pipeline has the DiTs of a trained model.

    Args:
        base_dir: folder of the base pipeline.
        transformer_config: diffusers config of the trained DiT (of each DiT).
        parts: folders of the trained DiTs in a pipeline.

    Raises:
        ConfigError: if `base_dir` is not a diffusers pipeline or is another model.
    """
    if not (base_dir / "model_index.json").is_file():
        raise ConfigError(
            f"--base {base_dir} has no model_index.json; give --base with a diffusers pipeline folder or Hub id (wands convert "
            "makes one of an official repository)."
        )
    for part in parts:
        path = base_dir / part / "config.json"
        config = read_json_object(
            path, label=f"--base {base_dir}: {path}", fix="give a whole diffusers pipeline."
        )
        differing = [
            f"{key}={config[key]} (checkpoint {value})"
            for key, value in transformer_config.items()
            if key[0] != "_" and key in config and config[key] != value
        ]
        if differing:
            raise ConfigError(
                f"--base {base_dir} is another model: {', '.join(differing)}; give the pipeline that the run started from."
            )


def copy_base(base_dir: Path, out: Path, parts: Sequence[str], link: bool = True) -> None:
    """Copy a base pipeline without the trained DiTs, its repository card, its samples and hidden files.

    Args:
        base_dir: folder of the base pipeline.
        out: existing folder.
        parts: folders of the trained DiTs.
        link: hard-link files if the file system can.
    """
    replaced = {*parts, "README.md", RECORD_FILE, LOSS_FILE, "samples"}

    def ignore(folder: str, names: list[str]) -> set[str]:
        skipped = replaced if Path(folder) == base_dir else set()
        return {name for name in names if name.startswith(".") or name in skipped}

    copy = _link_or_copy if link else shutil.copy2
    shutil.copytree(base_dir, out, ignore=ignore, copy_function=copy, dirs_exist_ok=True)


def carry_over(earlier: Path, out: Path) -> None:
    """Copy what users added to an earlier export: samples, and a README.md of their own with the loss plot it may show."""
    if (earlier / "samples").is_dir():
        shutil.copytree(earlier / "samples", out / "samples", copy_function=_link_or_copy)
    card = earlier / "README.md"
    if card.is_file() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        for path in (card, earlier / LOSS_FILE):
            if path.is_file():
                _link_or_copy(str(path), str(out / path.name))


def _link_or_copy(source: str, target: str) -> str:
    real = os.path.realpath(source)  # the files of a Hub cache are links to its blobs
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
    return target
