"""Read and write LoRA files of Wan in the layouts of diffusers, PEFT, ComfyUI, official Wan and musubi-tuner.

A key consists of a prefix that depends on the training program, the name of a module, and a suffix such as ".lora_A.weight". It
does not mark where the prefix ends, so wands has a list of prefixes. Some files, such as LoRAs for sampling in 4 steps, also
contain full differences: tensors that are added directly to norms, biases and modulation tables.

Sources: diffusers' `save_lora_weights` and its loaders of other layouts, ComfyUI's `comfy/lora.py`, musubi-tuner, LightX2V's
`lora_extractor.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.errors import CheckpointError, one_line
from wands.model.files.lora_update import LoraPair, LoraUpdate
from wands.model.files.name_maps import COMFYUI_DIT, COMFYUI_LORA, DIT, EXPERTS, shorten
from wands.model.files.tensor_files import TensorFiles

LORA_FILE = "pytorch_lora_weights.safetensors"
"""Name that diffusers gives to a LoRA file in a folder."""
PEFT_FILE = "adapter_model.safetensors"
"""Name that PEFT gives to a LoRA file in a folder."""
PEFT_CONFIG = "adapter_config.json"
"""Name of the file next to `PEFT_FILE` in which PEFT stores the settings of a LoRA, such as alpha."""

_SUFFIX = re.compile(r"\.(lora_\w+?)(?:\.[\w-]+)?(\.weight|\.bias)$|\.(\w+)$")
_KINDS = {
    **{"lora_A.weight": "A", "lora_down.weight": "A", "lora_B.weight": "B", "lora_up.weight": "B"},
    **{"lora_B.bias": "bias of B", "alpha": "alpha"},
    **{"diff": "weight", "w_norm": "weight", "diff_m": "weight", "diff_b": "bias", "b_norm": "bias"},
}
"""Kind of the tensor by suffix of its key: lora_A, lora_B, or the full difference of a weight or a bias."""
_OTHER_METHODS = {
    "DoRA": (".dora_scale", ".lora_magnitude_vector"),
    "LoKr": (".lokr_",),
    "LoHa": (".hada_",),
    "OFT": (".oft_",),
    "Tucker decomposition": (".lora_mid",),
    "replaced weights": (".set_weight", ".reshape_weight"),
}
"""Parts of tensor names by which a method that is not LoRA is recognized."""
_MERGE_IT = "merge the file into the model with the program that made the file"
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of PEFT's `init_lora_weights` that keep the base unchanged. All others move a part of the base into the LoRA."""
_MUSUBI = "lora_unet_"
_UNDERSCORE_PREFIXES = ("lora_unet__", _MUSUBI, "lycoris_", "lora_transformer_")
"""Prefixes after which underscores join the parts of a module name. VideoX-Fun writes `lora_unet__`."""
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "pipe.dit.", "transformer_2.", "transformer.")


# ---- read


def is_lora(names: Iterable[str]) -> bool:
    """Return whether any tensor name of a file is a key of a LoRA or of a similar method, such as LoKr."""
    return any(_split_key(name)[1] in _KINDS or _other_method(name) for name in names)


def read_lora_file(files: TensorFiles) -> dict[str, LoraUpdate]:
    """Read the LoRA in a safetensors file of any layout that `parse_lora` supports, as updates by DiT.

    A module without an alpha tensor gets its alpha from the file's metadata or PEFT's `adapter_config.json`.

    Raises:
        CheckpointError: if the file is damaged, contains values that are not finite, is not a LoRA of Wan, or has settings that
            wands does not support.
    """
    state = {name: files.read(name) for name in files.tensors}
    return parse_lora(state, settings=peft_settings(files.metadata, files.files[0]), where=files.where)


