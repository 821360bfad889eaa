"""A LoRA file in the keys of another program."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from wands.commands.converting.parts import Row
from wands.errors import CheckpointError
from wands.model.lora_files import EXPERT_NAMES, LORA_FILE
from wands.model.lora_keys import LoraPair, alphas_of, lora_to_comfyui, lora_to_diffusers, read_lora
from wands.model.names import EXPERTS
from wands.model.tensor_files import Entry, TensorFiles, as_bytes, write_safetensors


def convert_lora(
    source: Path, out: Path, *, to: str, dtype: torch.dtype | None = None
) -> tuple[list[Row], list[str]]:
    """Write a LoRA in other keys; where the file has two experts, a file for each, because no loader knows both at once.

    Args:
        source: file in any of the formats of `wands.model.lora_keys`.
        out: folder that exists.
        to: "diffusers", "official" or "comfyui".
        dtype: of the new file; None leaves it.

    Returns:
        A row for each file, and notes.

    Raises:
        CheckpointError: the file is no LoRA of Wan, or reads back differently.
    """
    where = f"SRC {source}"
    with TensorFiles([source], where) as files:
        state = {name: files.read(name) for name in files.shapes}
        loras = read_lora(state, alphas=alphas_of(files.metadata, source), where=where)
        rows: list[Row] = []
        notes = []
        for expert, pairs in loras.items():
            keys = _keys(pairs, to)
            if dtype is not None:
                keys = {key: value.to(dtype) for key, value in keys.items()}
            path = out / _file_name(source, to, expert, len(loras) > 1)
            entries = [
                Entry(key, tuple(value.shape), value.dtype, lambda value=value: value)  # type: ignore[misc]
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
            own = len(state) if len(loras) == 1 else sum(key.startswith(f"{expert}.") for key in state)
            rows.append(Row(path.name, own, len(keys), len(keys.keys() - state.keys()), size))
    if len(loras) > 1 and to == "diffusers":
        notes.append(
            f"load {_file_name(source, to, EXPERTS[1], True)} with load_lora_weights(..., load_into_transformer_2=True)."
        )
    return rows, notes


def _keys(pairs: dict[str, LoraPair], to: str) -> dict[str, Tensor]:
    if to == "diffusers":
        return lora_to_diffusers({EXPERTS[0]: pairs})
    return lora_to_comfyui(pairs) if to == "comfyui" else lora_to_comfyui(pairs, prefix="")


def _file_name(source: Path, to: str, expert: str, several: bool) -> str:
    side = EXPERT_NAMES[expert] + "_" if several else ""
    return f"{side}{LORA_FILE}" if to == "diffusers" else f"{side}{source.stem}.safetensors"


def _compare(keys: dict[str, Tensor], path: Path) -> None:
    with TensorFiles([path], "convert") as back:
        for key, value in keys.items():
            if not torch.equal(as_bytes(back.read(key)), as_bytes(value)):
                raise CheckpointError(f"convert: {key} read back from {path} differs; write to another disk.")
