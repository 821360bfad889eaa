"""Convert checkpoints of earlier versions of wands, which contain DeepSpeed's pickles, to the format without pickles.

Opening a pickle can run any code. `wands convert RUN --trust-pickle` therefore runs this file in a subprocess, and nothing
else in wands opens these files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from wands.files import atomic_folder
from wands.model.files.checkpoint_files import (
    STATE_FILE,
    STATE_METADATA,
    TrainState,
    average_file,
    load_state,
    state_file,
)
from wands.model.files.tensor_files import LazyTensor, hash_file, write_safetensors

Place = tuple[int, int, int, list[int]]
"""(flat tensor, offset in the flat tensor, start in the parameter, number of values) of a fragment of a parameter."""


def convert_step(folder: Path) -> None:
    """Replace the pickles of one step folder by safetensors files. The old folder is kept until the new one is complete."""
    state = load_state(folder)
    with atomic_folder(folder, replaceable=STATE_FILE) as out:
        hashes = {}
        for part in state.parts:
            (out / part).mkdir()
            for rank in range(state.world_size if state.zero_stage else 1):
                tensors, values = _read_rank(folder / part, state, rank)
                name = f"{part}/{state_file(rank)}"
                hashes[name] = write_safetensors(out / name, tensors, {STATE_METADATA: json.dumps(values)})
            for rank in range(state.world_size):
                name = f"{part}/{average_file(rank)}"
                if (folder / name).is_file():
                    (out / name).write_bytes((folder / name).read_bytes())
                    hashes[name] = hash_file(out / name)
        files = {name: (out / name).stat().st_size for name in hashes}
        (out / STATE_FILE).write_text(
            json.dumps(replace(state, files=files, hashes=hashes).to_json()), encoding="utf-8"
        )


def _read_rank(folder: Path, state: TrainState, rank: int) -> tuple[list[LazyTensor], dict[str, Any]]:
    stage = state.zero_stage
    model = _load(
        folder,
        f"*zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "*mp_rank_00_model_states.pt",
    )
    zero = (
        _load(folder, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        if stage
        else {}
    )
    base = zero.get("optimizer_state_dict") or zero.get("base_optimizer_state") or model["optimizer"]
