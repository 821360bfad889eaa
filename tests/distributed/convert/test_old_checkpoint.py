"""`wands convert RUN --trust-pickle`: the converted pickles of earlier versions have the bytes that a run writes today."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from tests.support.runs import run_training
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import average_file, find_checkpoint
from wands.checkpoint.save import CheckpointSaver
from wands.checkpoint.step_folders import STATE_FILE
from wands.cli import main
from wands.convert import old_checkpoint
from wands.errors import CheckpointError
from wands.model.files.tensor_files import as_bytes, write_safetensors
from wands.train import loop

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "checkpoint"
LORA = ("lora.rank=2", "lora.alpha=4", "lora.targets=attention")


def save_both_ways(model: Path, out: Path, overrides: tuple[str, ...], ds: dict[str, Any]) -> None:
    """Train, and let DeepSpeed save each step into `out`/old too, as earlier versions of wands did."""

    class SaveTwice(CheckpointSaver):
        def _complete(self, state: Any, *args: Any) -> Path:
            step = super()._complete(state, *args)
            old = out / "old" / "checkpoints" / step.name
            for part, engine in self._engines.items():
                is_lora = self._run.recipe.lora is not None
                engine.save_checkpoint(
                    str(old), tag=part, save_latest=False, exclude_frozen_parameters=is_lora
                )
                if part in self._averages:
                    path = old / part / average_file(torch.distributed.get_rank())
                    write_safetensors(path, *self._averages[part].stored())
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                files = {str(path.relative_to(old)): path.stat().st_size for path in old.rglob("*.*")}
                values = replace(state, files=files).to_json()
                del values["hashes"], values["hash_of_this_file"]
                (old / STATE_FILE).write_text(json.dumps(values))
            return step

    try:
        with mock.patch.object(loop, "CheckpointSaver", SaveTwice):
            run_training(model, out, overrides, ds)
    finally:
        torch.compiler.set_stance("default")


def contents(path: Path) -> dict[str, Any]:
    """Dtype, shape and bytes of each tensor of a file, and its metadata."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        values = {name: json.loads(text) for name, text in file.metadata().items() if name != "format"}
    found = {name: (str(value.dtype), list(value.shape), digest(value)) for name, value in tensors.items()}
    return {**found, **values}


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(value).numpy()).hexdigest()[:12]


MUON = ("optim.name=muon", "optim.grad_clip=0")
FROZEN = ("model.trainable=['blocks.*.attn*']",)
CASES = [
    (1, 2, ("ema.decay=0.9", "ema.warmup=false", *FROZEN), {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (2, 0, (), {}),
            (2, 0, (*MUON, *FROZEN), {}),
            (2, 0, LORA, {}),
            (2, 1, FROZEN, {}),
            (2, 1, MUON, {}),
            (2, 2, LORA, {}),
            (2, 2, ("optim.name=adamw8bit",), {}),
            (2, 3, (), {"sub_group_size": 20_000}),
            (2, 3, ("ema.decay=0.9", *FROZEN), {}),
            (2, 3, LORA, {}),
            (2, 3, MUON, {"reduce_scatter": False}),
        )
    ),
]


@pytest.mark.parametrize(("world_size", "stage", "overrides", "more"), CASES)
def test_pickles_become_the_files_of_today(
    world_size: int,
    stage: int,
    overrides: tuple[str, ...],
    more: dict[str, Any],
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
):
    settings = ("train.max_steps=2", *overrides)
    worlds[world_size].run(save_both_ways, tiny_pipeline, tmp_path, settings, zero(stage, **more))
    wanted, old = (tmp_path / name / "checkpoints" / "step_00000002" for name in (".", "old"))
    with pytest.raises(CheckpointError, match=r"pickles.* run wands convert .* --trust-pickle"):
        find_checkpoint(old)
    old_checkpoint.main(old.parent.parent)
    for path in sorted((wanted / "transformer").iterdir()):
        assert contents(old / "transformer" / path.name) == contents(path)
    assert find_checkpoint(old, verify=True).state.step == 2
    assert list(old.with_name(f"{old.name}.pickles").rglob("*.pt"))  # kept


def test_a_pickle_runs_only_in_a_subprocess_that_was_asked_for(tmp_path: Path):
    """The pickle writes a file with the id of the process that opens it."""
    run, ran = shutil.copytree(FIXTURE, tmp_path / "run"), tmp_path / "ran"
    step = find_pickles(run)
    code = f"import os; open({str(ran)!r}, 'w').write(str(os.getpid()))"
    torch.save({"module": _Runs(code)}, next(step.rglob("*model_states.pt")))
    values = json.loads((step / STATE_FILE).read_text())
    values["files"] = {name: (step / name).stat().st_size for name in values["files"]}
    (step / STATE_FILE).write_text(json.dumps(values))
    for command in (
        ["export", str(run), "--out", str(tmp_path / "out")],
        ["convert", str(run), "--to", "diffusers"],
    ):
        assert CliRunner().invoke(main, command).exit_code == 2
    assert not ran.exists()
    result = CliRunner().invoke(main, ["convert", str(run), "--trust-pickle"])
    assert result.exit_code == 2
    assert "No pickle was changed" in result.output
    assert int(ran.read_text()) != os.getpid()
    assert find_pickles(run) == step


def find_pickles(run: Path) -> Path:
    return next(run.rglob("*model_states.pt")).parents[1]


class _Runs:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


@pytest.mark.slow
def test_a_run_without_pickles_is_one_sentence(tmp_path: Path):
    result = CliRunner().invoke(main, ["convert", str(tmp_path), "--trust-pickle"])
    assert result.exit_code == 2
    assert "contains no checkpoint with pickles" in result.output
    assert "Traceback" not in result.output
