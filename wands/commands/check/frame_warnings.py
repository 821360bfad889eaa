"""Warnings of `wands check` that need the images of a clip: hard cuts, images that do not change, and black borders."""

from __future__ import annotations

import numpy as np

CUT_CHANGE, CUT_RATIO, CUT_DRIFT = 20.0, 2.0, 0.25
"""Limits for a hard cut between two images. The mean difference of their pixels is at least CUT_CHANGE (of 255), and CUT_RATIO
times the mean of the two differences before and the two differences after the cut. The first and the last of these six images
differ by about as much: at most the share CUT_DRIFT more or less. After a flash, they differ less, and in fast motion more.
"""
SAME_IMAGE, NEW_SHARE = 3, 0.25
"""An image is new if the mean of a block of 16 x 16 pixels differs by more than SAME_IMAGE (of 255) from the last new image. A
sample is near-frozen if the share of new images is below NEW_SHARE.
"""
BORDER_VALUE, BORDER_SHARE = 32, 0.02
"""Limits for black borders on two opposite sides of the frame. No pixel of a border is brighter than BORDER_VALUE (of 255). The
sum of the two widths is at least the share BORDER_SHARE of the frame, and the two widths differ by at most this share.
"""
SHOWN = 3
CUTS = "hard cut inside a sample: at {}; a sample should show one shot, so cut the clip with wands split"
FROZEN = "near-frozen: few frames show a change ({}); remove the clip, or find such clips with wands measure"
BORDERS = "black borders: {} are learned as a part of the image; crop them with wands split, or with the column crop"


class FrameWarnings:
    """Detector of hard cuts, images that do not change, and black borders in the windows (ranges of frames) of one clip."""

    def __init__(self) -> None:
        self._cuts, self._frozen = list[str](), list[str]()
        self._brightest = np.zeros((1, 1), np.uint8)

    def add(self, frames: np.ndarray, start_seconds: float, fps: float) -> None:
        """Examine a window (range of frames) of the clip. All windows must have the same frame size.

        Args:
            frames: uint8 [frames, height / 4, width / 4, 3]: every fourth pixel in each direction.
            start_seconds: time of the first frame.
            fps: frames per second.
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
            near, six = changes[max(cut - 2, 0) : cut + 3], images[max(cut - 2, 0) : cut + 4]
            is_peak = changes[cut] * (len(near) - 1) >= CUT_RATIO * (near.sum() - changes[cut])
            if is_peak and abs(np.abs(six[-1] - six[0]).mean() / changes[cut] - 1) <= CUT_DRIFT:
                self._cuts.append(f"{start_seconds + new[cut + 1] / fps:.2f} s")

    def texts(self) -> list[str]:
        """Return one warning for each kind of problem in the examined windows, or an empty list."""
        borders = []
        for side, axis in (("height", 1), ("width", 0)):
            dark = self._brightest.max(axis) <= BORDER_VALUE
            before, after = int(dark.argmin()), int(dark[::-1].argmin())
            if before + after >= BORDER_SHARE * len(dark) >= abs(before - after):
                borders.append(f"{(before + after) / len(dark):.0%} of the {side}")
        facts = (CUTS, self._cuts), (FROZEN, self._frozen), (BORDERS, borders)
        return [
            text.format(", ".join(rows[:SHOWN]) + ", ..." * (len(rows) > SHOWN))
            for text, rows in facts
            if rows
        ]
