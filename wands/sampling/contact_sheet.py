"""Contact sheets: a few frames of each video on one PNG, optionally a clip beside its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wands.files import atomic_path

CELL = (144, 256)  # pixels: every frame is scaled to the largest size inside this (height, width)
MARGIN, FRAME_GAP, SIDE_GAP, ROW_GAP = 20, 4, 28, 18
MIN_WIDTH = 480  # a single narrow video leaves its caption room all the same
LABEL_LINES = 2
TEXT, FAINT, PAPER, LINE = (28, 28, 30), (110, 110, 118), (255, 255, 255), (222, 222, 226)


@dataclass(frozen=True)
class SheetRow:
    """One row of a sheet.

    Attributes:
        label: caption, drawn above the frames.
        left: uint8 [F, H, W, 3].
        right: uint8 [F, H, W, 3] of any other size, drawn beside `left`; None leaves that side out.
    """

    label: str
    left: np.ndarray
    right: np.ndarray | None = None


def pick_frames(frames: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` frames evenly over a video, the first and the last among them; all of a shorter video.

    Args:
        frames: uint8 [F, H, W, 3].
        count: frames wanted, at least 1.

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
    """Draw the rows below each other and write one PNG, whole or not at all.

    Args:
        path: the PNG; a file of that name is replaced.
        rows: at least one.
        frames_per_row: frames of each video, evenly chosen.
        titles: headings of the two sides, drawn when any row has a right side.

    Raises:
        WandsError: the file cannot be written.
    """
    assert rows, "a contact sheet needs a row"
    lefts = [_strip(row.left, frames_per_row) for row in rows]
    rights = [None if row.right is None else _strip(row.right, frames_per_row) for row in rows]
    two_sided = any(right is not None for right in rights)
    left_width = max(strip.width for strip in lefts)
    right_width = max((strip.width for strip in rights if strip is not None), default=0)
    body = max(left_width + (SIDE_GAP + right_width if two_sided else 0), MIN_WIDTH)
    label_font, title_font = _font(15), _font(13)
    labels = [_wrap(row.label, label_font, body) for row in rows]
    line = _line_height(label_font)
    heights = [
        len(label) * line + 6 + _height(left, right)
        for label, left, right in zip(labels, lefts, rights, strict=True)
    ]
    head = MARGIN + (_line_height(title_font) + 10 if two_sided else 0)
    total = head + sum(heights) + ROW_GAP * (len(rows) - 1) + MARGIN

    sheet = Image.new("RGB", (body + 2 * MARGIN, total), PAPER)
    draw = ImageDraw.Draw(sheet)
    right_x = MARGIN + left_width + SIDE_GAP
    if two_sided:
        draw.text((MARGIN, MARGIN), titles[0], font=title_font, fill=FAINT)
        draw.text((right_x, MARGIN), titles[1], font=title_font, fill=FAINT)
    y = head
    for label, left, right, height in zip(labels, lefts, rights, heights, strict=True):
        for i, text in enumerate(label):
            draw.text((MARGIN, y + i * line), text, font=label_font, fill=TEXT)
        strip_y = y + len(label) * line + 6
        sheet.paste(left, (MARGIN, strip_y))
        if right is not None:
            sheet.paste(right, (right_x, strip_y))
        y += height + ROW_GAP
        if y < total - MARGIN:
            draw.line((MARGIN, y - ROW_GAP // 2, MARGIN + body, y - ROW_GAP // 2), fill=LINE)
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")


def _height(left: Image.Image, right: Image.Image | None) -> int:
    return max(left.height, right.height if right is not None else 0)


def _strip(frames: np.ndarray, count: int) -> Image.Image:
    assert frames.dtype == np.uint8, frames.dtype
    assert frames.shape[3:] == (3,), frames.shape
    chosen = pick_frames(frames, count)
    _, height, width, _ = chosen.shape
    scale = min(CELL[0] / height, CELL[1] / width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    strip = Image.new("RGB", (len(chosen) * (size[0] + FRAME_GAP) - FRAME_GAP, size[1]), PAPER)
    for i, frame in enumerate(chosen):
        strip.paste(
            Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS), (i * (size[0] + FRAME_GAP), 0)
        )
    return strip


def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's built-in font knows little beyond Latin; matplotlib, a dependency anyway, brings DejaVu Sans.
    import matplotlib

    return ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size
    )


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    ascent, descent = font.getmetrics()
    return ascent + descent + 2


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break at blanks into at most LABEL_LINES lines; what does not fit ends in an ellipsis."""
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < LABEL_LINES:
        last = len(lines) == LABEL_LINES - 1
        fits = len(rest)
        while fits > 1 and font.getlength(rest[:fits] + ("…" if last and fits < len(rest) else "")) > width:
            fits -= 1
        if fits < len(rest) and not last:
            blank = rest.rfind(" ", 1, fits + 1)
            fits = blank if blank > 0 else fits
        lines.append(rest[:fits].rstrip() + ("…" if last and fits < len(rest) else ""))
        rest = rest[fits:].lstrip()
    return lines
