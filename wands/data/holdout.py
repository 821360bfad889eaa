"""Choose the samples that are held out of training, and exclude training samples that are too similar to them.

A hash of the clip's name decides, so new clips do not change the decision for old clips. In data with only a few films (long
clips), a span of time of each film is held out instead.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wands.config.auto import usual_held_out
from wands.data.cache.format import checksum, to_bits
from wands.data.clips.file_kinds import CLIP_EXTENSIONS

SUFFIX = re.compile(
    rf"(?:@\d+\.\d+(?:-\d+\.\d+)?|~[0-9a-f]{{8}}|{'|'.join(map(re.escape, CLIP_EXTENSIONS))})+\Z",
    re.IGNORECASE,
)
"""Suffixes that follow the clip's name in a key: time range, hash of the caption (`ClipRecord.key`), file extension."""
PLACE = re.compile(r"(?:@(\d+\.\d+)(?:-(\d+\.\d+))?)?(?:~[0-9a-f]{8})?(?:#(\d+))?(?:#\d+x\d+)?\Z")
"""End of a key, all parts optional: time range, caption hash, window, frame size. Groups: start, end, window."""
TRAIN, HELD_OUT, GAP, DUPLICATE = range(4)
"""Sides of a sample. GAP: too close in time to a held-out sample of its film; DUPLICATE: nearly equal to one. Neither is used."""
Range = tuple[float, float]
MIN_WINDOWS = 8
FEW_FILMS = 2.0
GAP_SECONDS = 2.0
MAX_BITS = 12
"""Limits for `choose_sides` and `drop_duplicates`. A film is a clip with at least `MIN_WINDOWS` windows (time ranges).

If fewer than `FEW_FILMS` whole films would be held out, or would remain for training, a span of each film is held out instead.
Windows less than `GAP_SECONDS` from a span are not used. The signatures of duplicates differ in at most `MAX_BITS` bits.
"""


def clip_name(key: str) -> str:
    """Return the name of a sample's clip: the key without extension, time range, caption hash, window number and frame size.

    "a.mp4@2.000-9.500#0003" becomes "a". Text of a file name that looks like a time range is removed, too.
    """
    name = key.partition("#")[0]
    if "@" in name or "~" in name or "." in name[-6:]:
        return SUFFIX.sub("", name, count=1)
    return name


def hold_out(keys: Iterable[str], fraction: float) -> np.ndarray:
    """Return bool [N], True for samples of held-out clips, about `fraction` (0 to 1) of all clips.

    The decision depends only on `clip_name`. A larger fraction holds out all clips that a smaller fraction holds out.
    """
    limit = int(fraction * 2.0**64)
    return np.array([_place(key) < limit for key in keys], dtype=bool)


def smallest_fraction(keys: Iterable[str]) -> float:
    """Return the smallest fraction with two decimals for which `hold_out` holds out a clip."""
    return math.floor(min(map(_place, keys)) / 2.0**64 * 100 + 1) / 100


def _place(key: str) -> int:
    """Return where the clip of a sample is in the order in which clips are held out, from 0 to 2**64."""
    return _hash(clip_name(key), b"wands holdout")


