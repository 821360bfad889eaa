"""Held-out clips: a matter of the clip's name, never of its neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_tools.split import name_hash
from tests.support.examples import examples
from wands.data.clips.records import records_of_clip, settle_keys
from wands.data.holdout import clip_name, hold_out

KEYS = st.text(st.characters(exclude_categories=("Cs",)) | st.just("\udcff"), max_size=12)
WINDOWS = st.sampled_from([(None, None), (1.5, None), (None, 3.25), (60.0, 61.5)])
FURTHER = st.sampled_from(["", "#0000", "#0017", "#640x352", "#0002#320x176"])


@examples(200)
@given(
    folder=st.sampled_from(["", "a/b/", "dots.in.it/", "me@home/", "x~1/"]),
    stem=st.sampled_from(
        ["clip", "clip.v2", "a@b", "a@1.500", "a@1.5~01234567", "a.mp4", "a~b", "2024-01-01", "x#y", "ü"]
    ),
    extension=st.sampled_from([".mp4", ".MOV", ".webp"]),
    window=WINDOWS,
    suffix=FURTHER,
    fraction=st.floats(0, 1),
    twin=st.booleans(),
)
def test_all_samples_of_a_clip_are_on_one_side(
    folder: str,
    stem: str,
    extension: str,
    window: tuple[float | None, float | None],
    suffix: str,
    fraction: float,
    twin: bool,
) -> None:
    """Windows, captions and sizes, as the scan names them; with `twin` a neighbour makes keys keep their extension."""
    name = f"{folder}{stem}{extension}"
    path, captions = Path("/in") / name, ["one caption", "another"]
    items = [*records_of_clip(name, path, captions, "here")]
    if window != (None, None):
        items += records_of_clip(name, path, captions, "here", window)
    if twin:
        items += records_of_clip(f"{folder}{stem}.avi", path.with_name(f"{stem}.avi"), ["a third"], "here")
    records, rejections = settle_keys(items)
    assert not rejections
    assert len(records) == 2 + 2 * (window != (None, None)) + twin
    (alone,), _ = settle_keys(records_of_clip(name, path, ["only"], "here"))
    assert len(set(hold_out([alone.key, *(record.key + suffix for record in records)], fraction))) == 1


@examples(50)
@given(keys=st.lists(KEYS, min_size=1), small=st.floats(0, 1), large=st.floats(0, 1))
def test_a_larger_share_holds_out_all_that_a_smaller_one_does(
    keys: list[str], small: float, large: float
) -> None:
    small, large = sorted((small, large))
    assert (hold_out(keys, small) <= hold_out(keys, large)).all()
    assert not hold_out(keys, 0.0).any()
    assert hold_out(keys, 1.0).all()
    assert hold_out(keys[-1:], small)[0] == hold_out(keys, small)[-1]  # whatever stands beside it


def test_the_share_is_about_right_and_always_the_same_clips() -> None:
    keys = [f"folder/clip {i:05d}" for i in range(20_000)]
    held = np.array(keys)[hold_out(keys, 0.02)].tolist()
    assert 340 < len(held) < 460  # 400, to within three standard deviations
    assert held[:3] == ["folder/clip 00010", "folder/clip 00040", "folder/clip 00042"]


def test_a_half_made_by_split_has_both_sides() -> None:
    """`data_tools.split` cuts by a hash of the key: with the same hash a half of it would have nothing to hold out."""
    half = [key for key in map(str, range(2000)) if name_hash(key) >= 0.5]
    assert 0.07 < hold_out(half, 0.1).mean() < 0.13


def test_names() -> None:
    assert clip_name("a/b@1.000-2.500~0123abcd#0003#640x352") == "a/b"
    assert clip_name("a/b.mp4~0123abcd") == "a/b"
    assert clip_name("me@home/b@2x~draft") == "me@home/b@2x~draft"
    assert clip_name("v1.5/take.2") == "v1.5/take.2"
