"""Find what makes a decoded clip a poor sample: cuts, still images, borders, and unusual properties of its file."""

from __future__ import annotations

import numpy as np

from wands.data.clips.clip import ClipSpec
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS
from wands.data.clips.video import DecodedClip
from wands.data.clips.video_file import VideoInfo
from wands.errors import failed_rules

TO_SDR = "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable,zscale=t=bt709:m=bt709:r=tv,format=yuv420p"
"""FFmpeg filter that converts HDR video to SDR video. The VAE was trained on SDR video."""
CUT_CHANGE = 20.0
CUT_RATIO = 2.0
CUT_DRIFT = 0.25
"""Limits for a hard cut between two images. The distance of two images is the mean difference of their pixels, from 0 to 255.
A hard cut meets three rules:

1. The distance at the cut is at least CUT_CHANGE.
2. The distance at the cut is at least CUT_RATIO times the mean of the two distances before the cut and the two distances after
   the cut.
3. The distance between the third image before the cut and the third image after the cut differs by at most the fraction
   CUT_DRIFT from the distance at the cut. A flash gives a smaller distance, and fast motion gives a larger distance.
"""
SAME_IMAGE = 3
NEW_SHARE = 0.25
"""Limits for near-frozen samples. Each frame is compared with the last new frame, in blocks of 16 x 16 pixels. The frame is new
if the mean of any block differs by more than SAME_IMAGE (of 255). A sample is near-frozen if the share of new frames is below
NEW_SHARE.
"""
BORDER_VALUE = 32
BORDER_SHARE = 0.02
"""Limits for black borders on two opposite sides of the frame. No pixel of a border is brighter than BORDER_VALUE (of 255). The
sum of the two widths is at least the share BORDER_SHARE of the frame, and the two widths differ by at most this share.
"""
MAX_PLAUSIBLE_FPS = 480  # slow-motion cameras of phones record up to 240, few files are above
SMALL_SHARE = 0.25
"""Share of the area of --max-pixels below which a sample has a small frame."""
SHOWN = 3
CUTS = "hard cut inside a sample: at {}; a sample should show one shot, so cut the clip with wands split"
FROZEN = "near-frozen: few frames show a change ({}); remove the clip, or find such clips with wands measure"
BORDERS = "black borders: {} are learned as a part of the image; crop them with wands split, or with the column crop"


class FrameWarnings:
    """Detector of hard cuts, images that do not change, and black borders in the windows of one clip."""

    def __init__(self) -> None:
        self._cuts = list[str]()
        self._frozen = list[str]()
        self._brightest = np.zeros((1, 1), np.uint8)

    def add(self, frames: np.ndarray, start_seconds: float, fps: float) -> None:
        """Examine a window of the clip. All windows must have the same frame size.

        `frames` is uint8 [frames, height / 4, width / 4, 3]: every fourth pixel in each direction.
        """
        count, height, width, _ = frames.shape
        self._brightest = np.maximum(self._brightest, frames.max(0).max(2))
        sums = frames.reshape(count, height // 4, 4, width * 3).sum(2, np.uint16)
        blocks = sums.reshape(count, height // 4, width // 4, 4, 3).sum(3, np.uint16) / np.float32(16)
        new = [0]
        for index in range(1, count):
            if np.abs(blocks[index] - blocks[new[-1]]).max() > SAME_IMAGE:
                new.append(index)
        if len(new) < NEW_SHARE * count:
            self._frozen.append(f"{len(new)} of {count} from {start_seconds:.2f} s on")
        images = blocks[new]
        changes = np.abs(np.diff(images, axis=0)).mean((1, 2, 3))
        for cut in np.flatnonzero(changes >= CUT_CHANGE):
            near = changes[max(cut - 2, 0) : cut + 3]
            six = images[max(cut - 2, 0) : cut + 4]
            is_peak = changes[cut] * (len(near) - 1) >= CUT_RATIO * (near.sum() - changes[cut])
            if is_peak and abs(np.abs(six[-1] - six[0]).mean() / changes[cut] - 1) <= CUT_DRIFT:
                self._cuts.append(f"{start_seconds + new[cut + 1] / fps:.2f} s")

    def texts(self) -> list[str]:
        """Return one warning for each kind of problem in the examined windows."""
        borders = []
        for side, axis in (("height", 1), ("width", 0)):
            dark = self._brightest.max(axis) <= BORDER_VALUE
            before = int(dark.argmin())
            after = int(dark[::-1].argmin())
            if before + after >= BORDER_SHARE * len(dark) >= abs(before - after):
                borders.append(f"{(before + after) / len(dark):.0%} of the {side}")
        facts = (CUTS, self._cuts), (FROZEN, self._frozen), (BORDERS, borders)
        return [
            text.format(", ".join(rows[:SHOWN]) + ", ..." * (len(rows) > SHOWN))
            for text, rows in facts
            if rows
        ]


def file_warnings(
    path: str, clip: DecodedClip, longest: int, largest: tuple[int, int], spec: ClipSpec
) -> list[str]:
    """Return warnings about unusual properties of a decoded file, such as a variable frame rate.

    `clip` is its last window, whose `variable_fps` and `interlaced` describe all frames. `longest` is the number of frames of the
    longest sample, `largest` width and height of the largest.
    """
    width, height = largest
    share = width * height / spec.max_pixels if spec.max_pixels else 1.0
    source = clip.source
    is_image = path.lower().endswith(IMAGE_EXTENSIONS)
    is_slow = source.fps < 0.95 * spec.fps and not is_image
    shown = "x".join(f"{float(side):.0f}" for side in source.display_size)
    properties = {
        f"variable frame rate (mean {source.fps:.5g} fps): frames are chosen by timestamp": clip.variable_fps,
        f"low frame rate: {source.fps:.4g} fps, frames are repeated to get {spec.fps:g} fps": is_slow,
        f"implausible frame rate: {source.fps:.5g} fps; the file's time stamps may be wrong, so compare its duration, "
        f"{source.duration:.2f} s, with the real one": source.fps > MAX_PLAUSIBLE_FPS and not is_image,
        "interlaced: moving edges look like combs; convert the clip with ffmpeg -i IN -vf bwdif OUT": clip.interlaced,
        f"HDR: {source.hdr} brightness is kept as stored, which looks gray; convert the clip with "
        f"ffmpeg -i IN -vf {TO_SDR} OUT": source.hdr,
        _describe_turn(source): source.rotation or source.mirrored,
        f"pixel aspect ratio: {source.sar}, used as {shown} square pixels": source.sar != 1,
        f"small frame: {width}x{height} is {share:.0%} of the area of --max-pixels {spec.max_pixels}, and clips are not "
        "scaled up; use a larger clip": share < SMALL_SHARE,
        "becomes a still image: only one frame can be used; use a longer clip": longest == 1 and not is_image,
    }
    return failed_rules(properties)


def _describe_turn(source: VideoInfo) -> str:
    if source.mirrored and source.rotation % 180 == 0:
        return f"mirror flag: mirrored {'top to bottom' if source.rotation else 'left to right'}"
    mirrored = ", then mirrored left to right" if source.mirrored else ""
    return f"rotation flag: turned upright by {source.rotation} degrees{mirrored}"
