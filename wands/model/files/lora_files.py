"""Where the LoRA of a DiT lies: a file, a folder with one, or of two experts one for each, in folders or files named so."""

from __future__ import annotations

from pathlib import Path

from wands.errors import ConfigError
from wands.model.files.lora_keys import PEFT_FILE
from wands.model.files.names import EXPERTS

LORA_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name of the file in a folder."""
EXPERT_NAMES = dict(zip(EXPERTS, ("high_noise", "low_noise"), strict=True))
"""DiT of a pipeline -> what the folder or file of its LoRA is called after, by `wands export` and by most who publish."""


def parts_in(path: Path) -> list[str]:
    """The DiTs of which a folder holds a LoRA under the expert's name; [] where nothing is named so."""
    return [part for part, name in EXPERT_NAMES.items() if _named(path, name)]


def find_lora_file(path: Path, key: str, part: str | None = None) -> Path:
    """The safetensors file of one DiT's LoRA.

    Args:
        path: file or folder.
        key: what the user calls it, for errors.
        part: of a model of two experts, "transformer" or "transformer_2"; None for a model of one DiT.

    Raises:
        ConfigError: there is none, it is the other expert's, or it is not clear which of several.
    """
    if path.is_file():
        if path.suffix != ".safetensors":  # a pickle runs whatever its author wrote into it
            raise ConfigError(f"{key}={path} must be a .safetensors file; convert it.")
        return path
    if not path.is_dir():
        raise ConfigError(f"{key}={path} does not exist; give a LoRA's file or folder.")
    if part is not None and (own := parts_in(path)):
        name = EXPERT_NAMES[part]
        if part not in own:
            raise ConfigError(
                f"{key}={path} holds no LoRA of the {name.replace('_', '-')} expert; set model.experts to the one that it holds."
            )
        [found, *_] = _named(path, name)
        return find_lora_file(found, key)
    files = sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (LORA_FILE, PEFT_FILE) if (path / name).is_file()]
    if not usual and len(files) != 1:
        several = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ConfigError(f"{key}={path} holds {several} and no {LORA_FILE}; name the file.")
    return (usual or files)[0]


def _named(path: Path, name: str) -> list[Path]:
    if (path / name).is_dir():
        return [path / name]
    return sorted(file for file in path.glob("*.safetensors") if name in file.name.lower())
