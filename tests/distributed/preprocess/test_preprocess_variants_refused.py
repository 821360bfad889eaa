"""Options, parts and caches that do not fit a model with given frames."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.variant_caches import BOUNDS, CLIP, read_variant, run, source
from wands.data.cache.reader import LatentCache
from wands.errors import CacheError, ConfigError

__all__ = ["source"]  # fixtures


@pytest.mark.parametrize("max_frames", [1, 4])
def test_options_that_make_stills_are_refused(
    max_frames: int, source: Path, tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=rf"--max-frames={max_frames} gives samples of one frame, but .* use 5 or more"
    ):
        run(source, tmp_path / "cache", tiny_variant(CLIP), max_frames=max_frames)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("image_encoder", {"hidden_size": 64}, "image encoder's hidden_size=64 must equal image_dim=32"),
        (
            "image_encoder",
            {"patch_size": 32},
            "image encoder that gives 50 tokens, but a transformer that takes 257",
        ),
        (
            "vae",
            {"scale_factor_spatial": 16},
            r"VAE's scale factors=\(4, 16, 16\) must equal stride=\(4, 8, 8\)",
        ),
        ("vae", {"z_dim": 48}, "VAE's z_dim=48 must equal out_channels=16"),
    ],
)
def test_parts_of_another_model_are_refused(
    part: str,
    changes: dict[str, int],
    message: str,
    source: Path,
    tiny_variant: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = shutil.copytree(tiny_variant(CLIP), tmp_path / "model")
    config = model / part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        run(source, tmp_path / "cache", model)


@pytest.mark.slow
def test_a_cache_of_text_alone_is_refused(
    source: Path, tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    text = tiny_variant("wan2.1-t2v-1.3b")
    run(source, tmp_path / "cache", text, max_pixels=BOUNDS[1])
    variant = read_variant(tiny_variant(CLIP))
    with pytest.raises(
        CacheError, match=r"conditions=\[text, mask\].*clip.*encode again with wands preprocess"
    ):
        LatentCache(tmp_path / "cache").check_fits(variant, {})
    with pytest.raises(CacheError, match=r"was begun with.*another --out"):
        run(source, tmp_path / "cache", tiny_variant(CLIP), max_pixels=BOUNDS[1])
