"""A resumed run prints what changed, refuses other data and another base, and finds a base that only moved."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.train.test_datasets import write_cache
from tests.support.runs import make_run
from wands.checkpoint.epoch_files import EPOCH_FILE, epoch_values
from wands.errors import CheckpointError
from wands.files import write_text
from wands.model.files.tensor_files import hash_file
from wands.train.prepare import load_run
from wands.train.prepared_run import PreparedRun
from wands.train.summary import start_block

LORA = ("lora.rank=4", "data.mock={num_samples: 4, shapes: [[1,4,4]]}")


def save_state(run: PreparedRun, number: int = 1, **changes: None) -> None:
    """The files of a checkpoint that are read before the weights. `changes`: values of fields of `TrainState`."""
    step = run.output_dir / "checkpoints" / f"step_{number:08d}"
    plan = run.schedule.sampler.step_plan(number - 1)
    write_text(step / EPOCH_FILE, json.dumps(epoch_values(run.data.keys, run.data.checksums, plan)))
    state = replace(run.state, step=number, loss=[(1, 0.5)], **changes)
    state.write(step, {EPOCH_FILE: hash_file(step / EPOCH_FILE)})


def resume(model: Path, out: Path, *overrides: str, deepspeed: Path | None = None) -> PreparedRun:
    settings = (f"model.path={model}", f"output_dir={out}", "train.max_steps=9", *overrides)
    options = {"world_size": 1, "device_type": "cpu", "encoders": lambda path: {}, "resume": "auto"}
    return load_run(None, deepspeed, settings, **options)


def first_run(model: Path, out: Path, *overrides: str) -> PreparedRun:
    out.mkdir()
    return resume(model, out, *overrides)


def test_every_change_is_in_the_start_block(tiny_pipeline: Path, tmp_path: Path):
    save_state(first_run(tiny_pipeline, tmp_path / "run", *LORA))
    assert "checkpoint:" not in start_block(resume(tiny_pipeline, tmp_path / "run", *LORA))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": false}}')
    changes = ("optim.lr=2e-6", "flow.flow_shift=5", "precision.compute=fp32", "lora.dropout=0.1", "ema={}")
    run = resume(tiny_pipeline, tmp_path / "run", *LORA, *changes, deepspeed=tmp_path / "ds.json")
    lines = [line.strip().removeprefix("changed").strip() for line in start_block(run).splitlines()]
    assert {
        "optim.lr=2e-06 (checkpoint: 1e-05)",
        "flow.flow_shift=5.0 (checkpoint: 3.0)",
        "precision.compute=fp32 (checkpoint: bf16)",
        "lora.dropout=0.1 (checkpoint: 0.0)",
        "DeepSpeed.zero_optimization.overlap_comm=false (checkpoint: null)",
    } <= set(lines)
    assert sum("(checkpoint: " in line for line in lines) < 12


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.99])
def test_a_damaged_plan_of_the_epoch_is_damage_of_its_checkpoint(
    place: float, tiny_pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The hash is compared before the file is parsed, so that the run resumes from the older checkpoint."""
    run = first_run(tiny_pipeline, tmp_path / "run", *LORA)
    for number in (1, 2):
        save_state(run, number)
    write_text(run.output_dir / "checkpoints" / "latest", "step_00000002")
    assert resume(tiny_pipeline, tmp_path / "run", *LORA).start_step == 2
    path = run.output_dir / "checkpoints" / "step_00000002" / EPOCH_FILE
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    assert resume(tiny_pipeline, tmp_path / "run", *LORA).start_step == 1
    assert any("epoch.json is damaged" in text for text in caplog.messages)


def test_the_parameters_without_decay_may_not_change(tiny_pipeline: Path, tmp_path: Path):
    save_state(first_run(tiny_pipeline, tmp_path / "run", *LORA))
    with pytest.raises(
        CheckpointError, match=r"optim\.decay_norms=False must equal the checkpoint's value True"
    ):
        resume(tiny_pipeline, tmp_path / "run", *LORA, "optim.decay_norms=false")


