"""Copy the frozen models of a base pipeline (--base), and the user's files of an earlier export, into the folder of an export."""

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
    """Check that a new DiT can replace the DiT of the base pipeline in the folder `base`.

    The diffusers `config` of the new DiT must equal the configs in the subfolders `parts` of the base. Input channels of
    conditions of outside code, keys that start with "_", and keys that the base lacks are not compared. `two_experts` says
    whether the new model has two DiTs, as the base must then have; None skips this check. `model` names the new DiT's model in
    messages.

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
    """Copy a base pipeline into the existing folder `out`, without the DiTs in `parts`, which the export replaces.

    Hidden files, README.md, wands_export.json, loss.png and `samples` are left out, too. `link` makes hard links where the file
    system can: a program that writes into one also changes the base.

    Raises:
        WandsError: if a file is a link that leads out of the base and of the Hub cache: a push would publish it.
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
    """Copy the user's files from an earlier export, which may not exist, into the existing folder of a new one.

    They are the folder `samples`, and a README.md without the line `MARKER`, together with the plot loss.png, which it may show.
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
