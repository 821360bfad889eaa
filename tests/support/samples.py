"""Samples and conditions for tests, made from tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from wands.data.collate import Sample
from wands.variants import VARIANTS, Variant


def sample_of(sample_id: str, latents: Tensor, text_embeds: Tensor, **others: Tensor | None) -> Sample:
    """Return a sample with these arrays; None leaves an array out."""
    arrays = {"latents": latents, "text_embeds": text_embeds, **others}
    return Sample(sample_id, {name: array for name, array in arrays.items() if array is not None})


def with_arrays(sample: Sample, **arrays: Tensor) -> Sample:
    """Return a copy of a sample with these arrays added or replaced."""
    return replace(sample, arrays={**sample.arrays, **arrays})


def narrow_text(name: str) -> Variant:
    """Return a published variant with a text encoder of width 8."""
    row = VARIANTS[name]
    return replace(row, dit=replace(row.dit, text_dim=8))
