"""Copy files into the folder of an export: the frozen models of a base pipeline, and the user's files from an earlier export."""

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
    """Check that the DiTs of a base pipeline have the same config as the trained DiTs.

    Args:
        base_dir: folder of the base pipeline.
        transformer_config: diffusers config of every trained DiT.
        parts: subfolders of the trained DiTs in the pipeline, such as "transformer".

    Raises:
        ConfigError: if `base_dir` is not a diffusers pipeline, or a DiT's config differs from `transformer_config`.
    """
    if not (base_dir / "model_index.json").is_file():
        raise ConfigError(
            f"--base {base_dir} has no model_index.json. Give the folder or Hub id of a diffusers pipeline, which wands convert "
            "can make from an official repository."
        )
    for part in parts:
        path = base_dir / part / "config.json"
        config = read_json_object(
            path, label=f"--base {base_dir}: {path}", fix="give a whole diffusers pipeline."
        )
        if differing := differing_keys(config, transformer_config, "checkpoint"):
            raise ConfigError(
                f"--base {base_dir} is another model: {', '.join(differing)}. Give the pipeline that the run started from."
            )


def differing_keys(config: Mapping[str, Any], expected: Mapping[str, Any], owner: str) -> list[str]:
    """Compare two diffusers configs, and return a text with both values for each key whose values differ.

    Keys that start with "_" and keys that are missing in `config` are not compared.

    Args:
        config: config of a pipeline.
        expected: config with the expected values.
        owner: name of the source of `expected`. The returned texts contain this name.
    """
    return [
        f"{key}={config[key]} ({owner} {value})"
        for key, value in expected.items()
        if key[0] != "_" and key in config and config[key] != value
    ]


def copy_base(base_dir: Path, out: Path, parts: Sequence[str], link: bool = True) -> None:
    """Copy a base pipeline into the folder of an export.

    The trained DiTs and the hidden files are not copied. README.md, the export record, the loss plot and the samples of
    the base are not copied either.

    Args:
        base_dir: folder of the base pipeline.
        out: existing folder of the export.
        parts: subfolders of the trained DiTs, which are not copied.
        link: whether to make hard links instead of copies if the file system supports hard links.
    """
    replaced = {*parts, "README.md", RECORD_FILE, LOSS_FILE, "samples"}

    def ignore(folder: str, names: list[str]) -> set[str]:
        skipped = replaced if Path(folder) == base_dir else set()
        return {name for name in names if name.startswith(".") or name in skipped}

    copy = _link_or_copy if link else shutil.copy2
    shutil.copytree(base_dir, out, ignore=ignore, copy_function=copy, dirs_exist_ok=True)


def carry_over(earlier: Path, out: Path) -> None:
    """Copy what users added to an earlier export into the folder of a new export.

    Copy the folder `samples`. If `wands push` did not write the earlier README.md, also copy README.md and the loss
    plot.

    Args:
        earlier: folder of the earlier export, which may not exist.
        out: existing folder of the new export.
    """
    if (earlier / "samples").is_dir():
        shutil.copytree(earlier / "samples", out / "samples", copy_function=_link_or_copy)
    card = earlier / "README.md"
    if card.is_file() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        for path in (card, earlier / LOSS_FILE):
            if path.is_file():
                _link_or_copy(str(path), str(out / path.name))


def _link_or_copy(source: str, target: str) -> str:
    real = os.path.realpath(source)  # in a Hub cache, the files are symbolic links
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
    return target
