"""Add LoRAs to the DiTs for sampling: find the files, read them in any layout that diffusers or wands supports, and load them.

For sampling, diffusers itself reads LoRA files in the layouts of diffusers, ComfyUI and musubi-tuner. The reason is that
diffusers can also load LoRA updates of biases, which wands cannot merge into the weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wands.errors import CheckpointError, ConfigError, one_line
from wands.files import read_json
from wands.model.files.hub import fetch_model, is_hub_id
from wands.model.files.lora_files import (
    EXPERT_NAMES,
    PEFT_CONFIG,
    PEFT_FILE,
    experts_in,
    find_lora_file,
    lora_tensors,
    parse_lora,
)
from wands.model.files.name_maps import EXPERTS

log = logging.getLogger(__name__)
PEFT_KEYS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias")
"""Keys of PEFT's settings that change the update which a LoRA adds to the weights."""


@dataclass(frozen=True)
class Lora:
    """One LoRA file to add to the DiTs.

    Attributes:
        path: file, folder or Hub id as the user typed it. For a folder with one LoRA file for each expert, the path of
            this LoRA's file.
        file: the safetensors file on this machine.
        subfolder: "transformer" or "transformer_2". Keys in the file that do not name a DiT belong to this DiT.
        scale: factor that multiplies the LoRA's update of the weights.
        flag: command line flag that the user typed, for error messages.
    """

    path: str
    file: Path
    subfolder: str = "transformer"
    scale: float = 1.0
    flag: str = "--lora"

    @property
    def label(self) -> str:
        """Flag and value that name the LoRA in error messages."""
        return f"{self.flag}={self.path}"

    def record(self) -> dict[str, Any]:
        """Return the LoRA's entry in `samples.jsonl`. The entry contains nothing that depends on the machine."""
        return {"path": self.path, "part": self.subfolder, "scale": self.scale}


def find_loras(lora: Sequence[str | Path], lora_2: Sequence[str | Path] = ()) -> list[Lora]:
    """Find the files of LoRAs. Download a LoRA that is given as a Hub id. Do not read any tensor.

    Args:
        lora: values of the flag --lora, each "PATH" or "PATH=SCALE".
        lora_2: values of the flag --lora-2, which is for the low-noise expert, in the same form.

    Raises:
        ConfigError: if a scale is not a number, or a LoRA does not exist.
    """
    found = []
    for flag, subfolder, texts in (("--lora", EXPERTS[0], lora), ("--lora-2", EXPERTS[1], lora_2)):
        for text in texts:
            found += _find(flag, subfolder, *_parse(str(text), flag))
    return found


def _parse(text: str, flag: str) -> tuple[str, float]:
    path, equals, number = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise ConfigError(
            f"{flag}={text} must end in a number after the '='. Write PATH or PATH=SCALE, for example PATH=0.8."
        )
    return path, scale


def _find(flag: str, subfolder: str, path: str, scale: float) -> list[Lora]:
    """Find the LoRA files at `path`: one file, or one file for each expert (DiT for high or low noise).

    A file belongs to an expert if its file name, or the name of its subfolder, contains "high_noise" or "low_noise".
    """
    on_hub = is_hub_id(path)
    root = _fetch(path, flag) if on_hub else Path(path)
    experts = experts_in(root)
    if not experts:
        return [Lora(path, find_lora_file(root, flag), subfolder, scale, flag)]
    if flag == "--lora-2":
        if subfolder not in experts:
            raise ConfigError(
                f"{flag}={path} contains no LoRA of the low-noise expert. Set --lora-2 to a LoRA of this expert, or use --lora."
            )
        experts = [subfolder]
    files = {expert: find_lora_file(root, flag, expert) for expert in experts}
    return [Lora(path if on_hub else str(file), file, expert, scale, flag) for expert, file in files.items()]


def _fetch(path: str, flag: str) -> Path:
    """Download the LoRA weights of a Hub repository and return their local folder.

    diffusers is not used for the download, because diffusers would load only the first file of the repository. In a
    repository with one file for each expert, diffusers would ignore the file of the low-noise expert without a warning.
    """
    root = fetch_model(path, key=flag, allow=("*.safetensors", f"*{PEFT_CONFIG}"))  # * matches folders too
    folders = sorted({file.parent for file in root.rglob("*.safetensors")})
    if not folders:
        raise ConfigError(f"{flag}={path} contains no .safetensors file. Set {flag} to a LoRA repository.")
    return folders[0] if len(folders) == 1 and folders[0].name not in EXPERT_NAMES.values() else root


