"""Interface of a condition: one input of a model in addition to the noisy latents.

A condition is an object with a name. Its attributes say which files, arrays and channels it has, and its methods make the
arrays and turn them into what the model gets. `Condition` has a default for every method except `enter`, and for `encode`
if the condition has arrays. `wands.conditions.published` has examples.

To add a condition in outside code, subclass `Condition` and pass the object to the commands and functions that take
`conditions`. The object must be picklable, because `wands preprocess` sends it to its workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.clip_files import ClipFile
from wands.config.recipe import FlowConfig
from wands.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Arrays = Mapping[str, "Tensor"]
Draw = Callable[[str], np.random.Generator]
"""Function from a purpose to a random number generator. Equal purposes of one sample give equal numbers."""


@dataclass(frozen=True)
class TextTokens:
    """Entry into the cross-attention to text.

    Attributes:
        tokens: [n, width of the text encoder] with n <= 512, without padding.
    """

    tokens: Tensor


@dataclass(frozen=True)
class CrossAttention:
    """Entry into the cross-attention to images.

    Attributes:
        tokens: [I, width of CLIP]. The number I is equal for all samples.
    """

    tokens: Tensor


@dataclass(frozen=True)
class Channels:
    """Entry into the input channels of the model, next to the channels of the noisy latents.

    Attributes:
        rows: fp32 [n, P'], channels of each token in the order of `wands.patches.patchify`.
    """

    rows: Tensor


@dataclass(frozen=True)
class LossWeights:
    """Entry into the loss.

    Attributes:
        weights: fp32 [n], weight of each token.
    """

    weights: Tensor


Entry = TextTokens | CrossAttention | Channels | LossWeights
"""Result of `Condition.enter`. Entries of one kind are joined in the order of the conditions: channels along the channels of
a token, cross-attention along the tokens."""


class VideoEncoder(Protocol):
    """The VAE, as `wands.encoders.vae.WanVideoEncoder`."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels [3, F, H, W] in [-1, 1], or a batch of them, to normalized latents in fp32."""
        ...


class StillEncoder(Protocol):
    """CLIP, as `wands.encoders.image.ImageEncoder`."""

    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        """Encode images, each uint8 [rows, columns, 3], to hidden states [tokens, width]."""
        ...


class Encoders(Protocol):
    """Frozen encoders of a pipeline. Each encoder is loaded at its first use, and stays loaded."""

    device: torch.device

    @property
    def vae(self) -> VideoEncoder:
        """The VAE."""
        ...

    @property
    def image(self) -> StillEncoder:
        """CLIP and its image processor."""
        ...


@dataclass(eq=False)
class ClipFrames:
    """Decoded frames of one sample.

    Attributes:
        frames: RGB, uint8 [F, H, W, 3] on the CPU.
        pixels: the same frames as fp32 [3, F, H, W] in [-1, 1], on the device of the encoders.
        files: maps the column of each file next to the clip to what `ClipFile.of_window` returned: by default its frames,
            uint8 [F, H, W, 3]. Files that the clip lacks are missing.
        size: size of the sample in latents and tokens.
    """

    frames: Tensor
    pixels: Tensor
    files: Arrays
    size: ClipSize


class Condition:
    """One input of a model in addition to the noisy latents.

    Attributes:
        name: unique name, which messages, manifests and configs contain.
        files: kinds of files next to a clip that the condition needs.
        arrays: arrays of a sample in the cache.
        encoders: attributes of `Encoders` that `encode` uses. They are loaded before the first clip.
        channels: number of latent channels that the condition adds to the input of the model.
        cross_tokens: number of tokens that the condition adds to the cross-attention to images.
        dropout: probability with which training replaces the arrays of a sample by those of `absent`.
        kind: name of the samples in evaluations that get this condition. None if the condition does not change the name.
        is_optional: whether only some uses of a sample get this condition, so that evaluations measure both kinds.
    """

    name: str = ""
    files: tuple[ClipFile, ...] = ()
    arrays: tuple[ArraySpec, ...] = ()
    encoders: tuple[str, ...] = ("vae",)
    channels: int = 0
    cross_tokens: int = 0
    dropout: float = 0.0
    kind: str | None = None
    is_optional: bool = False

    def fingerprint(self) -> Any:
        """Return JSON values that decide the arrays in addition to the encoders. The manifest of a cache contains them."""
        return {}

    def check_clip(self, path: str, num_frames: int) -> None:
        """Check a sample of `num_frames` frames before it is encoded.

        Raises:
            DataError: if the condition cannot be made from this sample.
        """

    def encode(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        """Return the arrays of a sample, in a worker of `wands preprocess`. The dtypes are converted to those of `arrays`."""
        assert not self.arrays, f"condition {self.name} has arrays, but no method encode"
        return {}

    def encode_batch(self, clips: Sequence[ClipFrames], encoders: Encoders) -> list[dict[str, Tensor]]:
        """Return the arrays of samples of equal size."""
        return [self.encode(clip, encoders) for clip in clips]

    def absent(self, size: ClipSize) -> dict[str, Tensor]:
        """Return the arrays of a sample without this condition: zeros, and no optional array."""
        return {spec.name: spec.zeros(size, [1] * spec.num_free) for spec in self.arrays if not spec.optional}

    def mock(self, draw: Draw, size: ClipSize, free_len: int) -> dict[str, Tensor]:
        """Return random arrays of a sample. `free_len` is the size of each dimension that is None."""
        required = [spec for spec in self.arrays if not spec.optional]
        shapes = {spec.name: spec.shape(size, [free_len] * spec.num_free) for spec in required}
        return {spec.name: spec.draw(draw(spec.name), shapes[spec.name]) for spec in required}

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry | None:
        """Return what the model or the loss gets of a sample, or None for nothing.

        Args:
            arrays: arrays of this condition. Optional arrays may be missing. Frames that belong to other ranks are zero.
            size: size of the sample.
        """
        return None

    def num_clean_tokens(self, draw: Draw, grid: tuple[int, int, int], flow: FlowConfig) -> int:
        """Return the number of tokens at the start of a sample that the model gets without noise, and that have no loss.

        Args:
            draw: random number generators of this use of the sample.
            grid: number of tokens along (frame, row, column).
            flow: `flow` section of the recipe.
        """
        return 0

    def dropout_rate(self, flow: FlowConfig, of_source: float | None) -> float:
        """Return the probability with which the arrays of a sample are replaced by those of `absent`.

        Args:
            flow: `flow` section of the recipe.
            of_source: `caption_dropout` of the sample's data source.
        """
        return self.dropout

    def request(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        """Return the arrays of a video to sample.

        Args:
            clip: gray frames in the size of the video, and the files that the user gave for this video.
            encoders: frozen encoders of the pipeline.
        """
        return self.encode(clip, encoders)

    @property
    def dropout_purpose(self) -> str:
        """Purpose of the random number that decides the dropout."""
        return f"drop {self.name}"


def check_entry(condition: Condition, entry: Entry, size: ClipSize) -> None:
    """Raise DataError if the channels of an entry are not those that the condition declares."""
    if not isinstance(entry, Channels):
        return
    width = entry.rows.shape[1]
    patch = math.prod(size.patch_size)
    if width != condition.channels * patch:
        raise DataError(
            f"enter of condition {condition.name} returns {width} values for each token, but channels={condition.channels} and "
            f"patches of {patch} latent pixels make {condition.channels * patch}; correct channels or enter."
        )
