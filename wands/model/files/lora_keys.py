"""Read and write LoRAs of Wan in the key formats of diffusers, PEFT, ComfyUI, official Wan and musubi-tuner.

A LoRA file does not say which part of a key is the trainer's prefix and which part is the name of the module.
Sources: diffusers' `save_lora_weights` and its loaders of other formats, ComfyUI's `comfy/lora.py`, musubi-tuner.

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

from wands.errors import CheckpointError, one_line
from wands.model.files.name_maps import COMFYUI_DIT, COMFYUI_LORA, DIT, EXPERTS, shorten


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
        """Return an equal pair with scale 1, which every loader reads; exact if the scale is a power of two."""
        if self.scale == 1.0:
            return self
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """Return the update of the module's weight, [O, I] float64."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


_PART = re.compile(r"\.(?:lora_(?P<half>A|B|down|up)(?:\.[\w-]+)?\.weight|(?P<alpha>alpha))$")
_MUSUBI = "lora_unet_"
PEFT_FILE = "adapter_model.safetensors"
"""PEFT's name of a LoRA file in a folder."""
_PEFT_CONFIG = "adapter_config.json"
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "transformer_2.", "transformer.")


def is_lora(names: Iterable[str]) -> bool:
    """Return whether `names` are keys of a LoRA file."""
    return any(_PART.search(name) and "lora_" in name for name in names)


def read_lora(
    state: Mapping[str, Tensor], *, alphas: Mapping[str, float] | None = None, where: str = "the LoRA"
) -> dict[str, dict[str, LoraPair]]:
    """Read the tensors of a LoRA in any of the known key formats.

    - diffusers: `transformer.` or `transformer_2.` and diffusers' module name
    - PEFT: `base_model.model.` and diffusers' module name, with or without the adapter's name after lora_A
    - ComfyUI: `diffusion_model.` and the official module name
    - no prefix: diffusers' or the official module name
    - musubi-tuner: `lora_unet_` and the official module name with underscores for dots

    Args:
        state: tensors by key.
        alphas: alpha of each expert, for modules without an alpha key; the default is the rank.
        where: name of the file in errors.

    Returns:
        {"transformer": {diffusers module: pair}}, and an entry "transformer_2" if the file has that expert.

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
            place = _place(key[: match.start()])
        except KeyError:
            unknown.append(key)
            continue
        half = {"down": "A", "up": "B"}.get(match["half"], match["half"] or "alpha")
        if half in halves.setdefault(place, {}):
            raise CheckpointError(
                f"{where} contains several adapters ({key} repeats). Give a file of one adapter."
            )
        halves[place][half] = value
    if unknown:
        raise CheckpointError(
            f"{where} contains {len(unknown)} keys that are not LoRA keys of Wan's linear layers ({shorten(unknown)}). Give a "
            "file with only lora_A and lora_B (or lora_down and lora_up) and alpha."
        )
    broken = [".".join(place) for place, own in halves.items() if not {"A", "B"} <= own.keys()]
    if broken:
        raise CheckpointError(
            f"{where} lacks lora_A or lora_B of {len(broken)} modules ({shorten(broken)}). Download the file again."
        )
    loras: dict[str, dict[str, LoraPair]] = {}
    for (expert, module), own in halves.items():
        lora_A, lora_B = own["A"], own["B"]
        if lora_A.ndim != 2 or lora_B.ndim != 2 or lora_A.shape[0] != lora_B.shape[1]:
            raise CheckpointError(
                f"{where}: {module} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit. Give a "
                "LoRA of linear layers."
            )
        rank = lora_A.shape[0]
        own_alpha = float(own["alpha"]) if "alpha" in own else (alphas or {}).get(expert)
        scale = 1.0 if own_alpha is None else own_alpha / rank
        loras.setdefault(expert, {})[module] = LoraPair(lora_A, lora_B, scale)
    return loras


def lora_to_diffusers(loras: Mapping[str, Mapping[str, LoraPair]]) -> dict[str, Tensor]:
    """Return the keys that diffusers' `save_lora_weights` writes, with alpha folded into lora_B and both experts in one file.

    Args:
        loras: result of `read_lora`.
    """
    return {
        f"{expert}.{module}.lora_{half}.weight": value
        for expert, pairs in loras.items()
        for module, pair in pairs.items()
        for half, value in zip("AB", _folded_halves(pair), strict=True)
    }


def lora_to_comfyui(pairs: Mapping[str, LoraPair], *, prefix: str = COMFYUI_LORA) -> dict[str, Tensor]:
    """Return keys for ComfyUI, with alpha folded into lora_B: `diffusion_model.blocks.0.self_attn.q.lora_A.weight`.

    There are no alpha keys, because diffusers rejects a file with an alpha key outside the blocks. ComfyUI has no name
    for a second expert: write one file for each expert.

    Args:
        pairs: LoRA of one DiT by diffusers module.
        prefix: prefix of every key; "" gives the keys of official Wan.
    """
    return {
        f"{prefix}{DIT.to_official(module)}.lora_{half}.weight": value
        for module, pair in pairs.items()
        for half, value in zip("AB", _folded_halves(pair), strict=True)
    }


def _folded_halves(pair: LoraPair) -> tuple[Tensor, Tensor]:
    folded = pair.folded()
    return folded.lora_A, folded.lora_B


def _place(key: str) -> tuple[str, str]:
    """Return (expert, diffusers module) of a LoRA key without its suffix."""
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


def alphas_of(metadata: Mapping[str, str] | None, path: str | Path) -> dict[str, float]:
    """Return the alpha of each expert that a trainer wrote outside the keys; {} if it wrote none.

    diffusers writes alpha into the file's metadata, PEFT into `adapter_config.json` next to `adapter_model.safetensors`.

    Args:
        metadata: metadata of the safetensors file.
        path: path of the file.

    Raises:
        CheckpointError: if the settings are damaged or need more than one alpha, such as DoRA or an alpha per module.
    """
    path = Path(path)
    peft_config = path.with_name(_PEFT_CONFIG)
    is_peft = path.name == PEFT_FILE and peft_config.is_file()
    try:
        settings: dict[str, Any] = json.loads((metadata or {}).get("lora_adapter_metadata", "{}"))
        if is_peft:
            config = json.loads(peft_config.read_text(encoding="utf-8"))
            settings |= {f"{EXPERTS[0]}.{key}": value for key, value in config.items()}
    except (ValueError, AttributeError) as error:
        damaged = _PEFT_CONFIG if is_peft else "lora_adapter_metadata"
        raise CheckpointError(
            f"{path}: its {damaged} is not a JSON object ({one_line(error)}). Download the LoRA again."
        ) from None
    unsupported = {
        key.rpartition(".")[2]
        for key, value in settings.items()
        if value and key.endswith((".alpha_pattern", ".use_dora", ".use_rslora"))
    }
    if unsupported:
        raise CheckpointError(
            f"{path} was trained with {', '.join(sorted(unsupported))}, which LoRA keys cannot express. Convert the file with "
            "the program that trained it."
        )
    end = ".lora_alpha"
    return {key.removesuffix(end): float(value) for key, value in settings.items() if key.endswith(end)}
