"""Add LoRAs to the DiTs for sampling: find the files, read them with the reader that training uses, and load them.

diffusers' own reader is not used, because it drops the keys of norms, modulation tables and DoRA without an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wands.errors import CheckpointError, ConfigError, one_line
from wands.model.files.hub import fetch_model, is_hub_id
from wands.model.files.lora_files import (
    EXPERT_NAMES,
    PEFT_CONFIG,
    LoraPair,
    LoraUpdate,
    experts_in,
    find_lora_file,
    lora_tensors,
    read_lora_file,
)
from wands.model.files.name_maps import EXPERTS, shorten
from wands.model.files.tensor_files import TensorFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lora:
    """One LoRA file to add to the DiTs.

    Attributes:
        path: file, folder or Hub id as the user typed it. If the user typed a folder with one file for each expert, `path` is
            the file of one expert.
        file: the safetensors file on this machine.
        subfolder: selects the DiTs that the LoRA changes. With "transformer", tensors whose keys start with "transformer_2."
            are added to the low-noise expert (DiT "transformer_2"), and all other tensors to the DiT "transformer". With
            "transformer_2", only the low-noise expert changes. It then gets the tensors whose keys start with
            "transformer_2.", or all tensors if there are no such keys.
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
        """Flag and path that the user typed, such as "--lora=style.safetensors". Error messages name the LoRA with this text."""
        return f"{self.flag}={self.path}"


