"""Run diffusers' DiT with the tensors before a conversion and with the tensors after it, and compare the two outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from wands.commands.convert.source_components import ComponentMapping
from wands.errors import CheckpointError
from wands.export.transformer_weights import stock_forward
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes


def stock_names(names: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps each tensor name of a DiT file to the name of this tensor in diffusers.

    The translation uses diffusers' conversion function instead of the name map of wands. A comparison can then find
    errors in the name map of wands.

    Args:
        names: all tensor names of a DiT file, in any layout.
    """
    names = list(names)
    if any(".attn1." in name for name in names):
        return {name: name for name in names}
    converted = convert_wan_transformer_to_diffusers({name: name for name in names})
    # diffusers' conversion script renames this tensor, but diffusers' function does not.
    positions = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
    return {stored: new.replace(*positions) for new, stored in converted.items()}


def compare_forwards(mapping: ComponentMapping, tensors: Sequence[LazyTensor], files: Sequence[Path]) -> str:
    """Run diffusers' DiT with the source's tensors and with the result's tensors, and compare the two outputs bit for bit.

    Args:
        mapping: maps names in the new layout to the source's tensors. The files of the source must be open.
        tensors: tensors in the result. The source's tensors are cast to the dtypes of these tensors.
        files: files of the result.

    Returns:
        A text about the result of the comparison, for the summary of the conversion.

    Raises:
        CheckpointError: if the two outputs differ.
    """
    new_names = stock_names(mapping.sources)
    dtypes = {new_names[tensor.name]: tensor.dtype for tensor in tensors}
    if dtypes["patch_embedding.weight"].itemsize < 2:
        return "no forward pass was run, because PyTorch cannot compute in the dtype of this DiT"
    old_names = stock_names(source.name for source in mapping.sources.values())
    before = {old_names[source.name]: source for source in mapping.sources.values()}
    with TensorFiles(files, "convert") as result:
        after = {new_names[name]: tensor for name, tensor in result.tensors.items()}
        first, second = (_forward(mapping.config, dtypes, stored) for stored in (before, after))
    if not torch.equal(as_bytes(first), as_bytes(second)):
        raise CheckpointError(
            "convert: the output of the converted DiT differs from the output of SOURCE's DiT. Report this error with the "
            "model's name."
        )
    if not torch.isfinite(first).all():
        return "the DiT's output in a forward pass is unchanged, but not finite: the model has diverged"
    return "the DiT's output in a forward pass of diffusers is unchanged"


def _forward(
    config: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], stored: Mapping[str, LazyTensor]
) -> Tensor:
    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel.from_config(config).eval()
    # Allocate new tensors, because the alignment of a tensor in memory can change the summation order of a kernel.
    state = {name: stored[name].read().to(dtypes[name]) for name, _ in model.named_parameters()}
    model.load_state_dict(state, assign=True)
    return stock_forward(model, dtypes["patch_embedding.weight"])
