"""The key cache of causal sample videos counts in a run's memory."""

from __future__ import annotations

import pytest

from wands.config.recipe import ObjectiveConfig
from wands.planning.sampling_load import sampling_load
from wands.sampling.requests import SampleRequest
from wands.variants import VARIANTS

VARIANT = VARIANTS["wan2.1-t2v-1.3b"]
REQUEST = SampleRequest(prompt="a", height=480, width=832, num_frames=81, guidance_scale=5.0)


@pytest.mark.parametrize(
    ("objective", "frames"),
    [
        (None, 0),
        (ObjectiveConfig(), 0),
        (ObjectiveConfig(name="teacher_forcing"), 2 * 21),  # all frames, for two predictions
        (ObjectiveConfig(name="teacher_forcing", window_frames=6, sink_frames=3), 2 * 12),
    ],
)
def test_cached_tokens(objective: ObjectiveConfig | None, frames: int):
    load = sampling_load([REQUEST], VARIANT, objective)
    assert load["cached_tokens"] == frames * 1560
    without = REQUEST.model_copy(update={"guidance_scale": 1.0})
    assert sampling_load([without], VARIANT, objective)["cached_tokens"] == frames * 1560 // 2
