"""Compare forwards of stock diffusers with the tensors before and after a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.commands.convert.source_components import ComponentMapping
from wands.errors import CheckpointError
from wands.export.transformer_weights import stock_forward
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes


def stock_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name of a tensor in a DiT file: diffusers name}, by diffusers' conversion.

    Comparisons use diffusers' conversion, so that they find errors in the name map of wands.

    Args:
        names: all names of a file, in any layout.
    """
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    names = list(names)
    if any(".attn1." in name for name in names):
        return {name: name for name in names}
    converted = convert_wan_transformer_to_diffusers({name: name for name in names})
    # diffusers' conversion script renames this tensor, but diffusers' function does not.
    positions = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
    return {stored: new.replace(*positions) for new, stored in converted.items()}


def compare_forwards(
    mapping: ComponentMapping, source: TensorFiles, tensors: Sequence[LazyTensor], files: Sequence[Path]
) -> str:
    """Run the stock model with the tensors of the source, then with the tensors of the result, and compare the outputs.

    Args:
        mapping: mapping of the DiT.
        source: open tensor files of the source.
        tensors: tensors that were written; the tensors of the source are cast to the same dtypes.
        files: written files.

    Returns:
        A sentence about the outputs.

    Raises:
        CheckpointError: if the outputs differ.
    """
    new_names = stock_names(mapping.sources)
    dtypes = {new_names[tensor.name]: tensor.dtype for tensor in tensors}
    compute_dtype = dtypes["patch_embedding.weight"]
    if compute_dtype.itemsize < 2:
        return "no forward, because PyTorch does not compute in its dtype"
    old_names = stock_names(source.name for source in mapping.sources.values())
    in_source, in_result = ({new: old for old, new in names.items()} for names in (old_names, new_names))
    first = _forward(
        mapping.config, compute_dtype, lambda name: source.read(in_source[name]).to(dtypes[name])
    )
    with TensorFiles(files, "convert") as result:
        second = _forward(mapping.config, compute_dtype, lambda name: result.read(in_result[name]))
    if not torch.equal(as_bytes(first), as_bytes(second)):
        raise CheckpointError(
            "convert: a forward of the result differs from a forward of the source. Report this error with the name of the model."
        )
    if not torch.isfinite(first).all():
        return "a forward gives the same output, which is not finite: the model has diverged"
    return "a forward of stock diffusers gives the same output"


def _forward(config: Mapping[str, Any], dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
    from accelerate import init_empty_weights
    from diffusers import WanTransformer3DModel

    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel.from_config(config).eval()
    # Newly allocated tensors, because the alignment of a tensor can change the summation order of a kernel.
    model.load_state_dict({name: read(name) for name, _ in model.named_parameters()}, assign=True)
    return stock_forward(model, dtype)
