"""A LoRA file in the keys of another program."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from wands.commands.convert.convert_parts import ComponentSummary
from wands.errors import CheckpointError, ConfigError
from wands.model.files.lora_files import EXPERT_NAMES, LORA_FILE, find_lora_file, parts_in
from wands.model.files.lora_keys import (
    PEFT_FILE,
    LoraPair,
    alphas_of,
    is_lora,
    lora_to_comfyui,
    lora_to_diffusers,
    read_lora,
)
from wands.model.files.names import EXPERTS
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes, write_safetensors


def find_loras(root: Path) -> dict[str | None, Path]:
    """The file of each LoRA that a source is: {None: file} of one file, {expert: its file} of a folder that names experts.

    Returns:
        Nothing where the source is no LoRA.

    Raises:
        CheckpointError: a file cannot be read.
        ConfigError: an expert's folder has no LoRA, or it is not clear which.
    """
    usual = [root] if root.is_file() else [root / name for name in (LORA_FILE, PEFT_FILE)]
    single = next((path for path in usual if path.is_file()), None)
    found: dict[str | None, Path] = {None: single} if single else {}
    if not found and not (root / "model_index.json").is_file():
        found = {part: find_lora_file(root, "SRC", part) for part in parts_in(root)}
    for path in found.values():
        with TensorFiles([path], f"SRC {path}") as files:
            if not is_lora(files.shapes):
                return {}
    beside = sorted(root.glob("*.safetensors")) if None not in found else []
    odd = [path.name for path in beside if path not in found.values()]
    if found and odd:
        raise ConfigError(f"SRC {root} holds LoRAs of two experts and {odd[0]} beside them; name one file.")
    return found


def convert_lora(
    source: Path, out: Path, *, to: str, dtype: torch.dtype | None = None, expert: str | None = None
) -> tuple[list[ComponentSummary], list[str]]:
    """Write a LoRA in other keys; where the file has two experts, a file for each, because no loader knows both at once.

    Args:
        source: file in any of the formats of `wands.model.files.lora_keys`.
        out: folder that exists.
        to: "diffusers", "official" or "comfyui".
        dtype: of the new file; None leaves it.
        expert: of two the one whose LoRA this is, by its name in the pipeline; None where the keys alone say it.

    Returns:
        A row for each file, and notes.

    Raises:
        CheckpointError: the file is no LoRA of Wan, or of the other expert, or reads back differently.
    """
    where = f"SRC {source}"
    with TensorFiles([source], where) as files:
        state = {name: files.read(name) for name in files.shapes}
        loras = read_lora(state, alphas=alphas_of(files.metadata, source), where=where)
        if expert is not None:
            loras = {expert: _of_expert(loras, expert, where)}
        several = expert is not None or len(loras) > 1
        rows: list[ComponentSummary] = []
        notes = []
        for part, pairs in loras.items():
            keys = _keys(pairs, to)
            if dtype is not None:
                keys = {key: value.to(dtype) for key, value in keys.items()}
            path = out / _file_name(source, to, part, several)
            entries = [
                LazyTensor(key, tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]
                for key, value in sorted(keys.items())
            ]
            write_safetensors(path, entries)
            _compare(keys, path)
            folded = sum(pair.scale != 1.0 for pair in pairs.values())
            if folded:
                notes.append(
                    f"alpha / rank of {folded} modules of {path.name} is multiplied into lora_B, so that alpha is the rank."
                )
            size = sum(entry.num_bytes for entry in entries)
            own = len(state) if len(loras) == 1 else sum(key.startswith(f"{part}.") for key in state)
            rows.append(ComponentSummary(path.name, own, len(keys), len(keys.keys() - state.keys()), size))
    if several and EXPERTS[1] in loras and to == "diffusers":
        notes.append(
            f"load {_file_name(source, to, EXPERTS[1], True)} with load_lora_weights(..., load_into_transformer_2=True)."
        )
    return rows, notes


def _of_expert(loras: dict[str, dict[str, LoraPair]], expert: str, where: str) -> dict[str, LoraPair]:
    """Of a file that lies where one expert's belongs; most do not say in their keys whose they are."""
    if expert in loras:
        return loras[expert]
    if list(loras) == [EXPERTS[0]]:
        return loras[EXPERTS[0]]
    raise CheckpointError(
        f"{where} lies where the LoRA of {expert} belongs and holds one of {', '.join(loras)}; give the file by itself."
    )


def _keys(pairs: dict[str, LoraPair], to: str) -> dict[str, Tensor]:
    if to == "diffusers":
        return lora_to_diffusers({EXPERTS[0]: pairs})
    return lora_to_comfyui(pairs) if to == "comfyui" else lora_to_comfyui(pairs, prefix="")


def _file_name(source: Path, to: str, expert: str, several: bool) -> str:
    side, stem = EXPERT_NAMES[expert], LORA_FILE if to == "diffusers" else f"{source.stem}.safetensors"
    return f"{side}_{stem}" if several and side not in stem else stem


def _compare(keys: dict[str, Tensor], path: Path) -> None:
    with TensorFiles([path], "convert") as back:
        for key, value in keys.items():
            if not torch.equal(as_bytes(back.read(key)), as_bytes(value)):
                raise CheckpointError(f"convert: {key} read back from {path} differs; write to another disk.")
