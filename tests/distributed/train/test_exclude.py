"""Excluded samples leave gaps: all other clips keep their steps and their noise, also from the middle of a run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.train.test_datasets import write_cache
from tests.distributed.watch.test_bad_steps import events, watch, zero
from tests.support.runs import losses, make_run, run_training, weights
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.data.sampler import PlanSampler
from wands.errors import ConfigError
from wands.train.summary import start_block

OUT = "data.exclude=[mock-000001, mock-000004]"  # one bin, with others in the steps 2, 3, 5 and 8


def clips_of(out: Path) -> set[tuple[Any, ...]]:
    names = ("step", "sample_id", "repeat_index", "epoch", "sigma")
    lines = (line for path in out.glob("samples-rank*.jsonl") for line in path.read_text().splitlines())
    return {tuple(json.loads(line)[name] for name in names) for line in lines}


@pytest.mark.slow
def test_the_other_clips_keep_their_steps_and_their_noise(tiny_pipeline: Path, tmp_path: Path, run_world):
    """A run that excludes clips after its second step, stopped once more after its fourth."""
    common = ("train.max_steps=6", "train.log_samples=true", "checkpoint.every=2", "checkpoint.keep=9")

    def run(name: str, *overrides: str, resume: bool | Path = False) -> list[dict[str, Any]]:
        return run_world(
            2, run_training, tiny_pipeline, tmp_path / name, (*common, *overrides), zero(2), resume
        )[0]

    whole = run("run")
    every_clip = clips_of(tmp_path / "run")
    without = run("run", OUT, resume=tmp_path / "run" / "checkpoints" / "step_00000002")
    left = clips_of(tmp_path / "run")
    after = weights(tmp_path / "run")
    names = {"mock-000001", "mock-000004"}
    assert left == {clip for clip in every_clip if clip[0] <= 2 or clip[1] not in names}
    assert losses(without)[:2] == losses(whole)[:2]
    assert losses(without)[2:] != losses(whole)[2:]
    assert [row["samples"] for row in without] == [3, 4, 2, 3, 2, 3]
    again = run("run", OUT, resume=tmp_path / "run" / "checkpoints" / "step_00000004")
    assert losses(again) == losses(without)
    assert all(torch.equal(value, after[name]) for name, value in weights(tmp_path / "run").items())
    assert find_checkpoint(tmp_path / "run").state.data_summary["num_samples"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("enabled", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_step_without_clips_changes_nothing(enabled: str, tiny_pipeline: Path, tmp_path: Path, run_world):
    overrides = (
        *("train.max_steps=4", "ema.decay=0.9", "optim.weight_decay=0.5", "train.log_samples=true"),
        *("data.exclude=[mock-000002, mock-000003, mock-000005]", f"packing.enabled={enabled}"),
    )
    ranks = run_world(2, watch, tiny_pipeline, tmp_path, overrides, zero(2), 1.0)
    assert ranks[0] == ranks[1] == [(empty, empty, empty) for empty in (True, False, False, True)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples"] for row in rows] == [0, 4, 4, 0]
    state = find_checkpoint(tmp_path).state
    assert [step for step, _ in state.loss] == [2, 3]
    assert state.bad_steps["skipped"] == []
    assert not events(tmp_path)


def test_the_plan_without_samples_is_the_plan_with_gaps(tiny_pipeline: Path, tmp_path: Path):
    """The reference takes the samples out of the steps of a sampler that knows nothing of them."""
    settings = ("train.max_steps=12", "data.mock.num_samples=40", "train.bins_per_step=4")
    every = make_run(tiny_pipeline, tmp_path, settings, world_size=1).schedule.sampler
    excluded = {every.keys[i] for i in range(0, 40, 3)}
    run = make_run(tiny_pipeline, tmp_path, (*settings, f"data.exclude={sorted(excluded)}"), world_size=1)
    sampler: PlanSampler = run.schedule.sampler
    assert (sampler.total_steps, sampler.steps_per_epoch) == (every.total_steps, every.steps_per_epoch)
    for ours, theirs in zip(sampler.iterate(), every.iterate(), strict=True):
        assert ours.bins == tuple(tuple(i for i in bin if i % 3) for bin in theirs.bins)
        assert ours.mean_samples == theirs.mean_samples
        assert ours.num_samples == sum(map(len, ours.bins))
    assert "data.exclude leaves out 14 samples" in start_block(run)


def test_wrong_keys_are_refused(tiny_pipeline: Path, tmp_path: Path):
    def run(*overrides: str) -> Any:
        return make_run(tiny_pipeline, tmp_path / "run", overrides, world_size=1)

    with pytest.raises(
        ConfigError, match=r"data\.exclude=mock-00003 is not the key .* did you mean mock-000003\?"
    ):
        run("data.exclude=[mock-000001, mock-00003]")
    with pytest.raises(ConfigError, match=r"data\.exclude names every sample"):
        run(f"data.exclude={[f'mock-{number:06d}' for number in range(7)]}")
    with pytest.raises(
        ConfigError, match=r"data\.exclude='.*missing\.txt' is invalid: .*cannot be read \(No such file"
    ):
        run(f"data.exclude={tmp_path / 'missing.txt'}")
    keys = tmp_path / "bad clips.txt"
    keys.write_text("mock-000001\n\nmock-000004\n")
    of_file = run(f"data.exclude={keys}")
    of_list = run(OUT)
    assert of_file.recipe == of_list.recipe  # every rank and the checkpoint know the keys, not the path
    assert of_file.state.data_fingerprint == run().state.data_fingerprint


def test_keys_of_the_other_side_of_a_split_are_known(tiny_pipeline: Path, tmp_path: Path):
    write_cache(tmp_path / "cache", tiny_pipeline, "abcdefg", 1)
    settings = (
        "data.mock=null",
        f"data.cache={tmp_path / 'cache'}",
        "data.exclude=[a, b, c]",
        "data.holdout=0.4",
    )
    for split in ("train", "holdout"):
        run = make_run(tiny_pipeline, tmp_path / "run", (*settings, f"data.split={split}"), world_size=1)
        names = {
            run.data.keys[i] for plan in run.schedule.sampler.iterate() for bin in plan.bins for i in bin
        }
        assert names == set(run.data.keys) - {"a", "b", "c"}


def test_the_state_counts_the_licences_of_the_trained_clips(tiny_pipeline: Path, tmp_path: Path):
    """In two sources with repeats, each clip counts once, and excluded clips do not count."""
    cc = dict.fromkeys("abcd", "CC-BY-4.0")
    mit = dict.fromkeys("xy", "MIT")
    write_cache(tmp_path / "one", tiny_pipeline, "abcdef", 1, cc)
    write_cache(tmp_path / "two", tiny_pipeline, "axyz", 2, mit)
    write_cache(tmp_path / "bare", tiny_pipeline, "abc", 1)
    write_cache(
        tmp_path / "many",
        tiny_pipeline,
        "abcdefghijklmnopqrstuvwxyz",
        1,
        {x: x for x in "abcdefghijklmnopqrstuvw"},
    )

    def licenses(*names: str) -> list[list[Any]]:
        paths = ", ".join(f"{{path: {tmp_path / name}, repeat: 2}}" for name in names)
        settings = ("data.mock=null", f"data.sources=[{paths}]", "data.exclude=[b, c]")
        run = make_run(tiny_pipeline, tmp_path / "run", settings, world_size=1)
        summary = json.loads(json.dumps(run.state.to_json()))["data_summary"]
        total = sum(number for _, number in summary["licenses"])
        assert total in (0, summary["num_samples"])
        return summary["licenses"]

    assert licenses("one", "two") == [["CC-BY-4.0", 2], ["MIT", 2], ["not stated", 4]]
    assert licenses("bare") == []
    assert licenses("many")[20:] == [["others", 1], ["not stated", 3]]
    assert make_run(tiny_pipeline, tmp_path / "run", world_size=1).state.data_summary["licenses"] == []