def find_loras(lora: Sequence[str | Path], lora_2: Sequence[str | Path] = ()) -> list[Lora]:
    """Find the files of LoRAs. Download a LoRA that is given as a Hub id. Do not read any tensor.

    Args:
        lora: values of the flag --lora, each "PATH" or "PATH=SCALE".
        lora_2: values of the flag --lora-2, which is for the low-noise expert, each "PATH" or
            "PATH=SCALE".

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
            f"{flag}={text}: there is no file {text}, and the scale {number!r} is not a finite number. Write PATH or "
            "PATH=SCALE, such as lora.safetensors=0.8."
        )
    return path, scale


def _find(flag: str, subfolder: str, path: str, scale: float) -> list[Lora]:
    """Find the LoRA files at `path`: one file, or one file for each expert (DiT for high or low noise).

    A file belongs to an expert if its name contains "high_noise" or "low_noise", or if its folder has one of these two names.
    If there are files for experts, the result contains the LoRA of each expert for --lora, and only the LoRA of the low-noise
    expert for --lora-2.

    Args:
        flag: "--lora" or "--lora-2".
        subfolder: `Lora.subfolder` of the result if there are no files for experts: "transformer" or "transformer_2".
        path: file, folder or Hub id.
        scale: factor that multiplies the LoRA's update of the weights.
    """
    on_hub = is_hub_id(path)
    root = _fetch(path, flag) if on_hub else Path(path)
    experts = experts_in(root)
    if not experts:
        if subfolder == EXPERTS[0] and EXPERT_NAMES[EXPERTS[1]] in root.name:
            log.warning(f"{flag}={path} goes to the high-noise expert; use --lora-2 for the low-noise expert")
        return [Lora(path=path, file=find_lora_file(root, flag), subfolder=subfolder, scale=scale, flag=flag)]
    if flag == "--lora-2":
        if subfolder not in experts:
            raise ConfigError(
                f"{flag}={path} contains no LoRA of the low-noise expert. --lora-2 accepts only LoRAs of the low-noise expert. "
                "Pass LoRAs of the high-noise expert with --lora."
            )
        experts = [subfolder]
    files = {expert: find_lora_file(root, flag, expert) for expert in experts}
    return [
        Lora(path=path if on_hub else str(file), file=file, subfolder=expert, scale=scale, flag=flag)
        for expert, file in files.items()
    ]


def _fetch(path: str, flag: str) -> Path:
    """Download the LoRA weights of a Hub repository and return their local folder.

    diffusers is not used for the download, because diffusers would load only the first file of the repository. In a
    repository with one file for each expert, diffusers would ignore the file of the low-noise expert without a warning.
    """
    root = fetch_model(path, key=flag, allow=("*.safetensors", f"*{PEFT_CONFIG}"))  # * matches folders too
    folders = sorted({file.parent for file in root.rglob("*.safetensors")})
    if not folders:
        raise ConfigError(f"{flag}={path} contains no .safetensors file. Set {flag} to a LoRA.")
    return folders[0] if len(folders) == 1 and folders[0].name not in EXPERT_NAMES.values() else root


def add_loras(pipeline: Any, loras: Sequence[Lora]) -> None:
    """Add LoRAs to the DiTs of a pipeline, each with its scale.

    The LoRA matrices become PEFT layers next to the linear layers. They are not merged into the weights, because a bf16 weight
    would lose small updates. Some LoRA files also contain full-size updates of parameters (tensors such as `.diff`). These are
    added to the weights.

    Args:
        pipeline: diffusers pipeline for which offloading is not enabled yet.
        loras: result of `find_loras`.

    Raises:
        ConfigError: if a file is damaged, has an unknown layout, uses a method other than LoRA, or does not fit the DiT.
    """
    updates = [(lora, part, update) for lora in loras for part, update in _read(lora, pipeline).items()]
    for lora, part, update in updates:  # first, because PEFT renames the parameters of its layers
        for name in update.differences:
            parameter = getattr(pipeline, part).get_parameter(name)
            parameter.data = update.merge(name, parameter.data, lora.scale).to(parameter.dtype)
    scales: dict[str, dict[str, float]] = {}
    for number, (lora, part, update) in enumerate(updates):
        model, name = getattr(pipeline, part), f"lora_{number}"
        if not update.pairs:
            continue
        try:
            tensors = lora_tensors({key: _promote(pair, model.dtype) for key, pair in update.pairs.items()})
            pipeline.load_lora_into_transformer(tensors, model, adapter_name=name, low_cpu_mem_usage=True)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{lora.label} does not fit the {part} ({one_line(error)}). Use a LoRA of this model."
            ) from None
        scales.setdefault(part, {})[name] = lora.scale
    for part, weights in scales.items():
        getattr(pipeline, part).set_adapters(list(weights), list(weights.values()))


def _promote(pair: LoraPair, dtype: torch.dtype) -> LoraPair:
    """Cast both matrices of a LoRA pair to the DiT's dtype `dtype`, or to the dtype of lora_B if that dtype is wider.

    Call this function before `lora_tensors`, which multiplies lora_B by alpha / rank. In a narrower dtype, the product would
    lose digits.
    """
    dtype = torch.promote_types(pair.lora_B.dtype, dtype)
    return LoraPair(pair.lora_A.to(dtype), pair.lora_B.to(dtype), pair.scale)


def _read(lora: Lora, pipeline: Any) -> dict[str, LoraUpdate]:
    """Read a LoRA file, and return its update for each DiT.

    If an update contains parameters that its DiT lacks, these parameters are left out with a warning.

    Returns:
        A dict that maps "transformer" or "transformer_2" to the update of this DiT.

    Raises:
        ConfigError: if the file is damaged or not a LoRA of Wan. Also if the file has an update for a DiT that the pipeline
            lacks, or if a DiT lacks all parameters of its update.
    """
    try:
        updates = read_lora_file(TensorFiles([lora.file], lora.label))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if lora.subfolder == EXPERTS[1]:
        updates = {EXPERTS[1]: updates.get(EXPERTS[1]) or updates[EXPERTS[0]]}
    for part, update in updates.items():
        model, total = getattr(pipeline, part, None), len(update.shapes)
        if model is None:
            raise ConfigError(
                f"{lora.label} is a LoRA of {part}, which --model does not have. Use a LoRA of this model."
            )
        missing = update.find_missing(model, lora.label)
        if len(missing) == total:
            raise ConfigError(
                f"{lora.label} fits no parameter of the {part}: all {total} parameters of the LoRA are missing there, such as "
                f"{min(missing)}. Use a LoRA of this model."
            )
        if missing:
            facts = lora.label, len(missing), total, part, shorten(missing)
            log.warning("%s: %d of the LoRA's %d parameters are not in the %s and are skipped: %s", *facts)
        updates[part] = update.without(missing)
    return updates
