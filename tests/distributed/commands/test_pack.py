"""`wands tools pack`: the file holds every sample once, adds up, and is what training forwards."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.commands import pack
from tests.support.runs import BASE, make_run, run_training
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.resume import check_resumable
from wands.cli import main
from wands.commands.pack import FORMAT
from wands.errors import CheckpointError, ConfigError, DataError, WandsError
from wands.texts import safe_lines

KEYS = [f"mock-{i:06d}" for i in range(7)]
TOKENS = [8, 12, 2, 24, 6, 16, 9]  # of the mock data of tests/support/runs.py


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *steps = map(json.loads, path.read_text().splitlines())
    return header, steps


def settings(model: Path, *more: str) -> list[str]:
    return [*BASE, f"model.path={model}", *more]


@pytest.mark.parametrize("epoch", [0, 2])
def test_the_file_is_whole_and_adds_up(tiny_pipeline: Path, tmp_path: Path, epoch: int):
    out = tmp_path / "new" / "plan.jsonl"
    pack(None, overrides=settings(tiny_pipeline), out=out, epoch=epoch)
    header, steps = read(out)
    assert header["format"] == FORMAT
    assert header["epoch"] == epoch
    assert header["num_samples"] == 7
    assert header["num_tokens"] == sum(TOKENS)
    assert len(steps) == header["num_steps"] == 2
    assert [step["step"] for step in steps] == [2 * epoch, 2 * epoch + 1]
    assert header["first_step"] == 2 * epoch
    bins = [bin for step in steps for bin in step["bins"]]
    assert header["num_bins"] == len(bins) == 4
    assert sorted(key for bin in bins for key in bin["keys"]) == KEYS
    a, b = header["cost"]
    costs = [sum(a * n + b * n * n for n in bin["tokens"]) for bin in bins]
    for bin, cost in zip(bins, costs, strict=True):
        assert [KEYS[i] for i in bin["indices"]] == bin["keys"]
        assert [TOKENS[i] for i in bin["indices"]] == bin["tokens"]
        assert sum(bin["tokens"]) <= header["max_tokens"] == 24
        assert bin["cost"] == pytest.approx(cost / (sum(costs) / 4), abs=1e-4)
    for step in steps:
        assert len(step["bins"]) == header["bins_per_step"] == 2
        assert step["num_tokens"] == sum(n for bin in step["bins"] for n in bin["tokens"])
        assert step["num_samples"] == sum(len(bin["keys"]) for bin in step["bins"])
        assert step["fill"] == pytest.approx(step["num_tokens"] / 48, abs=1e-4)
    slowest = max(costs[:2]) + max(costs[2:])
    assert header["efficiency"] == {"2": pytest.approx(sum(costs) / 2 / slowest)}
    assert header["fill"] == pytest.approx(steps[0]["num_tokens"] / 48)  # the last step does not count


def test_the_plan_is_the_job_s_at_any_dp_size(tiny_pipeline: Path, tmp_path: Path):
    more = ("train.bins_per_step=4",)
    pack(None, overrides=settings(tiny_pipeline, *more), out=tmp_path / "plan")
    header, steps = read(tmp_path / "plan")
    for world_size in (1, 2, 4):
        run = make_run(tiny_pipeline, tmp_path / "run", more, world_size=world_size)
        assert run.identity.fingerprint == header["data_fingerprint"]
        planned = [run.schedule.sampler.step_plan(step["step"]).bins for step in steps]
        assert planned == [tuple(tuple(bin["indices"]) for bin in step["bins"]) for step in steps]


def _train(model: str, folder: str) -> None:
    run_training(Path(model), Path(folder), ("train.epochs=2", "train.log_samples=true"))


def test_training_forwards_exactly_these_bins(tiny_pipeline: Path, tmp_path: Path, run_world: Any):
    planned = {}
    for epoch in (0, 1):
        pack(None, overrides=settings(tiny_pipeline), out=tmp_path / f"plan{epoch}", epoch=epoch)
        _, steps = read(tmp_path / f"plan{epoch}")
        planned |= {step["step"] + 1: Counter(tuple(bin["keys"]) for bin in step["bins"]) for step in steps}
    run_world(2, _train, str(tiny_pipeline), str(tmp_path / "run"))
    assert len(planned) == 4
    assert _forwarded(tmp_path / "run", 4) == planned


def _train_plan(model: str, folder: str, plan: str | None, resume: bool = False) -> None:
    settings = () if plan is None else (f"packing.plan={plan}",)
    more = ("train.epochs=3", "train.log_samples=true", "checkpoint.every=3", *settings)
    run_training(Path(model), Path(folder), more, resume=resume)


@pytest.mark.slow
def test_training_follows_the_file(tiny_pipeline: Path, tmp_path: Path, run_world: Any):
    """The bins of the second epoch in another order: a file that wands would not have planned."""
    plan = tmp_path / "plan.jsonl"
    pack(None, overrides=settings(tiny_pipeline), out=plan, epoch=1)
    header, steps = read(plan)
    bins = [step["bins"] for step in steps]
    steps[0]["bins"] = [bins[1][0], bins[0][1]]
    steps[1]["bins"] = [bins[0][0], bins[1][1]]
    plan.write_text("".join(json.dumps(line) + "\n" for line in (header, *steps)))

    run_world(2, _train_plan, str(tiny_pipeline), str(tmp_path / "run"), str(plan))
    forwarded = _forwarded(tmp_path / "run", 6)
    for number, step in enumerate(steps, start=3):
        assert forwarded[number] == Counter(tuple(bin["keys"]) for bin in step["bins"])
    run_world(2, _train_plan, str(tiny_pipeline), str(tmp_path / "plain"), None)
    plain = _forwarded(tmp_path / "plain", 6)
    assert [forwarded[n] == plain[n] for n in range(1, 7)] == [True, True, False, False, True, True]
    # In the middle of this epoch, the run resumes with the same file and refuses to do so without it.
    (tmp_path / "run" / "checkpoints" / "step_00000006").rename(tmp_path / "set aside")
    run_world(2, _train_plan, str(tiny_pipeline), str(tmp_path / "run"), str(plan), True)
    assert _forwarded(tmp_path / "run", 6) == forwarded
    saved = find_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000003")[1]
    with pytest.raises(CheckpointError, match=r"packing\.plan=None must equal the checkpoint's value"):
        check_resumable(saved, replace(make_run(tiny_pipeline, tmp_path).state, step=3), "run")


def _forwarded(run: Path, num_steps: int) -> dict[int, Counter[tuple[str, ...]]]:
    found: dict[int, Counter[tuple[str, ...]]] = {step: Counter() for step in range(1, num_steps + 1)}
    for rank in (0, 1):  # a bin of the two of a step on each
        rows = [json.loads(line) for line in (run / f"samples-rank{rank}.jsonl").open()]
        for step, bins in found.items():
            bins[tuple(row["sample_id"] for row in rows if row["step"] == step)] += 1
    return found


def test_a_file_that_does_not_fit_is_refused(tiny_pipeline: Path, tmp_path: Path):
    plan = tmp_path / "plan.jsonl"
    pack(None, overrides=settings(tiny_pipeline), out=plan)
    header, steps = read(plan)
    first, second = (step["bins"] for step in steps)

    def error(*lines: Any, overrides: tuple[str, ...] = ()) -> str:
        plan.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError) as caught:
            make_run(tiny_pipeline, tmp_path / "run", (f"packing.plan={plan}", *overrides))
        text = str(caught.value)
        assert text.endswith("write the file again with wands tools pack --out and this recipe.")
        return text

    other = "has other samples, steps or bins than epoch 0 of this run"
    assert other in error({**header, "format": "wands-plan-0"}, *steps)
    assert other in error(header, *steps, overrides=("data.mock.num_samples=6",))
    assert other in error(header, steps[0])
    assert other in error(header, *steps, overrides=("train.bins_per_step=1",))
    assert other in error(header, {"bins": [first[0], first[0]]}, {"bins": second})
    whole = {"indices": [i for bin in (*first, *second) for i in bin["indices"]]}
    assert "has a bin with more than packing.max_tokens=24" in error(
        header, {"bins": [whole, {"indices": []}]}, {"bins": [{"indices": []}] * 2}
    )
    assert "cannot be read ('bins')" in error(header, {"step": 0})
    assert "cannot be read" in error()
    assert "cannot be read" in error(["a list"], *steps)


def test_the_option_sets_the_key(tiny_pipeline: Path, tmp_path: Path):
    options = [part for item in settings(tiny_pipeline) for part in ("--set", item)]
    result = CliRunner().invoke(main, ["train", "--dry-run", "--plan", str(tmp_path / "no"), *options])
    assert result.exit_code == 2
    problem = f"packing.plan={tmp_path / 'no'} cannot be read (No such file or directory)"
    assert safe_lines(problem) in result.stderr


def test_the_command_says_what_it_planned(tiny_pipeline: Path, tmp_path: Path):
    out = tmp_path / "plan.jsonl"
    options = [part for item in settings(tiny_pipeline) for part in ("--set", item)]
    result = CliRunner().invoke(main, ["tools", "pack", "--out", str(out), "--epoch", "1", *options])
    assert result.exit_code == 0, result.output
    assert "epoch 1, seed 0: 7 samples, 77 tokens" in result.output
    assert "4 of at most 24 tokens" in result.output
    assert "starts at step 2" in result.output
    assert safe_lines(str(out)) in result.output
    assert len(out.read_text().splitlines()) == 3


def test_what_cannot_be_planned_is_refused_and_nothing_written(tiny_pipeline: Path, tmp_path: Path):
    out = tmp_path / "plan.jsonl"
    with pytest.raises(DataError, match="max_tokens=20 is less than sample mock-000003"):
        pack(None, overrides=settings(tiny_pipeline, "packing.max_tokens=20"), out=out)
    (tmp_path / "file").touch()
    with pytest.raises(WandsError, match="cannot be written"):
        pack(None, overrides=settings(tiny_pipeline), out=tmp_path / "file" / "plan.jsonl")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_held_out_clips_and_windows_are_in_the_plan(tiny_pipeline: Path, tmp_path: Path):
    more = ("data.holdout=0.4", "packing.buffer_size=2")
    sides = {}
    for split in ("train", "holdout"):
        overrides = settings(tiny_pipeline, *more, f"data.split={split}")
        text = pack(None, overrides=overrides, out=tmp_path / split)
        header, steps = read(tmp_path / split)
        sides[split] = {key for step in steps for bin in step["bins"] for key in bin["keys"]}
        num = len(sides[split])
        other = 7 - len(sides[split])
        assert (header["split"], header["holdout"], header["buffer_size"]) == (split, 0.4, 2)
        assert header["sources"] == [
            {
                "path": "mock",
                "num_samples": num,
                "num_other_side": other,
                "num_gap": 0,
                "num_duplicates": 0,
                "repeat": 1.0,
            }
        ]
        assert header["num_samples"] == num
        assert header["num_tokens"] == sum(TOKENS[KEYS.index(key)] for key in sides[split])
        said = (
            f"{num} clips to train on, {other} held out"
            if split == "train"
            else f"{num} held-out clips, {other} left out"
        )
        assert f"split {split} (data.holdout=0.4): {said}" in text
    assert sorted([*sides["train"], *sides["holdout"]]) == KEYS
    assert all(sides.values())
