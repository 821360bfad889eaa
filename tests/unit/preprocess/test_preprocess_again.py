"""A second run does what has changed and no more: a new clip, another caption, another name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.launch.test_preprocess import Counter
from tests.support.commands import check, preprocess, record_decoded
from tests.support.preprocessed import CAPTIONS, SMALL, contents
from tests.support.samples import narrow_text
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.clips.captions import add_trigger
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip
from wands.data.clips.video_file import open_video
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError, DataError
from wands.preprocess import decoding
from wands.preprocess.preprocess import QUARANTINE_NAME, PreprocessRun
from wands.preprocess.preprocess_report import PreprocessReport
from wands.texts import plural

WINDOWS = SMALL | {"clip_mode": "slide"}


@pytest.fixture
def source(clips_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, stem in (("carphone_pristine.mp4", "man"), ("bikes.mp4", "bikes")):
        shutil.copy(clips_dir / name, folder / f"{stem}.mp4")
    (folder / "man.txt").write_text(CAPTIONS["nested/carphone"])
    (folder / "bikes.txt").write_text(CAPTIONS["bikes"])
    return folder


def run(source: Path, out: Path, model: Path, options: dict[str, Any]) -> PreprocessReport:
    report = preprocess(str(source), out, model, **options)
    assert report is not None
    return report


def forbid_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clip is decoded and no VAE loaded."""
    monkeypatch.setattr(WanVideoEncoder, "load", None)
    monkeypatch.setattr(decoding, "decode_clip", None)


