"""One decoding and one pass of the VAE for all captions of a clip; several sizes of a clip, which come and go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from tests.launch.test_preprocess import Counter
from tests.launch.test_preprocess_workers import noise
from tests.support.commands import check, preprocess, record_decoded
from tests.support.preprocessed import SMALL, contents
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec, TooSmallError, plan_sizes, split_suffix
from wands.data.clips.video import decode_clip
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError, ConfigError
from wands.preprocess.preprocess_report import PreprocessReport

OPTIONS = SMALL | {"clip_mode": "slide"}
# the clips are of 64 x 96 and 32 x 48 pixels, of two windows each
SMALLER = 48 * 64
LARGER = 10**6
CAPTIONS = ["A cat.", "A sleeping cat.", "Noise."]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of different size, the first with three captions, and a broken one with two."""
    folder = tmp_path_factory.mktemp("sizes")
    noise(folder / "cat.mp4", 0)
    noise(folder / "small.mp4", 1, scale=8)
    (folder / "broken.mp4").write_text("no video")
    captions = {"cat.mp4": CAPTIONS, "small.mp4": ["Small."], "broken.mp4": ["One.", "Two."]}
    (folder / "captions.json").write_text(json.dumps(captions))
    return folder


def run(source: Path, out: Path, model: Path, *bounds: int, **changes: Any) -> PreprocessReport:
    report = preprocess(str(source), out, model, **(OPTIONS | {"max_pixels": bounds} | changes))
    assert report is not None
    return report


