"""The key formats in which LoRAs of Wan are published, read and written.

A LoRA file does not say what is its module's name and what its trainer's prefix; here is what each trainer writes.
Sources: diffusers' `save_lora_weights` and its loaders of foreign formats, ComfyUI's `comfy/lora.py`, musubi-tuner.

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

from wands.errors import CheckpointError
from wands.model.files.names import (
    COMFYUI_DIT,
    COMFYUI_LORA,
    EXPERTS,
    find_module,
    find_musubi_module,
    shorten,
    to_official,
)


@dataclass(frozen=True)
class LoraPair:
    """The two matrices of one module's LoRA: they add `scale * lora_B @ lora_A` to the weight.

    Attributes:
        lora_A: [R, I].
        lora_B: [O, R].
        scale: alpha / R.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float = 1.0

    def folded(self) -> LoraPair:
        """The same with scale 1, as every loader reads it; exact where the scale is a power of two."""
        if self.scale == 1.0:
            return self
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """What it adds to its module's weight, [O, I] in float64."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


_PART = re.compile(r"\.(?:lora_(?P<half>A|B|down|up)(?:\.[\w-]+)?\.weight|(?P<alpha>alpha))$")
_MUSUBI = "lora_unet_"
PEFT_FILE = "adapter_model.safetensors"
"""PEFT's name of a LoRA in a folder."""
_PEFT_CONFIG = "adapter_config.json"
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "transformer_2.", "transformer.")


def is_lora(names: Iterable[str]) -> bool:
    """Whether names are those of a LoRA file."""
    return any(_PART.search(name) and "lora_" in name for name in names)


def read_lora(
    state: Mapping[str, Tensor], *, alphas: Mapping[str, float] | None = None, where: str = "the LoRA"
) -> dict[str, dict[str, LoraPair]]:
    """Understand a LoRA of any of the known formats.

    They are diffusers' (`transformer.` + diffusers' modules), PEFT's own (`base_model.model.`, with or without the
    adapter's name behind lora_A), ComfyUI's (`diffusion_model.` + official modules), the bare modules of either, and
    musubi-tuner's (`lora_unet_` + official modules with underscores).

    Args:
        state: tensors by key.
        alphas: of each expert's modules that have no key for it; where there is none, it is the rank.
        where: what to call the file in errors.

    Returns:
        {"transformer": {diffusers module: its pair}}, and the same for "transformer_2" where the file has it.

    Raises:
        CheckpointError: keys that are no LoRA of Wan, or a module of which one half is missing.
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
            raise CheckpointError(f"{where} holds several adapters (again {key}); give one at a time.")
        halves[place][half] = value
    if unknown:
        raise CheckpointError(
            f"{where} holds {len(unknown)} keys that are no LoRA of Wan's linear layers ({shorten(unknown)}); give one "
            "of lora_A and lora_B (or lora_down and lora_up) and alpha."
        )
    broken = [
        f"{expert}.{module}" for (expert, module), own in halves.items() if not {"A", "B"} <= own.keys()
    ]
    if broken:
        raise CheckpointError(
            f"{where} lacks one half of {len(broken)} modules ({shorten(broken)}); fetch the file again."
        )
    loras: dict[str, dict[str, LoraPair]] = {}
    for (expert, module), own in halves.items():
        lora_A, lora_B = own["A"], own["B"]
        if lora_A.ndim != 2 or lora_B.ndim != 2 or lora_A.shape[0] != lora_B.shape[1]:
            raise CheckpointError(
                f"{where}: {module} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit; give "
                "a LoRA of linear layers."
            )
        rank = lora_A.shape[0]
        own_alpha = float(own["alpha"]) if "alpha" in own else (alphas or {}).get(expert)
        scale = 1.0 if own_alpha is None else own_alpha / rank
        loras.setdefault(expert, {})[module] = LoraPair(lora_A, lora_B, scale)
    return loras


def lora_to_diffusers(loras: Mapping[str, Mapping[str, LoraPair]]) -> dict[str, Tensor]:
    """Keys as diffusers' `save_lora_weights` writes them, alpha folded into lora_B, both experts in one file.

    Args:
        loras: as `read_lora` gives them.
    """
    return {
        f"{expert}.{module}.lora_{half}.weight": value
        for expert, pairs in loras.items()
        for module, pair in pairs.items()
        for half, value in zip("AB", _folded_halves(pair), strict=True)
    }


def lora_to_comfyui(pairs: Mapping[str, LoraPair], *, prefix: str = COMFYUI_LORA) -> dict[str, Tensor]:
    """Keys as ComfyUI reads them, alpha folded into lora_B: `diffusion_model.blocks.0.self_attn.q.lora_A.weight`.

    An alpha of its own is left out because diffusers refuses a file that has one outside the blocks. ComfyUI has no
    name for a second expert: each expert gets a file of its own.

    Args:
        pairs: of one DiT, by diffusers module.
        prefix: of every key; "" makes keys as official Wan names its modules.
    """
    return {
        f"{prefix}{to_official(module)}.lora_{half}.weight": value
        for module, pair in pairs.items()
        for half, value in zip("AB", _folded_halves(pair), strict=True)
    }


def _folded_halves(pair: LoraPair) -> tuple[Tensor, Tensor]:
    folded = pair.folded()
    return folded.lora_A, folded.lora_B


def _place(key: str) -> tuple[str, str]:
    """(expert, diffusers module) of a LoRA key without its end."""
    if key.startswith(_MUSUBI):
        return EXPERTS[0], find_musubi_module(key.removeprefix(_MUSUBI))
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    expert = EXPERTS[1] if prefix == f"{EXPERTS[1]}." else EXPERTS[0]
    return expert, find_module(key.removeprefix(prefix))


def alphas_of(metadata: Mapping[str, str] | None, path: str | Path) -> dict[str, float]:
    """The alpha of each expert that a trainer wrote beside the keys; {} where it wrote none.

    diffusers writes it into the file's metadata, PEFT into `adapter_config.json` beside its `adapter_model`.

    Args:
        metadata: of the safetensors file.
        path: of the file.

    Raises:
        CheckpointError: it asks for more than an alpha, such as DoRA or one alpha for each module, or is damaged.
    """
    path, settings = Path(path), (metadata or {}).get("lora_adapter_metadata", "{}")
    beside = path.with_name(_PEFT_CONFIG)
    is_peft = path.name == PEFT_FILE and beside.is_file()
    try:
        found: dict[str, Any] = json.loads(settings)
        if is_peft:
            config = json.loads(beside.read_text(encoding="utf-8"))
            found |= {f"{EXPERTS[0]}.{key}": value for key, value in config.items()}
    except (ValueError, AttributeError) as error:
        what = _PEFT_CONFIG if is_peft else "lora_adapter_metadata"
        raise CheckpointError(f"{path}: its {what} is no JSON object ({error}); mend it.") from None
    odd = {
        key.rpartition(".")[2]
        for key, value in found.items()
        if value and key.endswith((".alpha_pattern", ".use_dora", ".use_rslora"))
    }
    if odd:
        raise CheckpointError(
            f"{path} was trained with {', '.join(sorted(odd))}, which keys cannot say; convert it with its trainer."
        )
    return {
        key.removesuffix(".lora_alpha"): float(value)
        for key, value in found.items()
        if key.endswith(".lora_alpha")
    }
