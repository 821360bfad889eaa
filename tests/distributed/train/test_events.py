"""events.jsonl: what happened to a run, also before a resume, in the model card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.watch.test_bad_steps import SKIP, damaged_clip
from tests.support.run_folder import write_rows
from tests.support.runs import Hooked, run_training
from wands.commands.export import export
from wands.config.options import ExportOptions
from wands.export.export_record import RECORD_FILE
from wands.export.model_card import FolderContents, build_card
from wands.files import read_rows
from wands.plugin import Plugin

SETTINGS = ("checkpoint.every=2", "checkpoint.keep=9")


def train_until_a_crash(
    model: Path, out: Path, step: int, overrides: tuple[str, ...], resume: bool = False
) -> None:
    def fail(number: int) -> None:
        if number == step:
            raise OSError(5, "the disk burns")

    with pytest.raises(OSError, match="burns"):
        run_training(model, out, overrides, resume=resume, plugin=Plugin(objective=Hooked(before=fail)))


def train_with_a_stop(model: Path, out: Path, overrides: tuple[str, ...]) -> None:
    """Stop after the first step."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "save_quit").touch()
    run_training(model, out, overrides)


def train_with_a_damaged_clip(model: Path, out: Path, overrides: tuple[str, ...], resume: bool) -> None:
    with damaged_clip():
        run_training(model, out, (*SKIP, *overrides), resume=resume)


@pytest.mark.slow
def test_a_crash_is_a_restart_and_stays_in_the_log(tiny_pipeline: Path, tmp_path: Path, worlds):
    out = tmp_path / "run"
    last = ("train.max_steps=6", *SETTINGS)
    worlds[1].run(train_until_a_crash, tiny_pipeline, out, 4, last)
    worlds[1].run(train_until_a_crash, tiny_pipeline, out, 2, last, True)
    path = out / "events.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # as if it was killed
    worlds[1].run(run_training, tiny_pipeline, out, last, None, True)
    worlds[1].run(run_training, tiny_pipeline, out, ("train.max_steps=7", *SETTINGS), None, True)
    rows = read_rows(out / "events.jsonl")
    assert [(row["event"], row["step"]) for row in rows] == [
        *(("start", 0), ("save", 2), ("error", 4)),
        ("restart", 2),
        *(("restart", 2), ("save", 4), ("save", 6), ("end", 6)),
        *(("start", 6), ("save", 7), ("end", 7)),
    ]
    assert {key: rows[0][key] for key in ("world_size", "num_nodes", "checkpoint")} == {
        "world_size": 1, "num_nodes": 1, "checkpoint": None,
    }  # fmt: skip
    changed = [row["changed"] for row in rows if row["event"] in ("start", "restart")]
    assert changed == [None, None, None, "train.max_steps=7 (checkpoint: 6)"]
    first, second = (row for row in rows if row["event"] == "restart")
    assert (first["number"], first["last_step"], first["checkpoint"]) == (1, 3, "step_00000002")
    assert (second["number"], second["last_step"]) == (2, 3)
    assert "burns" in first["reason"]
    assert second["reason"] is None
    assert all(row["time"] > 1.7e9 for row in rows)


def test_a_stop_is_no_restart(tiny_pipeline: Path, tmp_path: Path, worlds):
    worlds[1].run(train_with_a_stop, tiny_pipeline, tmp_path, ("train.max_steps=3",))
    worlds[1].run(run_training, tiny_pipeline, tmp_path, ("train.max_steps=3",), None, True)
    events = [row["event"] for row in read_rows(tmp_path / "events.jsonl")]
    assert events == ["start", "save", "stop", "start", "save", "end"]


@pytest.mark.slow
def test_the_model_card_counts_restarts_and_skips(tiny_pipeline: Path, tmp_path: Path, worlds):
    """Updates that are made again count once. The card of an older checkpoint does not count later events."""
    run = tmp_path / "run"
    worlds[1].run(train_with_a_damaged_clip, tiny_pipeline, run, ("train.max_steps=4", *SETTINGS), False)
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().replace('"end"', '"killed"'))
    worlds[1].run(train_with_a_damaged_clip, tiny_pipeline, run, ("train.max_steps=6", *SETTINGS), True)
    skipped = [row["step"] for row in read_rows(run / "events.jsonl") if row.get("skipped")]
    assert len(skipped) > 1
    rows = [{"step": step, "weights": "raw", "held_out": 0.5 - step / 100} for step in (0, 2, 4)]
    write_rows(run / "evaluations.jsonl", rows)
    for step, restarts in ((2, []), (6, [4])):
        checkpoint = run / "checkpoints" / f"step_{step:08d}"
        out = export(ExportOptions(checkpoint=checkpoint, out=tmp_path / f"out-{step}"))
        record = json.loads((out / RECORD_FILE).read_text())
        events = {"restart": restarts, "skipped update": [number for number in skipped if number <= step]}
        assert record["events"] == events
        assert record["held_out"] == [[row["step"], row["held_out"]] for row in rows if row["step"] <= step]
        card = build_card(out, "me/run", record, FolderContents("WanPipeline"), "mit")
        many = len(events["skipped update"])
        assert (
            f"| {len(restarts)} restart{'s' * (not restarts)}, {many} skipped update{'s' * (many != 1)} |"
            in card
        )
    assert "restart" not in build_card(
        out, "me/run", {**record, "events": {}}, FolderContents("WanPipeline"), "mit"
    )