def choose_sides(
    keys: Sequence[str], seconds: Sequence[np.ndarray], fraction: float | Literal["auto"]
) -> np.ndarray:
    """Return int8 [N], TRAIN, HELD_OUT or GAP (not used) for each sample.

    A film is a clip with at least `MIN_WINDOWS` windows. Few films means that (number of films) * `fraction` or (number of films)
    * (1 - `fraction`) is less than `FEW_FILMS`.

    - A clip that is not a film, or one of many films, is held out as a whole or not at all (see `hold_out`).
    - Of each of few films, a span of `fraction` of the windows is held out. The hash of the film's name decides where the span
      is, and whether its length is rounded up or down. The two windows next to a span, and all windows less than `GAP_SECONDS`
      from it, are GAP.

    Adding a film changes the choice for other films only if few films become many.

    Args:
        keys: keys of the samples of all sources.
        seconds: for each source, lengths of its samples in seconds.
        fraction: share of the clips to hold out, from 0 to 1, or "auto" for the number of `usual_held_out`.
    """
    names = [clip_name(key) for key in keys]
    counts = Counter(names)
    # All windows of a source have the same length, but the last window of a film may be shorter.
    longest = np.repeat([part.max(initial=0) for part in seconds], [len(part) for part in seconds])
    films: defaultdict[str, defaultdict[Range, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (name, length) in enumerate(zip(names, np.concatenate(seconds), strict=True)):
        if counts[name] >= MIN_WINDOWS:
            films[name][_time_range(keys[row], length, longest[row])].append(row)
    cut = {name: windows for name, windows in films.items() if len(windows) >= MIN_WINDOWS}
    if fraction == "auto":
        total = len(counts) - len(cut) + sum(map(len, cut.values()))  # a window of a film counts as a clip
        fraction = usual_held_out(total) / max(total, 1)
        sides = _hold_out_first(keys, round(fraction * (len(counts) - len(cut))))
    else:
        sides = hold_out(keys, fraction).astype(np.int8)
    if len(cut) * min(fraction, 1 - fraction) < FEW_FILMS:
        for name, windows in cut.items():
            for time_range, side in _cut_film(name, sorted(windows), fraction):
                sides[windows[time_range]] = side
    return sides


def _hold_out_first(keys: Sequence[str], number: int) -> np.ndarray:
    """Return int8 [N], HELD_OUT for samples of the first `number` clips in the order in which clips are held out."""
    places = {clip_name(key): _place(key) for key in keys}
    chosen = set(sorted(places, key=places.__getitem__)[:number])
    return np.array([HELD_OUT if clip_name(key) in chosen else TRAIN for key in keys], np.int8)


def signature(latents: Tensor) -> np.ndarray:
    """Return uint64 [2], 128 bits that are almost the same for a video and its re-encoded or resized copy.

    The first word describes the mean frame: four bits for each of the first 16 latent channels compare neighboring quadrants. A
    bit is 1 if the left (or upper) quadrant has the larger mean. The second word does the same for the mean frame of the second
    half minus that of the first half, in which two takes of one scene differ. For one latent frame it is a checksum of the
    latents, so images of equal composition are no duplicates. `latents` is [C, f, h, w].
    """
    frames = latents[:16].detach().cpu().float()
    half = max(1, frames.shape[1] // 2)
    first, last = F.adaptive_avg_pool2d(torch.stack([frames[:, :half].mean(1), frames[:, -half:].mean(1)]), 2)
    x = torch.cat([first + last, last - first])
    bits = np.packbits(torch.cat([x[:, :, 0] > x[:, :, 1], x[:, 0] > x[:, 1]], dim=1).numpy())
    words = np.resize(np.pad(bits, (0, 16)), 16).view(np.uint64)
    if frames.shape[1] == 1:
        words[1] = checksum(to_bits(latents))
    return words


def drop_duplicates(sides: np.ndarray, contents: np.ndarray, signatures: np.ndarray) -> None:
    """Set `sides` (int8 [N], from `choose_sides`) to DUPLICATE for training samples equal or nearly equal to a held-out sample.

    Samples with the same number in `contents` (int64 [N]) are equal. Two `signatures` (uint64 [N, 2]) are nearly equal if at most
    `MAX_BITS` bits differ, and one of the four 16-bit parts of their first words is equal. A signature with a word of 0 is not
    compared: its image has no differing quadrants, as in a black video.
    """
    duplicates = np.isin(contents, contents[sides == HELD_OUT])
    rows = np.flatnonzero(signatures.all(axis=1))
    signatures = signatures[rows]
    own = np.unique(signatures[sides[rows] == HELD_OUT], axis=0)
    # Comparing all pairs is slow, so two samples must agree in one of four parts of the first number.
    for part in range(4):
        mine, others = (words.view(np.uint16).reshape(-1, 8)[:, part] for words in (own, signatures))
        order = np.argsort(others, kind="stable")
        starts, ends = (np.searchsorted(others[order], mine, side) for side in ("left", "right"))
        ordered = signatures[order]
        for words, start, end in zip(own, starts.tolist(), ends.tolist(), strict=True):
            near = np.bitwise_count(ordered[start:end] ^ words) @ np.ones(2) <= MAX_BITS
            duplicates[rows[order[start:end][near]]] = True
    sides[(sides == TRAIN) & duplicates] = DUPLICATE


def _hash(name: str, purpose: bytes) -> int:
    # The purpose differs from the hash of data_tools.split. Otherwise all clips of one split could be held out.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, person=purpose)
    return int.from_bytes(digest.digest(), "big")


def _time_range(key: str, length: float, longest: float) -> Range:
    """Return (start, end) of a sample in its file, in seconds.

    - "a@2.000-9.500#0003": window 3 of the time range, from 2 + 3 * `longest` for `length` seconds.
    - "a@2.000-9.500": (2, 9.5), because the key does not state the place of a shorter sample (`--clip-mode middle`).
    - "a@2.000": (2, 2 + `length`).
    - "a#0003": from 3 * `longest` for `length` seconds.
    - "a": (0, `length`).

    `longest` is the length of a full window: the longest sample of the cache.
    """
    start, end, number = next(PLACE.finditer(key)).groups()
    begin = float(start or 0) + int(number or 0) * longest
    return round(begin, 3), round(float(end) if end and not number else begin + length, 3)


def _cut_film(name: str, windows: Sequence[Range], fraction: float) -> Iterator[tuple[Range, int]]:
    """Yield (window, side) for the sorted windows of a film, as `choose_sides` describes."""
    place, rounding = (_hash(name, purpose) / 2.0**64 for purpose in (b"wands span", b"wands span size"))
    count = int(len(windows) * fraction + rounding)
    first = int(place * (len(windows) - count + 1))
    span = windows[first : first + count]
    for number, window in enumerate(windows):
        next_to = first - 1 <= number <= first + count
        close = any(window[0] < end + GAP_SECONDS and window[1] > start - GAP_SECONDS for start, end in span)
        yield window, HELD_OUT if window in span else GAP if span and (next_to or close) else TRAIN
