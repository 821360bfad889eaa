"""Read the tensors of one model from the files of other programs.

Such a file may contain further models, weights in fp8 with or without scales, and a prefix in front of all names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wands.errors import CheckpointError
from wands.model.files.name_maps import split_prefix
from wands.model.files.tensor_files import LazyTensor, TensorFiles

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALES = ("scale_weight", "weight_scale")
"""Last parts of the names of tensors that multiply a weight in fp8. ComfyUI has used both."""
_NOT_NEEDED = ("scale_input", "input_scale", "scaled_fp8", "comfy_quant")
"""Last parts of the names of tensors that a program needs only to compute in fp8."""


class SourceTensors(NamedTuple):
    """Tensors of one model in a source of a conversion.

    Attributes:
        tensors: tensor by name without prefix; `LazyTensor.name` is the name in the file. A weight in fp8 is read as fp32, times
            its scale.
        fp8: names in the file of the weights that are stored in fp8.
        notes: sentences for the user about what was left out or changed.
    """

    tensors: dict[str, LazyTensor]
    fp8: frozenset[str]
    notes: list[str]


def read_tensors(files: Sequence[Path], where: str) -> SourceTensors:
    """Find the tensors of one model in files, safetensors or pickles that contain only tensors, without reading their values.

    Raises:
        CheckpointError: if a file is damaged, or stores weights in a format that wands does not read. Messages start with
            `where`.
    """
    opened = TensorFiles(files, where)
    names, others = split_prefix(opened.tensors)
    named = {name: opened.tensors[old] for name, old in names.items()}
    tensors = _dequantized(named, where)
    fp8 = frozenset(tensor.name for name, tensor in tensors.items() if named[name].dtype in FP8)
    notes = []
    if opened.training_state:
        notes.append(f"the weights are those of {opened.training_state} in {files[0].name}.")
    models = sorted({name.split(".")[0] for name in others} - {*_NOT_NEEDED})
    if models:
        notes.append(f"only the transformer of {files[0].name} is converted, not its {', '.join(models)}.")
    if fp8:
        scaled = "multiplied by their scales and " if len(tensors) < len(named) else ""
        notes.append(
            f"{len(fp8)} fp8 weights of {files[0].name} were {scaled}converted, to bf16 unless --dtype says otherwise."
        )
    for name, tensor in tensors.items():
        if name.endswith(".weight") and not tensor.dtype.is_floating_point:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{where}: {tensor.name} has the dtype {kind}, but wands reads only weights that are floating-point numbers. Use "
                "a file whose weights are not quantized."
            )
    return SourceTensors(tensors, fp8, notes)


def _dequantized(named: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """Return tensors without their scales. Each weight in fp8 becomes a tensor that is read as fp32, times its scale."""
    result = {}
    for name, tensor in named.items():
        module, _, leaf = name.rpartition(".")
        weight = named.get(f"{module}.weight")
        if leaf in _NOT_NEEDED or (leaf in _SCALES and weight is not None and weight.dtype in FP8):
            continue
        if tensor.dtype not in FP8:
            result[name] = tensor
            continue
        found = (named[f"{module}.{key}"] for key in _SCALES if f"{module}.{key}" in named)
        scale = next(found, None) if leaf == "weight" else None
        rows = (tensor.shape[:1], (*tensor.shape[:1], *(1,) * (len(tensor.shape) - 1)))
        if scale is not None and torch.Size(scale.shape).numel() != 1 and scale.shape not in rows:
            raise CheckpointError(
                f"{where}: {scale.name} has the shape {[*scale.shape]}, but wands reads one scale for a weight or for each of "
                "its rows. Use a file whose weights are not quantized."
            )
        read = partial(_read_fp8, tensor, scale)
        result[name] = LazyTensor(name=tensor.name, shape=tensor.shape, dtype=torch.float32, read=read)
    return result


def _read_fp8(tensor: LazyTensor, scale: LazyTensor | None) -> Tensor:
    value = tensor.read().float()
    if scale is None:
        return value
    factor = scale.read().float().reshape(-1, *(1,) * (value.ndim - 1))
    return value * factor
