"""Names of VAE, UMT5 and CLIP are one to one between official modules and the modules of diffusers and transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tests.support.official import T5Encoder, WanVae, XlmRobertaClip, random_state
from wands.convert.source_components import split_sources
from wands.errors import CheckpointError
from wands.model.files.name_maps import (
    CLIP,
    CLIP_UNUSED,
    UMT5,
    UMT5_TIED,
    rename_all,
    vae_names,
    vae_structure,
)
from wands.model.files.official import LATENTS_22, clip_config, umt5_config, vae_config
from wands.model.files.tensor_files import LazyTensor


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def vae_to_diffusers(names, where: str) -> dict[str, str]:
    return rename_all(names, vae_names(*vae_structure(names, where)).to_diffusers, where)


def vae_to_official(names, where: str) -> dict[str, str]:
    return rename_all(names, vae_names(*vae_structure(names, where)).to_official, where)


def umt5_to_diffusers(names, where: str) -> dict[str, str]:
    return rename_all(names, UMT5.to_diffusers, where)


def clip_to_diffusers(names, where: str) -> dict[str, str]:
    stored = {name: LazyTensor.of(name, torch.zeros(3)) for name in names if not name.startswith(CLIP_UNUSED)}
    used = split_sources(stored)
    return rename_all(used, CLIP.to_diffusers, where)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("nested", [False, True], ids=["2.1", "2.2"])
def test_vae_is_one_to_one(nested: bool, num_blocks: int):
    with torch.device("meta"):
        official = shapes(
            WanVae(4, 48 if nested else 16, num_blocks, nested, decoder_dim=8 if nested else None)
        )
        config = vae_config(official)
        diffusers = shapes(AutoencoderKLWan(**config))
    there = vae_to_diffusers(official, "here")
    assert {new: official[old] for new, old in there.items()} == diffusers
    assert vae_structure(official, "here") == vae_structure(diffusers, "here") == (num_blocks, nested)
    assert vae_to_official(diffusers, "here") == {old: new for new, old in there.items()}
    assert AutoencoderKLWan(**config).config["z_dim"] == (48 if nested else 16)


def test_vae_of_wan_21_as_diffusers_converts_it():
    with torch.device("meta"):
        official = shapes(WanVae(96))
        published = dict(AutoencoderKLWan().config)
        found = dict(AutoencoderKLWan(**vae_config(official)).config)
    theirs = convert_wan_vae_to_diffusers({name: name for name in official})
    assert vae_to_diffusers(official, "here") == theirs
    assert {k: v for k, v in found.items() if k[0] != "_"} == {
        k: v for k, v in published.items() if k[0] != "_"
    }


def test_config_of_wan_22_s_vae_is_the_published_one():
    """Compare every key that diffusers' script for the published model sets; the test above checks the names."""
    with torch.device("meta"):
        config = vae_config(shapes(WanVae(160, 48, 2, True, 256)))
    expected = {
        "base_dim": 160, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 256,
        "scale_factor_temporal": 4, "scale_factor_spatial": 16, "patch_size": 2, **LATENTS_22,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert (len(LATENTS_22["latents_mean"]), len(LATENTS_22["latents_std"])) == (48, 48)


def test_vae_names_of_wan_22_by_hand():
    """A few lines of diffusers' script, which the library does not contain."""
    with torch.device("meta"):
        found = vae_to_diffusers(shapes(WanVae(8, 48, 2, True)), "here")
    for new, old in {
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": "encoder.downsamples.1.downsamples.0.shortcut.weight",
        "encoder.down_blocks.2.downsampler.time_conv.bias": "encoder.downsamples.2.downsamples.2.time_conv.bias",
        "decoder.up_blocks.0.upsampler.resample.1.weight": "decoder.upsamples.0.upsamples.3.resample.1.weight",
        "decoder.up_blocks.3.resnets.2.norm2.gamma": "decoder.upsamples.3.upsamples.2.residual.3.gamma",
    }.items():
        assert found[new] == old


def test_umt5_is_one_to_one():
    official = shapes(T5Encoder(vocab=30, dim=16, dim_attn=24, dim_ffn=40, num_heads=4, num_layers=3))
    config = UMT5Config(**umt5_config(official))
    model = UMT5EncoderModel(config)
    theirs = {name: shape for name, shape in shapes(model).items() if name != UMT5_TIED}
    there = umt5_to_diffusers(official, "here")
    assert {new: official[old] for new, old in there.items()} == theirs
    assert rename_all(theirs, UMT5.to_official, "here") == {old: new for new, old in there.items()}
    assert config.is_gated_act


def test_umt5_computes_what_the_official_encoder_does():
    """Names do not say which half of the gated feed-forward goes through the activation; numbers do."""
    official = T5Encoder(vocab=30, dim=16, dim_attn=16, dim_ffn=24, num_heads=2, num_layers=1)
    state = random_state(official)
    config = UMT5Config(**umt5_config(shapes(official)), dropout_rate=0.0)
    model = UMT5EncoderModel(config).eval()
    names = umt5_to_diffusers(state, "here")
    model.load_state_dict({new: state[old] for new, old in names.items()}, strict=False)
    layer = model.encoder.block[0].layer[1]
    x = torch.randn(1, 5, 16)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * state["blocks.0.norm2.weight"]
    gate = nn.functional.gelu(normed @ state["blocks.0.ffn.gate.0.weight"].T, approximate="tanh")
    hidden = (normed @ state["blocks.0.ffn.fc1.weight"].T) * gate
    with torch.no_grad():
        torch.testing.assert_close(
            layer(x), x + hidden @ state["blocks.0.ffn.fc2.weight"].T, rtol=1e-5, atol=1e-5
        )


def test_the_image_half_of_clip():
    official = XlmRobertaClip(dim=32, mlp_dim=48, num_layers=2)
    with torch.no_grad():
        for i, value in enumerate(official.parameters()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + 1000 * i)
    state = official.state_dict()
    names = clip_to_diffusers(state, "here")
    sources = split_sources({name: LazyTensor.of(name, value) for name, value in state.items()})
    model = CLIPVisionModel(CLIPVisionConfig(**clip_config(shapes(official))))
    new = {name.removeprefix("vision_model."): sources[old].read() for name, old in names.items()}
    theirs = {name.removeprefix("vision_model."): tuple(v.shape) for name, v in model.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in new.items()} == theirs
    whole = state["visual.transformer.1.attn.to_qkv.weight"]
    for part, rows in (("q", slice(0, 32)), ("k", slice(32, 64)), ("v", slice(64, 96))):
        assert torch.equal(new[f"encoder.layers.1.self_attn.{part}_proj.weight"], whole[rows])


@pytest.mark.parametrize(
    ("to_new_names", "model"),
    [
        (vae_to_diffusers, WanVae()),
        (vae_to_official, AutoencoderKLWan(base_dim=4)),
        (umt5_to_diffusers, T5Encoder(3, 4, 4, 4, 1, 1)),
        (clip_to_diffusers, XlmRobertaClip(4, 4, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_unknown_names_are_listed(to_new_names: Callable, model: nn.Module):
    with pytest.raises(
        CheckpointError, match=r"x\.pth has 1 tensor names that no Wan model has \(surprise\.weight\)"
    ):
        to_new_names(shapes(model) | {"surprise.weight": (1,)}, "x.pth")


def test_a_file_that_is_no_vae():
    with pytest.raises(CheckpointError, match=r"x\.pth is not a Wan VAE"):
        vae_to_diffusers({"a.weight": (1,)}, "x.pth")
