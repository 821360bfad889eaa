"""Find, read and write LoRA files of Wan in the layouts of diffusers, PEFT, ComfyUI, official Wan and musubi-tuner.

A LoRA file does not mark where in a key the trainer's prefix ends and the name of the module starts.
Sources: diffusers' `save_lora_weights` and its loaders of other layouts, ComfyUI's `comfy/lora.py`, musubi-tuner.

Letters: R rank, I in features, O out features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wands.errors import CheckpointError, ConfigError, one_line
from wands.model.files.name_maps import COMFYUI_DIT, COMFYUI_LORA, DIT, EXPERTS, shorten
from wands.model.files.tensor_files import TensorFiles

LORA_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' name of a LoRA file in a folder."""
PEFT_FILE = "adapter_model.safetensors"
"""PEFT's name of a LoRA file in a folder."""
PEFT_CONFIG = "adapter_config.json"
"""PEFT's settings next to `PEFT_FILE`."""
EXPERT_NAMES = dict(zip(EXPERTS, ("high_noise", "low_noise"), strict=True))
"""DiT of a pipeline -> word in the name of the folder or file of its LoRA, as `wands export` and most publishers write it."""

_PART = re.compile(r"\.(?:lora_(?P<half>A|B|down|up)(?:\.[\w-]+)?\.weight|(?P<alpha>alpha))$")
_MUSUBI = "lora_unet_"
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "transformer_2.", "transformer.")


@dataclass(frozen=True)
class LoraPair:
    """Two matrices of one module's LoRA, which add `scale * lora_B @ lora_A` to the weight.

    Attributes:
        lora_A: [R, I].
        lora_B: [O, R].
        scale: alpha / R.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float = 1.0

    def folded(self) -> LoraPair:
        """Return an equal pair with scale 1, which every loader reads. Folding is exact if the scale is a power of two."""
        if self.scale == 1.0:
            return self
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """Return the update of the module's weight, [O, I] float64."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


# ---- find


def experts_in(folder: Path) -> list[str]:
    """Return the DiTs whose name in `EXPERT_NAMES` is part of the name of a file or subfolder; [] if there is none."""
    return [expert for expert, name in EXPERT_NAMES.items() if _with_name(folder, name)]


def find_lora_file(path: Path, key: str, expert: str | None = None) -> Path:
    """Return the safetensors file of one DiT's LoRA.

    Args:
        path: a file, a folder with one file, or a folder with one file or folder for each expert.
        key: option or recipe key that the user typed, for errors.
        expert: "transformer" or "transformer_2" for a model of two experts, None for a model of one DiT.

    Raises:
        ConfigError: if there is no LoRA, only the LoRA of the other expert, or several candidates.
    """
    if path.is_file():
        if path.suffix != ".safetensors":  # a pickle can run any code
            raise ConfigError(f"{key}={path} must be a .safetensors file. Convert the file.")
        return path
    if not path.is_dir():
        raise ConfigError(f"{key}={path} does not exist. Give the file or folder of a LoRA.")
    if expert is not None and (experts := experts_in(path)):
        name = EXPERT_NAMES[expert]
        if expert not in experts:
            raise ConfigError(
                f"{key}={path} contains no LoRA of the {name.replace('_', '-')} expert. Set model.experts to the other expert."
            )
        return find_lora_file(_with_name(path, name)[0], key)
    files = sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (LORA_FILE, PEFT_FILE) if (path / name).is_file()]
    if not usual and len(files) != 1:
        number = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ConfigError(f"{key}={path} contains {number} and no {LORA_FILE}. Give the LoRA file.")
    return (usual or files)[0]


