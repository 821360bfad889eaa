"""Exports and checkpoints with values of the wrong type or size: `wands push` and a resume end in one sentence, or work."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_values import odd_copies, outcome, to_text
from wands.checkpoint.checkpoint_files import find_checkpoint, load_exported_state, load_state
from wands.checkpoint.resume import check_resumable, list_changes
from wands.commands.plots import save_loss_plot
from wands.errors import CheckpointError
from wands.export.export_record import RECORD_FILE, read_record, read_sample_rows
from wands.export.model_card import FolderContents, build_card, loss_points

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "tests" / "fixtures" / "checkpoint" / "checkpoints" / "step_00000003"
RECORD: dict[str, Any] = {
    "base": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "step": 12,
    "checkpoint": "step_00000012",
    "variant": "wan2.2-t2v-a14b",
    "parts": ["transformer", "transformer_2"],
    "recipe": {"data": {"cache": "/mnt/cache"}, "lora": {"rank": 4, "alpha": 4.0, "targets": ["a"]}},
    "data": {"num_samples": 1234, "num_tokens": 5, "licenses": [["mit", 3]], "fingerprint": "ab12cd"},
    "loss": [[1, 2.0], [2, 1.0]],
    "held_out": [[1, 2.0], [2, None]],
    "events": {"restart": [1], "skipped update": [2]},
    "dtype": "bf16",
    "ema": {"decay": 0.9},
    "wands_version": "0.1.0",
}


def make_card(folder: Path) -> None:
    """Make the card and the plot that `wands push` makes of a record before it sends the folder."""
    record = read_record(folder / RECORD_FILE)
    build_card(folder, "alice/wan", record, FolderContents(), "mit").encode()
    if points := loss_points(record):
        series = {"train": points, "held-out": record.get("held_out")}
        curves = {name: ([x for x, _ in rows], [y for _, y in rows]) for name, rows in series.items() if rows}
        save_loss_plot(folder / "loss.png", curves, marks=record.get("events") or {})


@pytest.mark.slow
def test_any_value_in_any_field_of_an_export_record(tmp_path: Path) -> None:
    for what, damaged in odd_copies(RECORD, share=0.1):
        (tmp_path / RECORD_FILE).write_text(to_text(damaged))
        try:
            outcome(lambda: make_card(tmp_path))
        except Exception as error:
            raise AssertionError(what) from error
    (tmp_path / RECORD_FILE).write_text(json.dumps(RECORD))
    assert outcome(lambda: make_card(tmp_path)) == "done"


def test_any_value_in_any_field_of_the_rows_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for what, damaged in odd_copies({"prompt": "a cat", "file": "a.mp4", "seed": 1}):
        path.write_text(to_text(damaged) + "\n")
        try:
            outcome(lambda: [row.get("file") for row in read_sample_rows(path)])
        except Exception as error:
            raise AssertionError(what) from error


def write_state(folder: Path, values: dict[str, Any], *, with_hash: bool) -> None:
    """Write `wands_state.json`, with a hash that fits if wanted: whoever edits the file can compute it."""
    from wands.checkpoint.checkpoint_files import _hash_of

    values = {key: value for key, value in values.items() if key != "hash_of_this_file"}
    digest = {"hash_of_this_file": _hash_of(json.loads(to_text(values)))} if with_hash else {}
    (folder / "wands_state.json").write_text(to_text({**values, **digest}))


def use_state(folder: Path) -> None:
    state = load_state(folder)
    current = load_state(STORED)
    outcome(lambda: check_resumable(state, current, "--resume x"))
    list_changes(state, current)
    find_checkpoint(folder, verify=True)
    assert state.lora is None or state.lora.rank > 0
    state.has_experts, [state.has_average(part) for part in state.parts]
    json.dumps(asdict(state))


@pytest.mark.slow
def test_any_value_in_any_field_of_a_training_state(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED, tmp_path / "step_00000003"))
    values = json.loads((STORED / "wands_state.json").read_text())
    del values["hash_of_this_file"]
    odd = list(odd_copies(values))
    for what, damaged in random.Random(0).sample(odd, 500):
        if not isinstance(damaged, dict):
            continue
        write_state(folder, damaged, with_hash=True)
        try:
            outcome(lambda: use_state(folder))
        except Exception as error:
            raise AssertionError(what) from error


def test_a_training_state_without_its_hash_is_damaged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(STORED, tmp_path / "step_00000003"))
    values = json.loads((STORED / "wands_state.json").read_text())
    write_state(folder, values, with_hash=False)
    with pytest.raises(CheckpointError, match="hash_of_this_file=None is not the hash"):
        load_state(folder)
    write_state(folder, values, with_hash=True)
    assert load_state(folder).step == 3


def test_a_shape_that_the_file_does_not_contain_allocates_nothing(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(STORED, tmp_path / "step_00000003"))
    for path in folder.glob("transformer/state_rank_*"):
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["wands_state"])
        for place in header["fragments"].values():
            place[1] = [2**30, 2**20]
        save_file(load_file(path), path, {"wands_state": json.dumps(header)})
    values = json.loads((folder / "wands_state.json").read_text())
    values["files"] = {name: (folder / name).stat().st_size for name in values["files"]}
    write_state(folder, values, with_hash=True)
    with pytest.raises(CheckpointError, match="lack values of"):
        load_exported_state(folder)
