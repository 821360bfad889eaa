"""Plan the samples of a clip: frame sizes and time windows. The module only computes; it uses neither files nor PyAV.

The key of a sample is the key of its clip, followed by a suffix. The suffix has a part for the window and a part for the
size. Each part can be empty. Keys of clips never contain "#", so the suffix begins at the first "#".

- Window: with `--clip-mode slide`, a clip is cut into consecutive windows (ranges of frames). The part is the number of the
  window, such as "#0003" for the fourth window. In other clip modes, the part is empty.
- Size: with several values of `--max-pixels`, a clip has samples of several sizes. The part is empty for the first value. For
  other values, the part is width x height, such as "#640x352". With a window, the suffix is, for example, "#0003#640x352".
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
    """Error for a clip whose frames are too small for the model.

    After scaling down to --max-pixels, each side of a frame must have at least `ClipSpec.size_multiple` pixels.
    """


@dataclass(frozen=True)
class ClipSpec:
    """Frame rate, size and length of the samples of every clip.

    If ``height`` and ``width`` are set, a frame is stretched to exactly this size. With ``center_crop``, the frame is
    instead resized to cover this size, and then cropped centrally.

    Without ``height`` and ``width``, a frame keeps its aspect ratio. The frame is scaled down (never up) to at most
    ``max_pixels``. Then it is cropped centrally, so that both sides are multiples of ``size_multiple``.

    A sample has 1 + k * ``frame_stride`` frames, where k is 0 or a positive integer.

    Attributes:
        fps: frames per second of the samples.
        height: exact height of a frame in pixels. Set both ``height`` and ``width``, or neither.
        width: exact width of a frame in pixels.
        center_crop: whether to crop to ``height`` x ``width`` instead of stretching.
        max_pixels: largest height x width of a frame in pixels. It cannot be combined with ``height``.
        more_pixels: further values of ``max_pixels``. Each window (range of frames) becomes one more sample for each value,
            unless the window has a sample of the same size already.
        max_frames: largest number of frames of a window. None takes the whole clip.
        clip_mode: ``head`` takes the first frames of a clip, and ``middle`` takes the central frames. ``slide`` takes
            consecutive windows without overlap. The last window may be shorter. A shorter last window of only one
            frame is dropped if the clip has other windows.
        size_multiple: height and width of a sample are multiples of this number. It is the spatial stride of the VAE x
            the patch size: 16 for Wan 2.1.
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

        Args:
            variant: variant of the model. Its VAE and patch size give the attributes ``size_multiple`` (height and width are
                multiples of this number) and ``frame_stride``.
            options: values of other attributes of `ClipSpec`. The default of ``fps`` is the variant's frame rate. The
                default of ``max_frames`` is 81. Without ``height``, the default of ``max_pixels`` is `MAX_PIXELS`.

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
        """Return the largest allowed number of frames, 1 + k * frame_stride, that is at most `num_frames`. Return 0 for
        0 frames.
        """
        return (num_frames - 1) // self.frame_stride * self.frame_stride + 1 if num_frames > 0 else 0


@dataclass(frozen=True)
class FrameSize:
    """Frame size before and after cropping: a frame is resized to ``scaled``, then cropped centrally to ``target``.
    Both are (width, height) in pixels of the frame as it is displayed.
    """

    scaled: tuple[int, int]
    target: tuple[int, int]


def plan_size(spec: ClipSpec, width: Fraction, height: Fraction) -> FrameSize:
    """Choose the size to which the frames of a clip are scaled and cropped.

    Args:
        spec: rules for the size.
        width: displayed width of the clip in pixels, with the pixel aspect ratio applied.
        height: displayed height of the clip in pixels.

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
    """Choose the size of the frames of a clip for each limit of the frame area (value of --max-pixels).

    Args:
        spec: rules for the size, with all limits.
        width: displayed width of the clip in pixels, with the pixel aspect ratio applied.
        height: displayed height of the clip in pixels.

    Returns:
        A pair (sizes, error). `sizes` maps the suffix of a sample's key to the frame size. The suffix is "" for the limit
        `spec.max_pixels`. For each further limit, the suffix contains the size, such as "#640x352". A limit that gives the
        same size as an earlier limit is left out. `error` describes the first limit at which a side of the frame would be
        too short. `error` is None if there is no such limit.

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
    """Split the suffix of a sample's key into the part for the window (range of frames) and the part for the size.

    The part for the window is "" or, for example, "#0003". The part for the size is "" or, for example, "#640x352".
    """
    match = re.fullmatch(r"((?:#\d+)?)((?:#\d+x\d+)?)", suffix)
    assert match, suffix
    return match[1], match[2]


def plan_windows(spec: ClipSpec, begin: float, finish: float) -> Iterator[tuple[float, int]]:
    """Choose the windows (ranges of frames) of a clip between the times `begin` and `finish` in seconds.

    Do not collect the windows in a list: a damaged file may claim a duration of years.

    Yields:
        (start in seconds, number of frames) of each window, in time order. Nothing is yielded if not even one frame lies
        between `begin` and `finish`.
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
