"""Contact sheets and loss plots: what is drawn where, and that files appear whole."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wands.commands.plots import save_loss_plot, smooth
from wands.errors import WandsError
from wands.sampling import contact_sheet
from wands.sampling.contact_sheet import SheetRow, pick_frames, save_contact_sheet


def video(colors: list[tuple[int, int, int]], height: int = 32, width: int = 48) -> np.ndarray:
    """One flat color a frame."""
    return np.stack([np.full((height, width, 3), color, np.uint8) for color in colors])


def columns_of(sheet: np.ndarray, color: tuple[int, int, int]) -> tuple[int, int, int]:
    """First column, last column and number of pixels of a color."""
    found = (sheet == color).all(axis=2)
    assert found.any(), color
    columns = np.flatnonzero(found.any(axis=0))
    return int(columns[0]), int(columns[-1]), int(found.sum())


def test_pick_frames_takes_first_last_and_even_steps() -> None:
    frames = np.arange(17, dtype=np.uint8).reshape(17, 1, 1, 1)
    assert pick_frames(frames, 5).ravel().tolist() == [0, 4, 8, 12, 16]
    assert pick_frames(frames, 1).ravel().tolist() == [0]
    assert pick_frames(frames[:2], 4).ravel().tolist() == [0, 1]


def test_clip_stands_left_of_its_sample_in_order(tmp_path: Path) -> None:
    red = (200, 0, 0)
    green = (0, 200, 0)
    blue = (0, 0, 200)
    gray = (90, 90, 90)
    rows = [
        SheetRow("first", [video([red, green]), video([blue], 16, 64)]),
        SheetRow("second", [video([gray], 48, 32)]),
    ]
    save_contact_sheet(tmp_path / "deep" / "sheet.png", rows, frames_per_row=2)
    with Image.open(tmp_path / "deep" / "sheet.png") as image:
        sheet = np.asarray(image.convert("RGB"))
    first, second, right, below = (columns_of(sheet, color) for color in (red, green, blue, gray))
    assert first[0] < first[1] < second[0] < second[1] < right[0]
    assert below[0] == first[0]
    # Aspect kept inside the cell of 144 x 256: 2:3 and 3:2 fill its height, 1:4 its width.
    assert [area[2] for area in (first, second, right, below)] == [144 * 216, 144 * 216, 64 * 256, 144 * 96]
    rows_of = [np.flatnonzero((sheet == color).all(axis=2).any(axis=1)) for color in (red, gray)]
    assert rows_of[0][-1] < rows_of[1][0]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sheet.png"]


def test_titles_appear_with_two_sides_only(tmp_path: Path) -> None:
    frames = video([(0, 0, 0)])
    heights = {}
    for name, right in (("one", []), ("two", [frames])):
        save_contact_sheet(tmp_path / f"{name}.png", [SheetRow("a", [frames, *right])])
        with Image.open(tmp_path / f"{name}.png") as image:
            heights[name] = image.height
    assert heights["two"] > heights["one"]


def test_labels_wrap_inside_the_sheet_and_end_in_an_ellipsis() -> None:
    font = contact_sheet._font(15)
    text = "a man rides a bicycle down the street " * 20
    for width in (200, 480, 900):
        lines = contact_sheet._wrap_text(text, font, width)
        assert len(lines) == 2
        assert all(font.getlength(line) <= width for line in lines)
        assert lines[1].endswith("…")
        assert text.startswith(lines[0] + " ")
    assert contact_sheet._wrap_text("short  one\n", font, 200) == ["short one"]
    assert contact_sheet._wrap_text("x" * 300, font, 200)[0] == "x" * len(
        contact_sheet._wrap_text("x" * 300, font, 200)[0]
    )
    assert contact_sheet._wrap_text("", font, 200) == []


def test_a_label_of_600_kb_takes_no_time() -> None:
    font = contact_sheet._font(15)
    started = time.process_time()
    for text in ("a cat walks " * 50_000, "x" * 600_000, " " * 600_000, "a" + 600_000 * "\u0301"):
        lines = contact_sheet._wrap_text(text, font, 480)
        assert all(font.getlength(line) <= 480 for line in lines)
    assert time.process_time() - started < 5  # seconds; it was a minute for each


def test_unwritable_sheet_is_one_sentence_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    rows = [SheetRow("a", [video([(1, 2, 3)])])]
    with pytest.raises(WandsError, match=r"sheet\.png cannot be written \(.*\); free space"):
        save_contact_sheet(tmp_path / "file" / "sheet.png", rows)
    save_contact_sheet(tmp_path / "sheet.png", rows)
    old = (tmp_path / "sheet.png").read_bytes()

    def fail(self: Image.Image, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(WandsError, match="No space left on device"):
        save_contact_sheet(tmp_path / "sheet.png", rows)
    assert (tmp_path / "sheet.png").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sheet.png"]


def test_smooth_is_the_trailing_mean_of_finite_values() -> None:
    values = np.array([4.0, 2.0, np.nan, 6.0, np.inf])
    np.testing.assert_allclose(smooth(values, 2), [4, 3, 2, 6, 6])
    np.testing.assert_allclose(smooth(values[:2], 1), values[:2])
    assert np.isnan(smooth(np.array([np.nan, 1.0]), 1)).tolist() == [True, False]


def test_loss_plot_draws_every_series(tmp_path: Path) -> None:
    """C0 is blue, C1 orange: both appear, and a series of one point is visible."""
    steps = list(range(1, 101))
    save_loss_plot(
        tmp_path / "two.png", {"a": (steps, [1 / s for s in steps]), "b": (steps, [2.0] * 100)}, window=1
    )
    save_loss_plot(tmp_path / "one.png", {"a": ([5], [0.5])}, title="One step")
    save_loss_plot(tmp_path / "gap.png", {"a": (steps, [float("nan"), *([1.0] * 99)])})

    def has(name: str, color: tuple[int, int, int]) -> int:
        with Image.open(tmp_path / name) as image:
            pixels = np.asarray(image.convert("RGB")).astype(int)
        return int((np.abs(pixels - color).max(axis=2) < 8).sum())

    events = {"restart": [20, 60], "skipped update": [40], "nothing": []}
    save_loss_plot(tmp_path / "events.png", {"a": (steps, [2.0] * 100)}, marks=events)

    blue = (31, 119, 180)
    orange = (255, 127, 14)
    red = (214, 39, 40)
    purple = (148, 103, 189)
    assert has("two.png", blue) > 300
    assert has("two.png", orange) > 300
    assert has("one.png", blue) > 20
    assert has("one.png", orange) == 0
    assert has("gap.png", blue) > 300
    assert has("events.png", red) > has("events.png", purple) > 20
    assert has("two.png", red) == has("two.png", purple) == 0


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 8, 8, 1)])
def test_frames_of_another_layout_are_a_programmers_mistake(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        save_contact_sheet(tmp_path / "x.png", [SheetRow("a", [np.zeros(shape, np.uint8)])])
