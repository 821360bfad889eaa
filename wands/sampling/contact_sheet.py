"""Draw contact sheets: a PNG with a few frames of each video, optionally with each clip next to its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from wands.files import atomic_path

CELL = (256, 144)
"""Largest (width, height) of a frame in pixels."""
MARGIN, FRAME_GAP, SIDE_GAP, ROW_GAP, LABEL_GAP = 20, 4, 28, 18, 6
MIN_WIDTH = 480
"""Smallest width of a row in pixels, so that the caption of a narrow video has enough room."""
LABEL_LINES = 2
TEXT, FAINT, PAPER, LINE = (28, 28, 30), (110, 110, 118), (255, 255, 255), (222, 222, 226)


@dataclass(frozen=True)
class SheetRow:
    """One row of a sheet.

    Attributes:
        label: caption, drawn above the frames.
        left: uint8 [F, H, W, 3].
        right: uint8 [F, H, W, 3] of any size, drawn to the right of `left`; None leaves the right side empty.
    """

    label: str
    left: np.ndarray
    right: np.ndarray | None = None


def pick_frames(frames: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` evenly spaced frames of a video, including the first and the last. Choose all frames of a short video.

    Args:
        frames: uint8 [F, H, W, 3].
        count: number of frames, at least 1.

    Returns:
        uint8 [min(F, count), H, W, 3].
    """
    assert count > 0, count
    return frames[np.linspace(0, len(frames) - 1, min(len(frames), count)).round().astype(int)]


def save_contact_sheet(
    path: Path,
    rows: Sequence[SheetRow],
    *,
    frames_per_row: int = 4,
    titles: tuple[str, str] = ("clip", "sample"),
) -> None:
    """Draw all rows, one below the other, and write a PNG.

    Args:
        path: PNG to create or replace.
        rows: at least one row.
        frames_per_row: number of evenly spaced frames of each video.
        titles: headings of the two sides, which are drawn if any row has a right side.

    Raises:
        WandsError: if the file cannot be written.
    """
    assert rows, "a contact sheet needs a row"
    videos = [[row.left] if row.right is None else [row.left, row.right] for row in rows]
    strips = [[_strip(video, frames_per_row) for video in pair] for pair in videos]
    num_sides = max(map(len, strips))
    widths = [max(pair[side].width for pair in strips if side < len(pair)) for side in range(num_sides)]
    lefts = (MARGIN, MARGIN + widths[0] + SIDE_GAP)
    body = max(sum(widths) + SIDE_GAP * (num_sides - 1), MIN_WIDTH)
    font, title_font = _font(15), _font(13)
    labels = [_wrap(row.label, font, body) for row in rows]
    line = _line_height(font)
    y = MARGIN + (_line_height(title_font) + 10 if num_sides == 2 else 0)
    bottoms = []
    for label, pair in zip(labels, strips, strict=True):
        y += len(label) * line + LABEL_GAP + max(strip.height for strip in pair)
        bottoms.append(y)
        y += ROW_GAP

    sheet = Image.new("RGB", (body + 2 * MARGIN, bottoms[-1] + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    if num_sides == 2:
        for left, title in zip(lefts, titles, strict=True):
            draw.text((left, MARGIN), title, font=title_font, fill=FAINT)
    for label, pair, bottom in zip(labels, strips, bottoms, strict=True):
        top = bottom - max(strip.height for strip in pair)
        for i, text in enumerate(label):
            draw.text((MARGIN, top - LABEL_GAP - (len(label) - i) * line), text, font=font, fill=TEXT)
        for left, strip in zip(lefts, pair, strict=False):
            sheet.paste(strip, (left, top))
        if bottom != bottoms[-1]:
            draw.line((MARGIN, bottom + ROW_GAP // 2, MARGIN + body, bottom + ROW_GAP // 2), fill=LINE)
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


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
    # The font of Pillow has few glyphs that are not Latin. matplotlib contains DejaVu Sans.
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(file), size)


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a text at spaces into at most LABEL_LINES lines. A text that is too long ends in an ellipsis."""
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
