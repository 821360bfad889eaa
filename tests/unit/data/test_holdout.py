"""Held-out clips: a matter of the clip's name, never of its neighbors. Spans of films, and duplicates that never straddle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data_tools.split import name_hash
from tests.support.examples import examples
from wands.data.clips.records import records_of_clip, settle_keys
from wands.data.holdout import (
    DUPLICATE,
    GAP,
    GAP_SECONDS,
    HELD_OUT,
    MAX_BITS,
    MIN_WINDOWS,
    TRAIN,
    _place,
    choose_sides,
    clip_name,
    drop_duplicates,
    hold_out,
    signature,
)

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
    """Windows, captions and sizes, as the scan names them; with `twin` a neighbor makes keys keep their extension."""
    name = f"{folder}{stem}{extension}"
    path = Path("/in") / name
    captions = ["one caption", "another"]
    whole = (None, None)
    items = [*records_of_clip(name, path, captions, "here", {})]
    if window != whole:
        items += records_of_clip(
            name, path, captions, "here", dict(zip(("start", "end"), window, strict=True))
        )
    if twin:
        items += records_of_clip(
            f"{folder}{stem}.avi", path.with_name(f"{stem}.avi"), ["a third"], "here", {}
        )
    records, rejections = settle_keys(items)
    assert not rejections
    assert len(records) == 2 + 2 * (window != (None, None)) + twin
    (alone,), _ = settle_keys(records_of_clip(name, path, ["only"], "here", {}))
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
    assert hold_out(keys[-1:], small)[0] == hold_out(keys, small)[-1]  # whatever the other keys are


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


# ---- spans of films


def windows_of(name: str, number: int) -> list[str]:
    """Consecutive windows, as `--clip-mode slide` names them."""
    return [f"{name}#{i:04d}" for i in range(number)]


def sides_of(keys: list[str], fraction: float = 0.1, seconds: float = 5.0) -> list[int]:
    return choose_sides(keys, [np.full(len(keys), seconds)], fraction).tolist()


@pytest.mark.parametrize("scenes", [False, True])
def test_a_span_of_a_film_is_held_out(scenes: bool) -> None:
    keys = [f"film@{5 * i}.000-{5 * i + 5}.000" for i in range(40)] if scenes else windows_of("film", 40)
    sides = sides_of(keys)
    first = sides.index(HELD_OUT)
    assert sides[first - 1 : first + 5] == [
        GAP,
        *[HELD_OUT] * 4,
        GAP,
    ]  # the hash is not at an end of the film
    assert sides.count(TRAIN) == 40 - 6
    if scenes:  # minutes between the scenes
        assert sides_of([f"film@{200 * i}.000-{200 * i + 5}.000" for i in range(40)]) == sides
    else:
        shorter_end = [np.array([5.0] * 39 + [1.0])]
        assert choose_sides(keys, shorter_end, 0.1).tolist() == sides
    # Clips of one window, more captions and sizes, and a second film change nothing.
    more = (
        [key + end for key in keys for end in ("~01234567", "#320x176")]
        if scenes
        else windows_of("other", 60)
    )
    clips = [f"clip {i:03d}" for i in range(500)]
    joined = dict(zip((all_keys := clips + keys + more), sides_of(all_keys), strict=True))
    assert [joined[key] for key in keys] == sides
    assert [joined[key] for key in clips] == hold_out(clips, 0.1).tolist()
    if scenes:
        assert [joined[key] for key in more] == [side for side in sides for _ in range(2)]
    else:
        assert [joined[key] for key in more].count(HELD_OUT) == 6


@examples(100)
@given(
    films=st.lists(st.integers(MIN_WINDOWS, 60), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.4),
    seconds=st.floats(0.3, 6.0),
    finer=st.integers(1, 3),
)
def test_no_training_window_is_near_a_held_out_one(
    films: list[int], fraction: float, seconds: float, finer: int
) -> None:
    """Two caches of the same films, the second with shorter windows."""
    first = [key for name, number in enumerate(films) for key in windows_of(f"f{name}", number)]
    second = [key for name, number in enumerate(films) for key in windows_of(f"f{name}", number * finer)]
    lengths = [np.full(len(first), seconds), np.full(len(second), seconds / finer)]
    sides = choose_sides(first + second, lengths, fraction)
    starts = [int(key[-4:]) * seconds for key in first] + [int(key[-4:]) * seconds / finer for key in second]
    ends = np.array(starts) + np.concatenate(lengths)
    names = np.array([key[:2] for key in first + second])
    for held in np.flatnonzero(sides == HELD_OUT):
        near = (names == names[held]) & (starts < ends[held] + GAP_SECONDS - 0.01)
        near &= ends > starts[held] - GAP_SECONDS + 0.01
        assert not (sides[near] == TRAIN).any()
    windows = sum(films) if finer == 1 else len(sides)
    held = (sides == HELD_OUT).sum() / (1 + (finer == 1))
    assert abs(held - windows * fraction) <= len(films)  # each film is rounded up or down
    larger = choose_sides(
        first + second, lengths, fraction * 1.2
    )  # of four films, a span of each is held out
    assert (larger[sides == HELD_OUT] == HELD_OUT).all()


def test_short_clips_and_many_films_are_held_out_whole() -> None:
    short = [key for i in range(30) for key in windows_of(f"clip{i}", MIN_WINDOWS - 1)]
    films = [key for i in range(20) for key in windows_of(f"film{i}", 40)]
    for keys in (short, films):
        assert sides_of(keys) == hold_out(keys, 0.1).tolist()
    assert GAP in sides_of(films[: 19 * 40])


# ---- duplicates


@examples(100)
@given(data=st.data(), number=st.integers(1, 60))
def test_equal_and_nearly_equal_samples_never_straddle(data: st.DataObject, number: int) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    sides = draw.choice(np.array([TRAIN, HELD_OUT, GAP], np.int8), number)
    clip = draw.integers(number // 2 + 1, size=number)
    contents = np.where(draw.random(number) < 0.5, clip, 1000 + np.arange(number))
    base = draw.integers(1 << 63, size=(number, 2), dtype=np.uint64)[clip]
    flips = np.zeros((number, 2), np.uint64)
    for row in flips:  # three bits of the first number: at least one of its four parts is unchanged
        row[0] = sum(1 << int(bit) for bit in draw.choice(64, 3, replace=False))
        row[1] = 1 << int(draw.integers(64))
    signatures = np.where(draw.random((number, 1)) < 0.5, base ^ flips, base)
    signatures[draw.random(number) < 0.2] = 0  # as of a black video
    before = sides.copy()
    drop_duplicates(sides, contents, signatures)
    assert ((sides == before) | ((before == TRAIN) & (sides == DUPLICATE))).all()
    for i in np.flatnonzero(before == TRAIN):
        held = before == HELD_OUT
        bits = np.bitwise_count(signatures ^ signatures[i]).sum(1)
        same = held & (contents == contents[i])
        # Between 4 and `MAX_BITS` bits, the parts decide.
        sure = held & signatures.all(1) & signatures[i].all() & (bits <= 4)
        unlike = held & ((bits > MAX_BITS) | ~signatures.all(1) | (not signatures[i].all()))
        if (same | sure).any():
            assert sides[i] == DUPLICATE
        elif (unlike == held).all():
            assert sides[i] == TRAIN


def video(scene: int, take: int = 0, size: tuple[int, int] = (30, 52), frames: int = 9) -> Tensor:
    """Latents of a fixed background and of something that moves, float [16, frames, rows, columns]."""
    draw = [torch.Generator().manual_seed(100 * scene + 7 * number) for number in (0, take + 1)]
    background = torch.randn(1, 16, 5, 5, generator=draw[0])
    moves = 0.5 * torch.randn(frames, 16, 4, 4, generator=draw[1]).cumsum(0)
    moves -= moves.mean(0)
    both = F.interpolate(background, size, mode="bilinear") + F.interpolate(moves, size, mode="bilinear")
    return both.transpose(0, 1)


def test_a_signature_knows_a_copy_and_another_take() -> None:
    def distance(a: Tensor, b: Tensor) -> int:
        return int(np.bitwise_count(signature(a.bfloat16()) ^ signature(b.bfloat16())).sum())

    for scene in range(20):
        original = video(scene)
        noise = 0.1 * torch.randn(original.shape, generator=torch.Generator().manual_seed(scene))
        assert distance(original, original + noise) <= MAX_BITS  # encoded again
        assert distance(original, video(scene, size=(22, 38))) <= MAX_BITS
        assert distance(original, video(scene, take=1)) > MAX_BITS  # the same background
        still = original[:, :1]
        assert distance(still, still.clone()) == 0
        assert (signature(still.bfloat16()) ^ signature((still + noise[:, :1]).bfloat16()))[1] != 0
    assert signature(video(0)).all()
    assert not signature(torch.zeros(16, 5, 4, 4))[1]  # nothing moves: no signature


@pytest.mark.parametrize(("clips", "number"), [(11, 0), (12, 2), (40, 4), (1000, 20)])
def test_auto_holds_out_a_number_of_clips_with_all_their_samples(clips: int, number: int) -> None:
    keys = [f"{clip}.mp4#{window:04d}" for clip in range(clips) for window in range(2)]
    sides = choose_sides(keys, [np.ones(len(keys))], "auto")
    held = {clip_name(key) for key, side in zip(keys, sides, strict=True) if side == HELD_OUT}
    assert len(held) == number
    assert (sides == HELD_OUT).sum() == 2 * number
    assert not number or set(np.flatnonzero(hold_out(keys, 1e-9 + max(map(_place, held)) / 2.0**64))) == set(
        np.flatnonzero(sides == HELD_OUT)
    ), "the clips that the smallest fraction holds out"


def test_auto_holds_out_a_span_of_a_film() -> None:
    keys = [f"film.mp4#{window:04d}" for window in range(100)]
    held = np.flatnonzero(choose_sides(keys, [np.full(100, 5.0)], "auto") == HELD_OUT)
    assert len(held) in (10, 11)
    assert held[-1] - held[0] == len(held) - 1
