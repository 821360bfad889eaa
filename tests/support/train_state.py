"""A training state without a training."""

from __future__ import annotations

from typing import Any

from wands.checkpoint.checkpoint_files import TrainState
from wands.config.recipe import Recipe


def train_state(**changes: Any) -> TrainState:
    """Return the state of step 7 of a full finetune, with other values."""
    values: dict[str, Any] = {
        "step": 7,
        "epoch": 0,
        "world_size": 1,
        "zero_stage": 0,
        "variant": "wan2.1-t2v-tiny",
        "parts": ["transformer"],
        "transformer_config": {},
        "data_fingerprint": "",
        "data_summary": {},
        "recipe": Recipe().model_dump(mode="json"),
        "base": "",
        "loss": [],
        "files": {},
        "hashes": {},
        "data_contents": "",
        "base_fingerprint": None,
        "ds_config": {},
        "data_start": (0, 0),
        "objective": {"name": "flow_matching", "version": 1},
    }
    return TrainState(**(values | changes))
