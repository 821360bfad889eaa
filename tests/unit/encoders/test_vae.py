"""Pixels to latents against diffusers' own processor, VAE and arithmetic, with each known bug put in once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from wands.data.clips.video import to_frames, to_pixels
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError


@pytest.fixture(scope="module")
def measured(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny VAE with Wan 2.1's own, very unequal, mean and std: one that is skipped or inverted shows."""
    vae = AutoencoderKLWan.from_pretrained(tiny_pipeline, subfolder="vae")
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters  # Wan 2.1's own
    stock = AutoencoderKLWan.load_config(tiny_pipeline, subfolder="vae") | {
        "latents_mean": defaults["latents_mean"].default,
        "latents_std": defaults["latents_std"].default,
    }
    folder = tmp_path_factory.mktemp("measured")
    vae.save_pretrained(folder / "vae")
    (folder / "vae" / "config.json").write_text(json.dumps(dict(stock)))
    return folder


@pytest.fixture(scope="module")
def encoder(measured: Path) -> WanVideoEncoder:
    return WanVideoEncoder.load(measured)


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    """uint8 [9, 32, 48, 3]: smooth color, full range."""
    t, y, x = np.meshgrid(np.linspace(0, 3, 9), np.linspace(0, 4, 32), np.linspace(0, 5, 48), indexing="ij")
    waves = [np.sin(x + t), np.cos(y - t), np.sin(x * y / 3)]
    return np.stack([(127.5 + 127.5 * wave).round() for wave in waves], -1).astype(np.uint8)


@torch.no_grad()
def stock_latents(model: Path, frames: np.ndarray) -> Tensor:
    """As diffusers does it: VideoProcessor, posterior mode, arithmetic of its image-to-video pipeline."""
    vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
    video = VideoProcessor(vae_scale_factor=8).preprocess_video([Image.fromarray(frame) for frame in frames])
    latents = vae.encode(video).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    return ((latents - mean) * std)[0]


@torch.no_grad()
def stock_video(model: Path, latents: Tensor) -> np.ndarray:
    """As the end of diffusers' WanPipeline: undo the statistics, decode, VideoProcessor."""
    vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1)
    video = vae.decode(latents[None] / std + mean, return_dict=False)[0]
    return VideoProcessor(vae_scale_factor=8).postprocess_video(video, output_type="np")[0]


def mismatch(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_latents_equal_diffusers(measured: Path, encoder: WanVideoEncoder, frames: np.ndarray) -> None:
    latents = encoder.encode(to_pixels(frames))
    assert latents.shape == (16, 3, 4, 6)
    assert latents.dtype == torch.float32
    assert mismatch(latents, stock_latents(measured, frames)) <= 2e-6
    assert latents.std() > 0.1


@torch.no_grad()
def test_the_default_is_the_stock_vae_bit_for_bit(
    measured: Path, encoder: WanVideoEncoder, frames: np.ndarray
) -> None:
    vae = AutoencoderKLWan.from_pretrained(measured, subfolder="vae", torch_dtype=torch.float32)
    pixels = to_pixels(frames)
    assert torch.equal(
        encoder.encode(pixels), encoder.normalize(vae.encode(pixels[None]).latent_dist.mode()[0])
    )


@pytest.fixture(scope="module")
def wide() -> Tensor:
    """Pixels [3, 5, 288, 480], larger than a tile: smooth color in motion."""
    t, y, x = torch.meshgrid(
        torch.arange(5.0), torch.linspace(0, 12, 288), torch.linspace(0, 20, 480), indexing="ij"
    )
    return torch.stack([torch.sin(x + t / 3), torch.cos(y - t / 2), torch.sin(x * y / 9)]).clamp(-1, 1)


@pytest.fixture(scope="module")
def exact(encoder: WanVideoEncoder, wide: Tensor) -> Tensor:
    return encoder.encode(wide)


def relative(latents: Tensor, exact: Tensor) -> Tensor:
    """Root mean square of the difference in each column of latents, in units of their spread."""
    assert latents.shape == exact.shape
    return (latents - exact).square().mean((0, 1, 2)).sqrt() / exact.std()


@pytest.mark.slow
def test_tiles_are_near_the_whole(
    measured: Path, encoder: WanVideoEncoder, exact: Tensor, wide: Tensor, frames: np.ndarray
) -> None:
    """Measured: 7 % of the spread with these random weights; 2 % with a small trained VAE on a real clip."""
    tiled = WanVideoEncoder.load(measured, tiling=True)
    columns = relative(tiled.encode(wide), exact)
    assert 0.005 < columns.mean() < 0.15
    assert columns.max() < 0.3  # at the seams
    small = to_pixels(frames)
    assert torch.equal(tiled.encode(small), encoder.encode(small))  # no larger than a tile


@pytest.mark.slow
def test_bfloat16_is_near_float32(measured: Path, exact: Tensor, wide: Tensor) -> None:
    """Measured: 1 % of the spread with these random weights; 1.7 % with a small trained VAE on a real clip."""
    half = WanVideoEncoder.load(measured, dtype="bf16")
    assert half.vae.dtype == torch.bfloat16
    latents = half.encode(wide)
    assert latents.dtype == torch.float32
    assert 0.001 < relative(latents, exact).mean() < 0.03


def test_decode_equals_diffusers(measured: Path, encoder: WanVideoEncoder, frames: np.ndarray) -> None:
    latents = encoder.encode(to_pixels(frames))
    ours = encoder.decode(latents).permute(1, 2, 3, 0).numpy() / 2 + 0.5
    theirs = stock_video(measured, latents)
    assert ours.shape == theirs.shape == (9, 32, 48, 3)
    assert np.abs(ours - theirs).max() <= 2e-5
    assert to_frames(encoder.decode(latents)).shape == frames.shape


def test_normalize_round_trip(encoder: WanVideoEncoder) -> None:
    raw = torch.randn(16, 2, 3, 3)
    assert torch.allclose(encoder.denormalize(encoder.normalize(raw)), raw, atol=1e-6)
    assert mismatch(encoder.normalize(raw), raw) > 0.1


def _skipped(self: WanVideoEncoder, latents: Tensor) -> Tensor:
    return latents


def _inverted(self: WanVideoEncoder, latents: Tensor) -> Tensor:
    return latents * self._std + self._mean


def _without_mean(self: WanVideoEncoder, latents: Tensor) -> Tensor:
    return latents / self._std


@pytest.mark.parametrize("bug", [_skipped, _inverted, _without_mean])
def test_bugs_of_mean_and_std_are_caught(
    measured: Path,
    encoder: WanVideoEncoder,
    frames: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[..., Tensor],
) -> None:
    monkeypatch.setattr(WanVideoEncoder, "normalize", bug)
    assert mismatch(encoder.encode(to_pixels(frames)), stock_latents(measured, frames)) > 0.05


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(lambda p: p / 2 + 0.5, id="pixels in [0, 1]"),
        pytest.param(lambda p: p.flip(0), id="BGR"),
        pytest.param(lambda p: p.transpose(2, 3).reshape(p.shape), id="rows as columns"),
    ],
)
def test_bugs_of_pixels_are_caught(
    measured: Path, encoder: WanVideoEncoder, frames: np.ndarray, bug: Callable[[Tensor], Tensor]
) -> None:
    wrong = encoder.encode(bug(to_pixels(frames)).contiguous())
    assert mismatch(wrong, stock_latents(measured, frames)) > 1e-3


