"""What a clip is turned into: which sizes, which windows of time. Pure arithmetic: no file, no PyAV.

The key of a sample is its row's key and a suffix: "#0003" for the fourth window in slide mode, then "#640x352" (width x height)
for every size but that of the first bound. Keys of rows never contain "#".
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from wands.errors import ConfigError, DataError
from wands.variants import Variant

MAX_PIXELS = 480 * 832
"""Default bound of a frame's area: Wan's 480p class, whatever the aspect."""

# Matroska and FLV round timestamps to 1 ms: a frame due at 62.5 ms may carry 63 ms and must still be chosen.
TIME_SLACK = 1e-3


class TooSmallError(DataError):
    """A bound on a frame's area leaves less than the smallest legal side."""


@dataclass(frozen=True)
class ClipSpec:
    """What every clip is turned into: rate, size, length.

    Size: with ``height`` and ``width`` the picture is resized to exactly that, or, with ``center_crop``, to
    cover it and cut centrally. Otherwise it keeps its own aspect, is scaled down (never up) to at most
    ``max_pixels``, and the few pixels over a multiple of ``size_multiple`` are cut centrally.
    Length: 1 + k * ``frame_stride`` frames.

    Attributes:
        fps: frames per second of the result.
        height: pixels; with ``width`` or not at all.
        width: pixels.
        center_crop: cut to ``height`` x ``width`` rather than distort.
        max_pixels: upper bound of height * width; not together with ``height``.
        max_frames: upper bound of a window's frames; None takes the whole clip.
        clip_mode: ``head`` the first frames, ``middle`` the central ones, ``slide`` consecutive windows that
            do not overlap. The last window may be shorter; unless it is the only one, it is dropped when it
            would be a still (at most ``frame_stride`` frames left).
        size_multiple: VAE stride x patch, 16 for Wan2.1.
        frame_stride: temporal stride of the VAE.

    Raises:
        ConfigError: a value that cannot be.
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

    def __post_init__(self) -> None:
        multiple = self.size_multiple
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ConfigError(f"fps={self.fps} must be positive; use the variant's own, e.g. 16")
        if (self.height is None) != (self.width is None):
            raise ConfigError(f"height={self.height} width={self.width} come together; give both or neither")
        for name, size in (("height", self.height), ("width", self.width)):
            if size is not None and (size < multiple or size % multiple):
                near = max(multiple, round(size / multiple) * multiple)
                raise ConfigError(f"{name}={size} must be a multiple of {multiple}; use {near}")
        if self.center_crop and self.height is None:
            raise ConfigError("center_crop=True needs a size to cut to; give height and width")
        if self.max_pixels is not None and self.height is not None:
            raise ConfigError(
                f"max_pixels={self.max_pixels} and height={self.height} exclude each other; drop one"
            )
        if self.max_pixels is not None and self.max_pixels < multiple**2:
            raise ConfigError(f"max_pixels={self.max_pixels} must be at least {multiple**2}; raise it")
        if self.max_frames is not None and self.max_frames < 1:
            raise ConfigError(f"max_frames={self.max_frames} must be at least 1; use 81, for example")
        if self.clip_mode not in ("head", "middle", "slide"):
            raise ConfigError(f"clip_mode={self.clip_mode} is unknown; use head, middle or slide")
        if self.clip_mode == "slide" and self.max_frames is None:
            raise ConfigError("clip_mode=slide needs a window length; give max_frames")
        assert multiple >= 2, "yuv420p and the VAE both need even sizes"
        assert self.frame_stride >= 1

    @classmethod
    def of_variant(
        cls,
        variant: Variant,
        *,
        fps: float | None = None,
        height: int | None = None,
        width: int | None = None,
        center_crop: bool = False,
        max_pixels: int | None = None,
        max_frames: int | None = 81,
        clip_mode: Literal["head", "middle", "slide"] = "head",
    ) -> "ClipSpec":
        """What `wands preprocess` and `wands check` do with clips unless told otherwise.

        Args:
            variant: gives strides and, unless `fps` does, the frame rate.
            fps: frames per second of the samples.
            height: exact height in pixels, with `width`.
            width: exact width in pixels.
            center_crop: fill height x width by cutting rather than by stretching.
            max_pixels: default: `MAX_PIXELS`; no bound with `height` and `width`.
            max_frames: longest sample; None keeps whole clips.
            clip_mode: which part of a longer clip.

        Raises:
            ConfigError: a value that cannot be, or options that exclude each other.
        """
        if max_pixels is None and height is None:
            max_pixels = MAX_PIXELS
        shortest = variant.vae_stride[0] + 1
        if variant.num_images and max_frames is not None and max_frames < shortest:
            raise ConfigError(
                f"max_frames={max_frames} makes stills, and {variant.name} is given the first frame; use {shortest} or more"
            )
        return cls(
            fps=fps if fps is not None else variant.fps,
            height=height,
            width=width,
            center_crop=center_crop,
            max_pixels=max_pixels,
            max_frames=max_frames,
            clip_mode=clip_mode,
            size_multiple=variant.vae_stride[1] * variant.dit.patch_size[1],
            frame_stride=variant.vae_stride[0],
        )

    def legal_frames(self, num_frames: int) -> int:
        """The largest 1 + k * frame_stride that is <= num_frames (0 for 0)."""
        return (num_frames - 1) // self.frame_stride * self.frame_stride + 1 if num_frames > 0 else 0


@dataclass(frozen=True)
class Geometry:
    """Resize to ``scaled``, then cut centrally to ``target``; both (width, height) in pixels as displayed."""

    scaled: tuple[int, int]
    target: tuple[int, int]


def plan_size(spec: ClipSpec, width: Fraction, height: Fraction) -> Geometry:
    """Choose the size for a picture that is displayed at width x height square pixels.

    Raises:
        TooSmallError: nothing of at least ``size_multiple`` pixels on each side is left.
    """
    multiple = spec.size_multiple
    if spec.width is not None and spec.height is not None:
        target = (spec.width, spec.height)
        if not spec.center_crop:
            return Geometry(target, target)
    else:
        shrink = min(1.0, math.sqrt(spec.max_pixels / (width * height))) if spec.max_pixels else 1.0
        # 1e-6 px of slack: a root that should be whole must not lose a row to float rounding.
        target_width, target_height = (
            int(float(side) * shrink + 1e-6) // multiple * multiple for side in (width, height)
        )
        target = (target_width, target_height)
        if min(target) < multiple:
            raise TooSmallError(
                f"size={float(width):.0f}x{float(height):.0f} is below {multiple} px on a side "
                f"(max_pixels={spec.max_pixels}); use a larger clip or a larger max_pixels"
            )
    cover = max(target[0] / width, target[1] / height)
    scaled = (max(target[0], round(width * cover)), max(target[1], round(height * cover)))
    return Geometry(scaled, target)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a clip is kept at.

    Attributes:
        geometries: suffix of the sample's key -> size; no two are the same size.
        refused: what is wrong with a bound that gives none.
    """

    geometries: dict[str, Geometry]
    refused: TooSmallError | None = None


