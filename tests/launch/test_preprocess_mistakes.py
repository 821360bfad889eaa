"""Windows, mistakes of the user and the memory of `wands preprocess`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL, clips, contents, one_clip
from wands.data.cache.reader import LatentCache
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError, DataError

__all__ = ["clips", "one_clip"]  # fixtures


@pytest.mark.slow
def test_slide_windows_cover_the_clip_and_resume(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SMALL | {"clip_mode": "slide", "max_samples": 2}
    report = preprocess(str(one_clip), tmp_path / "whole", tiny_pipeline, **options)
    assert report.num_accepted > 3  # 4 s at 16 fps, 9 frames each
    encode = WanVideoEncoder.encode
    calls = 0

    def interrupted(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return encode(self, pixels)

    monkeypatch.setattr(WanVideoEncoder, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **options)
    monkeypatch.setattr(WanVideoEncoder, "encode", encode)
    again = preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **options)
    assert again.num_reused == 3
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")
    assert not list((tmp_path / "cache").glob(".*"))
    starts = [LatentCache(tmp_path / "cache").meta(i)["start_seconds"] for i in range(again.num_accepted)]
    assert np.allclose(np.diff(starts), 9 / 16)


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"source": "nowhere/at/all"}, DataError, "nowhere/at/all"),
        ({"model": "no/such/model"}, ConfigError, "neither a folder nor a Hub id"),
        (
            {"height": 100, "max_pixels": None, "width": 96},
            ConfigError,
            "height=100 must be a multiple of 16",
        ),
        ({"height": 64, "max_pixels": None}, ConfigError, "must be set together"),
        ({"device": "cuda:77"}, ConfigError, "--device cuda:77 cannot be used"),
        ({"device": "warp"}, ConfigError, "--device warp cannot be used"),
        ({"clip_mode": "slide", "max_frames": None}, ConfigError, "needs a window length"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path, change: dict[str, Any], error: type, message: str
) -> None:
    options: dict[str, Any] = {"source": str(one_clip), "model": tiny_pipeline, **SMALL} | change
    with pytest.raises(error, match=message) as caught:
        preprocess(out=tmp_path / "cache", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_encoders_of_another_dit_are_refused(one_clip: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_pipeline, tmp_path / "other"))
    config = other / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"text_dim": 4096}))
    with pytest.raises(ConfigError, match="text encoder's d_model=32 must equal text_dim=4096"):
        preprocess(str(one_clip), tmp_path / "cache", other, **SMALL)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"in_channels": 32}))
    with pytest.raises(ConfigError, match=r"in_channels=32.* which no Wan 2\.1 or 2\.2"):
        preprocess(str(one_clip), tmp_path / "cache", other, **SMALL)


@pytest.mark.slow
def test_out_of_memory_rejects_the_clip_alone(
    clips: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = WanVideoEncoder.encode

    def sometimes(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.shape[-2] < pixels.shape[-1] / 2:  # bikes is the widest
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(self, pixels)

    monkeypatch.setattr(WanVideoEncoder, "encode", sometimes)
    report = preprocess(str(clips), tmp_path / "cache", tiny_pipeline, **SMALL)
    assert [(item.key, "lower --max-frames" in item.reason) for item in report.rejected] == [("bikes", True)]
    assert report.num_accepted == 2


def test_encoders_are_never_in_memory_together(
    one_clip: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    loaded: list[Any] = []
    load_text = TextEncoder.load
    load_vae = WanVideoEncoder.load

    def watched_text(*args: Any) -> TextEncoder:
        encoder = load_text(*args)
        loaded.append(weakref.ref(encoder.model))
        return encoder

    def watched_vae(*args: Any, **options: Any) -> WanVideoEncoder:
        assert loaded, "the captions come first"
        assert loaded[0]() is None, "UMT5 is still in memory"
        return load_vae(*args, **options)

    monkeypatch.setattr(TextEncoder, "load", watched_text)
    monkeypatch.setattr(WanVideoEncoder, "load", watched_vae)
    preprocess(str(one_clip), tmp_path / "cache", tiny_pipeline, **SMALL)
