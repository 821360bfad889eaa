"""Real clips to a cache: against diffusers itself, with broken files, resume, disk full and kill -9."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.video_processor import VideoProcessor
from PIL import Image

from tests.support.commands import preprocess
from tests.support.preprocessed import CAPTIONS, SMALL, clips, contents, one_clip, single_clip, three_clips
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, Rejection
from wands.data.clips.video import decode_clip, save_video
from wands.encoders import image
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError, DataError
from wands.preprocess import clip_rules
from wands.preprocess.preprocess_report import PreprocessReport
from wands.variants import variant_of

__all__ = ["clips", "one_clip"]  # fixtures


@dataclass(frozen=True)
class Made:
    """A cache that several tests begin with, and what was seen while it was made."""

    cache: Path
    report: PreprocessReport
    source: Path
    num_captions: int

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.cache, to))


def make(source: Path, model: Path, out: Path) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        captions = Counter(patch, TextEncoder, "encode").calls
        report = preprocess(str(source), out, model, **SMALL)
    assert report is not None
    return Made(out, report, source, len(captions))


@pytest.fixture(scope="module")
def made(clips_dir: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Cache of the three clips."""
    folder = tmp_path_factory.mktemp("made")
    return make(three_clips(folder / "clips", clips_dir), tiny_pipeline, folder / "cache")


