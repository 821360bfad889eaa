"""Find, read and write LoRA files of Wan in the layouts of diffusers, PEFT, ComfyUI, official Wan and musubi-tuner.

A key of a LoRA file consists of a prefix that depends on the training program, the name of a module, and a suffix such as
".lora_A.weight". The key does not mark where the prefix ends, so wands compares the key with a list of known prefixes.

Sources: diffusers' `save_lora_weights` and its loaders of other layouts, ComfyUI's `comfy/lora.py`, musubi-tuner.

Letters: R rank of the LoRA, I in features, O out features.
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
"""Name that diffusers gives to a LoRA file in a folder."""
PEFT_FILE = "adapter_model.safetensors"
"""Name that PEFT gives to a LoRA file in a folder."""
PEFT_CONFIG = "adapter_config.json"
"""Name of the file next to `PEFT_FILE` in which PEFT stores the settings of a LoRA, such as alpha."""
EXPERT_NAMES = dict(zip(EXPERTS, ("high_noise", "low_noise"), strict=True))
"""Maps "transformer" to "high_noise" and "transformer_2" to "low_noise". `wands export` and most publishers write
"high_noise" or "low_noise" into the name of the LoRA's file or folder.
"""

_PART = re.compile(r"\.(?:lora_(?P<half>A|B|down|up)(?:\.[\w-]+)?\.weight|(?P<alpha>alpha))$")
_MUSUBI = "lora_unet_"
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "transformer_2.", "transformer.")


@dataclass(frozen=True)
class LoraPair:
    """LoRA of one module: two matrices, which add `scale * lora_B @ lora_A` to the module's weight.

    Attributes:
        lora_A: matrix [rank, in_features].
        lora_B: matrix [out_features, rank].
        scale: factor of the product lora_B @ lora_A: alpha / rank, or 1 if the LoRA has no alpha.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float = 1.0

    def folded(self) -> LoraPair:
        """Return an equivalent pair with scale 1, whose lora_B is multiplied by the scale of this pair.

        Every loader can read a pair with scale 1. The multiplication is exact if the scale is a power of two.
        """
        if self.scale == 1.0:
            return self
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """Return the matrix that the LoRA adds to the module's weight, float64 [out_features, in_features]."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


# ---- find


def experts_in(folder: Path) -> list[str]:
    """Return the experts (DiTs for high or low noise) for which a folder contains a LoRA.

    A LoRA belongs to an expert if the name of its file or subfolder contains "high_noise" or "low_noise".

    Returns:
        A list with "transformer" if the high-noise expert has a LoRA, and "transformer_2" if the low-noise expert has a
        LoRA.
    """
    return [expert for expert, name in EXPERT_NAMES.items() if _with_name(folder, name)]


def find_lora_file(path: Path, key: str, expert: str | None = None) -> Path:
    """Return the safetensors file of one DiT's LoRA.

    Args:
        path: a file, a folder with one file, or a folder that has one file or one subfolder for each expert.
        key: option or recipe key that the user typed, for error messages.
        expert: "transformer" or "transformer_2" for a model with two experts; None for a model with one DiT.

    Raises:
        ConfigError: if `path` does not exist, contains no LoRA for `expert`, or contains several files that could be
            the LoRA.
    """
    if path.is_file():
        if path.suffix != ".safetensors":  # a pickle can run any code
            raise ConfigError(f"{key}={path} must be a .safetensors file. Convert the file to safetensors.")
        return path
    if not path.is_dir():
        raise ConfigError(f"{key}={path} does not exist. Set {key} to the file or folder of a LoRA.")
    if expert is not None and (experts := experts_in(path)):
        name = EXPERT_NAMES[expert]
        if expert not in experts:
            raise ConfigError(
                f"{key}={path} contains no LoRA of the {name.replace('_', '-')} expert. Add the LoRA of this expert, or set "
                "model.experts so that only the expert with a LoRA is trained."
            )
        return find_lora_file(_with_name(path, name)[0], key)
    files = sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (LORA_FILE, PEFT_FILE) if (path / name).is_file()]
    if not usual and len(files) != 1:
        number = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ConfigError(f"{key}={path} contains {number} and no {LORA_FILE}. Set {key} to a LoRA file.")
    return (usual or files)[0]


def _with_name(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_dir():
        return [folder / name]
    return sorted(file for file in folder.glob("*.safetensors") if name in file.name.lower())


# ---- read


def is_lora(names: Iterable[str]) -> bool:
    """Return whether the tensor names of a file contain a LoRA key, such as "transformer.blocks.0.attn1.to_q.lora_A.weight"."""
    return any(_PART.search(name) and "lora_" in name for name in names)


def read_lora_file(files: TensorFiles) -> dict[str, dict[str, LoraPair]]:
    """Read the LoRA in an open file of any layout that `parse_lora` supports.

    Modules without an alpha tensor get the alpha in the file's metadata or in PEFT's `adapter_config.json`.

    Returns:
        A dict {"transformer": {diffusers module name: pair}}. Modules whose keys have the prefix `transformer_2.` are
        under "transformer_2" instead.

    Raises:
        CheckpointError: if the file is damaged, is not a LoRA of Wan, or has settings that wands does not support.
    """
    state = {name: files.read(name) for name in files.shapes}
    return parse_lora(state, alphas=alphas_of(files.metadata, files.files[0]), where=files.where)


def parse_lora(
    state: Mapping[str, Tensor], *, alphas: Mapping[str, float] | None = None, where: str = "the LoRA"
) -> dict[str, dict[str, LoraPair]]:
    """Group the tensors of a LoRA file into pairs of matrices (lora_A, lora_B), one pair for each module of the DiT.

    The keys may have any of these layouts:

    - diffusers: prefix `transformer.` or `transformer_2.`, then diffusers' module name
    - PEFT: prefix `base_model.model.`, then diffusers' module name; the name of the adapter may follow lora_A and
      lora_B
    - ComfyUI: prefix `diffusion_model.`, then the official module name
    - no prefix: diffusers' or the official module name
    - musubi-tuner: prefix `lora_unet_`, then the official module name with underscores instead of dots

    Args:
        state: maps a key of the file to its tensor.
        alphas: maps "transformer" or "transformer_2" to the alpha of modules without an alpha key. Without any alpha, the
            scale of a module is 1.
        where: name of the file for error messages.

    Returns:
        A dict {"transformer": {diffusers module name: pair}}. Modules whose keys have the prefix `transformer_2.` are
        under "transformer_2" instead.

    Raises:
        CheckpointError: if a key is not a LoRA key of Wan, or two keys name the same matrix. Also if a module lacks one of
            its two matrices, or the shapes of the two matrices do not fit each other.
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
                f"{where} contains several LoRAs for the same modules (a second tensor is {key}). Use a file with one LoRA."
            )
        halves[module][half] = value
    if unknown:
        raise CheckpointError(
            f"{where} contains {len(unknown)} keys that are not LoRA keys of Wan's linear layers ({shorten(unknown)}). Use a "
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
                f"{where}: {name} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit each "
                "other. Use a LoRA of linear layers."
            )
        alpha = float(tensors["alpha"]) if "alpha" in tensors else (alphas or {}).get(expert)
        scale = 1.0 if alpha is None else alpha / lora_A.shape[0]
        loras.setdefault(expert, {})[name] = LoraPair(lora_A, lora_B, scale)
    return loras