def test_bug_sampling_the_posterior_is_caught(
    encoder: WanVideoEncoder, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution as Posterior

    right = encoder.encode(to_pixels(frames))
    monkeypatch.setattr(Posterior, "mode", lambda self: self.sample())
    assert mismatch(encoder.encode(to_pixels(frames)), right) > 0.05


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((3, 8, 32, 48), 0.0, r"8 frames are not 1 \+ 4k"),
        ((3, 12, 32, 48), 0.0, r"12 frames are not 1 \+ 4k"),
        ((3, 9, 30, 48), 0.0, "height 30"),
        ((3, 9, 32, 44), 0.0, "width 44"),
        ((3, 9, 32, 48), 255.0, r"255\.0.*not in \[-1, 1\]"),
        ((3, 9, 32, 48), -1.01, r"not in \[-1, 1\]"),
        ((3, 9, 32, 48), float("nan"), r"not in \[-1, 1\]"),
        ((9, 3, 32), 0.0, r"not \[3, F, H, W\]"),
    ],
)
def test_what_the_vae_would_cut_silently_is_refused(
    encoder: WanVideoEncoder, shape: tuple[int, ...], value: float, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        encoder.encode(torch.full(shape, value))


def test_bug_frames_not_4k_plus_1_loses_the_tail(measured: Path) -> None:
    """The mistake that the assertion above prevents: the stock VAE drops frames 9 to 11 without a word."""
    vae = AutoencoderKLWan.from_pretrained(measured, subfolder="vae")
    pixels = torch.rand(1, 3, 12, 16, 16) * 2 - 1
    with torch.no_grad():
        whole = vae.encode(pixels).latent_dist.mode()
        cut = vae.encode(pixels[:, :, :9]).latent_dist.mode()
    assert torch.equal(whole, cut)


def test_half_precision_pixels_are_refused(encoder: WanVideoEncoder) -> None:
    with pytest.raises(AssertionError, match="float32"):
        encoder.encode(torch.zeros(3, 1, 16, 16, dtype=torch.bfloat16))


def test_one_frame_is_a_clip(encoder: WanVideoEncoder) -> None:
    assert encoder.encode(torch.zeros(3, 1, 16, 32)).shape == (16, 1, 2, 4)


def test_a_vae_that_does_not_load_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no vae folder"):
        WanVideoEncoder.load(tmp_path)
    (tmp_path / "vae").mkdir()
    with pytest.raises(ConfigError, match="the VAE cannot be loaded") as caught:
        WanVideoEncoder.load(tmp_path)
    assert "\n" not in str(caught.value)
