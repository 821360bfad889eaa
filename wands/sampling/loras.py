"""LoRAs for `wands infer`: read in every layout that diffusers converts, and added to the DiTs that they were trained for."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wands.errors import CheckpointError, ConfigError
from wands.model.files.hub import fetch_model
from wands.model.files.lora_files import EXPERT_NAMES, find_lora_file, parts_in
from wands.model.files.lora_keys import PEFT_FILE, lora_to_diffusers, read_lora

log = logging.getLogger(__name__)
PEFT_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", f"*{PEFT_CONFIG}")  # a * of the Hub's patterns goes into folders


@dataclass(frozen=True)
class Lora:
    """One LoRA as it was asked for.

    Attributes:
        path: file, folder or Hub id.
        part: "transformer" or "transformer_2", the DiT that it is for when it does not say so itself.
        scale: what its update is multiplied by.
        key: the option that named it, for messages.
        file: where its weights lie on this machine; None before they are looked for.
    """

    path: str
    part: str = "transformer"
    scale: float = 1.0
    key: str = "infer.lora"
    file: Path | None = None

    def record(self) -> dict[str, Any]:
        """What tells it from others wherever it is used: where a machine keeps what it fetched does not."""
        return {"path": self.path, "part": self.part, "scale": self.scale}


def find_loras(lora: Sequence[str | Path], lora_2: Sequence[str | Path] = ()) -> list[Lora]:
    """Understand what was asked for, and fetch what lies on the Hub; files are looked for, none is read.

    Args:
        lora: "PATH" or "PATH=SCALE" each.
        lora_2: the same for the low-noise expert.

    Raises:
        ConfigError: a scale is no number, or there is no such LoRA.
    """
    asked = [_parse(str(text), "infer.lora", "transformer") for text in lora]
    asked += [_parse(str(text), "infer.lora_2", "transformer_2") for text in lora_2]
    for one in asked:
        if not Path(one.path).exists() and not _HUB_ID.fullmatch(one.path):
            raise ConfigError(f"{one.key}={one.path} does not exist; give a LoRA's folder, file or Hub id.")
    return [found for one in asked for found in _with_files(one)]


def _with_files(lora: Lora) -> list[Lora]:
    """What was asked for, once for each expert of which its folder names a file."""
    here = Path(lora.path).exists()
    root = Path(lora.path) if here else _fetched(lora)
    parts = parts_in(root)
    if not parts:
        return [replace(lora, file=find_lora_file(root, lora.key))]
    if lora.key == "infer.lora_2":
        if lora.part not in parts:
            raise ConfigError(
                f"{lora.key}={lora.path} holds no LoRA of the low-noise expert; give one, or use infer.lora."
            )
        parts = [lora.part]
    files = {part: find_lora_file(root, lora.key, part) for part in parts}
    return [
        replace(lora, path=str(file) if here else lora.path, part=part, file=file)
        for part, file in files.items()
    ]


def _fetched(lora: Lora) -> Path:
    """The folder with the weights of a Hub repository, wherever in it they lie.

    diffusers would take whichever file it meets first, of two experts the high-noise one, and not say which.
    """
    root = fetch_model(lora.path, key=lora.key, allow=_HUB_FILES)
    folders = sorted({file.parent for file in root.rglob("*.safetensors")})
    if not folders:
        raise ConfigError(f"{lora.key}={lora.path} holds no .safetensors file; give a LoRA's repository.")
    return folders[0] if len(folders) == 1 and folders[0].name not in EXPERT_NAMES.values() else root


def _parse(text: str, key: str, part: str) -> Lora:
    path, equals, scale = text.rpartition("=")
    if not equals or Path(text).exists():
        return Lora(text, part, key=key)
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{key}={text} must end in a number; write PATH or PATH=SCALE, such as PATH=0.8.")
    return Lora(path, part, value, key)


def add_loras(pipeline: Any, loras: Sequence[Lora]) -> None:
    """Add LoRAs to the DiTs of a pipeline, unmerged, each with its scale.

    Args:
        pipeline: diffusers', not offloaded yet.
        loras: from `find_loras`.

    Raises:
        ConfigError: a file is damaged, of a layout that diffusers does not know, or fits nothing.
    """
    added: dict[str, dict[str, float]] = {}
    for number, lora in enumerate(loras):
        name = f"lora_{number}"
        for part, (state, metadata) in _read(pipeline, lora).items():
            module = getattr(pipeline, part, None)
            if module is None:
                raise ConfigError(
                    f"{lora.key}={lora.path} holds a LoRA of {part}, which the pipeline does not have; give one of this model."
                )
            _check_fit(lora, part, module, state)
            try:
                pipeline.load_lora_into_transformer(
                    state, transformer=module, adapter_name=name, metadata=metadata, low_cpu_mem_usage=True
                )
            except (RuntimeError, ValueError, TypeError) as error:
                raise _unusable(lora, f"does not fit the {part}", error) from None
            added.setdefault(part, {})[name] = lora.scale
    for part, scales in added.items():
        getattr(pipeline, part).set_adapters(list(scales), list(scales.values()))


def _read(pipeline: Any, lora: Lora) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Part of the pipeline -> its tensors and its LoraConfig, both keyed as for "transformer"."""
    file = lora.file
    assert file is not None, f"{lora.path} was not looked for"
    metadata: dict[str, Any] | None
    try:
        if (file.parent / PEFT_CONFIG).is_file() and file.name == PEFT_FILE:
            state, metadata = _read_peft(file)
        else:
            state, metadata = pipeline.lora_state_dict(
                str(file.parent), weight_name=file.name, return_lora_metadata=True, use_safetensors=True
            )
    except (
        Exception
    ) as error:  # a file of another kind fails in diffusers' conversion with whatever it trips over
        raise _unusable(lora, "cannot be read as a LoRA", error) from None
    if not any(key.startswith(("transformer.", "transformer_2.")) for key in state):
        state, metadata = _read_unprefixed(lora, state), None
    low = {key: value for key, value in state.items() if key.startswith("transformer_2.")}
    groups = {"transformer_2": low}
    if not (low and lora.part == "transformer_2"):
        groups[lora.part] = {key: value for key, value in state.items() if key not in low}
    return {
        part: (_renamed(tensors), _renamed(_of_part(metadata, tensors)) or None)
        for part, tensors in groups.items()
        if tensors
    }


