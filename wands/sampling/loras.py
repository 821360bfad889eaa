"""Add LoRAs to the DiTs for sampling, read with the reader that training uses.

diffusers' own reader drops the keys of norms, modulation tables and DoRA without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wands.config.recipe import split_scale
from wands.errors import CheckpointError, ConfigError, one_line
from wands.model.files.hub import fetch_model, is_hub_id
from wands.model.files.lora_experts import FoundLora, assign_experts, find_lora_files
from wands.model.files.lora_files import PEFT_CONFIG, lora_tensors
from wands.model.files.lora_update import LoraPair, LoraUpdate
from wands.model.files.name_maps import EXPERTS, shorten

log = logging.getLogger(__name__)

_FLAGS = dict(zip(("--lora-1", "--lora-2"), EXPERTS, strict=True))


@dataclass(frozen=True)
class Lora:
    """LoRA that the user adds to the DiTs.

    Attributes:
        path: file, folder or Hub id as the user typed it.
        files: the file of the LoRA, or one file for each expert.
        scale: factor on the LoRA's update of the weights.
        flag: command line flag that the user typed.
    """

    path: str
    files: tuple[FoundLora, ...]
    scale: float = 1.0
    flag: str = "--lora"

    @property
    def label(self) -> str:
        """Flag and path that the user typed, such as "--lora=style.safetensors", for error messages."""
        return f"{self.flag}={self.path}"

    def assigned(self, two_experts: bool) -> Lora:
        """Return a copy whose files name the DiTs that they change in a model.

        Raises:
            ConfigError: if the LoRA is for another kind of model, or does not say for which of two experts it is.
        """
        if not two_experts and self.flag in _FLAGS:
            raise ConfigError(
                f"{self.label} is for one of two experts, but --model has only one DiT. Use --lora."
            )
        ways = f"use --lora-1 {self.path} for the high-noise or --lora-2 {self.path} for the low-noise expert"
        return replace(
            self, files=tuple(assign_experts(self.files, self.label, two_experts=two_experts, ways=ways))
        )


def find_loras(
    lora: Sequence[str | Path], lora_1: Sequence[str | Path] = (), lora_2: Sequence[str | Path] = ()
) -> list[Lora]:
    """Find the files of the values "PATH" or "PATH=SCALE" of --lora, --lora-1 and --lora-2. No tensor is read.

    A LoRA that is given as a Hub id is downloaded.

    Raises:
        ConfigError: if a scale is not a number, or a LoRA does not exist or is damaged.
    """
    texts = {"--lora": lora, "--lora-1": lora_1, "--lora-2": lora_2}
    return [_find(flag, *_parse(str(text), flag)) for flag, values in texts.items() for text in values]


def _parse(text: str, flag: str) -> tuple[str, float]:
    try:
        return split_scale(text)
    except ValueError as error:
        raise ConfigError(f"{flag}={text}: {error}.") from None


def _find(flag: str, path: str, scale: float) -> Lora:
    on_hub = is_hub_id(path)
    root = _fetch(path, flag) if on_hub else Path(path)
    names = [path.rpartition("/")[2]] if on_hub else []
    try:
        files = find_lora_files(root, flag, _FLAGS.get(flag), names)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return Lora(path=path, files=tuple(files), scale=scale, flag=flag)


def _fetch(path: str, flag: str) -> Path:
    """Download the LoRA weights of a Hub repository and return their local folder.

    diffusers would load only the first file, and ignore that of the low-noise expert without a warning.
    """
    root = fetch_model(path, key=flag, allow=("*.safetensors", f"*{PEFT_CONFIG}"))  # * matches folders too
    folders = sorted({file.parent for file in root.rglob("*.safetensors")})
    if not folders:
        raise ConfigError(f"{flag}={path} contains no .safetensors file. Set {flag} to a LoRA.")
    return folders[0] if len(folders) == 1 else root


def add_loras(pipeline: Any, loras: Sequence[Lora]) -> None:
    """Add LoRAs (results of `Lora.assigned`) to the DiTs of a pipeline for which offloading is not enabled yet.

    The matrices become PEFT layers next to the linear layers, because a bf16 weight would lose small updates if they were merged.
    Full-size updates of parameters (tensors such as `.diff`) are added to the weights.

    Raises:
        ConfigError: if a file is damaged, has an unknown layout, uses a method other than LoRA, or does not fit the DiT.
    """
    updates = [
        (lora, part, update)
        for lora in loras
        for file in lora.files
        for part, update in _read(lora, file, pipeline).items()
    ]
    for lora, part, update in updates:  # first, because PEFT renames the parameters of its layers
        for name in update.differences:
            parameter = getattr(pipeline, part).get_parameter(name)
            parameter.data = update.merge(name, parameter.data, lora.scale).to(parameter.dtype)
    scales: dict[str, dict[str, float]] = {}
    for number, (lora, part, update) in enumerate(updates):
        model = getattr(pipeline, part)
        name = f"lora_{number}"
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
    """Cast a LoRA pair to `dtype`, or to the dtype of lora_B if that is wider.

    `lora_tensors` then multiplies lora_B by alpha / rank, which would lose digits in a narrower dtype.
    """
    dtype = torch.promote_types(pair.lora_B.dtype, dtype)
    return LoraPair(pair.lora_A.to(dtype), pair.lora_B.to(dtype), pair.scale)


def _read(lora: Lora, file: FoundLora, pipeline: Any) -> dict[str, LoraUpdate]:
    """Read a file of a LoRA, and return its update for each DiT.

    Parameters that a DiT lacks are left out with a warning, or with a ConfigError if these are all.
    """
    try:
        updates = file.read(lora.label)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    for part, update in updates.items():
        model = getattr(pipeline, part)
        total = len(update.shapes)
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