@pytest.fixture(scope="module")
def made_of_one(clips_dir: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Cache of the single clip."""
    folder = tmp_path_factory.mktemp("one")
    return make(single_clip(folder / "one", clips_dir), tiny_pipeline, folder / "cache")


class Counter:
    """Counts calls of a method and lets them through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls: list[Any] = []
        original = getattr(owner, name)

        def counted(instance: Any, *args: Any) -> Any:
            self.calls.append(args)
            return original(instance, *args)

        monkeypatch.setattr(owner, name, counted)


@torch.no_grad()
def stock_sample(model: Path, video: Path, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same clip and caption through diffusers alone: VideoProcessor, VAE, statistics, encode_prompt."""
    spec = ClipSpec(fps=16, max_pixels=SMALL["max_pixels"], max_frames=SMALL["max_frames"])
    frames = next(decode_clip(video, spec)).frames
    vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
    pixels = VideoProcessor(vae_scale_factor=8).preprocess_video([Image.fromarray(frame) for frame in frames])
    mean, std = (torch.tensor(vae.config[f"latents_{s}"]).view(1, -1, 1, 1, 1) for s in ("mean", "std"))
    latents = (vae.encode(pixels).latent_dist.mode() - mean) / std
    pipeline = WanPipeline.from_pretrained(model, transformer=None, vae=None)
    embeds, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
    return latents[0], embeds[0]


def differs(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference in units of what storing bf16 rounds."""
    return float(((ours.float() - theirs).abs() / (theirs.abs() * 2**-8 + 1e-5)).max())


def test_cache_equals_diffusers(made_of_one: Made, tiny_pipeline: Path) -> None:
    video = made_of_one.source / "man.mp4"
    report = made_of_one.report
    latents, embeds = stock_sample(tiny_pipeline, video, CAPTIONS["nested/carphone"])
    cache = LatentCache(made_of_one.cache, verify=True)
    sample = cache.read(0)
    assert sample.sample_id == "man"
    assert differs(sample.latents, latents) <= 1
    padded = torch.nn.functional.pad(sample.text_embeds, (0, 0, 0, 512 - len(sample.text_embeds)))
    assert differs(padded, embeds) <= 1
    assert differs(cache.null_text_embeds, stock_sample(tiny_pipeline, video, "")[1][:1]) <= 1
    assert report.tokens.tolist() == [np.prod(latents.shape[1:]) // 4]
    variant = variant_of(json.loads((tiny_pipeline / "transformer" / "config.json").read_text()))
    cache.check_fits(variant, fingerprint_pipeline(tiny_pipeline))


@pytest.mark.gpu
def test_a_gpu_encodes_what_a_cpu_does(made_of_one: Made, tiny_pipeline: Path, tmp_path: Path) -> None:
    options = {**SMALL, "device": "cuda"}
    preprocess(str(made_of_one.source), tmp_path / "cache", tiny_pipeline, **options)
    sample, right = (LatentCache(path).read(0) for path in (tmp_path / "cache", made_of_one.cache))
    for found, expected in ((sample.latents, right.latents), (sample.text_embeds, right.text_embeds)):
        # stored in bf16, where neighbors are 2 ** -8 apart; cuDNN convolves in TF32
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(lambda frames: frames.movedim(-1, -4) / 255, id="pixels in [0, 1]"),
        pytest.param(
            lambda frames: frames.flip(-1).movedim(-1, -4) / 127.5 - 1, id="BGR", marks=pytest.mark.slow
        ),
    ],
)
def test_bug_in_the_pixels_is_caught(
    one_clip: Path,
    tiny_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    monkeypatch.setattr(image, "to_pixels", bug)
    preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **SMALL)
    latents, _ = stock_sample(tiny_pipeline, one_clip / "man.mp4", "")
    assert differs(LatentCache(tmp_path / "cache").read(0).latents, latents) > 10


def test_report_and_metadata(made: Made) -> None:
    report = made.report
    assert made.num_captions == 3  # "", and two that differ
    assert (report.num_accepted, report.num_reused, report.rejected) == (3, 0, ())
    cache = LatentCache(made.cache)
    assert cache.keys == ["bikes", "city", "nested/carphone"]
    assert cache.index.num_frames.tolist() == [9, 9, 9]
    meta = cache.meta(0)
    assert meta["caption"] == "Street scenes of cyclists & parked bicycles."
    assert meta["source"] == str(made.source / "bikes.mp4")
    assert (meta["fps"], meta["start_seconds"]) == (16, 0.0)
    assert meta["height"] % 16 == meta["width"] % 16 == 0
    assert meta["height"] * meta["width"] <= SMALL["max_pixels"]
    shapes = {tuple(shape) for shape in cache.index.latent_shapes.tolist()}
    assert len(shapes) == 3  # each keeps its own aspect
    text = str(report)
    assert "3 samples for wan2.1-t2v-tiny" in text
    assert "0 rejected" in text
    assert f"{report.num_bytes:,} bytes" in text
    assert report.num_bytes == sum(p.stat().st_size for p in (made.cache).glob("*.h5"))


def break_some(clips: Path, clips_dir: Path) -> set[str]:
    """Put one of each kind of broken file next to good ones; returns their keys."""
    content = (clips_dir / "bigbuckbunny.mp4").read_bytes()
    (clips / "cut.mp4").write_bytes(content[: len(content) // 2])
    (clips / "empty.mp4").touch()
    (clips / "text.mp4").write_text("this is not a video\n" * 100)
    (clips / "tiny.mp4").unlink(missing_ok=True)
    save_video(clips / "tiny.mp4", np.zeros((5, 8, 8, 3), np.uint8), 16)
    broken = {"cut", "empty", "text", "tiny", "mute"}
    for stem in broken - {"mute"}:
        (clips / f"{stem}.txt").write_text(f"a caption of {stem}")
    shutil.copy(clips / "bikes.mp4", clips / "mute.mp4")  # a clip without a caption
    return broken


def test_broken_clips_stop_nothing_and_are_named(
    clips: Path, clips_dir: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    broken = break_some(clips, clips_dir)
    report = preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert report.num_accepted == 3
    assert {item.key for item in report.rejected} == broken
    reasons = {item.key: item.reason for item in report.rejected}
    assert "missing caption" in reasons["mute"]
    assert "size=8x8" in reasons["tiny"]
    lines = (tmp_path / "cache" / "rejects.jsonl").read_text().splitlines()
    assert {json.loads(line)["key"]: json.loads(line)["reason"] for line in lines} == reasons
    text = str(report)
    assert "5 rejected, listed in rejects.jsonl:" in text
    assert all(reason in text for reason in reasons.values())


def assert_every_caption_is_written(cache: LatentCache, folder: Path) -> None:
    assert len(cache) > 0
    written = {path.read_text() for path in folder.glob("*.txt")}
    assert all(cache.meta(i)["caption"] in written for i in range(len(cache)))


def test_bug_file_name_as_caption_is_caught(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap: a clip without a caption is trained with its file name."""
    shutil.copy(one_clip / "man.mp4", one_clip / "DSC_0042 final.mp4")
    preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert_every_caption_is_written(LatentCache(tmp_path / "cache"), one_clip)

    def named(*args: Any, **kwargs: Any) -> tuple[list[ClipRecord], list[Rejection]]:
        rows, rejected = load_source(*args, **kwargs)
        return rows + [ClipRecord(r.key, Path(r.path), Path(r.path).stem) for r in rejected], []

    monkeypatch.setattr(clip_rules, "load_source", named)
    preprocess(str(one_clip), tmp_path / "wrong", tiny_pipeline, **SMALL)
    assert len(LatentCache(tmp_path / "wrong")) == 2
    with pytest.raises(AssertionError):
        assert_every_caption_is_written(LatentCache(tmp_path / "wrong"), one_clip)


@pytest.mark.parametrize("kind", ["text", "empty", "mute"])
def test_nothing_accepted_is_an_error(
    clips_dir: Path, tiny_pipeline: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    if kind == "mute":
        shutil.copy(clips_dir / "bikes.mp4", folder / "a.mp4")
    else:
        (folder / "a.mp4").write_text("no video" if kind == "text" else "")
        (folder / "a.txt").write_text("a caption")
    with pytest.raises(DataError, match=r"gave no sample: 1 clip rejected \(first: ") as caught:
        preprocess(str(folder), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert "\n" not in str(caught.value)
    assert len((tmp_path / "cache" / "rejects.jsonl").read_text().splitlines()) == 1
    with pytest.raises(CacheError, match="unfinished"):
        LatentCache(tmp_path / "cache")


# ---- going on


def test_second_run_encodes_only_what_is_new(
    clips: Path, made: Made, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = clips / "city.mpg"
    moved.rename(tmp_path / "city.mpg")
    preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    (tmp_path / "city.mpg").rename(moved)
    encoded = Counter(monkeypatch, WanVideoEncoder, "encode")
    report = preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert (len(encoded.calls), report.num_accepted, report.num_reused) == (1, 3, 2)
    assert contents(tmp_path / "cache") == contents(made.cache)
    assert report.tokens.tolist() == made.report.tokens.tolist()


def test_finished_cache_loads_no_encoder(
    made_of_one: Made, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of_one.copy(tmp_path / "cache")
    for encoder in (TextEncoder, WanVideoEncoder):
        monkeypatch.setattr(encoder, "load", None)
    report = preprocess(str(made_of_one.source), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert report.num_reused == 1
    assert contents(tmp_path / "cache") == contents(made_of_one.cache)


def test_changed_caption_and_changed_file_are_encoded_again(
    clips: Path, made: Made, clips_dir: Path, tiny_pipeline: Path, tmp_path: Path
) -> None:
    before = contents(made.copy(tmp_path / "cache"))
    (clips / "bikes.txt").write_text("Something else.")
    shutil.copy(clips_dir / "carphone_distorted.mp4", clips / "nested" / "carphone.mp4")
    os.utime(clips / "city.mpg")  # touched, not changed
    report = preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    after = contents(tmp_path / "cache")
    assert report.num_reused == 1
    assert after["city"] == before["city"]
    assert after["bikes"][0] == before["bikes"][0]
    assert after["bikes"][1] != before["bikes"][1]
    assert after["bikes"][2] == "Something else."
    assert after["nested/carphone"][0] != before["nested/carphone"][0]


@pytest.mark.slow
def test_pictures_alike_at_both_ends_are_two(tiny_pipeline: Path, tmp_path: Path) -> None:
    """Without compression a file's ends are its border: equal latents must not be taken from the other."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        picture = np.full((256, 384, 3), 255, np.uint8)
        picture[96:160, 96:288] = color
        Image.fromarray(picture).save(folder / f"{name}.bmp")
        (folder / f"{name}.txt").write_text("a square")
        preprocess(str(folder), tmp_path / "cache", tiny_pipeline, **SMALL)
    cache = LatentCache(tmp_path / "cache")
    assert len(cache) == 2
    assert not torch.equal(cache.read(0).latents, cache.read(1).latents)


def test_removed_clip_leaves_the_index_and_comes_back_for_free(
    clips: Path, made: Made, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(made.copy(tmp_path / "cache"))
    (clips / "city.mpg").rename(tmp_path / "city.mpg")
    (clips / "city.txt").unlink()
    report = preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert (report.num_accepted, report.num_left_out) == (2, 1)
    assert "1 sample of earlier runs left out of the index" in str(report)
    assert set(contents(tmp_path / "cache")) == {"bikes", "nested/carphone"}
    (tmp_path / "city.mpg").rename(clips / "city.mpg")
    (clips / "city.txt").write_text(CAPTIONS["city"])
    monkeypatch.setattr(WanVideoEncoder, "load", None)
    preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert contents(tmp_path / "cache") == before


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"max_frames": 5}, ["settings.clip.max_frames=9 but this run has 5"]),
        (
            {"fps": 8, "text_dtype": "bf16", "max_pixels": 4096},
            [
                "settings.clip.fps=16 but this run has 8.0",
                "settings.clip.max_pixels=6144 but this run has 4096",
                "settings.text_dtype=fp32 but this run has bf16",
            ],
        ),
        ({"vae_tiling": True}, ["settings.vae_tiling=False but this run has [256, 192]"]),
        ({"vae_dtype": "bf16"}, ["settings.vae_dtype=fp32 but this run has bf16"]),
    ],
)
def test_other_settings_are_refused_and_each_is_named_with_both_values(
    made_of_one: Made, tiny_pipeline: Path, change: dict[str, Any], differences: list[str]
) -> None:
    before = contents(made_of_one.cache)
    with pytest.raises(CacheError) as caught:
        preprocess(str(made_of_one.source), made_of_one.cache, tiny_pipeline, **(SMALL | change))
    assert str(caught.value) == (
        f"cache={made_of_one.cache} was begun with {', '.join(differences)}; use the settings of the first run, "
        "or another --out."
    )
    assert contents(made_of_one.cache) == before


def test_settings_of_the_vae_reach_it(made_of_one: Made, tiny_pipeline: Path, tmp_path: Path) -> None:
    """In bf16 the latents are others, of the same size; the cache says what made them."""
    options = SMALL | {"vae_dtype": "bf16", "vae_tiling": True}
    preprocess(str(made_of_one.source), tmp_path / "cache", tiny_pipeline, **options)
    ours, theirs = (LatentCache(path) for path in (tmp_path / "cache", made_of_one.cache))
    half, whole = (cache.read(0).latents.float() for cache in (ours, theirs))
    assert half.shape == whole.shape
    assert 0.002 < float((half - whole).square().mean().sqrt() / whole.std()) < 0.05
    assert {name: ours.fingerprint["settings"][name] for name in ("vae_dtype", "vae_tiling")} == {
        "vae_dtype": "bf16",
        "vae_tiling": [256, 192],
    }


def test_other_encoder_is_refused_and_names_both(
    made_of_one: Made, tiny_pipeline: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(tiny_pipeline, tmp_path / "other"))
    vae = AutoencoderKLWan.from_pretrained(other, subfolder="vae")
    with torch.no_grad():
        next(vae.parameters()).add_(0.01)
    vae.save_pretrained(other / "vae")
    ours, theirs = (fingerprint_pipeline(model)["vae"]["weights_sha256"] for model in (tiny_pipeline, other))
    with pytest.raises(CacheError, match=rf"begun with vae\.weights_sha256={ours} but this run has {theirs}"):
        preprocess(str(made_of_one.source), made_of_one.cache, other, **SMALL)
    variant = variant_of(json.loads((other / "transformer" / "config.json").read_text()))
    with pytest.raises(CacheError, match=rf"vae\.weights_sha256={ours} but the model, .*={theirs}"):
        LatentCache(made_of_one.cache).check_fits(variant, fingerprint_pipeline(other))
