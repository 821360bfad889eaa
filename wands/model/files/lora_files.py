"""Find, read and write LoRA files of Wan in the layouts of diffusers, PEFT, ComfyUI, official Wan and musubi-tuner.

A key of a LoRA file consists of a prefix that depends on the training program, the name of a module, and a suffix such as
".lora_A.weight". The key does not mark where the prefix ends, so wands compares the key with a list of known prefixes.

Some files, such as LoRAs for sampling in 4 steps, also contain full differences: tensors that are added directly to norms,
biases and modulation tables.

Sources: diffusers' `save_lora_weights` and its loaders of other layouts, ComfyUI's `comfy/lora.py`, musubi-tuner, LightX2V's
`lora_extractor.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wands.errors import CheckpointError, ConfigError, one_line
from wands.model.files.hashes import check_files
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

_SUFFIX = re.compile(r"\.(lora_\w+?)(?:\.[\w-]+)?(\.weight|\.bias)$|\.(\w+)$")
_KINDS = {
    **{"lora_A.weight": "A", "lora_down.weight": "A", "lora_B.weight": "B", "lora_up.weight": "B"},
    **{"lora_B.bias": "bias of B", "alpha": "alpha"},
    **{"diff": "weight", "w_norm": "weight", "diff_m": "weight", "diff_b": "bias", "b_norm": "bias"},
}
"""Maps the suffix of a tensor name in a LoRA file to the kind of the tensor.

"A" is lora_A, and "B" is lora_B. "weight" is a difference that is added to a weight, and "bias" to a bias.
"""
_OTHER_METHODS = {
    "DoRA": (".dora_scale", ".lora_magnitude_vector"),
    "LoKr": (".lokr_",),
    "LoHa": (".hada_",),
    "OFT": (".oft_",),
    "Tucker decomposition": (".lora_mid",),
    "replaced weights": (".set_weight", ".reshape_weight"),
}
"""Maps the name of each method that is not LoRA to parts of tensor names. A file of such a method has tensors whose names contain
one of these parts."""
_MUSUBI = "lora_unet_"
_PREFIXES = ("base_model.model.", COMFYUI_DIT, COMFYUI_LORA, "transformer_2.", "transformer.")


# ---- contents


@dataclass(frozen=True)
class LoraPair:
    """LoRA of one module: two matrices, which add `scale * lora_B @ lora_A` to the module's weight.

    Attributes:
        lora_A: matrix [rank, in_features].
        lora_B: matrix [out_features, rank].
        scale: factor of the product lora_B @ lora_A: alpha / rank (rsLoRA: alpha / sqrt(rank)), or 1 without alpha.
    """

    lora_A: Tensor
    lora_B: Tensor
    scale: float = 1.0

    def folded(self) -> LoraPair:
        """Return an equivalent pair with scale 1, whose lora_B is multiplied by the scale of this pair.

        A LoRA file with scale 1 needs no alpha, so every loader can read it. The multiplication is exact if the scale is a
        power of two.
        """
        return LoraPair(self.lora_A, (self.lora_B.double() * self.scale).to(self.lora_B.dtype))

    def delta(self) -> Tensor:
        """Return the matrix that the LoRA adds to the module's weight, float64 [out_features, in_features]."""
        return self.scale * (self.lora_B.double() @ self.lora_A.double())


@dataclass(frozen=True)
class LoraUpdate:
    """Everything that a LoRA file adds to the weights of one DiT.

    Attributes:
        pairs: maps the diffusers name of a linear layer to its two LoRA matrices.
        differences: maps the diffusers name of a parameter to the full difference that is added to the parameter.
    """

    pairs: dict[str, LoraPair] = field(default_factory=dict)
    differences: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each parameter that the LoRA changes."""
        matrices = [(f"{name}.weight", (len(p.lora_B), p.lora_A.shape[1])) for name, p in self.pairs.items()]
        return [*matrices, *((name, tuple(value.shape)) for name, value in self.differences.items())]

    def merge(self, name: str, weight: Tensor, scale: float) -> Tensor:
        """Return a parameter plus `scale` times the LoRA's update, in float64.

        If the LoRA does not change this parameter, return `weight` itself.

        Args:
            name: diffusers name of the parameter.
            weight: value of the parameter.
            scale: factor of the update.
        """
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in self.pairs:
            weight = weight + scale * self.pairs[module].delta()
        return weight + scale * self.differences[name].double() if name in self.differences else weight

    def find_missing(self, model: nn.Module, where: str) -> list[str]:
        """Return the names of the parameters that the LoRA changes and the model lacks.

        Args:
            model: DiT without a LoRA.
            where: option and value that name the LoRA, for error messages.

        Raises:
            ConfigError: if a parameter has different shapes in the LoRA and in the model.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in self.shapes:
            if shapes.get(name, shape) != shape:
                raise ConfigError(
                    f"{where}: the LoRA changes a parameter {name} of shape {[*shape]}, but this parameter has shape "
                    f"{[*shapes[name]]} in the model. Use a LoRA for this model."
                )
        return [name for name, _ in self.shapes if name not in shapes]

    def without(self, names: Collection[str]) -> LoraUpdate:
        """Return a copy of this LoRA update without its changes of the named parameters."""
        return LoraUpdate(
            {name: pair for name, pair in self.pairs.items() if f"{name}.weight" not in names},
            {name: value for name, value in self.differences.items() if name not in names},
        )


