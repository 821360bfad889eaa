"""Draw contact sheets. A contact sheet is a PNG with a few frames of each sampled video, and optionally the training clip
next to its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from wands.files import atomic_path

CELL = (256, 144)
"""Largest width and height of a frame on the sheet, in pixels."""
MARGIN, FRAME_GAP, SIDE_GAP, ROW_GAP, LABEL_GAP = 20, 4, 28, 18, 6
MIN_WIDTH = 480
"""Smallest width of a row in pixels, so that the caption of a narrow video has enough room."""
LABEL_LINES = 2
TEXT, FAINT, PAPER, LINE = (28, 28, 30), (110, 110, 118), (255, 255, 255), (222, 222, 226)


@dataclass(frozen=True)
class SheetRow:
    """One row of a contact sheet, which shows frames of one video, or frames of two videos next to each other.

    Attributes:
        label: caption above the frames.
        left: frames of the left video, uint8 [F, H, W, 3].
        right: frames of the right video, uint8 [F, H, W, 3]. The size may differ from the size of `left`. None leaves
            the right half of the row empty.
    """

    label: str
    left: np.ndarray
    right: np.ndarray | None = None


def pick_frames(frames: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` evenly spaced frames of a video, including the first and the last frame.

    If the video has fewer frames than `count`, choose all frames.

    Args:
        frames: frames of the video, uint8 [F, H, W, 3].
        count: number of frames to choose, at least 1.

    Returns:
        The chosen frames, uint8 [min(F, count), H, W, 3].
    """
    assert count > 0, count
    return frames[np.linspace(0, len(frames) - 1, min(len(frames), count)).round().astype(int)]


def save_contact_sheet(path: Path, rows: Sequence[SheetRow], frames_per_row: int = 4) -> None:
    """Draw a contact sheet with the rows below each other, and write the sheet as a PNG.

    If any row has a right video, the left column has the heading "clip" and the right column the heading "sample".

    Args:
        path: PNG to create or replace.
        rows: rows of the sheet, at least one.
        frames_per_row: number of evenly spaced frames to show of each video.

    Raises:
        WandsError: if the file cannot be written.
    """
    assert rows, "a contact sheet needs a row"
    videos = [[video for video in (row.left, row.right) if video is not None] for row in rows]
    strips = [[_strip(video, frames_per_row) for video in pair] for pair in videos]
    right = max(pair[0].width for pair in strips) + SIDE_GAP
    ends = [right + pair[1].width for pair in strips if len(pair) == 2]
    width = max(*ends, right - SIDE_GAP, MIN_WIDTH)
    bands = [_draw_row(row.label, pair, right, width) for row, pair in zip(rows, strips, strict=True)]

    title_font = _font(13)
    y = MARGIN + (_line_height(title_font) + 10 if ends else 0)
    height = y + sum(band.height + ROW_GAP for band in bands) - ROW_GAP + MARGIN
    sheet = Image.new("RGB", (width + 2 * MARGIN, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    if ends:
        draw.text((MARGIN, MARGIN), "clip", font=title_font, fill=FAINT)
        draw.text((MARGIN + right, MARGIN), "sample", font=title_font, fill=FAINT)
    for band in bands:
        if band is not bands[0]:
            draw.line((MARGIN, y - ROW_GAP // 2, MARGIN + width, y - ROW_GAP // 2), fill=LINE)
        sheet.paste(band, (MARGIN, y))
        y += band.height + ROW_GAP
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


def _draw_row(label: str, strips: Sequence[Image.Image], right: int, width: int) -> Image.Image:
    """Draw one row of a contact sheet: a caption, and below the caption one or two strips (frames of a video in a line).

    Args:
        label: text of the caption.
        strips: the left strip, or the left and the right strip.
        right: distance in pixels from the left edge of the row to the right strip.
        width: width of the row in pixels.
    """
    font = _font(15)
    lines, line_height = _wrap(label, font, width), _line_height(font)
    top = len(lines) * line_height + LABEL_GAP
    band = Image.new("RGB", (width, top + max(strip.height for strip in strips)), PAPER)
    for i, line in enumerate(lines):
        ImageDraw.Draw(band).text((0, i * line_height), line, font=font, fill=TEXT)
    for left, strip in zip((0, right), strips, strict=False):
        band.paste(strip, (left, top))
    return band


def _strip(frames: np.ndarray, count: int) -> Image.Image:
    assert frames.dtype == np.uint8, frames.dtype
    assert frames.shape[3:] == (3,), frames.shape
    cells = [
        ImageOps.contain(Image.fromarray(frame), CELL, Image.Resampling.LANCZOS)
        for frame in pick_frames(frames, count)
    ]
    width, height = cells[0].size
    strip = Image.new("RGB", (len(cells) * (width + FRAME_GAP) - FRAME_GAP, height), PAPER)
    for i, cell in enumerate(cells):
        strip.paste(cell, (i * (width + FRAME_GAP), 0))
    return strip


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's own font has few glyphs that are not Latin. matplotlib contains the font DejaVu Sans, which has more.
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(file), size)


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text at spaces into at most LABEL_LINES lines, each at most `width` pixels wide.

    A text that does not fit is cut and gets an ellipsis.
    """
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < LABEL_LINES:
        end = "…" if len(lines) == LABEL_LINES - 1 else ""
        if font.getlength(rest) <= width:
            return [*lines, rest]
        fits = len(rest) - 1
        while fits > 1 and font.getlength(rest[:fits] + end) > width:
            fits -= 1
        if not end and (blank := rest.rfind(" ", 1, fits + 1)) > 0:
            fits = blank
        lines.append(rest[:fits].rstrip() + end)
        rest = rest[fits:].lstrip()
    return lines
