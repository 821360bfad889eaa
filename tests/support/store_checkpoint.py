"""Write `tests/fixtures/checkpoint`: step 3 of a LoRA run of two ranks at ZeRO-3, with a moving average.

python -m tests.support.store_checkpoint
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.support.runs import run_training
from tests.support.world import run_world
from wands.checkpoint.checkpoint_files import find_checkpoint

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "fixtures" / "checkpoint"
VARIANT = "wan2.1-t2v-1.3b"
SETTINGS = (
    "train.max_steps=6",
    "lora.rank=2",
    "lora.alpha=4",
    "lora.targets=attention",
    "ema.decay=0.9",
)


def store(scratch: Path) -> None:
    from make_tiny_pipeline import build_tiny_pipeline

    model = scratch / VARIANT
    build_tiny_pipeline(model, size="test", vae_dir="random", variant=VARIANT)
    stage = {"zero_optimization": {"stage": 3}}
    run_world(2, run_training, model, scratch / "run", (*SETTINGS, "checkpoint.every=3"), stage)
    folder, state = find_checkpoint(scratch / "run" / "checkpoints" / "step_00000003")
    recipe = {**state.recipe, "output_dir": "runs/stored"}
    recipe["model"] = {**recipe["model"], "path": f"/models/{VARIANT}"}
    # The random weights of the base differ between kinds of CPU, so their digest is left out.
    state = replace(state, recipe=recipe, base=f"/models/{VARIANT}", base_fingerprint=None)
    state.write(folder, state.hashes)
    shutil.rmtree(STORED, ignore_errors=True)
    shutil.copytree(folder, STORED / "checkpoints" / folder.name)
    (STORED / "checkpoints" / "latest").write_text(folder.name)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts"))
    with tempfile.TemporaryDirectory() as scratch:
        store(Path(scratch))