def _with_name(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_dir():
        return [folder / name]
    return sorted(file for file in folder.glob("*.safetensors") if name in file.name.lower())


# ---- read


def is_lora(names: Iterable[str]) -> bool:
    """Return whether `names` are keys of a LoRA file."""
    return any(_PART.search(name) and "lora_" in name for name in names)


def read_lora_file(files: TensorFiles) -> dict[str, dict[str, LoraPair]]:
    """Read an open file with a LoRA in any layout of `parse_lora`, with the alpha that the trainer wrote outside the keys.

    Raises:
        CheckpointError: if the file is not a LoRA of Wan, is damaged, or has settings that wands does not support.
    """
    state = {name: files.read(name) for name in files.shapes}
    return parse_lora(state, alphas=alphas_of(files.metadata, files.files[0]), where=files.where)


def parse_lora(
    state: Mapping[str, Tensor], *, alphas: Mapping[str, float] | None = None, where: str = "the LoRA"
) -> dict[str, dict[str, LoraPair]]:
    """Translate the tensors of a LoRA from any of these layouts.

    - diffusers: `transformer.` or `transformer_2.` and diffusers' module name
    - PEFT: `base_model.model.` and diffusers' module name, with or without the adapter's name after lora_A
    - ComfyUI: `diffusion_model.` and the official module name
    - no prefix: diffusers' or the official module name
    - musubi-tuner: `lora_unet_` and the official module name with underscores instead of dots

    Args:
        state: tensors by key.
        alphas: alpha of each expert, for modules without an alpha key; the default is the rank.
        where: name of the file in errors.

    Returns:
        {"transformer": {diffusers module: pair}}, and an entry "transformer_2" if the file contains this expert.

    Raises:
        CheckpointError: if a key is not a LoRA key of Wan, or one of a module's two matrices is missing.
    """
    halves: dict[tuple[str, str], dict[str, Tensor]] = {}
    unknown = []
    for key, value in state.items():
        match = _PART.search(key)
        try:
            if match is None:
                raise KeyError(key)
            module = _module_of(key[: match.start()])
        except KeyError:
            unknown.append(key)
            continue
        half = {"down": "A", "up": "B"}.get(match["half"], match["half"] or "alpha")
        if half in halves.setdefault(module, {}):
            raise CheckpointError(
                f"{where} contains several adapters ({key} repeats). Give a file of one adapter."
            )
        halves[module][half] = value
    if unknown:
        raise CheckpointError(
            f"{where} contains {len(unknown)} keys that are not LoRA keys of Wan's linear layers ({shorten(unknown)}). Give a "
            "file with only lora_A and lora_B (or lora_down and lora_up) and alpha."
        )
    broken = [".".join(module) for module, tensors in halves.items() if not {"A", "B"} <= tensors.keys()]
    if broken:
        raise CheckpointError(
            f"{where} lacks lora_A or lora_B of {len(broken)} modules ({shorten(broken)}). Download the file again."
        )
    loras: dict[str, dict[str, LoraPair]] = {}
    for (expert, name), tensors in halves.items():
        lora_A, lora_B = tensors["A"], tensors["B"]
        if lora_A.ndim != 2 or lora_B.ndim != 2 or lora_A.shape[0] != lora_B.shape[1]:
            raise CheckpointError(
                f"{where}: {name} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit. Give a "
                "LoRA of linear layers."
            )
        alpha = float(tensors["alpha"]) if "alpha" in tensors else (alphas or {}).get(expert)
        scale = 1.0 if alpha is None else alpha / lora_A.shape[0]
        loras.setdefault(expert, {})[name] = LoraPair(lora_A, lora_B, scale)
    return loras


def pairs_of(loras: Mapping[str, dict[str, LoraPair]], expert: str) -> dict[str, LoraPair] | None:
    """Return the LoRA of one expert, or None if the file is for the other expert.

    A file with keys of only "transformer" is for any expert, because most files do not name their expert.
    """
    return loras.get(expert) or (loras[EXPERTS[0]] if list(loras) == [EXPERTS[0]] else None)


def _module_of(key: str) -> tuple[str, str]:
    """Return (expert, diffusers module) of a LoRA key without its suffix, or raise KeyError."""
    if key.startswith(_MUSUBI):
        return EXPERTS[0], _find_module(key.removeprefix(_MUSUBI), separator="_")
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    expert = EXPERTS[1] if prefix == f"{EXPERTS[1]}." else EXPERTS[0]
    return expert, _find_module(key.removeprefix(prefix))


def _find_module(name: str, separator: str = ".") -> str:
    """Return the diffusers name of a DiT module from its official or diffusers name, or raise KeyError."""
    block = re.match(rf"blocks{re.escape(separator)}(\d+){re.escape(separator)}", name)
    names = DIT.block if block else DIT.outside
    modules = {old.replace(".", separator): new for old, new in names.items()}
    modules |= {new: new for new in names.values()}
    return f"blocks.{block[1]}.{modules[name[block.end() :]]}" if block else modules[name]


def alphas_of(metadata: Mapping[str, str], path: Path) -> dict[str, float]:
    """Return the alpha of each expert that a trainer wrote outside the keys; {} if there is none.

    diffusers writes alpha into the metadata of the file. PEFT writes `adapter_config.json` next to `adapter_model.safetensors`.

    Args:
        metadata: metadata of the safetensors file.
        path: path of the file.

    Raises:
        CheckpointError: if the settings are damaged or need more than one alpha, such as DoRA or an alpha per module.
    """
    peft_config = path.with_name(PEFT_CONFIG)
    is_peft = path.name == PEFT_FILE and peft_config.is_file()
    try:
        settings: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        if is_peft:
            config = json.loads(peft_config.read_text(encoding="utf-8"))
            settings |= {f"{EXPERTS[0]}.{key}": value for key, value in config.items()}
    except (ValueError, AttributeError) as error:
        damaged = PEFT_CONFIG if is_peft else "lora_adapter_metadata"
        raise CheckpointError(
            f"{path}: {damaged} is not a JSON object ({one_line(error)}). Download the LoRA again."
        ) from None
    unsupported = {
        key.rpartition(".")[2]
        for key, value in settings.items()
        if value and key.endswith((".alpha_pattern", ".use_dora", ".use_rslora"))
    }
    if unsupported:
        raise CheckpointError(
            f"{path} was trained with {', '.join(sorted(unsupported))}, which LoRA keys cannot express. Convert the file with "
            "the program that trained the LoRA."
        )
    end = ".lora_alpha"
    return {key.removesuffix(end): float(value) for key, value in settings.items() if key.endswith(end)}


# ---- write


def lora_tensors(pairs: Mapping[str, LoraPair], layout: str = "diffusers") -> dict[str, Tensor]:
    """Return the keys and tensors of a LoRA file, with alpha folded into lora_B.

    There are no alpha keys, because diffusers rejects an alpha key outside the blocks. All loaders know a LoRA of either expert
    as "transformer", so a model of two experts needs one file for each expert.

    Args:
        pairs: LoRA of one DiT by diffusers module.
        layout: "diffusers": keys as `save_lora_weights` writes them; "comfyui": the prefix `diffusion_model.` and the official
            module name; "official": the official module name.
    """
    prefix = {"diffusers": f"{EXPERTS[0]}.", "comfyui": COMFYUI_LORA, "official": ""}[layout]
    rename = str if layout == "diffusers" else DIT.to_official
    folded = {f"{prefix}{rename(module)}.lora": pair.folded() for module, pair in pairs.items()}
    return {
        f"{stem}_{half}.weight": value
        for stem, pair in folded.items()
        for half, value in (("A", pair.lora_A), ("B", pair.lora_B))
    }