def parse_lora(
    state: Mapping[str, Tensor],
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    where: str = "the LoRA",
) -> dict[str, LoraUpdate]:
    """Group the tensors of a LoRA file into pairs (lora_A, lora_B) and full differences, for each DiT.

    The keys may have any of these layouts:

    - diffusers: prefix `transformer.` or `transformer_2.`, then diffusers' module name
    - PEFT: prefix `base_model.model.`, then diffusers' module name; the name of the adapter may follow lora_A and lora_B
    - DiffSynth-Studio: prefix `pipe.dit.`, then the official module name
    - ComfyUI: prefix `diffusion_model.`, then the official module name
    - no prefix: diffusers' or the official module name
    - musubi-tuner, LyCORIS and others: prefix `lora_unet_`, `lycoris_` or `lora_transformer_`, then the official or diffusers'
      module name with underscores instead of dots

    The suffix of a full difference is `.diff` (weight), `.diff_b` (bias) or `.diff_m` (modulation table). The LoRA of a
    convolution, and a bias of lora_B, become full differences too. All keys without the prefix `transformer_2.` belong to
    "transformer".

    Args:
        state: tensors by key.
        settings: PEFT's settings of each DiT, for modules without an alpha key. Without any alpha, the scale is 1.
        where: start of the error messages, such as "lora.init_from=FILE".

    Raises:
        CheckpointError: if a key is not a LoRA key of Wan, two keys name the same tensor, a module lacks one of its two matrices,
            or their shapes do not fit each other.
    """
    updates: dict[str, LoraUpdate] = {}
    for (expert, name), tensors in _group(state, where).items():
        update = updates.setdefault(expert, LoraUpdate())
        scale = 1.0
        changes = {leaf: tensors[leaf] for leaf in ("weight", "bias") if leaf in tensors}
        if "A" in tensors:
            pair = _pair_of(name, tensors, (settings or {}).get(expert, {}), where)
            scale = pair.scale
            if tensors["A"].ndim == 2:
                update.pairs[name] = pair
            else:
                shape = (len(pair.lora_B), *tensors["A"].shape[1:])
                changes["weight"] = (pair.delta().view(shape) + changes.get("weight", 0)).float()
        if "bias of B" in tensors:
            changes["bias"] = (scale * tensors["bias of B"].double() + changes.get("bias", 0)).float()
        for leaf, value in changes.items():
            # These parameters have no suffix .weight or .bias.
            is_parameter = leaf == "weight" and name.endswith(("scale_shift_table", "pos_embed"))
            update.differences[name if is_parameter else f"{name}.{leaf}"] = value
    return updates


def _group(state: Mapping[str, Tensor], where: str) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Group the tensors of a LoRA file by (DiT, diffusers module name), and in it by kind, a value of `_KINDS`."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    unknown = []
    for key, value in state.items():
        stem, suffix = _split_key(key)
        try:
            kind = _KINDS[suffix]
            module = _module_of(stem, is_table=suffix == "diff_m")
        except KeyError:
            unknown.append(key)
            continue
        if kind in groups.setdefault(module, {}):
            raise CheckpointError(
                f"{where} contains several LoRAs for the same modules (such as {key}). Use a file with one LoRA."
            )
        groups[module][kind] = value
    methods = sorted({method for key in unknown if (method := _other_method(key))})
    if methods:
        raise CheckpointError(
            f"{where} uses {' and '.join(methods)} ({shorten(filter(_other_method, unknown), 1)}), which wands cannot apply. "
            f"Use a plain LoRA, or {_MERGE_IT}."
        )
    if unknown or not state:
        raise CheckpointError(
            f"{where} is not a LoRA of Wan. Unknown keys: {shorten(unknown) or 'none, because the file is empty'}. Use a LoRA "
            "whose keys contain a Wan module, followed by lora_A, lora_B, lora_down, lora_up, alpha, diff, diff_b or diff_m."
        )
    broken = [
        ".".join(module)
        for module, kinds in groups.items()
        if ("A" in kinds) != ("B" in kinds) or kinds.keys() <= {"alpha", "bias of B"}
    ]
    if broken:
        raise CheckpointError(
            f"{where} lacks lora_A or lora_B of {len(broken)} modules ({shorten(broken)}). Download the file again."
        )
    return groups


