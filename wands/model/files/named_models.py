"""Models that have a name instead of files: the published ones, and a tiny one of each family for tests of machines.

Only their shapes are known, so their weights are random.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from wands.variants import VARIANTS, SamplingDefaults, Variant


def _tiny(row: Variant) -> Variant:
    """Return a model with the inputs of a published one, but 2 narrow blocks, and videos of 9 frames of 96 x 64 pixels."""
    dit = replace(row.dit, num_heads=8, head_dim=12, num_layers=2, ffn_dim=192, text_dim=64, freq_dim=64)
    name = f"{row.name.rpartition('-')[0]}-tiny"
    return replace(row, name=name, dit=dit, sampling=SamplingDefaults(height=64, width=96, num_frames=9))


TINY = {tiny.name: tiny for tiny in map(_tiny, reversed(VARIANTS.values()))}
"""Tiny models by name, such as "wan2.1-t2v-tiny". A CPU trains them."""


def named_model(path: str | Path) -> Variant | None:
    """Return the model with the name `path`; None if there is none, or a file or folder `path` exists."""
    return None if Path(path).exists() else VARIANTS.get(str(path)) or TINY.get(str(path))
