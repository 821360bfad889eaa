"""A condition with an array of each dtype, none of which enters the model: only the cache is of interest."""

from __future__ import annotations

from wands.conditions.arrays import ArraySpec
from wands.conditions.condition import Condition


class Facts(Condition):
    """Bytes per frame, a mask per pixel of the latents, and a list of any length that some samples lack."""

    name = "facts"
    arrays = (
        ArraySpec(name="depth", dtype="uint8", dims=("frames", "rows", "columns", 3)),
        ArraySpec(name="inside", dtype="bool", dims=("token_frames", "token_rows", "token_columns")),
        ArraySpec(name="track", dtype="bf16", dims=(None, 2), optional=True, max_len=9),
    )