class Counted:
    """Record the decoded clips, and the windows and captions that are encoded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.decoded = record_decoded(patch)
        self.windows, self.captions = (
            Counter(patch, owner, "encode").calls for owner in (WanVideoEncoder, TextEncoder)
        )


@pytest.fixture(scope="module")
def caches(
    source: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, ...], Path]:
    """Caches made in one go: under one bound, under the other, under both."""
    folder = tmp_path_factory.mktemp("caches")
    made = {}
    for bounds in ((SMALLER,), (LARGER,), (SMALLER, LARGER)):
        made[bounds] = folder / "-".join(map(str, bounds))
        run(source, made[bounds], tiny_pipeline, *bounds)
    return made


# ---- several captions


@pytest.mark.slow
def test_captions_share_decoding_and_latents(
    source: Path, tiny_pipeline: Path, caches: dict[tuple[int, ...], Path], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        report = run(source, tmp_path / "cache", tiny_pipeline, LARGER)
    assert sorted(path.name for path in counted.decoded) == ["broken.mp4", "cat.mp4", "small.mp4"]
    assert len(counted.windows) == 2 + 2
    assert report.num_accepted == 2 * len(CAPTIONS) + 2
    assert [item.key.partition("~")[0] for item in report.rejected] == [
        "broken",
        "broken",
    ]  # a line for each caption
    with h5py.File(tmp_path / "cache" / "shard-00000.h5") as shard:
        places = {group["latents"].id.get_offset() for group in shard["samples"].values()}
    assert len(places) == 2 + 2  # stored once
    together = {
        (caption, key.partition("#")[2]): bits
        for key, (*bits, caption) in contents(tmp_path / "cache").items()
    }
    for number, caption in enumerate(CAPTIONS[:2]):  # as if there were no other
        alone = tmp_path / f"alone{number}"
        alone.mkdir()
        shutil.copy(source / "cat.mp4", alone)
        (alone / "cat.txt").write_text(caption)
        run(alone, tmp_path / f"cache{number}", tiny_pipeline, LARGER)
        for key, (*bits, _) in contents(tmp_path / f"cache{number}").items():
            assert together[caption, key.partition("#")[2]] == bits
    assert contents(caches[LARGER,]) == contents(tmp_path / "cache")


@pytest.mark.slow
def test_a_further_caption_needs_no_video(
    source: Path, tiny_pipeline: Path, caches: dict[tuple[int, ...], Path], tmp_path: Path
) -> None:
    """Two captions, one of them lost with its shard entry, then the third: only text is encoded."""
    fewer = Path(shutil.copytree(source, tmp_path / "fewer"))
    listing = {"cat.mp4": CAPTIONS[:2], "small.mp4": ["Small."]}
    (fewer / "captions.json").write_text(json.dumps(listing))
    run(fewer, tmp_path / "cache", tiny_pipeline, LARGER)
    (fewer / "captions.json").write_text(json.dumps(listing | {"cat.mp4": CAPTIONS}))
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        report = run(fewer, tmp_path / "cache", tiny_pipeline, LARGER)
    assert (counted.decoded, counted.windows, counted.captions) == ([], [], [("Noise.",)])
    assert (report.num_relabelled, report.num_reused) == (2, 6)
    assert contents(tmp_path / "cache") == contents(caches[LARGER,])


# ---- several sizes


@pytest.mark.slow
def test_several_bounds_are_the_union_of_single_runs(
    source: Path, caches: dict[tuple[int, ...], Path]
) -> None:
    single, other, both = (contents(caches[bounds]) for bounds in ((SMALLER,), (LARGER,), (SMALLER, LARGER)))
    assert {key: value for key, value in both.items() if not key.endswith("#96x64")} == single
    large = {key.removesuffix("#96x64"): value for key, value in both.items() if key.endswith("#96x64")}
    assert large == {key: value for key, value in other.items() if not key.startswith("small")}
    assert len(large) == 6  # the small clip is of the same size under both bounds, and there once
    cache = LatentCache(caches[SMALLER, LARGER])
    by_key = {key: cache.meta(i) for i, key in enumerate(cache.keys)}
    assert (by_key["cat#0001"]["height"], by_key["cat#0001"]["width"]) == (32, 64)
    assert (by_key["cat#0001#96x64"]["height"], by_key["cat#0001#96x64"]["width"]) == (64, 96)
    assert by_key["cat#0001"]["start_seconds"] == by_key["cat#0001#96x64"]["start_seconds"]


@pytest.mark.slow
def test_bounds_come_and_go(
    source: Path, tiny_pipeline: Path, caches: dict[tuple[int, ...], Path], tmp_path: Path
) -> None:
    out = tmp_path / "cache"
    shutil.copytree(caches[SMALLER,], out)
    for bounds, decoded, encoded in (
        ((SMALLER, LARGER), ["broken.mp4", "cat.mp4"], 2),  # the new size alone
        ((SMALLER, LARGER), ["broken.mp4"], 0),
        ((SMALLER,), ["broken.mp4"], 0),
        ((SMALLER, LARGER), ["broken.mp4"], 0),  # the shards have kept it
    ):
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            run(source, out, tiny_pipeline, *bounds)
        assert (sorted(path.name for path in counted.decoded), len(counted.windows)) == (decoded, encoded)
        assert contents(out) == contents(caches[bounds])
    with pytest.raises(
        CacheError, match=rf"begun with settings\.clip\.max_pixels={SMALLER} but this run has {LARGER};"
    ):
        run(source, out, tiny_pipeline, LARGER, SMALLER)


def test_check_tells_the_same(source: Path, caches: dict[tuple[int, ...], Path]) -> None:
    bounds = (SMALLER, LARGER)
    told = check(str(source), max_pixels=bounds, max_frames=OPTIONS["max_frames"], clip_mode="slide")
    cache = LatentCache(caches[bounds])
    metas = {key: cache.meta(i) for i, key in enumerate(cache.keys)}
    assert {s.key: (s.num_frames, s.height, s.width, s.start_seconds) for s in told.samples} == {
        key: tuple(meta[name] for name in ("num_frames", "height", "width", "start_seconds"))
        for key, meta in metas.items()
    }
    rejects = [json.loads(line) for line in (caches[bounds] / "rejects.jsonl").read_text().splitlines()]
    assert sorted((clip.key, clip.reason) for clip in told.clips if clip.reason) == sorted(
        (line["key"], line["reason"]) for line in rejects
    )
    assert json.loads(told.to_json())["settings"]["more_pixels"] == [LARGER]


@pytest.mark.slow
def test_a_bound_that_is_too_small_for_a_clip_costs_that_size(
    source: Path, tiny_pipeline: Path, caches: dict[tuple[int, ...], Path], tmp_path: Path
) -> None:
    """16 x 16 pixels keep nothing of a picture of 3:2: said, and the other size is there, as if added later."""
    shutil.copytree(caches[SMALLER,], tmp_path / "cache")
    for out in ("cache", "fresh"):
        report = run(source, tmp_path / out, tiny_pipeline, SMALLER, 256)
        reasons = {item.key.partition("~")[0]: item.reason for item in report.rejected}
        assert "is below 16 px on a side (after scaling to --max-pixels=256)" in reasons["cat"]
        assert contents(tmp_path / out) == contents(caches[SMALLER,])
    cache = LatentCache(tmp_path / "fresh")
    assert [cache.meta(cache.find(key))["last"] for key in ("cat#0000", "cat#0001")] == [False, True]
    with pytest.raises(ConfigError, match="--max-pixels=255 must be at least 256"):
        run(source, tmp_path / "none", tiny_pipeline, SMALLER, 255)
    with pytest.raises(ConfigError, match=r"--max-pixels=\d+ and --height=64 cannot be combined"):
        run(source, tmp_path / "none", tiny_pipeline, SMALLER, LARGER, height=64, width=96)


def test_sizes_of_a_picture() -> None:
    size = (Fraction(1920), Fraction(1080))
    more = (1280 * 720, 480 * 832, 10**7, 10**8)
    sizes, _ = plan_sizes(ClipSpec(fps=16, max_pixels=480 * 832, more_pixels=more), *size)
    assert {suffix: geometry.target for suffix, geometry in sizes.items()} == {
        "": (832, 464),
        "#1280x720": (1280, 720),
        "#1920x1072": (1920, 1072),
    }
    with pytest.raises(TooSmallError, match="--max-pixels=256"):
        plan_sizes(ClipSpec(fps=16, max_pixels=256), *size)
    for suffix in ("", "#0012", "#1280x720", "#0012#1280x720"):
        assert "".join(split_suffix(suffix)) == suffix
    assert split_suffix("#0012#1280x720") == ("#0012", "#1280x720")


def test_sizes_decoded_together_are_those_decoded_alone(source: Path) -> None:
    path = source / "cat.mp4"
    spec = ClipSpec(fps=16, max_frames=9, clip_mode="slide", max_pixels=SMALLER)
    together = list(decode_clip(path, replace(spec, more_pixels=(LARGER,))))
    assert [clip.suffix for clip in together[:3]] == ["#0000", "#0000#96x64", "#0001"]
    for bound, part in ((SMALLER, together[::2]), (LARGER, together[1::2])):
        alone = list(decode_clip(path, ClipSpec(fps=16, max_frames=9, clip_mode="slide", max_pixels=bound)))
        assert len(alone) == len(part) == 2
        for one, other in zip(alone, part, strict=True):
            assert torch.equal(torch.from_numpy(one.frames), torch.from_numpy(other.frames))
