"""Records, pipelines and checkpoints for the tests of `wands infer`."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import torch
from diffusers import WanTransformer3DModel

from tests.support.train_state import train_state

SMALL = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2}


def read_video(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def write_state(path: Path, weights: dict[str, torch.Tensor]) -> str:
    """Write the weights as the only rank of a ZeRO-0 run does. Return the hash of the file."""
    from wands.model.files.tensor_files import LazyTensor, write_safetensors

    path.parent.mkdir(parents=True, exist_ok=True)
    fragments = {name: [0, list(value.shape)] for name, value in weights.items()}
    tensors = [LazyTensor.of(f"{name}/master", value.flatten()) for name, value in weights.items()]
    header = json.dumps({"fragments": fragments, "frozen": {}})
    return write_safetensors(path, tensors, {"wands_state": header})


def make_checkpoint(run: Path, model: WanTransformer3DModel, step: int, **config: object) -> Path:
    """Write what `wands train` leaves after a ZeRO-0 step on one process."""
    from wands.checkpoint.checkpoint_files import state_file
    from wands.checkpoint.step_folders import STATE_FILE, step_name

    folder = run / "checkpoints" / step_name(step)
    weights = folder / "transformer" / state_file(0)
    digest = write_state(weights, model.state_dict())
    state = train_state(
        step=step,
        transformer_config={**model.config, **config},
        files={f"transformer/{weights.name}": weights.stat().st_size},
        hashes={f"transformer/{weights.name}": digest},
    )
    (folder / STATE_FILE).write_text(json.dumps(state.to_json()))
    (folder.parent / "latest").write_text(folder.name)
    return folder