# ---- find


def experts_in(folder: Path) -> list[str]:
    """Return the experts (DiTs for high or low noise) for which a folder contains a LoRA.

    The LoRA of an expert is a safetensors file with "high_noise" or "low_noise" in its name, or a subfolder called
    "high_noise" or "low_noise".

    Returns:
        A list with "transformer" if the high-noise expert has a LoRA, and "transformer_2" if the low-noise expert has a
        LoRA.
    """
    return [expert for expert, name in EXPERT_NAMES.items() if _with_name(folder, name)]


def find_lora_file(path: Path, key: str, expert: str | None = None) -> Path:
    """Return the safetensors file of one DiT's LoRA.

    Args:
        path: a LoRA file or a folder. The folder contains either one LoRA file, or a separate LoRA for each expert. The LoRA
            of an expert is a file with "high_noise" or "low_noise" in its name, or a subfolder called "high_noise" or
            "low_noise".
        key: option or recipe key that the user typed, for error messages.
        expert: "transformer" or "transformer_2" for a model with two experts; None for a model with one DiT.

    Raises:
        ConfigError: if `path` does not exist, contains no LoRA for `expert`, or contains several files that could be
            the LoRA.
        CheckpointError: if the LoRA file changed after wands stored its hash.
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
                f"{key}={path} contains no LoRA of the {name.replace('_', '-')} expert. Add a .safetensors file with {name} in "
                f"its name, or train only the other expert with model.experts={'low' if name == 'high_noise' else 'high'}."
            )
        found, *others = _with_name(path, name)
        if others:
            names = ", ".join(file.name for file in (found, *others))
            raise ConfigError(f"{key}={path} has several files for one expert: {names}. Keep one of them.")
        check_files(path, f"{key}={path}", parts={found.name})
        return find_lora_file(found, key)
    files = sorted(path.glob("*.safetensors"))
    usual = [path / name for name in (LORA_FILE, PEFT_FILE) if (path / name).is_file()]
    if not usual and len(files) != 1:
        content = f"{len(files)} .safetensors files, but no {LORA_FILE}" if files else "no .safetensors file"
        raise ConfigError(f"{key}={path} contains {content}. Set {key} to a LoRA file.")
    check_files(path, f"{key}={path}", parts={(usual or files)[0].name})
    return (usual or files)[0]


def _with_name(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_dir():
        return [folder / name]
    return sorted(file for file in folder.glob("*.safetensors") if name in file.name.lower())


# ---- read


def is_lora(names: Iterable[str]) -> bool:
    """Return whether any tensor name of a file is a key of a LoRA or of a similar method, such as LoKr."""
    return any(_split_key(name)[1] in _KINDS or _other_method(name) for name in names)


def read_lora_file(files: TensorFiles) -> dict[str, LoraUpdate]:
    """Read the LoRA in a safetensors file of any layout that `parse_lora` supports.

    If the file has no alpha tensor for a module, the alpha comes from the file's metadata or PEFT's `adapter_config.json`.

    Returns:
        A dict that maps "transformer" or "transformer_2" to everything that the LoRA adds to the weights of this DiT.

    Raises:
        CheckpointError: if the file is damaged, is not a LoRA of Wan, or has settings that wands does not support.
    """
    state = {name: files.read(name) for name in files.tensors}
    return parse_lora(state, settings=peft_settings(files.metadata, files.files[0]), where=files.where)


def parse_lora(
    state: Mapping[str, Tensor],
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    where: str = "the LoRA",
) -> dict[str, LoraUpdate]:
    """Group the tensors of a LoRA file into pairs of matrices (lora_A, lora_B) and full differences of parameters.

    The keys may have any of these layouts:

    - diffusers: prefix `transformer.` or `transformer_2.`, then diffusers' module name
    - PEFT: prefix `base_model.model.`, then diffusers' module name; the name of the adapter may follow lora_A and
      lora_B
    - ComfyUI: prefix `diffusion_model.`, then the official module name
    - no prefix: diffusers' or the official module name
    - musubi-tuner: prefix `lora_unet_`, then the official module name with underscores instead of dots

    A full difference is a tensor that is added directly to a parameter. Its key has the suffix `.diff` (weight), `.diff_b`
    (bias) or `.diff_m` (modulation table). The LoRA of a convolution, and a bias of lora_B, are returned as full differences
    too.

    Args:
        state: maps a key of the file to its tensor.
        settings: maps "transformer" or "transformer_2" to PEFT's settings, such as "lora_alpha", for modules without an
            alpha key. Without any alpha, the scale of a module is 1.
        where: start of the error messages, such as "lora.init_from=FILE".

    Returns:
        A dict that maps "transformer" or "transformer_2" to the pairs and full differences of this DiT. Keys with the prefix
        `transformer_2.` belong to "transformer_2", and all other keys to "transformer".

    Raises:
        CheckpointError: if a key is not a LoRA key of Wan, or two keys name the same tensor. The error is also raised if a
            module lacks one of its two matrices, or the shapes of the two matrices do not fit each other.
    """
    updates: dict[str, LoraUpdate] = {}
    for (expert, name), tensors in _group(state, where).items():
        update = updates.setdefault(expert, LoraUpdate())
        scale, changes = 1.0, {leaf: tensors[leaf] for leaf in ("weight", "bias") if leaf in tensors}
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
    """Group the tensors of a LoRA file by module.

    Args:
        state: maps a key of the file to its tensor.
        where: start of the error messages, such as "lora.init_from=FILE".

    Returns:
        A dict {(DiT, module name): {kind: tensor}}. DiT is "transformer" or "transformer_2". The module name is
        the diffusers name. The kinds are the values of `_KINDS`, such as "A" for lora_A.

    Raises:
        CheckpointError: if `parse_lora` cannot use a key, or a module lacks one of its two matrices.
    """
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    unknown = []
    for key, value in state.items():
        stem, suffix = _split_key(key)
        try:
            kind, module = _KINDS[suffix], _module_of(stem, is_table=suffix == "diff_m")
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
            "Use a plain LoRA, or merge the file into the model with the program that made the file."
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
    """Return the LoRA of the module `name`: two matrices and a scale, which is computed from the rank and alpha.

    The alpha comes from `tensors`, or from PEFT's `settings` if `tensors` has no alpha. Without any alpha, the scale is 1.

    The returned matrices have two dimensions. For a convolution, the matrices in `tensors` have more than two dimensions, and
    all dimensions after the first are flattened.
    """
    lora_A, lora_B = tensors["A"], tensors["B"]
    if min(lora_A.ndim, lora_B.ndim) < 2 or len(lora_A) != lora_B.flatten(1).shape[1]:
        raise CheckpointError(
            f"{where}: {name} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, which do not fit each other. "
            "Their shapes must be [rank, inputs] and [outputs, rank]. Download the file again, or use another LoRA."
        )
    alpha, patterns = settings.get("lora_alpha"), settings.get("alpha_pattern") or {}
    for spelled in (name, DIT.to_official(name)):  # matched as PEFT does
        alpha = next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", spelled)), alpha)
    if "alpha" in tensors:
        alpha, settings = float(tensors["alpha"]), {}
    divisor = len(lora_A) ** (0.5 if settings.get("use_rslora") else 1)
    scale = 1.0 if alpha is None else alpha / divisor
    return LoraPair(lora_A.flatten(1), lora_B.flatten(1), scale)


def update_of(loras: Mapping[str, LoraUpdate], expert: str) -> LoraUpdate | None:
    """Return the LoRA of one expert (DiT for high or low noise). Return None if the LoRA file is not for this expert.

    Most LoRA files do not name an expert, and `parse_lora` returns their LoRA under the key "transformer". If `loras`
    has only the key "transformer", the LoRA under this key is therefore returned for either expert.

    Args:
        loras: result of `parse_lora`.
        expert: "transformer" or "transformer_2".
    """
    return loras.get(expert) or (loras[EXPERTS[0]] if list(loras) == [EXPERTS[0]] else None)


def _split_key(key: str) -> tuple[str, str]:
    """Split a LoRA key into (text before the suffix, suffix), and remove the name of a PEFT adapter from the suffix.

    The key "blocks.0.ffn.0.lora_A.default.weight" becomes ("blocks.0.ffn.0", "lora_A.weight").
    """
    match = _SUFFIX.search(key)
    return (key[: match.start()], "".join(filter(None, match.groups()))) if match else (key, "")


def _other_method(key: str) -> str | None:
    methods = (name for name, words in _OTHER_METHODS.items() if any(word in key for word in words))
    return next(methods, None)


def _module_of(key: str, is_table: bool = False) -> tuple[str, str]:
    """Return (expert, diffusers module name) for a key of a LoRA file. expert is "transformer" or "transformer_2".

    Args:
        key: key from which a suffix such as ".lora_A.weight" was removed.
        is_table: whether the suffix was ".diff_m" (difference of a modulation table). If so, return the name of the module's
            modulation table, not of the module.

    Raises:
        KeyError: if the DiT has no such module.
    """
    if key.startswith(_MUSUBI):  # VideoX-Fun writes two underscores
        name = key.removeprefix(_MUSUBI).removeprefix("_")
        return EXPERTS[0], _find_module(name + "_modulation" * is_table, separator="_")
    prefix = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), "")
    expert = EXPERTS[1] if prefix == f"{EXPERTS[1]}." else EXPERTS[0]
    return expert, _find_module(key.removeprefix(prefix) + ".modulation" * is_table)


def _find_module(name: str, separator: str = ".") -> str:
    """Return the diffusers name of a DiT module from its official or diffusers name.

    Args:
        name: name of the module.
        separator: "." or, in keys of musubi-tuner, "_". The separator joins the parts of `name`, such as "blocks", "0" and
            "ffn".

    Raises:
        KeyError: if the DiT has no such module.
    """
    block = re.match(rf"blocks{re.escape(separator)}(\d+){re.escape(separator)}", name)
    names = DIT.block if block else DIT.outside
    modules = {old.replace(".", separator): new for old, new in names.items()}
    modules |= {new: new for new in names.values()}
    return f"blocks.{block[1]}.{modules[name[block.end() :]]}" if block else modules[name]


def peft_settings(metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Return PEFT's settings for the LoRA of each DiT. They contain alpha, because PEFT does not store alpha as a tensor.

    diffusers writes the settings into the metadata of the LoRA file. PEFT writes them into `adapter_config.json` next to
    `adapter_model.safetensors`.

    Args:
        metadata: metadata of the safetensors file.
        path: path of the safetensors file.

    Returns:
        A dict that maps "transformer" or "transformer_2" to the settings, such as "lora_alpha". The dict is empty if neither
        the metadata nor `adapter_config.json` contains settings.

    Raises:
        CheckpointError: if the metadata or `adapter_config.json` is damaged, or its settings are for a DoRA.
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
    if any(values.get("use_dora") for values in experts.values()):
        raise CheckpointError(
            f"{path} uses DoRA (use_dora), which wands cannot apply. Use a plain LoRA, or merge the file into the model with the "
            "program that made the file."
        )
    return experts


# ---- write


def lora_tensors(
    pairs: Mapping[str, LoraPair], layout: str = "diffusers", differences: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the contents of a LoRA file as a dict of tensors by key.

    Only the layout "musubi" has alpha keys. In the other layouts, lora_B is multiplied by the scale alpha / rank. The keys
    do not contain the name of an expert (DiT for high or low noise), because loaders expect the same keys for both experts.
    Write one file for each expert.

    Args:
        pairs: maps a diffusers module name of one DiT to its LoRA.
        layout: layout of the keys. "diffusers": keys as `save_lora_weights` writes them. "comfyui": prefix
            `diffusion_model.` and the official module name. "official": the official module name. "musubi": prefix
            `lora_unet_` and the official module name with underscores.
        differences: maps a diffusers parameter name to its full difference, a tensor that is added to the parameter. Only
            the layouts "comfyui" and "official" can contain full differences. None means no full differences.
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