def add_loras(pipeline: Any, loras: Sequence[Lora]) -> None:
    """Add LoRAs to the DiTs of a pipeline, each with its scale. The LoRAs are not merged into the weights.

    Args:
        pipeline: diffusers pipeline for which offloading is not enabled yet.
        loras: result of `find_loras`.

    Raises:
        ConfigError: if a file is damaged, has an unknown layout, or fits no module of the DiT.
    """
    scales: dict[str, dict[str, float]] = {}
    for number, lora in enumerate(loras):
        name = f"lora_{number}"
        for subfolder, (state, metadata) in _read(pipeline, lora).items():
            module = getattr(pipeline, subfolder, None)
            if module is None:
                raise ConfigError(
                    f"{lora.label} is a LoRA of {subfolder}, which --model does not have. Use a LoRA of this model."
                )
            _check_fit(lora, subfolder, module, state)
            try:
                pipeline.load_lora_into_transformer(
                    state, transformer=module, adapter_name=name, metadata=metadata, low_cpu_mem_usage=True
                )
            except (RuntimeError, ValueError, TypeError) as error:
                raise _unusable(lora, f"does not fit the {subfolder}", error) from None
            scales.setdefault(subfolder, {})[name] = lora.scale
    for subfolder, weights in scales.items():
        getattr(pipeline, subfolder).set_adapters(list(weights), list(weights.values()))


def _read(pipeline: Any, lora: Lora) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Read a LoRA file, and return its tensors and settings separately for each DiT.

    Returns:
        A dict that maps "transformer" or "transformer_2" to (tensors by key, settings for PEFT's `LoraConfig`). The
        settings are None if the file has none. Every key starts with "transformer.", also for "transformer_2".
    """
    file = lora.file
    try:
        state, metadata = pipeline.lora_state_dict(
            str(file.parent), weight_name=file.name, return_lora_metadata=True, use_safetensors=True
        )
    except Exception as error:  # a file that is not a LoRA can raise any error in diffusers' conversion
        raise _unusable(lora, "cannot be read as a LoRA", error) from None
    config = file.with_name(PEFT_CONFIG)
    if file.name == PEFT_FILE and config.is_file():
        # diffusers reads neither PEFT's prefix nor PEFT's settings.
        settings = read_json(config, label=f"{lora.label}: {PEFT_CONFIG}")
        state = {
            f"transformer.{key.removeprefix('base_model.model.')}": value for key, value in state.items()
        }
        metadata = {f"transformer.{key}": settings[key] for key in PEFT_KEYS if key in settings}
    elif not any(key.startswith(("transformer.", "transformer_2.")) for key in state):
        try:  # diffusers' or official module names without a prefix
            state, metadata = lora_tensors(parse_lora(state, where=lora.label)[EXPERTS[0]]), None
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
    high, low = (
        (_select(state, f"{expert}."), _select(metadata or {}, f"{expert}.") or None) for expert in EXPERTS
    )
    if lora.subfolder == EXPERTS[1]:
        return {EXPERTS[1]: low if low[0] else high}
    return {expert: entries for expert, entries in zip(EXPERTS, (high, low), strict=True) if entries[0]}


def _select(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        f"transformer.{key.removeprefix(prefix)}": value
        for key, value in entries.items()
        if key.startswith(prefix)
    }


def _check_fit(lora: Lora, subfolder: str, module: Any, state: Mapping[str, Any]) -> None:
    targets = {key.split(".lora_")[0].removeprefix("transformer.") for key in state}
    missing = sorted(targets - {name for name, _ in module.named_modules()})
    if len(missing) == len(targets):
        raise ConfigError(
            f"{lora.label} fits no module of the {subfolder}: all {len(targets)} modules of the LoRA are missing there, such as "
            f"{missing[0]}. Use a LoRA of this model."
        )
    if missing:
        log.warning(
            "%s: %d of the LoRA's %d modules are not in the %s and are skipped, for example %s",
            *(lora.label, len(missing), len(targets), subfolder, missing[0]),
        )


def _unusable(lora: Lora, problem: str, error: Exception) -> ConfigError:
    return ConfigError(f"{lora.label} {problem} ({one_line(error)}). Use a LoRA of this model.")
