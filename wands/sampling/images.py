"""Read the images that sampled videos start or end with. The images are scaled and cropped like training clips."""

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
"""First and last image of a video to sample, in RGB and in the size of the video. The keys "image" and "last_image" are arguments
of diffusers' pipelines. An image that the user did not give is missing.
"""
NO_IMAGES: ConditionImages = {}


def read_images(requests: Sequence[SampleRequest]) -> tuple[list[ConditionImages], list[str]]:
    """Read the first and last images of all requests, scaled and cropped to the size of each request's video.

    Args:
        requests: requests whose heights and widths are valid for the model.

    Returns:
        (images of each request, error texts). There is one error text for each file that cannot be used.
    """
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
    """Read an image or one frame of a video, and return it in RGB with the requested size.

    The image is scaled to cover the requested size and cropped at its center, by the same code that decodes training clips.

    Args:
        path: a video, or an image in any format that FFmpeg or Pillow reads.
        height: height of the result in pixels.
        width: width of the result in pixels.
        last: whether to read the last frame of a video instead of the first frame.

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
