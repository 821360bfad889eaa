"""Find the LoRA files of a model: one file, a folder with one file, or a folder with one file or folder per expert."""

from __future__ import annotations

from pathlib import Path

from wands.errors import ConfigError
from wands.model.files.lora_keys import PEFT_FILE
from wands.model.files.name_maps import EXPERTS

LORA_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name of a LoRA file in a folder."""
EXPERT_NAMES = dict(zip(EXPERTS, ("high_noise", "low_noise"), strict=True))
"""DiT of a pipeline -> word in the name of its LoRA's folder or file, as `wands export` and most publishers write it."""


def experts_in(folder: Path) -> list[str]:
    """Return the DiTs for which a folder contains a LoRA under the expert's name; [] if it names no expert."""
    return [expert for expert, name in EXPERT_NAMES.items() if _with_name(folder, name)]


def find_lora_file(path: Path, key: str, expert: str | None = None) -> Path:
    """Return the safetensors file of one DiT's LoRA.

    Args:
        path: file or folder.
        key: option or recipe key that the user typed, for errors.
        expert: "transformer" or "transformer_2" for a model of two experts, None for a model of one DiT.

    Raises:
        ConfigError: if there is no LoRA, only the other expert's LoRA, or several candidates.
    """
    if path.is_file():
        if path.suffix != ".safetensors":  # a pickle can run any code
            raise ConfigError(f"{key}={path} must be a .safetensors file; convert it.")
        return path
    if not path.is_dir():
        raise ConfigError(f"{key}={path} does not exist; give a LoRA's file or folder.")
    if expert is not None and (experts := experts_in(path)):
        name = EXPERT_NAMES[expert]
        if expert not in experts:
            raise ConfigError(
                f"{key}={path} holds no LoRA of the {name.replace('_', '-')} expert; set model.experts to the other expert."
            )
        return find_lora_file(_with_name(path, name)[0], key)
    files = sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (LORA_FILE, PEFT_FILE) if (path / name).is_file()]
    if not usual and len(files) != 1:
        number = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ConfigError(f"{key}={path} holds {number} and no {LORA_FILE}; name the file.")
    return (usual or files)[0]


def _with_name(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_dir():
        return [folder / name]
    return sorted(file for file in folder.glob("*.safetensors") if name in file.name.lower())
