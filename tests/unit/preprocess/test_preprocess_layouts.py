"""`wands preprocess` from the layouts of other trainers to a cache that reads: archives, captions.json, images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from wands.cli import main
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, save_video, to_pixels
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder


def frames(seed: int, count: int) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 255, (count, 4, 6, 3))
    return coarse.repeat(16, axis=1).repeat(16, axis=2).astype(np.uint8)  # 64 x 96


def run(source: Path, model: Path, out: Path) -> LatentCache:
    arguments = ["preprocess", str(source), "--out", str(out), "--model", str(model)]
    result = CliRunner().invoke(main, [*arguments, "--max-frames", "9", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return LatentCache(out, verify=True)


def captions(cache: LatentCache) -> dict[str, str]:
    return {key: cache.meta(index)["caption"] for index, key in enumerate(cache.keys)}


def encoded(model: Path, path: Path) -> torch.Tensor:
    clip = next(decode_clip(path, ClipSpec(fps=16, max_frames=9)))
    return WanVideoEncoder.load(model).encode(to_pixels(clip.frames)).to(torch.bfloat16)


def test_webdataset_tar(tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "unpacked")
    source = tmp_path / "shards"
    source.mkdir()
    with tarfile.open(source / "shard-000000.tar", "w") as archive:
        for index in range(3):
            save_video(tmp_path / f"{index}.mp4", frames(index, 9), 16)
            members = {"mp4": (tmp_path / f"{index}.mp4").read_bytes()}
            if index == 0:
                members["txt"] = b"A cat."
            if index == 1:
                members["json"] = json.dumps({"caption": "A dog."}).encode()
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{index:06}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    cache = run(source, tiny_pipeline, tmp_path / "cache")
    assert captions(cache) == {"shard-000000/000000": "A cat.", "shard-000000/000001": "A dog."}
    for index in range(2):
        assert torch.equal(cache.read(index).latents, encoded(tiny_pipeline, tmp_path / f"{index}.mp4"))
    rejects = [json.loads(line) for line in (tmp_path / "cache/rejects.jsonl").read_text().splitlines()]
    assert [(item["key"], item["reason"].split(";")[0]) for item in rejects] == [
        ("shard-000000/000002", "missing caption")
    ]


@pytest.mark.slow
def test_diffusion_pipe_with_several_captions(tiny_pipeline: Path, tmp_path: Path) -> None:
    source = tmp_path / "set"
    for index in range(3):
        save_video(source / f"clip_{index}.mp4", frames(index, 5 + 4 * index), 16)
    listing = {"clip_0.mp4": ["A cat.", "A sleeping cat."], "clip_1.mp4": ["A dog."]}
    (source / "captions.json").write_text(json.dumps(listing))
    cache = run(source, tiny_pipeline, tmp_path / "cache")
    by_caption = {caption: key for key, caption in captions(cache).items()}
    assert set(by_caption) == {"A cat.", "A sleeping cat.", "A dog."}
    assert by_caption["A cat."] == "clip_0"
    first, second = (cache.read(cache.find(by_caption[text])) for text in ("A cat.", "A sleeping cat."))
    assert torch.equal(first.latents, second.latents)
    encoder = TextEncoder.load(tiny_pipeline)
    assert torch.equal(second.text_embeds, encoder.encode("A sleeping cat."))
    assert not torch.equal(first.text_embeds, second.text_embeds)
    assert "clip_2" in (tmp_path / "cache/rejects.jsonl").read_text()


def test_images_among_clips(tiny_pipeline: Path, tmp_path: Path) -> None:
    source = tmp_path / "set"
    save_video(source / "clip.mp4", frames(0, 9), 16)
    for index, name in enumerate(["a.png", "b.jpg", "c.webp"]):
        Image.fromarray(frames(index, 1)[0]).save(source / name)
    for stem in ("clip", "a", "b", "c"):
        (source / f"{stem}.txt").write_text(f"caption of {stem}")
    (source / "torn.png").write_bytes((source / "a.png").read_bytes()[:60])
    (source / "torn.txt").write_text("torn")
    cache = run(source, tiny_pipeline, tmp_path / "cache")
    assert captions(cache) == {stem: f"caption of {stem}" for stem in ("a", "b", "c", "clip")}
    assert cache.index.num_frames.tolist() == [1, 1, 1, 9]
    assert cache.index.latent_shapes[:, 1].tolist() == [1, 1, 1, 3]
    pixels = to_pixels(frames(0, 1))
    expected = WanVideoEncoder.load(tiny_pipeline).encode(pixels).to(torch.bfloat16)
    assert torch.equal(cache.read(0).latents, expected)  # png keeps every bit
    assert "torn" in (tmp_path / "cache/rejects.jsonl").read_text()