@pytest.fixture(scope="module")
def caches(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        write_cache(folder / name, tiny_pipeline, "abcdefg", seed)
    return folder


def test_other_contents_under_the_same_keys_are_refused(tiny_pipeline: Path, caches: Path, tmp_path: Path):
    run = first_run(tiny_pipeline, tmp_path / "run", f"data.cache={caches / 'a'}")
    save_state(run)
    resume(tiny_pipeline, tmp_path / "run", f"data.cache={caches / 'again'}")  # only moved
    with pytest.raises(
        CheckpointError, match="same names as the checkpoint's samples but different contents"
    ):
        resume(tiny_pipeline, tmp_path / "run", f"data.cache={caches / 'b'}")


def test_contents_are_those_of_the_used_samples(tiny_pipeline: Path, caches: Path, tmp_path: Path):
    def contents(*overrides: str) -> str:
        return make_run(
            tiny_pipeline, tmp_path, ("data.mock=null", *overrides), world_size=1
        ).identity.contents

    found = [
        contents(f"data.cache={caches / 'a'}"),
        contents(f"data.cache={caches / 'b'}"),
        contents(f"data.cache={caches / 'a'}", "data.holdout=0.4"),
        contents(f"data.sources=[{{path: {caches / 'a'}}}, {{path: {caches / 'b'}}}]"),
        contents("data.mock={num_samples: 4, shapes: [[2,4,4]]}"),
        contents("data.mock={num_samples: 4, shapes: [[2,4,4]], text_lens: [7]}"),
    ]
    assert len(set(found)) == len(found)
    assert contents(f"data.cache={caches / 'again'}", "data.holdout=0.4") == found[2]


def copy_model(model: Path, to: Path, change: int | None = None) -> Path:
    """A copy of the pipeline. `change`: number of the tensor of the DiT that has other values."""
    shutil.copytree(model, to)
    file = next((to / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    for name in sorted(weights)[change : change + 1] if change is not None else ():
        weights[name] = weights[name] + 1.0
    # In two files, of which an index says what they contain: another layout of the same weights.
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file(
            {name: weights[name].contiguous() for name in part},
            file.with_name(f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"),
            {"format": "pt"},
        )
    file.unlink()
    return to


def test_the_base_of_a_lora_is_known_by_its_weights(tiny_pipeline: Path, tmp_path: Path):
    run = first_run(tiny_pipeline, tmp_path / "run", *LORA)
    save_state(run)
    name = tiny_pipeline.name
    moved = copy_model(tiny_pipeline, tmp_path / "moved" / "renamed")
    resume(moved, tmp_path / "run", *LORA)
    for number in (0, -1):
        other = copy_model(tiny_pipeline, tmp_path / f"changed{number}" / name, number % 60)
        with pytest.raises(CheckpointError, match="different weights than the base of the checkpoint's LoRA"):
            resume(other, tmp_path / "run", *LORA)
    save_state(run, base_fingerprint=None)  # as of random weights: the name decides
    resume(tmp_path / "changed0" / name, tmp_path / "run", *LORA)
    with pytest.raises(CheckpointError, match=r"model\.path=.*renamed must equal"):
        resume(moved, tmp_path / "run", *LORA)
    # A full finetune has all weights in its checkpoints.
    full = LORA[1:]
    save_state(first_run(tiny_pipeline, tmp_path / "full", *full))
    resume(tmp_path / "changed0" / name, tmp_path / "full", *full)


def test_a_merged_lora_is_known_by_its_weights(tiny_pipeline: Path, tmp_path: Path):
    def lora(path: Path, value: float) -> str:
        path.parent.mkdir()
        layer = "transformer.blocks.0.attn1.to_q"
        width = load_file(next((tiny_pipeline / "transformer").glob("*.safetensors")))[
            "blocks.0.attn1.to_q.weight"
        ].shape[0]
        save_file(
            {
                f"{layer}.lora_A.weight": torch.full((2, width), value),
                f"{layer}.lora_B.weight": torch.ones(width, 2),
            },
            path,
        )
        return f"model.merge_loras=[{{path: {path}}}]"

    one = lora(tmp_path / "a" / "x.safetensors", 0.5)
    save_state(first_run(tiny_pipeline, tmp_path / "run", *LORA, one))
    resume(tiny_pipeline, tmp_path / "run", *LORA, lora(tmp_path / "b" / "y.safetensors", 0.5))
    for other in (lora(tmp_path / "c" / "x.safetensors", 0.25), one.replace("}", ", scale: 0.5}"), LORA[0]):
        with pytest.raises(CheckpointError, match="different weights than the base"):
            resume(tiny_pipeline, tmp_path / "run", *LORA, other)


def test_the_optimizer_of_the_json_may_not_change(tiny_pipeline: Path, tmp_path: Path):
    from wands.checkpoint.resume import check_resumable

    state = first_run(tiny_pipeline, tmp_path / "run", *LORA).state
    config = json.loads(re.sub('"AdamW"', '"SGD"', json.dumps(state.ds_config)))
    check_resumable(state, state, "x")
    with pytest.raises(CheckpointError, match="the optimizer SGD must equal"):
        check_resumable(state, replace(state, ds_config=config), "x")
