"""Mock data answer like the cache when only some frames are asked for; the rest is in test_collate.py."""

from __future__ import annotations

import pytest
import torch

from wands.config.recipe import MockConfig
from wands.data.datasets import MockDataset
from wands.variants import VARIANTS

DATA = MockDataset(
    MockConfig(num_samples=3, shapes=[(1, 2, 4), (4, 4, 2)], text_lens=[2, 3]),
    VARIANTS["wan2.1-t2v-1.3b"].dit,
    seed=0,
)


def test_the_shape_told_is_the_shape_read():
    for i in range(3):
        assert DATA.read(i).latents.shape == (16, *DATA.latent_shape(i))


@pytest.mark.parametrize("frames", [(0, 4), (0, 1), (1, 3), (3, 4), (2, 2), (0, 0)])
def test_frames_not_asked_for_are_zero(frames: tuple[int, int]):
    """So a rank that asks for the wrong frames trains on zeros, which tests of parity see."""
    whole = DATA.read(1)
    part = DATA.read(1, frames)
    first, end = frames
    assert torch.equal(part.latents[:, first:end], whole.latents[:, first:end])
    assert torch.count_nonzero(part.latents) == torch.count_nonzero(whole.latents[:, first:end])
    assert torch.equal(part.text_embeds, whole.text_embeds)


def test_frames_outside_the_sample_are_a_programmer_mistake():
    with pytest.raises(AssertionError):
        DATA.read(1, (0, 5))