@pytest.mark.parametrize(
    "options", [SMALL, pytest.param(WINDOWS, marks=pytest.mark.slow)], ids=["head", "slide"]
)
def test_another_caption_encodes_the_caption_alone(
    source: Path,
    tiny_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    run(source, tmp_path / "cache", tiny_pipeline, options)
    (source / "bikes.txt").write_text("Something else.")
    captions = Counter(monkeypatch, TextEncoder, "encode")
    with monkeypatch.context() as patch:
        forbid_video(patch)
        report = run(source, tmp_path / "cache", tiny_pipeline, options)
    assert captions.calls == [("Something else.",)]
    assert report.num_relabelled >= 1
    assert report.num_relabelled + report.num_reused == report.num_accepted
    assert f"{plural(report.num_relabelled, 'sample')} with kept latents" in str(report)
    run(source, tmp_path / "whole", tiny_pipeline, options)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    caches = [LatentCache(tmp_path / name) for name in ("cache", "whole")]
    metas = [[cache.meta(i) for i in range(len(cache))] for cache in caches]
    assert metas[0] == metas[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [SMALL, pytest.param(WINDOWS, marks=pytest.mark.slow)], ids=["head", "slide"]
)
def test_another_name_encodes_nothing(
    source: Path,
    tiny_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    run(source, tmp_path / "cache", tiny_pipeline, options)
    for path in source.glob("bikes.*"):
        path.rename(path.with_stem("cyclists"))
    with monkeypatch.context() as patch:
        forbid_video(patch)
        run(source, tmp_path / "cache", tiny_pipeline, options)
    run(source, tmp_path / "whole", tiny_pipeline, options)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    assert any(key.startswith("cyclists") for key in contents(tmp_path / "cache"))


@pytest.mark.slow
def test_windows_of_a_finished_clip_are_not_decoded_again(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(source, tmp_path / "cache", tiny_pipeline, WINDOWS)
    before = contents(tmp_path / "cache")
    forbid_video(monkeypatch)
    monkeypatch.setattr(TextEncoder, "load", None)
    report = run(source, tmp_path / "cache", tiny_pipeline, WINDOWS)
    assert report.num_reused == first.num_accepted
    assert report.waited is None
    assert contents(tmp_path / "cache") == before


@pytest.mark.slow
def test_a_new_clip_is_the_only_one_decoded(
    source: Path, clips_dir: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "cache", tiny_pipeline, WINDOWS)
    shutil.copy(clips_dir / "carphone_distorted.mp4", source / "new.mp4")
    (source / "new.txt").write_text("A new one.")
    decoded = record_decoded(monkeypatch)
    run(source, tmp_path / "cache", tiny_pipeline, WINDOWS)
    assert decoded == [source / "new.mp4"]
    run(source, tmp_path / "whole", tiny_pipeline, WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_wrong_sum_in_the_shard_is_not_taken_for_latents(
    source: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """Keeping the latents of a damaged sample would give the damage a right checksum."""
    run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    cache = LatentCache(tmp_path / "cache")
    bits = cache.read(cache.find("bikes")).latents.view(-1)[:16]
    needle = bits.view(torch.uint16).numpy().tobytes()
    shard = tmp_path / "cache" / "shard-00000.h5"
    content = bytearray(shard.read_bytes())
    content[content.index(needle)] ^= 1
    shard.write_bytes(content)
    (source / "bikes.txt").write_text("Something else.")
    with pytest.raises(
        CacheError,
        match=r"damaged shard-00000\.h5 \(sample bikes does not match its stored checksum\); delete that file",
    ):
        run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    shard.unlink()
    run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    run(source, tmp_path / "whole", tiny_pipeline, SMALL)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_another_licence_keeps_the_latents(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(man: str, bikes: str) -> None:
        rows = f"man.mp4,A man.,{man}\nbikes.mp4,Bicycles.,{bikes}\n"
        (source / "metadata.csv").write_text(f"video,caption,license\n{rows}")

    def licenses() -> dict[str, str]:
        cache = LatentCache(tmp_path / "cache")
        named = dict(zip(cache.keys, cache.licenses, strict=True))
        assert [cache.meta(i)["license"] for i in range(len(cache))] == [*named.values()]
        return named

    write("", "CC0")
    run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    assert licenses() == {"bikes": "CC0", "man": ""}
    forbid_video(monkeypatch)
    write("MIT", "CC0")
    assert run(source, tmp_path / "cache", tiny_pipeline, SMALL).num_relabelled == 1
    assert licenses() == {"bikes": "CC0", "man": "MIT"}
    write("", "")  # a licence that was withdrawn
    run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    assert licenses() == {"bikes": "", "man": ""}
    monkeypatch.setattr(TextEncoder, "load", None)
    (source / "metadata.csv").write_text("video,caption\nman.mp4,A man.\nbikes.mp4,Bicycles.\n")
    assert run(source, tmp_path / "cache", tiny_pipeline, SMALL).num_reused == 2  # no column: nothing to do


@pytest.mark.slow
def test_where_leaves_clips_out_and_takes_them_back(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another --where changes the index of a cache, and encodes only clips that the cache lacks. `wands check` agrees."""
    table = source / "metadata.jsonl"
    rows = [
        {"video": f"{stem}.mp4", "caption": stem, "motion": motion}
        for stem, motion in (("man", 0.1), ("bikes", 0.3))
    ]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = run(table, tmp_path / "cache", tiny_pipeline, SMALL | {"where": "motion > .2"})
    reason = "motion = 0.1, but --where requires motion > .2"
    assert [(item.key, item.reason) for item in first.rejected] == [("man", reason)]
    checked = check(table, where="motion > .2", max_frames=9, max_pixels=64 * 96)
    assert [(clip.key, clip.reason, len(clip.samples)) for clip in checked.clips] == [
        ("man", reason, 0),
        ("bikes", "", 1),
    ]
    assert checked.problems()[0] == ("--where requires motion > .2", 1)
    assert run(table, tmp_path / "cache", tiny_pipeline, SMALL).num_accepted == 2  # the same settings
    with monkeypatch.context() as patch:
        forbid_video(patch)
        other = run(table, tmp_path / "cache", tiny_pipeline, SMALL | {"where": "motion < .2"})
    assert (other.num_accepted, other.num_left_out) == (1, 1)
    assert LatentCache(tmp_path / "cache").keys == ["man"]
    with pytest.raises(DataError, match="gave no sample"):
        run(table, tmp_path / "cache", tiny_pipeline, SMALL | {"where": "motion > 1"})
    assert LatentCache(tmp_path / "cache").keys == ["man"]  # the index is kept


@pytest.mark.slow
def test_a_mask_is_stored_and_encodes_its_clip_again(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    before = contents(tmp_path / "cache")
    pixels = np.random.default_rng(0).integers(10, 246, (72, 88), np.uint8)
    with open_video(source / "man.mp4") as reader:
        Image.fromarray(pixels).resize((reader.info.width, reader.info.height)).save(source / "man.mask.png")
    decoded = record_decoded(monkeypatch)
    report = run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    assert decoded == [source / "man.mp4"]
    assert report.num_accepted == 2
    cache = LatentCache(tmp_path / "cache", verify=True)
    bikes, man = (cache.read(cache.find(key)) for key in ("bikes", "man"))
    assert "token_weights" not in bikes.arrays
    weights = man.arrays["token_weights"]
    assert contents(tmp_path / "cache")["bikes"] == before["bikes"]

    rgb = next(
        decode_clip(source / "man.mask.png", ClipSpec(1, man.latents.shape[2] * 8, man.latents.shape[3] * 8))
    )
    gray = np.clip((rgb.frames[0].mean(axis=2) - 5) / 245, 0, 1)
    tokens = gray.reshape(gray.shape[0] // 16, 16, -1, 16).mean(axis=(1, 3))
    assert weights.shape == (man.latents.shape[1], *tokens.shape)
    for frame in weights.float().numpy():
        np.testing.assert_allclose(frame, tokens, atol=0.03)

    given = {cache.keys[i]: cache.meta(i)["caption"] for i in range(2)}
    captions = Counter(monkeypatch, TextEncoder, "encode")
    forbid_video(monkeypatch)
    run(source, tmp_path / "cache", tiny_pipeline, SMALL | {"trigger": "man"})
    cache = LatentCache(tmp_path / "cache", verify=True)
    assert cache.read(cache.find("man")).arrays["token_weights"].equal(weights)
    texts = {cache.keys[i]: cache.meta(i)["caption"] for i in range(2)}
    assert texts == {key: add_trigger(text, "man") for key, text in given.items()}
    assert texts != given
    assert {call[0] for call in captions.calls} == set(texts.values()) - set(given.values())


@pytest.mark.slow
def test_a_limit_encodes_the_first_clips_and_the_next_run_the_others(
    source: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    first = run(source, tmp_path / "cache", tiny_pipeline, SMALL | {"limit": 1})
    assert first.num_accepted == 1
    assert list(LatentCache(tmp_path / "cache").keys) == ["bikes"]
    second = run(source, tmp_path / "cache", tiny_pipeline, SMALL)
    assert (second.num_accepted, second.num_reused) == (2, 1)
    run(source, tmp_path / "whole", tiny_pipeline, SMALL)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_edited_lines_of_the_quarantine_are_skipped(tmp_path: Path) -> None:
    lines = [
        '{"video": "a", "reason": "x"}',
        '{"video',
        "7",
        '{"reason": "y"}',
        "",
        '{"video": "b", "reason": "z"}',
    ]
    settings: Any = SimpleNamespace(work=tmp_path / "cache" / "work")
    pool: Any = None
    with CacheWriter(tmp_path / "cache", narrow_text("wan2.1-t2v-1.3b"), {}) as writer:
        run = PreprocessRun(writer, pool, settings)
        run.prepare()
        assert run.quarantine == {}
        (writer.path / QUARANTINE_NAME).write_text("\n".join(lines))
        run.prepare()
    assert run.quarantine == {"a": "x", "b": "z"}
