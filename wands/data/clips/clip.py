"""Plan the samples of a clip: frame sizes and time windows, without files or PyAV.

The key of a sample is the key of its clip and a suffix, such as "#0003#640x352", which begins at the first "#".

- Window, with `--clip-mode slide`: number of the window (range of frames), such as "#0003" for the fourth.
- Size, for all values of `--max-pixels` except the first: width x height, such as "#640x352".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from wands.errors import ConfigError, DataError
from wands.variants import Variant

Crop = tuple[int, int, int, int]
"""(x, y, width, height) of a rectangle in pixels of the upright, displayed frame. The upper left corner is (x, y)."""
MAX_PIXELS = 480 * 832
"""Default limit of a frame's area in pixels: Wan's 480p class at any aspect ratio."""

# Matroska and FLV round timestamps to 1 ms. A frame for 62.5 ms may have the timestamp 63 ms and must still be chosen.
TIME_SLACK = 1e-3


class TooSmallError(DataError):
    """Error for a clip whose sides, scaled down to --max-pixels, are shorter than `ClipSpec.size_multiple` pixels."""


@dataclass(frozen=True)
class ClipSpec:
    """Frame rate, size and length (1 + k * ``frame_stride`` frames) of the samples of every clip.

    With ``height`` and ``width``, a frame is stretched to this size or, with ``center_crop``, resized to cover it and cropped.
    Otherwise it keeps its aspect ratio, is scaled down (never up) to ``max_pixels`` and cropped to multiples of
    ``size_multiple``.

    Attributes:
        height: exact height of a frame in pixels. Set both ``height`` and ``width``, or neither.
        max_pixels: largest height x width of a frame in pixels. It cannot be combined with ``height``.
        more_pixels: further values of ``max_pixels``. Each gives one more sample of each window, unless the size is the same.
        max_frames: largest number of frames of a window. None takes the whole clip.
        clip_mode: ``head`` takes the first frames, ``middle`` the central frames, ``slide`` consecutive windows without overlap.
            The last may be shorter; if it has only one frame, and is not the only window, it is dropped.
        size_multiple: spatial stride of the VAE x the patch size: 16 for Wan 2.1.
        frame_stride: temporal stride of the VAE.

    Raises:
        ConfigError: if a value is invalid or options exclude each other.
    """

    fps: float
    height: int | None = None
    width: int | None = None
    center_crop: bool = False
    max_pixels: int | None = None
    max_frames: int | None = None
    clip_mode: Literal["head", "middle", "slide"] = "head"
    size_multiple: int = 16
    frame_stride: int = 4
    more_pixels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        multiple = self.size_multiple
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ConfigError(f"--fps={self.fps} must be positive; use the model's frame rate, such as 16")
        if (self.height is None) != (self.width is None):
            raise ConfigError(
                f"--height={self.height} and --width={self.width} must be set together; set both or neither"
            )
        for name, size in (("--height", self.height), ("--width", self.width)):
            if size is not None and (size < multiple or size % multiple):
                near = max(multiple, round(size / multiple) * multiple)
                raise ConfigError(f"{name}={size} must be a multiple of {multiple}; use {near}")
        if self.center_crop and self.height is None:
            raise ConfigError("--center-crop needs a size to crop to; set --height and --width")
        for pixels in () if self.max_pixels is None else (self.max_pixels, *self.more_pixels):
            if self.height is not None:
                raise ConfigError(
                    f"--max-pixels={pixels} and --height={self.height} cannot be combined; remove one of the two"
                )
            if pixels < multiple**2:
                raise ConfigError(f"--max-pixels={pixels} must be at least {multiple**2}; use a larger value")
        if self.max_frames is not None and self.max_frames < 1:
            raise ConfigError(f"--max-frames={self.max_frames} must be at least 1; use 81, for example")
        if self.clip_mode == "slide" and self.max_frames is None:
            raise ConfigError("--clip-mode=slide needs a window length; set --max-frames")

    @classmethod
    def of_variant(cls, variant: Variant, **options: Any) -> ClipSpec:
        """Return the `ClipSpec` that `wands preprocess` and `wands check` use for a model variant.

        `options` are other attributes. The defaults are the variant's ``fps``, 81 ``max_frames`` and, without ``height``,
        `MAX_PIXELS`.

        Raises:
            ConfigError: if a value is invalid or options exclude each other.
        """
        max_frames = options.setdefault("max_frames", 81)
        shortest = variant.vae_stride[0] + 1
        if variant.num_images and max_frames is not None and max_frames < shortest:
            raise ConfigError(
                f"--max-frames={max_frames} gives samples of one frame, but {variant.name} generates a video from the "
                f"first frame and needs more frames; use {shortest} or more"
            )
        if options.get("fps") is None:
            options["fps"] = variant.fps
        if options.get("max_pixels") is None and options.get("height") is None:
            options["max_pixels"] = MAX_PIXELS
        size_multiple = variant.vae_stride[1] * variant.dit.patch_size[1]
        return cls(size_multiple=size_multiple, frame_stride=variant.vae_stride[0], **options)

    def legal_frames(self, num_frames: int) -> int:
        """Return the largest 1 + k * frame_stride that is at most `num_frames`, or 0 for 0 frames."""
        return (num_frames - 1) // self.frame_stride * self.frame_stride + 1 if num_frames > 0 else 0


@dataclass(frozen=True)
class FrameSize:
    """Displayed (width, height): a frame is resized to ``scaled``, then cropped centrally to ``target``."""

    scaled: tuple[int, int]
    target: tuple[int, int]


def plan_size(spec: ClipSpec, width: Fraction, height: Fraction) -> FrameSize:
    """Choose the size to which frames of the displayed width and height (pixel aspect ratio applied) are scaled and cropped.

    Raises:
        TooSmallError: if a side of the frame would be shorter than `spec.size_multiple` pixels.
    """
    multiple = spec.size_multiple
    if spec.width is not None and spec.height is not None:
        target = (spec.width, spec.height)
        if not spec.center_crop:
            return FrameSize(target, target)
    else:
        shrink = min(1.0, math.sqrt(spec.max_pixels / (width * height))) if spec.max_pixels else 1.0
        # The 1e-6 pixels absorb rounding errors: a side that is an integer must not lose a pixel row.
        sides = [int(float(side) * shrink + 1e-6) // multiple * multiple for side in (width, height)]
        target = sides[0], sides[1]
        if min(target) < multiple:
            raise TooSmallError(
                f"size={float(width):.0f}x{float(height):.0f} is below {multiple} px on a side "
                f"(after scaling to --max-pixels={spec.max_pixels}); use a larger clip or a larger --max-pixels"
            )
    cover = max(target[0] / width, target[1] / height)
    scaled = (max(target[0], round(width * cover)), max(target[1], round(height * cover)))
    return FrameSize(scaled, target)


def plan_sizes(
    spec: ClipSpec, width: Fraction, height: Fraction
) -> tuple[dict[str, FrameSize], TooSmallError | None]:
    """Return ({key suffix: frame size}, error of the first limit that makes a frame too small, or None).

    The suffix is "" for `spec.max_pixels` and, for example, "#640x352" for further limits, without repeated sizes.

    Raises:
        TooSmallError: if a side of the frame would be too short at every limit.
    """
    sizes: dict[str, FrameSize] = {}
    first_error: TooSmallError | None = None
    for limited in (spec, *(replace(spec, max_pixels=pixels) for pixels in spec.more_pixels)):
        try:
            size = plan_size(limited, width, height)
        except TooSmallError as error:
            first_error = first_error or error
            continue
        if size.target not in {known.target for known in sizes.values()}:
            sizes["" if limited is spec else "#{}x{}".format(*size.target)] = size
    if first_error is not None and not sizes:
        raise first_error
    return sizes, first_error


def split_suffix(suffix: str) -> tuple[str, str]:
    """Split the suffix of a sample's key into its window and its size, such as "#0003" and "#640x352", or ""."""
    match = re.fullmatch(r"((?:#\d+)?)((?:#\d+x\d+)?)", suffix)
    assert match, suffix
    return match[1], match[2]


def plan_windows(spec: ClipSpec, begin: float, finish: float) -> Iterator[tuple[float, int]]:
    """Yield (start in seconds, number of frames) of each window between `begin` and `finish` seconds, if there is any.

    Do not collect the windows in a list: a damaged file may claim a duration of years.
    """
    available = math.ceil((finish - begin - TIME_SLACK) * spec.fps)
    if available < 1:
        return
    length = spec.legal_frames(spec.max_frames or available)
    frames = min(length, spec.legal_frames(available))
    if spec.clip_mode == "head":
        yield begin, frames
    elif spec.clip_mode == "middle":
        yield begin + max(0.0, (finish - begin - frames / spec.fps) / 2), frames
    else:
        for first in range(0, available, length):
            frames = min(length, spec.legal_frames(available - first))
            if first == 0 or frames == length or frames > spec.frame_stride:
                yield begin + first / spec.fps, frames
