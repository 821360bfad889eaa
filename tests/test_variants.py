"""The arithmetic of a DiT's shape against the model that diffusers builds, and against published numbers."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wands.variants import TINY, VARIANTS, DiTShape, legal_frames, variant_of

CONFIG = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16,
    "text_dim": 20, "freq_dim": 16, "ffn_dim": 40, "num_layers": 3,
}  # fmt: skip


def test_num_params_is_what_diffusers_builds():
    model = WanTransformer3DModel(**CONFIG)
    assert DiTShape.from_config(model.config).num_params == sum(p.numel() for p in model.parameters())


def test_num_params_of_the_published_models():
    # 1.419 B and 14.288 B: the sizes that official checkpoints have
    assert VARIANTS["wan2.1-t2v-1.3b"].dit.num_params == 1_418_996_800
    assert VARIANTS["wan2.1-t2v-14b"].dit.num_params == 14_288_491_584


@pytest.mark.parametrize("grid", [(3, 4, 6), (1, 2, 2)])
def test_forward_flops_are_what_torch_counts(grid: tuple[int, int, int]):
    f, h, w = grid
    model = WanTransformer3DModel(**CONFIG)
    # the counter knows plain matmuls, not the CPU's fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 16, f, 2 * h, 2 * w), torch.tensor([500.0]), torch.randn(1, 512, 20))
    counted = counter.get_total_flops()
    ours = DiTShape.from_config(model.config).forward_flops([f * h * w])
    assert ours == pytest.approx(counted, rel=1e-3)


def test_variant_is_read_from_the_config():
    shape = VARIANTS["wan2.1-t2v-1.3b"].dit
    config = {
        **CONFIG, "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960,
        "text_dim": 4096, "freq_dim": 256,
    }  # fmt: skip
    assert variant_of(config).name == "wan2.1-t2v-1.3b"
    assert variant_of(config).dit == shape
    assert variant_of(CONFIG).name == TINY
    with pytest.raises(ValueError, match="in_channels=36"):
        variant_of({**CONFIG, "in_channels": 36})


def test_legal_frames():
    assert [legal_frames(n) for n in (1, 2, 4, 5, 8, 9, 81, 84)] == [1, 1, 1, 5, 5, 9, 81, 81]
