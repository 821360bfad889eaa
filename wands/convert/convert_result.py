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
        renamed: number of written tensors whose name differs from the name in the source.
        num_bytes: size of the written tensors in bytes.
        unused: names of the source's tensors that were not converted, because the new layout does not have them.
        forward: text about the comparison of the DiT's outputs before and after the conversion; "" if no outputs were
            compared.
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
    """Result of a conversion: the written folder, a summary of each component (model), and notes for the user.

    Attributes:
        out: folder that was written.
        summaries: one summary for each component or LoRA file.
        notes: sentences for the user, for example about a missing component and how to get it.
    """

    out: Path
    summaries: list[ComponentSummary] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, read: int, tensors: Sequence[LazyTensor], renamed: int, **details: Any) -> None:
        """Add the summary of a component or LoRA file to the result.

        Args:
            name: name of the component or file.
            read: number of tensors in the source.
            tensors: the written tensors.
            renamed: number of written tensors whose name differs from the name in the source.
            details: further fields of `ComponentSummary`.
        """
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
    """Return a dict that maps each tensor name of a DiT file to the name of this tensor in diffusers.

    The translation uses diffusers' conversion function instead of the name map of wands. A comparison can then find
    errors in the name map of wands.

    Args:
        names: all tensor names of a DiT file, in any layout.
    """
    without_prefix, _ = split_prefix(names)
    if any(".attn1." in name for name in without_prefix):
        return {old: name for name, old in without_prefix.items()}
    converted = convert_wan_transformer_to_diffusers(without_prefix)
    # diffusers' conversion script renames this tensor, but diffusers' function does not.
    positions = ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed")
    return {stored: new.replace(*positions) for new, stored in converted.items()}


def compare_forwards(mapping: ComponentMapping, tensors: Sequence[LazyTensor], files: Sequence[Path]) -> str:
    """Run diffusers' DiT with the source's tensors and with the result's tensors, and compare the two outputs bit for bit.

    Args:
        mapping: maps names in the new layout to the source's tensors.
        tensors: tensors in the result. The source's tensors are cast to the dtypes of these tensors.
        files: files of the result.

    Returns:
        A text about the result of the comparison, for the summary of the conversion.

    Raises:
        CheckpointError: if the two outputs differ.
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
