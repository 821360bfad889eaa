"""Read the images that sampled videos start or end with, scaled and cropped like training clips."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, probe
from wands.errors import DataError, WandsError
from wands.own_files import open_regular_file
from wands.sampling.requests import SampleRequest, flag_of

ConditionImages: TypeAlias = Mapping[str, Image.Image]
"""First and last image of a video in RGB and its size, if the user gave them, by argument of diffusers' pipelines."""
NO_IMAGES: ConditionImages = {}


def read_images(requests: Sequence[SampleRequest]) -> tuple[list[ConditionImages], list[str]]:
    """Return the first and last images of each checked request in the size of its video, and an error text for each bad file."""
    read = functools.cache(read_image)  # many prompts may share an image
    images = list[ConditionImages]()
    problems = []
    for request in requests:
        given: dict[str, Image.Image] = {}
        for key, path in (("image", request.image), ("last_image", request.last_image)):
            try:
                if path is not None:
                    given[key] = read(Path(path), request.height, request.width, last=key == "last_image")
            except DataError as error:
                problems.append(f"{flag_of(key)}={path} cannot be used: {error}")
        images.append(given)
    return images, list(dict.fromkeys(problems))


def read_image(path: Path, height: int, width: int, *, last: bool = False) -> Image.Image:
    """Read an image or the first (or last) frame of a video in RGB, scaled to cover the size and cropped at its center.

    The code that decodes training clips is used. `path` may have any format that FFmpeg or Pillow reads.

    Raises:
        DataError: if neither FFmpeg nor Pillow can read the file.
    """
    try:
        return Image.fromarray(_decode_frame(path, height, width, last))
    except DataError as refused:
        try:
            # A named pipe would block.
            with open(path, "rb", opener=open_regular_file) as file, Image.open(file) as opened:
                upright = ImageOps.exif_transpose(opened).convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError, WandsError):
            raise refused from None
    with tempfile.TemporaryDirectory(prefix="wands-image-") as folder:
        copy = Path(folder) / "image.png"
        upright.save(copy)
        return Image.fromarray(_decode_frame(copy, height, width, last))


def _decode_frame(path: Path, height: int, width: int, last: bool) -> np.ndarray:
    spec = functools.partial(ClipSpec, height=height, width=width, center_crop=True, size_multiple=2)
    if not last:
        return next(decode_clip(path, spec(fps=1, max_frames=1, frame_stride=1))).frames[0]
    info = probe(path)
    # At four times the frame rate of the video, the last sample is always the last frame, whatever the rounding of timestamps.
    start = max(0.0, info.duration - max(0.25, 2 / info.fps))
    clip = next(decode_clip(path, spec(fps=4 * info.fps, frame_stride=1), start=start or None))
    return clip.frames[-1]
