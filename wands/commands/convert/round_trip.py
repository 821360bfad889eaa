"""Whether a converted model is the source: bit by bit, and in what stock diffusers computes from either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.errors import CheckpointError
from wands.model.files.encoder_names import TensorSource
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes


def stock_names(names: Iterable[str]) -> dict[str, str]:
    """{name of a DiT's tensor in a file: diffusers name}, by diffusers' own conversion.

    Comparisons use it so that what checks is not what wrote.

    Args:
        names: all of a file, in any layout.
    """
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    names = list(names)
    if any(".attn1." in name for name in names):
        return {name: name for name in names}
    found = convert_wan_transformer_to_diffusers({name: name for name in names})
    # The library forgets the positions of a first and a last frame; diffusers' published conversion has them.
    positions = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
    return {stored: new.replace(*positions) for new, stored in found.items()}


def compare_bits(entries: Sequence[LazyTensor], written: Sequence[Path]) -> None:
    """Read everything back and compare it with the source.

    Args:
        entries: what was written.
        written: the files.

    Raises:
        CheckpointError: something is missing or differs.
    """
    with TensorFiles(written, "convert") as back:
        if back.shapes.keys() != {entry.name for entry in entries}:
            raise CheckpointError(
                f"convert: {written[0]} does not hold what was written; write to another disk."
            )
        for entry in entries:
            if not torch.equal(as_bytes(back.read(entry.name)), as_bytes(entry.read())):
                raise CheckpointError(
                    f"convert: {entry.name} read back from {written[0].parent} differs from the source; write to another disk."
                )


def compare_forwards(
    config: dict[str, Any],
    taken: Mapping[str, TensorSource],
    source: TensorFiles,
    entries: Sequence[LazyTensor],
    written: Sequence[Path],
) -> str:
    """Run the stock model on the source's tensors and then on the result's: one model in memory at a time.

    Args:
        config: diffusers' of the DiT.
        taken: what each new tensor was made of.
        source: the open source.
        entries: what was written; the source is cast as they were.
        written: the files.

    Returns:
        What came out, in words.

    Raises:
        CheckpointError: the outputs differ.
    """
    names, stored = stock_names(taken), stock_names(one.name for one in taken.values())
    dtypes = {names[entry.name]: entry.dtype for entry in entries}
    computing = dtypes["patch_embedding.weight"]
    if computing.itemsize < 2:
        return "no forward, because PyTorch does not compute in its dtype"
    of_source = {new: old for old, new in stored.items()}
    of_result = {new: old for old, new in names.items()}
    first = _forward(config, computing, lambda name: source.read(of_source[name]).to(dtypes[name]))
    with TensorFiles(written, "convert") as back:
        second = _forward(config, computing, lambda name: back.read(of_result[name]))
    if not torch.equal(as_bytes(first), as_bytes(second)):
        raise CheckpointError(
            "convert: a forward of the result differs from the source's; report this, with the model's name."
        )
    if not torch.isfinite(first).all():
        return "a forward gives the same output, which is not finite: the model has diverged"
    return "a forward of stock diffusers gives the same output"


def _forward(config: dict[str, Any], dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
    from accelerate import init_empty_weights
    from diffusers import WanTransformer3DModel

    with init_empty_weights(include_buffers=False):
        model = WanTransformer3DModel.from_config(config).eval()
    # Fresh tensors, never mapped ones: where they lie decides in which order a kernel sums, and so the last bit.
    model.load_state_dict({name: read(name) for name, _ in model.named_parameters()}, assign=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    own, image = model.config, None
    if own.image_dim:
        rows = own.pos_embed_seq_len
        image = normal(2, rows // 2, own.image_dim) if rows else normal(1, 257, own.image_dim)
    with torch.no_grad():
        output: Tensor = model(
            hidden_states=normal(1, own.in_channels, 1, 4, 4),
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=normal(1, 8, own.text_dim),
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
    return output
