"""The arithmetic of a DiT's shape against the model that diffusers builds, and against published numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wands.variants import IMAGE_LEN, VARIANTS, DiTShape, Variant, variant_of

CONFIG = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16,
    "text_dim": 20, "freq_dim": 16, "ffn_dim": 40, "num_layers": 3,
}  # fmt: skip


# Keys that the other kinds of models have in addition.
I2V = {"in_channels": 36}
CLIP = {**I2V, "image_dim": 14, "added_kv_proj_dim": 24}
FLF2V = {**CLIP, "pos_embed_seq_len": 2 * IMAGE_LEN}
TI2V = {"in_channels": 48, "out_channels": 48}


@pytest.mark.parametrize("kind", [{}, I2V, CLIP, FLF2V, TI2V])
def test_num_params_is_what_diffusers_builds(kind: dict):
    model = WanTransformer3DModel(**CONFIG | kind)
    assert DiTShape.from_config(model.config).num_params == sum(p.numel() for p in model.parameters())


def test_num_params_of_the_published_models():
    # The sizes that official checkpoints have.
    assert VARIANTS["wan2.1-t2v-1.3b"].dit.num_params == 1_418_996_800
    assert VARIANTS["wan2.1-t2v-14b"].dit.num_params == 14_288_491_584
    billions = {
        "wan2.1-i2v-14b": 16.395,
        "wan2.2-t2v-a14b": 14.288,
        "wan2.2-i2v-a14b": 14.289,
        "wan2.2-ti2v-5b": 5.000,
    }
    assert {name: round(VARIANTS[name].dit.num_params / 1e9, 3) for name in billions} == billions


@pytest.mark.parametrize("kind", [{}, CLIP, FLF2V])
@pytest.mark.parametrize("grid", [(3, 4, 6), (1, 2, 2)])
def test_forward_flops_are_what_torch_counts(grid: tuple[int, int, int], kind: dict):
    f, h, w = grid
    model = WanTransformer3DModel(**CONFIG | kind)
    pictures = 2 if "pos_embed_seq_len" in kind else 1
    image = torch.randn(pictures, IMAGE_LEN, 14) if kind else None
    # the counter knows plain matmuls, not the CPU's fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        video = torch.randn(1, model.config.in_channels, f, 2 * h, 2 * w)
        model(video, torch.tensor([500.0]), torch.randn(1, 512, 20), image)
    counted = counter.get_total_flops()
    ours = DiTShape.from_config(model.config).forward_flops([f * h * w])
    assert ours == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_published_variant_is_read_from_its_configs(name: str):
    row = VARIANTS[name]
    shape = row.dit
    config = {
        "patch_size": [1, 2, 2], "num_attention_heads": shape.num_heads, "attention_head_dim": 128,
        "num_layers": shape.num_layers, "ffn_dim": shape.ffn_dim,
        "in_channels": shape.in_channels, "out_channels": shape.out_channels, "text_dim": 4096,
        "freq_dim": 256, "image_dim": shape.image_dim, "pos_embed_seq_len": shape.image_positions or None,
    }  # fmt: skip
    index = {"boundary_ratio": row.boundary_ratio, "expand_timesteps": name == "wan2.2-ti2v-5b"}
    assert variant_of(config, index) == row
    # Of a bare DiT only this cannot be known: Wan 2.2's experts of text-to-video look like Wan 2.1.
    expected = "wan2.1-t2v-14b" if name == "wan2.2-t2v-a14b" else name
    assert variant_of(config).name == expected


@pytest.mark.parametrize(
    ("kind", "index", "name", "like"),
    [
        ({}, {}, "wan2.1-t2v-tiny", "wan2.1-t2v-14b"),
        ({}, {"boundary_ratio": 0.875}, "wan2.2-t2v-tiny", "wan2.2-t2v-a14b"),
        (I2V, {"boundary_ratio": 0.9}, "wan2.2-i2v-tiny", "wan2.2-i2v-a14b"),
        (CLIP, {}, "wan2.1-i2v-tiny", "wan2.1-i2v-14b"),
        (FLF2V, {}, "wan2.1-flf2v-tiny", "wan2.1-flf2v-14b"),
        (TI2V, {"expand_timesteps": True}, "wan2.2-ti2v-tiny", "wan2.2-ti2v-5b"),
    ],
)
def test_a_shape_of_ones_own_has_the_interfaces_of_its_family(kind: dict, index: dict, name: str, like: str):
    found = variant_of(CONFIG | kind, index)
    published = VARIANTS[like]
    assert found.name == name
    assert found.dit == DiTShape.from_config(CONFIG | kind)
    assert replace(found, name="", dit=published.dit, sampling=published.sampling) == replace(
        published, name=""
    )
    assert found.sampling.flow_shift == published.sampling.scheduler_shift


def test_a_boundary_of_the_pipeline_is_kept():
    assert variant_of(CONFIG, {"boundary_ratio": 0.7}).boundary_ratio == 0.7


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="in_channels=32"):
        variant_of({**CONFIG, "in_channels": 32})
    with pytest.raises(ValueError, match=r"config lacks keys of a Wan model: patch_size, num_layers$"):
        variant_of({key: value for key, value in CONFIG.items() if key not in ("patch_size", "num_layers")})


def test_the_pictures_of_a_variant():
    assert {name: row.num_images for name, row in VARIANTS.items() if row.num_images} == {
        "wan2.1-i2v-14b": 1, "wan2.1-flf2v-14b": 2, "wan2.2-i2v-a14b": 1,
    }  # fmt: skip
    for row in VARIANTS.values():
        assert row.dit.condition_channels == (20 if row.num_images else 0)
        assert row.dit.image_len == (row.num_images * IMAGE_LEN if "clip" in row.conditions else 0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda row: row.name)
def test_official_sizes_can_be_sampled(variant: Variant):
    chosen = variant.sampling
    frames, height, width = variant.latent_size(chosen.num_frames, chosen.height, chosen.width)
    assert (frames - 1) * 4 + 1 == chosen.num_frames
    assert (height % 2, width % 2) == (0, 0)
    assert (height * variant.vae_stride[1], width * variant.vae_stride[2]) == (chosen.height, chosen.width)
    assert (chosen.guidance_scale_2 is None) == (variant.boundary_ratio is None)


def test_other_numbers_of_frames_count_as_the_next_smaller_4k_plus_1():
    variant = VARIANTS["wan2.1-t2v-1.3b"]
    sizes = [variant.latent_size(n, 8, 8)[0] for n in (1, 2, 4, 5, 8, 9, 81, 84)]
    assert sizes == [1, 1, 1, 2, 2, 3, 21, 21]
