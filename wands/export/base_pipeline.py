"""Copy files into the folder of an export: the frozen models of a base pipeline, and the user's files from an earlier export."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wands.errors import ConfigError
from wands.export.export_record import RECORD_FILE
from wands.export.model_card import LOSS_FILE, MARKER
from wands.files import read_json_object
from wands.model.files.hub import check_link
from wands.variants import extra_channels


def check_base(
    base: Path, config: Mapping[str, Any], parts: Sequence[str], model: str, two_experts: bool | None = None
) -> None:
    """Check that a new DiT can replace the DiT of a base pipeline (option --base).

    The config of the new DiT must equal the config of the base's DiT, except for input channels of conditions of outside code,
    which the base may lack. Keys that start with "_", and keys that the base's
    config does not have, are not compared. The base must have as many DiTs as the model to which the new DiT belongs: one
    DiT, or two DiTs (high-noise and low-noise expert).

    Args:
        base: folder of the base pipeline.
        config: diffusers config of the new DiT.
        parts: subfolders of the base with the configs to compare, such as "transformer".
        model: text that names the new DiT's model in error messages, such as "SOURCE's model".
        two_experts: whether the new DiT's model has two DiTs. None skips the comparison of the numbers of DiTs.

    Raises:
        ConfigError: if `base` is not a diffusers pipeline, or has a different DiT config or number of DiTs.
    """
    fix = f"set --base to a pipeline of {model}."
    index, *stored = (
        read_json_object(
            base / name,
            label=f"--base {base} is not a complete diffusers pipeline: {name}",
            fix=f"{fix} wands convert makes a pipeline from an official repository.",
        )
        for name in ("model_index.json", *(f"{part}/config.json" for part in parts))
    )
    differing = [
        f"{key}={theirs[key]} instead of {value}"
        for key, value in config.items()
        for theirs in stored
        if key[0] != "_" and key in theirs and theirs[key] != value and not _are_added(key, config, theirs)
    ]
    base_has_two = bool((index.get("transformer_2") or [None])[0])
    if two_experts not in (None, base_has_two):
        differing.append("2 experts instead of 1" if base_has_two else "1 expert instead of 2")
    if differing:
        raise ConfigError(f"--base {base} does not fit {model}: {', '.join(dict.fromkeys(differing))}; {fix}")


def _are_added(key: str, config: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether two numbers of input channels differ only by conditions of outside code."""
    return key == "in_channels" and config[key] - base[key] == extra_channels(config) - extra_channels(base)


def copy_base(base_dir: Path, out: Path, parts: Sequence[str], link: bool = False) -> None:
    """Copy a base pipeline (option --base) into the folder of an export.

    Hidden files and the DiTs that the export replaces are not copied. Files that describe the base are not copied, either:
    README.md, wands_export.json, loss.png and the folder `samples`.

    Args:
        base_dir: folder of the base pipeline.
        out: existing folder of the export.
        parts: subfolders of the DiTs that the export replaces, such as "transformer".
        link: whether to make hard links instead of copies if the file system supports hard links. A program that writes
            into a hard link also changes the base.

    Raises:
        WandsError: if a file to copy is a link that leads out of the base and of the Hub cache: a push would publish it.
    """
    replaced = {*parts, "README.md", RECORD_FILE, LOSS_FILE, "samples"}

    def ignore(folder: str, names: list[str]) -> set[str]:
        skipped = replaced if Path(folder) == base_dir else set()
        ignored = {name for name in names if name.startswith(".") or name in skipped}
        for name in sorted({*names} - ignored):
            check_link(Path(folder, name), base_dir, f"--base {base_dir}")
        return ignored

    copy = _link_or_copy if link else shutil.copy2
    shutil.copytree(base_dir, out, ignore=ignore, copy_function=copy, dirs_exist_ok=True)


def carry_over(earlier: Path, out: Path) -> None:
    """Copy the user's files from the folder of an earlier export into the folder of a new export.

    The user's files are the folder `samples`, and a README.md without the line `MARKER`, with which wands marks its own
    README.md. The loss plot loss.png is copied together with the user's README.md, which may show the plot.

    Args:
        earlier: folder of the earlier export, which may not exist.
        out: existing folder of the new export.
    """
    if (earlier / "samples").is_dir():
        shutil.copytree(earlier / "samples", out / "samples", symlinks=True)
    card = earlier / "README.md"
    if card.is_file() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        for path in (card, earlier / LOSS_FILE):
            if path.is_file():
                shutil.copy2(path, out / path.name, follow_symlinks=False)


def _link_or_copy(source: str, target: str) -> str:
    real = os.path.realpath(source)  # in a Hub cache, the files are symbolic links
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
    return target
