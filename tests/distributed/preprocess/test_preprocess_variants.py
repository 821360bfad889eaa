"""Caches for models that are given frames: what training makes of them is what the stock pipeline makes at sampling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from data_tools.export import export_cache
from data_tools.import_cache import import_cache
from data_tools.inspect import describe_cache
from data_tools.merge import merge
from data_tools.split import split_cache
from data_tools.verify import verify_cache
from tests.launch.test_preprocess import differs
from tests.launch.test_preprocess_deadly import leave_suspects
from tests.support.commands import check
from tests.support.preprocessed import SMALL
from tests.support.runs import make_run, run_training
from tests.support.variant_caches import BOUNDS, CAPTIONS, CLIP, read_variant, run, source, stock_input
from tests.unit.preprocess.test_preprocess_again import forbid_video
from wands.conditions import published
from wands.conditions.published import arrays_of, conditions_of
from wands.config.recipe import FlowConfig
from wands.data.cache.format import checksum, to_bits
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip
from wands.data.collate import PackedBatch, PackingCollator, Sample
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.image import ImageEncoder, WindowEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError
from wands.patches import patchify
from wands.preprocess import encoding
from wands.preprocess.preprocess_report import PreprocessReport
from wands.variants import MASK_CHANNELS, VARIANTS, Variant

__all__ = ["source"]  # fixtures


NAMES = ["wan2.1-i2v-14b", "wan2.1-flf2v-14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"]
DEFAULT_TIER = ("wan2.1-flf2v-14b", "wan2.2-ti2v-5b")
IN_TIERS = [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in NAMES]


@dataclass(frozen=True)
class Made:
    """A cache, and what made it."""

    model: Path
    source: Path
    cache: Path
    report: PreprocessReport

    @property
    def variant(self) -> Variant:
        return read_variant(self.model)


def arrays(path: Path) -> dict[str, tuple[Any, ...]]:
    """All that a cache holds, bit by bit."""
    cache = LatentCache(path, verify=True)
    found = {}
    for i, key in enumerate(cache.keys):
        sample = cache.read(i)
        bits = [to_bits(sample.arrays[spec.name]).tobytes() for spec in cache.arrays if not spec.optional]
        found[key] = (*bits, cache.meta(i))
    return found


@pytest.fixture(scope="module")
def made(
    source: Path, tiny_variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """A cache for a variant, of the clip at two sizes."""
    folder = tmp_path_factory.mktemp("made")

    @cache
    def make(name: str) -> Made:
        model = tiny_variant(name)
        out = folder / name
        return Made(model, source, out, run(source, out, model))

    return make


def training_input(made: Made, key: str) -> tuple[Sample, PackedBatch]:
    """A sample of the cache, alone in a pack."""
    cached = LatentCache(made.cache, verify=True)
    variant = made.variant
    cached.check_fits(variant, fingerprint_pipeline(made.model))
    collate = PackingCollator(
        shape=variant.dit,
        flow=FlowConfig(i2v_ratio=1.0),
        seed=0,
        null_text_embeds=cached.null_text_embeds,
        conditions=conditions_of(variant),
    )
    sample = cached.read(cached.find(key))
    return sample, collate([sample], [0], 0)


def assert_training_equals_sampling(made: Made, size: int) -> None:
    """Latents, mask, states and timesteps; every comparison within what storing bf16 rounds."""
    variant = made.variant
    bound = BOUNDS[size]
    spec = ClipSpec.of_variant(variant, max_pixels=bound, max_frames=SMALL["max_frames"])
    frames = next(decode_clip(made.source / "man.mp4", spec)).frames
    keys = [key for key in LatentCache(made.cache).keys if ("x" in key.partition("#")[2]) == bool(size)]
    sample, batch = training_input(made, keys[0])
    f, h, w = sample.latents.shape[1:]
    assert (len(frames), *frames.shape[1:3]) == tuple(
        np.array([f - 1, h, w]) * variant.vae_stride + [1, 0, 0]
    )
    noise = torch.randn(sample.latents.shape, generator=torch.Generator().manual_seed(1))
    stock = stock_input(made.model, frames, noise)
    channels = variant.dit.out_channels
    if "first_frame" in variant.conditions:
        assert (batch.condition_channels, batch.image_embeds) == (None, None)
        assert torch.equal(stock.hidden_states[:, 1:], noise[:, 1:])
        clean = patchify(stock.hidden_states, variant.dit.patch_size)[: batch.num_cond_tokens[0]]
        assert differs(batch.tokens[: batch.num_cond_tokens[0]], clean) <= 1
        assert torch.equal(stock.timestep[0] == 0, torch.arange(len(batch.tokens)) < batch.num_cond_tokens[0])
    else:
        assert torch.equal(stock.hidden_states[:channels], noise)
        condition = patchify(stock.hidden_states[channels:], variant.dit.patch_size)
        assert batch.condition_channels is not None
        assert batch.condition_channels.shape == condition.shape
        assert differs(batch.condition_channels, condition) <= 1
        mask = len(condition[0]) // (MASK_CHANNELS + channels) * MASK_CHANNELS
        assert torch.equal(batch.condition_channels[:, :mask], condition[:, :mask])
        assert batch.num_cond_tokens == (0,)
        assert stock.timestep.shape == (1,)
    assert (stock.image_embeds is None) == (batch.image_embeds is None) == ("clip" not in variant.conditions)
    if batch.image_embeds is not None and stock.image_embeds is not None:
        assert differs(batch.image_embeds[0], stock.image_embeds) <= 1


@pytest.mark.parametrize("name", IN_TIERS)
def test_the_training_input_is_what_the_stock_pipeline_builds(name: str, made: Callable[[str], Made]) -> None:
    for size in range(len(BOUNDS)):
        assert_training_equals_sampling(made(name), size)


def _zero_latents(patch: pytest.MonkeyPatch) -> None:
    """Zeros where the latents of gray frames belong."""
    encode = WindowEncoder.encode

    def wrong(self: WindowEncoder, windows: Any) -> list[dict[str, Tensor]]:
        found = encode(self, windows)
        for encoded in found:
            encoded["image_latents"][:, 1:] = 0
        return found

    patch.setattr(WindowEncoder, "encode", wrong)


def _black(patch: pytest.MonkeyPatch) -> None:
    def wrong(pixels: Tensor, last_image: bool) -> Tensor:
        video = torch.full_like(pixels, -1)
        video[..., 0, :, :] = pixels[..., 0, :, :]
        return video

    patch.setattr(published, "given_frames", wrong)


def _last_layer(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: ImageEncoder, pictures: Any) -> Tensor:
        values = self.processor(images=list(pictures), return_tensors="pt")
        with torch.no_grad():
            return self.model(**values).last_hidden_state.flatten(0, 1)

    patch.setattr(ImageEncoder, "encode", wrong)


@pytest.mark.parametrize(
    "bug", [_zero_latents, *(pytest.param(bug, marks=pytest.mark.slow) for bug in (_black, _last_layer))]
)
def test_bugs_of_given_frames_are_caught(
    bug: Callable[[pytest.MonkeyPatch], None],
    source: Path,
    tiny_variant: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_variant(CLIP)
    bug(monkeypatch)
    wrong = Made(
        model, source, tmp_path / "wrong", run(source, tmp_path / "wrong", model, max_pixels=BOUNDS[0])
    )
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_training_equals_sampling(wrong, 0)


# ---- what else preprocess promises


@pytest.mark.parametrize("name", NAMES)
def test_check_tells_what_preprocess_makes(name: str, made: Callable[[str], Made]) -> None:
    done = made(name)
    told = check(str(done.source), model=done.model, max_pixels=BOUNDS, max_frames=SMALL["max_frames"])
    stored = LatentCache(done.cache)
    tokens = dict(zip(stored.keys, done.report.tokens.tolist(), strict=True))
    assert {sample.key: sample.num_tokens for sample in told.samples} == tokens
    multiple = 32 if name == "wan2.2-ti2v-5b" else 16
    for i in range(len(stored)):
        meta = stored.meta(i)
        assert (meta["height"] % multiple, meta["width"] % multiple, meta["fps"]) == (0, 0, done.variant.fps)
    reasons = {(clip.key, clip.reason) for clip in told.clips if clip.reason}
    assert reasons == {(item.key, item.reason) for item in done.report.rejected}
    if name == "wan2.2-ti2v-5b":
        assert not reasons  # a picture is a sample like any other
    else:
        ((key, reason),) = reasons
        assert key == "still"
        assert (
            "gives one frame, but an image-to-video model generates a video from the first frame and "
            "needs more frames" in reason
        )
    # Of so few samples HDF5's own tables are a large part.
    assert told.cache_bytes == pytest.approx(done.report.num_bytes, abs=8000)


def test_captions_share_all_but_the_text(made: Callable[[str], Made]) -> None:
    names = [spec.name for spec in arrays_of(made(CLIP).variant) if not spec.optional]
    with h5py.File(made(CLIP).cache / "shard-00000.h5", "r", locking=False) as shard:
        places = [[group[name].id.get_offset() for name in names] for group in shard["samples"].values()]
    assert len(places) == len(CAPTIONS) * len(BOUNDS)
    assert [len({row[i] for row in places}) for i in range(4)] == [2, 4, 2, 2]


def test_another_caption_keeps_what_belongs_to_the_frames(
    made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = made(CLIP)
    source = shutil.copytree(done.source, tmp_path / "source")
    out = tmp_path / "cache"
    shutil.copytree(done.cache, out)
    (source / "captions.json").write_text(json.dumps({"man.mp4": [CAPTIONS[0], "Another."]}))
    (source / "still.png").unlink()
    with monkeypatch.context() as patch:
        forbid_video(patch)
        patch.setattr(ImageEncoder, "load", None)
        assert run(source, out, done.model).num_relabelled == len(BOUNDS)
    before = arrays(done.cache)
    after = arrays(out)
    changed = {key for key in after if after[key] != before.get(key)}
    assert len(changed) == len(BOUNDS)
    frames = {(bits[0], *bits[2:4]) for bits in before.values()}
    assert {(bits[0], *bits[2:4]) for bits in after.values()} == frames


def test_a_run_that_ends_before_its_shards_goes_on_from_the_journal(
    made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = made(CLIP)
    out = tmp_path / "cache"

    def end(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encoding._ClipEncoder, "_move_to_shard", end)
        with pytest.raises(KeyboardInterrupt):
            run(done.source, out, done.model)
    assert not list(out.glob("shard-*.h5"))
    monkeypatch.setattr(WanVideoEncoder, "encode", None)
    monkeypatch.setattr(ImageEncoder, "encode", None)
    run(done.source, out, done.model)
    assert arrays(out) == arrays(done.cache)


@pytest.mark.full
def test_workers_make_the_same(made: Callable[[str], Made], tmp_path: Path) -> None:
    done = made(CLIP)
    source = shutil.copytree(done.source, tmp_path / "source")
    captions = json.loads((source / "captions.json").read_text())
    shutil.copy(source / "man.mp4", source / "he.mp4")
    with (source / "he.mp4").open("ab") as file:
        file.write(b"\0\0\0\x08free")  # another file of the same pictures
    (source / "captions.json").write_text(json.dumps(captions | {"he.mp4": CAPTIONS}))
    report = run(source, tmp_path / "cache", done.model, workers=2)
    assert report.num_workers == 2
    found = arrays(tmp_path / "cache")
    alone = arrays(done.cache)
    assert sorted(bits[:4] for bits in found.values()) == sorted(2 * [bits[:4] for bits in alone.values()])


@pytest.mark.slow
def test_a_subprocess_makes_the_same(
    made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = made(CLIP)
    leave_suspects(monkeypatch, "man")
    run(done.source, tmp_path / "cache", done.model)
    assert arrays(tmp_path / "cache") == arrays(done.cache)


# ---- the cache


def test_parts_of_a_sample_are_read_alone(made: Callable[[str], Made]) -> None:
    for verified in (False, True):
        stored = LatentCache(made(CLIP).cache, verify=verified)
        whole = stored.read(0)
        part = stored.read(0, (1, 2))
        for ours, theirs in (
            (part.latents, whole.latents),
            (part.arrays["image_latents"], whole.arrays["image_latents"]),
        ):
            assert torch.equal(ours[:, 1:2], theirs[:, 1:2])
            assert not ours[:, [0, 2]].any()
            assert theirs[:, [0, 2]].any()
        assert torch.equal(part.arrays["image_embeds"], whole.arrays["image_embeds"])
        assert checksum(*map(to_bits, whole.arrays.values())) == int(stored.index.crc32[0])


FITS = {
    (CLIP, "wan2.1-t2v-1.3b"): (True, False, False),
    (CLIP, "wan2.2-i2v-a14b"): (True, True, False),
    ("wan2.1-flf2v-14b", "wan2.2-t2v-a14b"): (True, False, False),
    ("wan2.2-i2v-a14b", CLIP): (False, False, False),
    ("wan2.1-flf2v-14b", CLIP): (False, False, False),
    (CLIP, "wan2.1-flf2v-14b"): (False, False, False),
    (CLIP, "wan2.2-ti2v-5b"): (False, False, False),
}


@pytest.mark.parametrize(("of", "model"), FITS)
def test_a_cache_serves_models_that_need_no_more(
    of: str, model: str, made: Callable[[str], Made], tiny_variant: Callable[[str], Path]
) -> None:
    fits, with_latents, with_states = FITS[of, model]
    variant = read_variant(tiny_variant(model))
    stored = LatentCache(made(of).cache)
    if not fits:
        with pytest.raises(CacheError, match=rf"made for {of[:10]}.*but the model is .*encode again with"):
            stored.check_fits(variant, {})
        return
    whole = stored.read(0)
    stored.check_fits(variant, {})
    stored.serve(conditions_of(variant))
    for verify_all in (False, True):
        stored.verify = verify_all
        sample = stored.read(0)
        assert ("image_latents" in sample.arrays, "image_embeds" in sample.arrays) == (
            with_latents,
            with_states,
        )
        assert torch.equal(sample.latents, whole.latents)


@pytest.mark.parametrize("part", ["image_encoder", "image_processor"])
def test_clip_of_another_model_is_refused(part: str, made: Callable[[str], Made]) -> None:
    done = made(CLIP)
    fingerprint = fingerprint_pipeline(done.model)
    LatentCache(done.cache).check_fits(done.variant, fingerprint)
    fingerprint[part] = {name: "0" * 64 for name in fingerprint[part]}
    with pytest.raises(CacheError, match=f"encoded for .* with {part}.config_sha256="):
        LatentCache(done.cache).check_fits(done.variant, fingerprint)


# ---- tools


@pytest.mark.parametrize("name", IN_TIERS)
def test_tools_keep_every_bit(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    done = made(name)
    wanted = arrays(done.cache)
    assert verify_cache(done.cache).problems == []
    split_cache(done.cache, tmp_path / "a", tmp_path / "b", keys=[min(wanted)])
    merge(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"])
    for form in ("safetensors", "webdataset"):
        export_cache(done.cache, tmp_path / form, form)
        import_cache(tmp_path / form, tmp_path / f"from-{form}")
    for out in ("merged", "from-safetensors", "from-webdataset"):
        assert arrays(tmp_path / out) == wanted
        assert LatentCache(tmp_path / out).manifest == LatentCache(done.cache).manifest
        assert verify_cache(tmp_path / out).problems == []
    text = describe_cache(LatentCache(done.cache), 1)
    assert ("image_latents bf16 16 x frames" in text) == ("image" in done.variant.conditions)
    assert ("image_embeds  bf16 257 x 32" in text) == (name == CLIP)


@pytest.mark.parametrize("array", ["image_latents", "image_embeds"])
def test_a_flipped_bit_is_found(array: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    out = shutil.copytree(made(CLIP).cache, tmp_path / "cache")
    sample = LatentCache(out).read(0)
    needle = to_bits(sample.arrays[array]).reshape(-1)[:16].tobytes()
    content = bytearray((out / "shard-00000.h5").read_bytes())
    content[content.rindex(needle) + 3] ^= 4
    (out / "shard-00000.h5").write_bytes(content)
    assert {problem.what.partition(" (")[0] for problem in verify_cache(out).problems} == {
        "the sample has a wrong checksum of latents and text"
    }
    with pytest.raises(CacheError, match="wrong checksum"):
        arrays(out)


# ---- training


@pytest.mark.parametrize("name", [CLIP, "wan2.2-ti2v-5b"])
def test_a_step_on_a_cache_of_given_frames(
    name: str, made: Callable[[str], Made], tmp_path: Path, run_world: Callable[..., list[Any]]
) -> None:
    done = made(name)
    overrides = ("data.mock=null", f"data.cache={done.cache}", "packing.max_tokens=128", "train.max_steps=1")
    training_run = make_run(done.model, tmp_path / "run", overrides, world_size=1)
    assert training_run.model.variant.conditions == VARIANTS[name].conditions
    ((row,),) = run_world(1, run_training, done.model, tmp_path / "run", overrides)
    assert row["loss"] > 0