def pairs_of(loras: Mapping[str, dict[str, LoraPair]], expert: str) -> dict[str, LoraPair] | None:
    """Return the LoRA of one expert (DiT for high or low noise). Return None if the LoRA file is not for this expert.

    Most LoRA files do not name an expert, and `parse_lora` returns their LoRA under the key "transformer". If `loras`
    has only the key "transformer", the LoRA under this key is therefore returned for either expert.

    Args:
        loras: result of `parse_lora`.
        expert: "transformer" or "transformer_2".
    """
    return loras.get(expert) or (loras[EXPERTS[0]] if list(loras) == [EXPERTS[0]] else None)


def _module_of(key: str) -> tuple[str, str]:
    """Return (expert, diffusers module name) for a LoRA key from which a suffix such as ".lora_A.weight" was removed.

    Raises:
        KeyError: if the DiT has no such module.
    """
    if key.startswith(_MUSUBI):
        return EXPERTS[0], _find_module(key.removeprefix(_MUSUBI), separator="_")
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    expert = EXPERTS[1] if prefix == f"{EXPERTS[1]}." else EXPERTS[0]
    return expert, _find_module(key.removeprefix(prefix))


def _find_module(name: str, separator: str = ".") -> str:
    """Return the diffusers name of a DiT module from its official or diffusers name.

    Args:
        name: name of the module.
        separator: text between the words of `name`.

    Raises:
        KeyError: if the DiT has no such module.
    """
    block = re.match(rf"blocks{re.escape(separator)}(\d+){re.escape(separator)}", name)
    names = DIT.block if block else DIT.outside
    modules = {old.replace(".", separator): new for old, new in names.items()}
    modules |= {new: new for new in names.values()}
    return f"blocks.{block[1]}.{modules[name[block.end() :]]}" if block else modules[name]


def alphas_of(metadata: Mapping[str, str], path: Path) -> dict[str, float]:
    """Return the alpha of each expert, for LoRA files that do not contain alpha as a tensor.

    diffusers writes alpha into the metadata of the LoRA file. PEFT writes alpha into `adapter_config.json` next to
    `adapter_model.safetensors`.

    Args:
        metadata: metadata of the safetensors file.
        path: path of the safetensors file.

    Returns:
        A dict that maps "transformer" or "transformer_2" to alpha. The dict is empty if neither the metadata nor
        `adapter_config.json` contains an alpha.

    Raises:
        CheckpointError: if the metadata or `adapter_config.json` is damaged, or names a method that one alpha cannot
            describe, such as DoRA, rsLoRA or an alpha for each module.
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
    """Return the contents of a LoRA file as a dict of tensors by key. The scale alpha / rank is multiplied into lora_B.

    The dict has no alpha keys, because diffusers rejects an alpha key outside the blocks. Loaders expect the same keys
    for both experts. A model with two experts therefore needs one file for each expert.

    Args:
        pairs: maps a diffusers module name of one DiT to its LoRA.
        layout: layout of the keys. "diffusers": keys as `save_lora_weights` writes them. "comfyui": prefix
            `diffusion_model.` and the official module name. "official": the official module name.
    """
    prefix = {"diffusers": f"{EXPERTS[0]}.", "comfyui": COMFYUI_LORA, "official": ""}[layout]
    rename = str if layout == "diffusers" else DIT.to_official
    folded = {f"{prefix}{rename(module)}.lora": pair.folded() for module, pair in pairs.items()}
    return {
        f"{stem}_{half}.weight": value
        for stem, pair in folded.items()
        for half, value in (("A", pair.lora_A), ("B", pair.lora_B))
    }
