"""Names of the frozen parts, one to one between official modules and those of diffusers and transformers."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tests.support.official import T5Encoder, WanVae, XlmRobertaClip
from wands.errors import CheckpointError
from wands.model.files import encoder_names
from wands.model.files.encoder_names import (
    LATENTS_22,
    TensorSource,
    clip_config,
    clip_to_diffusers,
    t5_config,
    t5_to_diffusers,
    t5_to_official,
    vae_config,
    vae_to_diffusers,
    vae_to_official,
)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def plain(taken: dict[str, TensorSource]) -> dict[str, str]:
    assert all(one == TensorSource(one.name) for one in taken.values())
    return {new: one.name for new, one in taken.items()}


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("nested", [False, True], ids=["2.1", "2.2"])
def test_vae_is_one_to_one(nested: bool, num_blocks: int):
    with torch.device("meta"):
        official = shapes(
            WanVae(4, 48 if nested else 16, num_blocks, nested, decoder_dim=8 if nested else None)
        )
        config = vae_config(official)
        diffusers = shapes(AutoencoderKLWan(**config))
    there = plain(vae_to_diffusers(official, "here"))
    assert {new: official[old] for new, old in there.items()} == diffusers
    assert plain(vae_to_official(diffusers, "here")) == {old: new for new, old in there.items()}
    assert AutoencoderKLWan(**config).config["z_dim"] == (48 if nested else 16)


def test_vae_of_wan_21_as_diffusers_converts_it():
    with torch.device("meta"):
        official = shapes(WanVae(96))
        published = dict(AutoencoderKLWan().config)
        found = dict(AutoencoderKLWan(**vae_config(official)).config)
    theirs = convert_wan_vae_to_diffusers({name: name for name in official})
    assert plain(vae_to_diffusers(official, "here")) == theirs
    assert {k: v for k, v in found.items() if k[0] != "_"} == {
        k: v for k, v in published.items() if k[0] != "_"
    }


def test_config_of_wan_22_s_vae_is_the_published_one():
    """Every key that diffusers' script for the published model sets; it names the names too, as the test above checks them."""
    with torch.device("meta"):
        config = vae_config(shapes(WanVae(160, 48, 2, True, 256)))
    expected = {
        "base_dim": 160, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 256,
        "scale_factor_temporal": 4, "scale_factor_spatial": 16, "patch_size": 2, **LATENTS_22,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert (len(LATENTS_22["latents_mean"]), len(LATENTS_22["latents_std"])) == (48, 48)


def test_vae_names_of_wan_22_by_hand():
    """A few lines of diffusers' script, which the library has not."""
    with torch.device("meta"):
        taken = plain(vae_to_diffusers(shapes(WanVae(8, 48, 2, True)), "here"))
    for new, old in {
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": "encoder.downsamples.1.downsamples.0.shortcut.weight",
        "encoder.down_blocks.2.downsampler.time_conv.bias": "encoder.downsamples.2.downsamples.2.time_conv.bias",
        "decoder.up_blocks.0.upsampler.resample.1.weight": "decoder.upsamples.0.upsamples.3.resample.1.weight",
        "decoder.up_blocks.3.resnets.2.norm2.gamma": "decoder.upsamples.3.upsamples.2.residual.3.gamma",
    }.items():
        assert taken[new] == old


def test_umt5_is_one_to_one():
    official = shapes(T5Encoder(vocab=30, dim=16, dim_attn=24, dim_ffn=40, num_heads=4, num_layers=3))
    config = UMT5Config(**t5_config(official))
    model = UMT5EncoderModel(config)
    theirs = {name: shape for name, shape in shapes(model).items() if name != encoder_names.T5_TIED}
    there = plain(t5_to_diffusers(official, "here"))
    assert {new: official[old] for new, old in there.items()} == theirs
    assert plain(t5_to_official(shapes(model), "here")) == {old: new for new, old in there.items()}
    assert config.is_gated_act


def test_umt5_computes_what_the_official_encoder_does():
    """Names cannot say which half of the gated feed-forward goes through the activation: numbers do."""
    from tests.support.official import random_state

    official = T5Encoder(vocab=30, dim=16, dim_attn=16, dim_ffn=24, num_heads=2, num_layers=1)
    state = random_state(official)
    config = UMT5Config(**t5_config(shapes(official)), dropout_rate=0.0)
    model = UMT5EncoderModel(config).eval()
    taken = t5_to_diffusers(shapes(official), "here")
    model.load_state_dict({new: one(state[one.name]) for new, one in taken.items()}, strict=False)
    layer = model.encoder.block[0].layer[1]
    x = torch.randn(1, 5, 16)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * state["blocks.0.norm2.weight"]
    gate = nn.functional.gelu(normed @ state["blocks.0.ffn.gate.0.weight"].T, approximate="tanh")
    hidden = (normed @ state["blocks.0.ffn.fc1.weight"].T) * gate
    with torch.no_grad():
        torch.testing.assert_close(
            layer(x), x + hidden @ state["blocks.0.ffn.fc2.weight"].T, rtol=1e-5, atol=1e-5
        )


def test_the_seeing_half_of_clip():
    official = XlmRobertaClip(dim=32, mlp_dim=48, num_layers=2)
    with torch.no_grad():
        for i, value in enumerate(official.parameters()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + 1000 * i)
    state = official.state_dict()
    taken = clip_to_diffusers(shapes(official), "here")
    model = CLIPVisionModel(CLIPVisionConfig(**clip_config(shapes(official))))
    new = {name.removeprefix("vision_model."): one(state[one.name]) for name, one in taken.items()}
    theirs = {name.removeprefix("vision_model."): tuple(v.shape) for name, v in model.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in new.items()} == theirs
    whole = state["visual.transformer.1.attn.to_qkv.weight"]
    for part, rows in (("q", slice(0, 32)), ("k", slice(32, 64)), ("v", slice(64, 96))):
        assert torch.equal(new[f"encoder.layers.1.self_attn.{part}_proj.weight"], whole[rows])
    used = {one.name for one in taken.values()}
    assert {name for name in state if name not in used} == {"visual.head", "textual.weight", "log_scale"}


@pytest.mark.parametrize(
    ("convert", "model"),
    [
        (vae_to_diffusers, WanVae()),
        (vae_to_official, AutoencoderKLWan(base_dim=4)),
        (t5_to_diffusers, T5Encoder(3, 4, 4, 4, 1, 1)),
        (clip_to_diffusers, XlmRobertaClip(4, 4, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_unknown_names_are_listed(convert, model: nn.Module):
    with pytest.raises(
        CheckpointError, match=r"x\.pth holds 1 names that are none of Wan's \(surprise\.weight\)"
    ):
        convert(shapes(model) | {"surprise.weight": (1,)}, "x.pth")


def test_a_file_that_is_no_vae():
    with pytest.raises(CheckpointError, match="is no VAE of official Wan"):
        vae_to_diffusers({"a.weight": (1,)}, "x.pth")