def _pair_of(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> LoraPair:
    """Return the LoRA of the module `name`.

    The alpha comes from `tensors`, else from PEFT's `settings`; without any, the scale is 1. The matrices of a convolution are
    flattened after the first dimension.
    """
    lora_A = tensors["A"]
    lora_B = tensors["B"]
    if min(lora_A.ndim, lora_B.ndim) < 2 or not 0 < len(lora_A) == lora_B.flatten(1).shape[1]:
        raise CheckpointError(
            f"{where}: {name} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit each other. "
            "Their shapes must be [rank, inputs] and [outputs, rank]. Download the file again, or use another LoRA."
        )
    alpha = settings.get("lora_alpha")
    patterns = settings.get("alpha_pattern") or {}
    try:
        for spelled in (name, DIT.to_official(name)):  # matched as PEFT does
            alpha = next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", spelled)), alpha)
    except re.error as error:
        raise CheckpointError(
            f"{where}: alpha_pattern contains a wrong pattern ({one_line(error)}). Download the LoRA again."
        ) from None
    if "alpha" in tensors:
        stored = tensors["alpha"]
        settings = {}
        alpha = stored.item() if stored.numel() == 1 else stored.tolist()
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise CheckpointError(f"{where}: the alpha of {name} is {alpha}, not one number. Use another file.")
    divisor = len(lora_A) ** (0.5 if settings.get("use_rslora") else 1)
    scale = 1.0 if alpha is None else alpha / divisor
    return LoraPair(lora_A.flatten(1), lora_B.flatten(1), scale)


def _split_key(key: str) -> tuple[str, str]:
    """Split a key into (text before the suffix, suffix), without the name of a PEFT adapter.

    "blocks.0.ffn.0.lora_A.default.weight" becomes ("blocks.0.ffn.0", "lora_A.weight").
    """
    match = _SUFFIX.search(key)
    return (key[: match.start()], "".join(filter(None, match.groups()))) if match else (key, "")


def _other_method(key: str) -> str | None:
    methods = (name for name, words in _OTHER_METHODS.items() if any(word in key for word in words))
    return next(methods, None)


def _module_of(key: str, is_table: bool = False) -> tuple[str, str]:
    """Return (DiT, diffusers name) of the module or, with `is_table`, of its modulation table; raise KeyError if unknown."""
    for prefix in _UNDERSCORE_PREFIXES:
        if key.startswith(prefix):
            name = key.removeprefix(prefix) + "_modulation" * is_table
            return EXPERTS[0], _find_module(name, separator="_")
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    expert = EXPERTS[1] if prefix == f"{EXPERTS[1]}." else EXPERTS[0]
    return expert, _find_module(key.removeprefix(prefix) + ".modulation" * is_table)


def _find_module(name: str, separator: str = ".") -> str:
    """Return the diffusers name of a module from either name, whose parts `separator` joins; raise KeyError if unknown."""
    block = re.match(rf"blocks{re.escape(separator)}(\d+){re.escape(separator)}", name)
    names = DIT.block if block else DIT.outside
    modules = {spelled.replace(".", separator): new for old, new in names.items() for spelled in (new, old)}
    return f"blocks.{block[1]}.{modules[name[block.end() :]]}" if block else modules[name]


def peft_settings(metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Return PEFT's settings, such as "lora_alpha", for the LoRA of each DiT; empty if there are none.

    diffusers writes them into the metadata of the LoRA file, PEFT into `adapter_config.json` next to `adapter_model.safetensors`.

    Raises:
        CheckpointError: if they are damaged, or are for a DoRA, or for a method such as PiSSA or OLoRA, whose LoRA starts with a
            part of the base weights and fits only the base without this part.
    """
    peft_config = path.with_name(PEFT_CONFIG)
    is_peft = path.name == PEFT_FILE and peft_config.is_file()
    try:
        settings: dict[str, Any] = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        if is_peft:
            config = json.loads(peft_config.read_text(encoding="utf-8"))
            settings |= {f"{EXPERTS[0]}.{key}": value for key, value in config.items()}
        experts: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            expert, _, name = key.rpartition(".")
            experts.setdefault(expert, {})[name] = value
    except (ValueError, AttributeError) as error:
        damaged = PEFT_CONFIG if is_peft else "lora_adapter_metadata"
        raise CheckpointError(
            f"{path}: {damaged} is not a JSON object ({one_line(error)}). Download the LoRA again."
        ) from None
    for values in experts.values():
        if not isinstance(values.get("alpha_pattern") or {}, dict):
            raise CheckpointError(f"{path}: alpha_pattern is not a JSON object. Download the LoRA again.")
        init = values.get("init_lora_weights")
        moves_base = isinstance(init, str) and init.lower() not in _PLAIN_INITS
        if values.get("use_dora") or moves_base:
            method = "DoRA (use_dora)" if values.get("use_dora") else f"init_lora_weights={init}"
            fix = "save it with PEFT's path_initial_model_for_weight_conversion" if moves_base else _MERGE_IT
            raise CheckpointError(
                f"{path} uses {method}, which wands cannot apply. Use a plain LoRA, or {fix}."
            )
    return experts


# ---- write


def lora_tensors(
    pairs: Mapping[str, LoraPair], layout: str = "diffusers", differences: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the contents of a LoRA file for one DiT as tensors by key.

    The keys do not name an expert, because loaders expect the same keys for both: write one file for each. In all layouts but
    "musubi", which has alpha keys, lora_B is multiplied by the scale.

    Args:
        pairs: LoRA by diffusers module name.
        layout: "diffusers": keys as `save_lora_weights` writes them. "comfyui": prefix `diffusion_model.` and the official module
            name. "official": the official module name. "musubi": prefix `lora_unet_` and the official name with underscores.
        differences: full difference by diffusers parameter name, only for "comfyui" and "official".
    """
    state: dict[str, Tensor] = {}
    if layout == "musubi":
        for module, pair in pairs.items():
            stem = _MUSUBI + DIT.to_official(module).replace(".", "_")
            state |= {f"{stem}.lora_down.weight": pair.lora_A, f"{stem}.lora_up.weight": pair.lora_B}
            state[f"{stem}.alpha"] = torch.tensor(pair.scale * len(pair.lora_A))
        return state
    prefix = {"diffusers": f"{EXPERTS[0]}.", "comfyui": COMFYUI_LORA, "official": ""}[layout]
    rename = str if layout == "diffusers" else DIT.to_official
    for module, pair in pairs.items():
        stem = f"{prefix}{rename(module)}.lora"
        state |= {f"{stem}_A.weight": pair.lora_A, f"{stem}_B.weight": pair.folded().lora_B}
    for name, value in (differences or {}).items():
        key = f"{prefix}{rename(name)}"
        is_bias = key.endswith(".bias")
        state[f"{key[:-5]}.diff_b" if is_bias else f"{key.removesuffix('.weight')}.diff"] = value
    return state
