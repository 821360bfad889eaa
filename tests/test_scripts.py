"""The scripts that people run: loss_compare judges."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import loss_compare
import pytest
from click.testing import CliRunner

from wands.cli import main

MOCK = "data.mock={num_samples: 5, shapes: [[2,4,4],[1,4,6],[2,2,2]], text_lens: [5, 9]}"


def train(recipe: str, settings: list[str]) -> None:
    done = CliRunner().invoke(main, ["train", recipe, *(part for one in settings for part in ("--set", one))])
    assert done.exit_code == 0, done.output


def test_loss_compare_accepts_packing_and_refuses_another_seed(
    tiny_pipeline: Path,
    tmp_path: Path,
    new_world,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The first run is started by the script; the others, in the same way otherwise, by us: torchrun takes its time."""
    as_it_is, runs = loss_compare.run, []

    def run(name: str, args: Namespace, settings: list[str]) -> Path:
        if not runs:
            folder = as_it_is(name, args, settings)
        elif settings == ["train.seed=0"]:
            folder = runs[0]  # that is the default
        else:
            folder = args.out / name
            more = [*settings, "train.log_samples=true", f"output_dir={folder}"]
            new_world(1, train, args.recipe, [*args.both, *more])
        runs.append(folder)
        return folder

    def compare(a: str, b: str, out: Path) -> int:
        both = (
            MOCK,
            f"model.path={tiny_pipeline}",
            "train.max_steps=3",
            "packing.max_tokens=24",
            "precision.compute=fp32",
            "optim.lr=1e-3",
        )
        settings = [part for value in both for part in ("--both", value)]
        command = ["loss_compare.py", "tiny", *settings, "--a", a, "--b", b, "--out", str(out)]
        monkeypatch.setattr(sys, "argv", command)
        return loss_compare.main()

    monkeypatch.setattr(loss_compare, "run", run)
    assert compare("packing.enabled=true", "packing.enabled=false", tmp_path / "same") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]) == 3
    assert (tmp_path / "same" / "compare.png").stat().st_size > 1000
    assert compare("train.seed=0", "train.seed=1", tmp_path / "other") == 1
    assert "largest relative difference" in capsys.readouterr().out
    assert len(set(runs)) == 3
