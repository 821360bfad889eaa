"""A control channel as outside code would add it: no file of wands knows it.

A control video lies next to each clip: a.control.mp4 belongs to a.mp4. The VAE encodes it, and its latents are appended to the
channels of the noisy latents.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.clip_files import ClipFile
from wands.conditions.condition import Arrays, Channels, ClipFrames, Condition, Encoders, Entry
from wands.data.clips.video import to_pixels
from wands.data.patchify import patchify
from wands.plugin import Plugin


class Control(Condition):
    """A control video as input channels.

    Args:
        dropout: probability of replacing the control by zeros in training.
    """

    name = "control"
    files = (ClipFile(column="control", endings=(".control.mp4",)),)
    arrays = (ArraySpec(name="control_latents", dtype="bf16", dims=(16, "frames", "rows", "columns")),)
    channels = 16

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def fingerprint(self) -> Any:
        return {"version": 1}

    def encode(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        pixels = to_pixels(clip.files["control"].to(encoders.device))
        return {"control_latents": encoders.vae.encode(pixels)}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry:
        return Channels(patchify(arrays["control_latents"].float(), size.patch_size))


plugin = Plugin(conditions=(Control(),))
