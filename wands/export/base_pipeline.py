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
            f"--base {base_dir} has no model_index.json. Set --base to the folder or Hub id of a diffusers pipeline. wands "
            "convert makes such a pipeline from an official repository."
        )
    for part in parts:
        path = base_dir / part / "config.json"
        config = read_json_object(
            path, label=f"--base {base_dir}: {path}", fix="set --base to a complete diffusers pipeline."
        )
        if differing := differing_keys(config, transformer_config, "checkpoint"):
            raise ConfigError(
                f"--base {base_dir} is not the base model of the run: {', '.join(differing)}. Set --base to the run's base model."
            )


def differing_keys(config: Mapping[str, Any], expected: Mapping[str, Any], owner: str) -> list[str]:
    """Compare two diffusers configs. Return one text for each key with different values; the text contains both values.

    Keys that start with "_" and keys that are missing in `config` are not compared.

    Args:
        config: config of a pipeline.
        expected: config with the expected values.
        owner: name for the returned texts that says where the expected values are from, such as "checkpoint".
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
    """Copy the files that the user added to an earlier export into the folder of a new export.

    The folder `samples` is copied. If the user wrote the README.md of the earlier export, README.md and the loss plot are
    copied too.

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
