"""Check a converted DiT by comparing its outputs with the outputs of the source's DiT, and summarize the conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from wands.convert.source_components import ComponentMapping
from wands.errors import CheckpointError
from wands.export.trained_weights import stock_forward
from wands.model.files.name_maps import shorten, split_prefix
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes
from wands.model.weight_dtypes import stock_dtype


@dataclass(frozen=True)
class ComponentSummary:
    """Summary of one converted component or LoRA file.

    Attributes:
        name: name of the component or file.
        read: number of tensors in the source.
        written: number of tensors in the result.
        renamed: number of written tensors with a new name.
        num_bytes: size of the written tensors.
        unused: the source's tensors that the new layout does not have.
        forward: text about the comparison of the DiT's outputs; "" without one.
    """

    name: str
    read: int
    written: int
    renamed: int
    num_bytes: int
    unused: tuple[str, ...] = ()
    forward: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.read} tensors read, {self.written} written, {self.renamed} renamed, "
            f"{self.num_bytes / 1e6:.1f} MB; the written tensors equal the source bit for bit"
        )
        if self.unused:
            text += f"; {len(self.unused)} tensors are not in the new layout ({shorten(self.unused, 3)})"
        return f"{text}; {self.forward}" if self.forward else text


@dataclass
class ConvertResult:
    """Folder that a conversion wrote, summary of each component or LoRA file, and notes for the user."""

    out: Path
    summaries: list[ComponentSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, read: int, tensors: Sequence[LazyTensor], renamed: int, **details: Any) -> None:
        """Add the summary of a component or LoRA file. `details` are further fields of `ComponentSummary`."""
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self.summaries.append(
            ComponentSummary(
                name=name, read=read, written=len(tensors), renamed=renamed, num_bytes=num_bytes, **details
            )
        )

    def __str__(self) -> str:
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*map(str, self.summaries), *notes, str(self.out)])


def stock_names(names: Iterable[str]) -> dict[str, str]:
    """Return the diffusers name of each tensor name of a DiT file in any layout.

    It uses diffusers' conversion, so that a comparison can find errors in the name map of wands.
    """
    without_prefix, _ = split_prefix(names)
    if any(".attn1." in name for name in without_prefix):
        return {old: name for name, old in without_prefix.items()}
    converted = convert_wan_transformer_to_diffusers(without_prefix)
    # diffusers' conversion script renames this tensor, but diffusers' function does not.
    positions = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
    return {stored: new.replace(*positions) for new, stored in converted.items()}


def compare_forwards(mapping: ComponentMapping, tensors: Sequence[LazyTensor], files: Sequence[Path]) -> str:
    """Run diffusers' DiT with the tensors of source and result; return a text for the summary.

    The source's tensors are cast to the dtypes of `tensors`, those of the result.

    Raises:
        CheckpointError: if the outputs are not equal bit for bit.
    """
    new_names = stock_names(mapping.sources)
    dtypes = {new_names[tensor.name]: tensor.dtype for tensor in tensors}
    dtype = dtypes["patch_embedding.weight"]
    old_names = stock_names(source.name for source in mapping.sources.values())
    before = {old_names[source.name]: source for source in mapping.sources.values()}
    after = {new_names[name]: tensor for name, tensor in TensorFiles(files, "convert").tensors.items()}

    def forward(stored: Mapping[str, LazyTensor]) -> Tensor:
        with init_empty_weights(include_buffers=False):
            model = WanTransformer3DModel.from_config(mapping.config).eval()
        # Allocate new tensors, because the alignment of a tensor in memory can change the summation order of a kernel.
        # Files of some programs mix dtypes, but diffusers computes in one.
        state = {
            name: stored[name].read().to(dtypes[name]).to(stock_dtype(name, dtype))
            for name, _ in model.named_parameters()
        }
        model.load_state_dict(state, assign=True)
        return stock_forward(model, dtype)

    first = forward(before)
    second = forward(after)
    if not torch.equal(as_bytes(first), as_bytes(second)):
        raise CheckpointError(
            "convert: the output of the converted DiT differs from the output of SOURCE's DiT. Report this error and the "
            "model's name to the authors of wands."
        )
    if not torch.isfinite(first).all():
        return "the DiT's output in a forward pass is unchanged, but not finite: the model has diverged"
    return "the DiT's output in a forward pass of diffusers is unchanged"
