"""Options of `wands check` and of `wands preprocess`."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.support.checked_clips import SMALL, clips
from tests.support.commands import check, preprocess
from tests.support.corpus import build_corpus
from wands.cli import main
from wands.data.cache.reader import LatentCache
from wands.errors import ConfigError, DataError

__all__ = ["clips"]  # fixtures


# ---- the same as preprocess


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["head", "slide"])
def test_it_says_what_preprocess_does(
    clips_dir: Path, tiny_pipeline: Path, tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "clips"
    build_corpus(folder, clips_dir)
    if mode == "head":  # every third file; the slow case takes all
        dropped = [stem for n, stem in enumerate(sorted({path.stem for path in folder.iterdir()})) if n % 3]
        for path in [path for path in folder.iterdir() if path.stem in dropped]:
            path.unlink()
    shutil.copy(clips_dir / "cityCC0.mpg", folder / "city.mpg")
    (folder / "city.txt").write_text("a city at night")
    options = SMALL | {"clip_mode": mode}
    told = check(str(folder), model=tiny_pipeline, **options)
    done = preprocess(str(folder), tmp_path / "cache", tiny_pipeline, device="cpu", **options)
    assert done is not None
    cache = LatentCache(tmp_path / "cache")
    metas = {key: cache.meta(i) for i, key in enumerate(cache.keys)}
    assert {s.key: (s.num_frames, s.height, s.width, s.start_seconds) for s in told.samples} == {
        key: tuple(meta[name] for name in ("num_frames", "height", "width", "start_seconds"))
        for key, meta in metas.items()
    }
    tokens = dict(zip(cache.keys, done.tokens.tolist(), strict=True))
    assert {s.key: s.num_tokens for s in told.samples} == tokens
    assert {(clip.key, clip.path, clip.reason) for clip in told.clips if clip.reason} == {
        (item.key, item.path, item.reason) for item in done.rejected
    }
    # A damaged clip may have samples before the damage: the cache has them, although the clip is rejected.
    footage = {clip.key: clip.footage for clip in told.clips if clip.samples and any(clip.footage)}
    assert {key: pytest.approx(row) for key, row in done.footage.items()} == footage
    text = {clip.key: min(512, clip.text_tokens) for clip in told.clips if clip.samples}
    lengths = dict(zip(cache.keys, cache.index.text_lens.tolist(), strict=True))
    assert {key: lengths[key] for key in text if key in lengths} == {
        k: v for k, v in text.items() if k in lengths
    }
    assert told.cache_bytes == pytest.approx(done.num_bytes, rel=0.1)  # small samples: a fifth is HDF5


def test_options_shared_with_preprocess_are_the_same() -> None:
    ours, theirs = (
        {option.name: option for option in main.commands[name].params} for name in ("check", "preprocess")
    )
    shared = ours.keys() & theirs.keys() - {"model"}
    assert shared >= {
        "height",
        "width",
        "center_crop",
        "max_pixels",
        "max_frames",
        "clip_mode",
        "fps",
        "split",
    }
    for name in shared:
        mine = ours[name]
        other = theirs[name]
        assert (mine.opts, mine.default) == (other.opts, other.default), name
        assert mine.type.to_info_dict() == other.type.to_info_dict(), name
        if isinstance(mine, click.Option) and isinstance(other, click.Option):
            assert mine.is_flag == other.is_flag


def test_wrong_options_are_refused(clips: Path, tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["check", str(clips), "--bins-per-step", "0"])
    assert "'--bins-per-step': 0 is not in the range x>=1" in refused.output
    with pytest.raises(ConfigError, match="neither a folder nor a Hub id"):
        check(str(clips), model=tmp_path / "nowhere")
    with pytest.raises(DataError, match="contains no clip"):
        check(str(tmp_path))
