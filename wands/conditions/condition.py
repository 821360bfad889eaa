"""Interface of a condition: one input of a model in addition to the noisy latents.

Its attributes say which files, arrays and channels it has; its methods make the arrays and turn them into what the model gets.
All methods have defaults except `enter`, and `encode` if the condition has arrays. Outside code subclasses `Condition` and passes
the object as one of `conditions`. It must be picklable, because `wands preprocess` sends it to its workers.
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
    """Entry into the cross-attention to text: [n, width of the text encoder] with n <= 512, without padding."""

    tokens: Tensor


@dataclass(frozen=True)
class CrossAttention:
    """Entry into the cross-attention to images: [I, width of CLIP]. I is equal for all samples."""

    tokens: Tensor


@dataclass(frozen=True)
class Channels:
    """Entry into the input channels of the model: rows fp32 [n, P'], for each token in the order of `wands.patches.patchify`."""

    rows: Tensor


@dataclass(frozen=True)
class LossWeights:
    """Entry into the loss: fp32 [n], the weight of each token."""

    weights: Tensor


@dataclass(frozen=True)
class SecondClip:
    """Entry of another clip of the same size into the sequence: fp32 [n, P], its clean tokens in the order of `patchify`.

    They are the tokens of the units with `is_second` (`wands.attention.units`), which the objective must define.
    """

    tokens: Tensor


Entry = TextTokens | CrossAttention | Channels | LossWeights | SecondClip
"""Result of `Condition.enter`. Entries of one kind are joined in the order of the conditions, along channels or tokens."""


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
        pixels: the same as fp32 [3, F, H, W] in [-1, 1], on the device of the encoders.
        files: result of `ClipFile.of_window` by column, by default frames, uint8 [F, H, W, 3]; without files that the clip lacks.
        size: size of the sample.
    """

    frames: Tensor
    pixels: Tensor
    files: Arrays
    size: ClipSize


class Condition:
    """One input of a model in addition to the noisy latents.

    Attributes:
        name: unique name, for messages, manifests and configs.
        files: kinds of files next to a clip that the condition needs.
        arrays: arrays of a sample in the cache.
        encoders: attributes of `Encoders` that `encode` uses. They are loaded before the first clip.
        channels: number of latent channels that the condition adds to the input of the model.
        cross_tokens: number of tokens that it adds to the cross-attention to images.
        dropout: probability with which training replaces the arrays of a sample by those of `absent`.
        kind: name of the samples in evaluations that get this condition; None does not change the name.
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
        """Check a sample before it is encoded; raise DataError if the condition cannot be made from it."""

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

        Optional arrays may be missing. Frames that belong to other ranks are zero.
        """
        return None

    def num_clean_tokens(self, draw: Draw, grid: tuple[int, int, int], flow: FlowConfig) -> int:
        """Return the number of tokens at the start of a sample without noise and loss.

        `grid` is (frames, rows, columns) of tokens.
        """
        return 0

    def dropout_rate(self, flow: FlowConfig, of_source: float | None) -> float:
        """Return the probability of dropout. `of_source` is `caption_dropout` of the sample's data source."""
        return self.dropout

    def request(self, clip: ClipFrames, encoders: Encoders) -> dict[str, Tensor]:
        """Return the arrays of a video to sample, from gray frames in its size and the files of the user."""
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
