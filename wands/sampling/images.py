"""Pictures that `wands infer` starts from, cut to a size as training clips are."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, probe
from wands.errors import DataError
from wands.sampling.requests import SampleRequest


@dataclass(frozen=True)
class Pictures:
    """What a sample starts from and ends at, each RGB of the video's size; None where nothing was given."""

    image: Image.Image | None = None
    last_image: Image.Image | None = None


def read_pictures(requests: Sequence[SampleRequest]) -> tuple[list[Pictures], list[str]]:
    """Read the pictures of all requests.

    Args:
        requests: of legal sizes.

    Returns:
        The pictures, in order, and what is wrong with a file: one sentence each.
    """
    found: dict[tuple[str, int, int, bool], Image.Image | None] = {}
    problems: list[str] = []

    def read(key: str, path: str | None, request: SampleRequest) -> Image.Image | None:
        if path is None:
            return None
        place = (path, request.height, request.width, key == "last_image")
        if place not in found:
            found[place] = None
            try:
                found[place] = read_picture(
                    Path(path), request.height, request.width, last=key == "last_image"
                )
            except DataError as error:
                problems.append(f"infer.{key}={path} cannot be used: {error}")
        return found[place]

    pictures = [
        Pictures(read("image", request.image, request), read("last_image", request.last_image, request))
        for request in requests
    ]
    return pictures, list(dict.fromkeys(problems))


def read_picture(path: Path, height: int, width: int, *, last: bool = False) -> Image.Image:
    """Read a picture, or a frame of a video, as training would see it at this size.

    It is scaled to cover the size and cut centrally, by the very code that decodes clips.

    Args:
        path: a video, or a picture in any format that FFmpeg or Pillow reads.
        height: pixels.
        width: pixels.
        last: take a video's last frame, not its first.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return Image.fromarray(_decode(path, height, width, last))
    except DataError as refused:
        try:
            with Image.open(path) as opened:
                upright = ImageOps.exif_transpose(opened).convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
            raise refused from None
    with tempfile.TemporaryDirectory(prefix="wands-picture-") as folder:
        copy = Path(folder) / "picture.png"
        upright.save(copy)
        return Image.fromarray(_decode(copy, height, width, last))


def _decode(path: Path, height: int, width: int, last: bool) -> np.ndarray:
    size: dict[str, Any] = {
        "height": height,
        "width": width,
        "center_crop": True,
        "size_multiple": 2,
        "frame_stride": 1,
    }
    if not last:
        return next(decode_clip(path, ClipSpec(fps=1, max_frames=1, **size))).frames[0]
    info = probe(path)
    # Four looks at every frame of the end: the last of them is at the last frame, however timestamps were rounded.
    start = max(0.0, info.duration - max(0.25, 2 / info.fps))
    clip = next(decode_clip(path, ClipSpec(fps=4 * info.fps, **size), start=start or None))
    return clip.frames[-1]