def _read_unprefixed(lora: Lora, state: Mapping[str, Any]) -> dict[str, Any]:
    """Modules without a trainer's prefix, under diffusers' or official names: diffusers would find no place for them."""
    try:
        return lora_to_diffusers(read_lora(state, where=f"{lora.key}={lora.path}"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _of_part(metadata: Mapping[str, Any] | None, tensors: Mapping[str, Any]) -> dict[str, Any]:
    prefixes = tuple({key.partition(".")[0] + "." for key in tensors})
    return {key: value for key, value in (metadata or {}).items() if key.startswith(prefixes)}


def _renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub(r"^transformer_2\.", "transformer.", key): value for key, value in entries.items()}


def _read_peft(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What PEFT's own `save_pretrained` writes; diffusers reads its tensors, but neither its prefix nor its config."""
    from peft import LoraConfig
    from safetensors.torch import load_file

    state = {f"transformer.{key.removeprefix(_PEFT_PREFIX)}": value for key, value in load_file(file).items()}
    config = json.loads((file.parent / PEFT_CONFIG).read_text(encoding="utf-8"))
    kept = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias")
    known = LoraConfig.__dataclass_fields__
    return state, {f"transformer.{key}": config[key] for key in kept if key in config and key in known}


def _check_fit(lora: Lora, part: str, module: Any, state: Mapping[str, Any]) -> None:
    places = {name for name, _ in module.named_modules()}
    targets = {key.split(".lora_")[0].removeprefix("transformer.") for key in state}
    missing = sorted(targets - places)
    if len(missing) == len(targets):
        raise ConfigError(
            f"{lora.key}={lora.path} fits nothing in the {part} ({len(targets)} places, first {missing[0]}); give a LoRA of a "
            "Wan model."
        )
    if missing:
        log.warning(
            "%s=%s: %d of %d places are not in the %s, first %s; they are left out",
            *(lora.key, lora.path, len(missing), len(targets), part, missing[0]),
        )


def _unusable(lora: Lora, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
    return ConfigError(f"{lora.key}={lora.path} {what} ({reason}); give a LoRA of this model.")
