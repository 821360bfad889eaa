"""A control video as further input channels of the model, for example depth or edges.

The control of `a.mp4` is `a.control.mp4` next to it, or the column `control` of a table. A base model gets the channels with zero
weights, so that it starts as the base. Every command that reads clips, caches or the input of a video gets the same --import:

    wands preprocess clips --model BASE --out cache --import examples/control_channel.py
    wands train wan2.1-t2v-1.3b-finetune --set data.cache=cache --import examples/control_channel.py
    wands infer --model EXPORTED --prompt "..." --input control=pose.mp4 --out samples --import examples/control_channel.py
"""

from typing import Any

from torch import Tensor

import wands


class Control(wands.Condition):
    """Latents of a control video, next to the channels of the noisy latents.

    Args:
        dropout: probability of replacing the control by zeros in training.
    """

    name = "control"
    files = (wands.ClipFile(column="control", endings=(".control.mp4",)),)
    arrays = (wands.ArraySpec(name="control_latents", dtype="bf16", dims=(16, "frames", "rows", "columns")),)
    channels = 16

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def fingerprint(self) -> Any:
        """Return what decides the arrays, besides the encoders: a cache is continued only with equal values."""
        return {"version": 1}

    def encode(self, clip: wands.ClipFrames, encoders: Any) -> dict[str, Tensor]:
        """Return the arrays of a sample, from the frames of its control video, uint8 [F, H, W, 3]."""
        pixels = wands.to_pixels(clip.files["control"].to(encoders.device))
        return {"control_latents": encoders.vae.encode(pixels)}

    def enter(self, arrays: Any, size: wands.ClipSize) -> wands.Channels:
        """Return the channels of each token, [tokens, channels of a token]."""
        return wands.Channels(wands.patchify(arrays["control_latents"].float(), size.patch_size))


plugin = wands.Plugin(conditions=(Control(),))
