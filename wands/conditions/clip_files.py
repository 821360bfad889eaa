"""Files next to a clip from which a condition is made, such as a loss mask or a control video.

The processes that decode clips import this module, so it needs neither torch nor PyAV.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_MASK_LEVELS = np.clip((np.arange(256, dtype=np.float32) - 5) / 245, 0, 1)
"""Maps a brightness to a weight. Codecs change black and white a little, so 0 to 5 is black and 250 to 255 is white."""


@dataclass(frozen=True)
class ClipFile:
    """Kind of file next to a clip. Its frames are cut, resampled, cropped and resized like those of the clip.

    A subclass may reduce the frames while the clip is decoded. Objects must be picklable.

    Attributes:
        column: column or JSON key with the path of the file, such as "control".
        endings: with (".control.mp4",), a.control.mp4 belongs to a.mp4. Members of a tar archive have these endings, too.
        required: whether a clip without the file is rejected.
        allows_image: whether an image may stand for every frame of a video.
    """

    column: str
    endings: tuple[str, ...]
    required: bool = True
    allows_image: bool = False

    def of_frame(self, image: np.ndarray, token_side: int) -> np.ndarray:
        """Return what is kept of a frame, uint8 [rows, columns, 3]. `token_side` is in pixels."""
        return image

    def of_window(self, frames: np.ndarray, frame_stride: int) -> np.ndarray:
        """Return what a condition gets of one sample, from the results of `of_frame`. `frame_stride` is that of the VAE.

        Raises:
            ValueError: if the sample cannot be used. The text completes "video=a.mp4 has the mask a.mask.mp4, which ...".
        """
        return frames


@dataclass(frozen=True)
class MaskFile(ClipFile):
    """Loss mask, reduced to the mean brightness of each token."""

    column: str = "mask"
    endings: tuple[str, ...] = (".mask.png", ".mask.mp4")
    required: bool = False
    allows_image: bool = True

    def of_frame(self, image: np.ndarray, token_side: int) -> np.ndarray:
        """Return the mean brightness in each token, from 0 (black) to 1 (white): [token rows, token columns]."""
        tokens = _MASK_LEVELS[image].reshape(len(image) // token_side, token_side, -1, token_side * 3)
        return tokens.mean(axis=(1, 3))

    def of_window(self, frames: np.ndarray, frame_stride: int) -> np.ndarray:
        """Return the weight of each token, the mean over the frames of its latent frame. The first latent frame has one."""
        rest = frames[1:].reshape(-1, frame_stride, *frames.shape[1:])
        weights = np.concatenate([frames[:1], rest.mean(axis=1)])
        if not weights.any():
            raise ValueError("is black throughout a sample")
        return weights


MASK_FILE = MaskFile()


class FoundFile(NamedTuple):
    """File next to a clip, with its kind."""

    kind: ClipFile
    path: Path