def plan_sizes(spec: ClipSpec, more_pixels: Sequence[int], width: Fraction, height: Fraction) -> Sizes:
    """Choose the size under each bound; a bound that gives a size which an earlier one has given adds none.

    Args:
        spec: holds the first bound.
        more_pixels: further ones.
        width: of the picture as displayed, in square pixels.
        height: likewise.

    Raises:
        TooSmallError: no bound leaves a legal size.
    """
    geometries: dict[str, Geometry] = {}
    refused: TooSmallError | None = None
    for bound in further_specs(spec, more_pixels):
        try:
            geometry = plan_size(bound, width, height)
        except TooSmallError as error:
            refused = refused or error
            continue
        if geometry.target not in {known.target for known in geometries.values()}:
            suffix = "" if bound is spec else "#{}x{}".format(*geometry.target)
            geometries[suffix] = geometry
    if refused is not None and not geometries:
        raise refused
    return Sizes(geometries, refused)


def further_specs(spec: ClipSpec, more_pixels: Sequence[int]) -> list[ClipSpec]:
    """`spec`, and the same with each further bound on a frame's area.

    Raises:
        ConfigError: a bound that cannot be.
    """
    return [spec, *(replace(spec, max_pixels=pixels) for pixels in more_pixels)]


def split_bounds(max_pixels: int | Sequence[int] | None) -> tuple[int | None, tuple[int, ...]]:
    """The first bound of a frame's area, which may be left to the default, and the further ones."""
    if max_pixels is None or isinstance(max_pixels, int):
        return max_pixels, ()
    return next(iter(max_pixels), None), tuple(max_pixels[1:])


def split_suffix(suffix: str) -> tuple[str, str]:
    """Part the suffix of a sample's key: ("#0003" or "", "#640x352" or "")."""
    found = re.fullmatch(r"((?:#\d+)?)((?:#\d+x\d+)?)", suffix)
    assert found, suffix
    return found[1], found[2]


def check_frames(path: str, num_frames: int, conditions: Collection[str]) -> None:
    """Refuse a sample of which a model that is given its first frame could predict nothing.

    Args:
        path: of the clip.
        num_frames: of the sample.
        conditions: of the variant.

    Raises:
        DataError: it is a still.
    """
    if num_frames == 1 and "image" in conditions:
        raise DataError(
            f"video={path} gives one frame, and an image-to-video model needs more than the one it is given; "
            "leave stills out, or give a longer clip"
        )


def plan_windows(spec: ClipSpec, begin: float, finish: float) -> Iterator[tuple[float, int]]:
    """Choose the windows inside [begin, finish) seconds, lazily: a damaged header may promise years.

    Yields:
        (start in seconds, number of frames) of each window, in time order; none when no frame fits.
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
