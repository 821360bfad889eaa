"""Draw contact sheets: PNG files with a few frames of each sampled video, and of other videos such as the training clip."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from wands.files import atomic_path

CELL = (256, 144)
"""Largest width and height of a frame on the sheet, in pixels."""
MARGIN = 20
FRAME_GAP = 4
SIDE_GAP = 28
ROW_GAP = 18
LABEL_GAP = 6
MIN_WIDTH = 480
"""Smallest width of a row in pixels, so that the caption of a narrow video has enough room."""
LABEL_LINES = 2
_NOTHING = Image.new("RGB", (0, 0))
TEXT = (28, 28, 30)
FAINT = (110, 110, 118)
PAPER = (255, 255, 255)
LINE = (222, 222, 226)


@dataclass(frozen=True)
class SheetRow:
    """One row of a contact sheet: frames of one or more videos next to each other, below a caption.

    Attributes:
        label: caption above the frames.
        videos: uint8 [frames, rows, columns, 3] of any sizes. None leaves the place of a video empty.
    """

    label: str
    videos: Sequence[np.ndarray | None]


def pick_frames(frames: np.ndarray, count: int) -> np.ndarray:
    """Return `count` evenly spaced frames with the first and the last, or all if there are fewer.

    Videos are uint8 [frames, rows, columns, 3].
    """
    return frames[np.linspace(0, len(frames) - 1, min(len(frames), count)).round().astype(int)]


def save_contact_sheet(
    path: Path,
    rows: Sequence[SheetRow],
    frames_per_row: int = 4,
    headings: Sequence[str] = ("clip", "sample"),
) -> None:
    """Draw at least one row, and write the sheet as a PNG.

    `frames_per_row` evenly spaced frames of each video are shown. The headings of the columns are drawn only if a row has several
    videos.

    Raises:
        WandsError: if the file cannot be written.
    """
    strips = [[_strip(video, frames_per_row) for video in row.videos] for row in rows]
    columns = list(zip_longest(*strips, fillvalue=_NOTHING))
    widths = [max(strip.width for strip in column) for column in columns]
    lefts = [sum(widths[:i]) + i * SIDE_GAP for i in range(len(widths))]
    width = max(lefts[-1] + widths[-1], MIN_WIDTH)
    bands = [_draw_row(row.label, own, lefts, width) for row, own in zip(rows, strips, strict=True)]

    title_font = _font(13)
    y = MARGIN + (_line_height(title_font) + 10 if len(columns) > 1 else 0)
    height = y + sum(band.height + ROW_GAP for band in bands) - ROW_GAP + MARGIN
    sheet = Image.new("RGB", (width + 2 * MARGIN, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for heading, left in zip(headings, lefts, strict=False) if len(columns) > 1 else ():
        draw.text((MARGIN + left, MARGIN), heading, font=title_font, fill=FAINT)
    for band in bands:
        if band is not bands[0]:
            draw.line((MARGIN, y - ROW_GAP // 2, MARGIN + width, y - ROW_GAP // 2), fill=LINE)
        sheet.paste(band, (MARGIN, y))
        y += band.height + ROW_GAP
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


def _draw_row(label: str, strips: Sequence[Image.Image], lefts: Sequence[int], width: int) -> Image.Image:
    """Draw one row of a contact sheet. `lefts` are the distances of the strips from its left edge in pixels."""
    font = _font(15)
    lines = _wrap_text(label, font, width)
    line_height = _line_height(font)
    top = len(lines) * line_height + LABEL_GAP
    band = Image.new("RGB", (width, top + max(strip.height for strip in strips)), PAPER)
    for i, line in enumerate(lines):
        ImageDraw.Draw(band).text((0, i * line_height), line, font=font, fill=TEXT)
    for left, strip in zip(lefts, strips, strict=False):
        band.paste(strip, (left, top))
    return band


def _strip(frames: np.ndarray | None, count: int) -> Image.Image:
    if frames is None:
        return _NOTHING
    assert frames.dtype == np.uint8, frames.dtype
    assert frames.shape[3:] == (3,), frames.shape
    cells = []
    for frame in map(Image.fromarray, pick_frames(frames, count)):
        cell = np.asarray(ImageOps.contain(frame, CELL, Image.Resampling.LANCZOS))
        cells.append(np.pad(cell, ((0, 0), (0, FRAME_GAP), (0, 0)), constant_values=PAPER[0]))
    return Image.fromarray(np.hstack(cells)[:, :-FRAME_GAP])


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's own font has few glyphs that are not Latin. matplotlib contains the font DejaVu Sans, which has more.
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(file), size)


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2


def _wrap_text(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text at spaces into at most `LABEL_LINES` lines of `width` pixels. A text that does not fit gets an ellipsis."""
    lines: list[str] = []
    # A longer label never fits, and measuring it again and again would take minutes.
    rest = " ".join(text[: LABEL_LINES * width].split())
    while rest and len(lines) < LABEL_LINES:
        end = "…" if len(lines) == LABEL_LINES - 1 else ""
        if font.getlength(rest) <= width:
            return [*lines, rest]
        lengths = range(1, len(rest))
        fits = max(1, bisect_right(lengths, width, key=lambda n: math.ceil(font.getlength(rest[:n] + end))))
        if not end and (blank := rest.rfind(" ", 1, fits + 1)) > 0:
            fits = blank
        lines.append(rest[:fits].rstrip() + end)
        rest = rest[fits:].lstrip()
    return lines
