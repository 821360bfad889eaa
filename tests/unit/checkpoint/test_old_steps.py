"""Folders that a run deletes: only checkpoints that wands wrote, and none through a link."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from wands.checkpoint.old_steps import delete_old_steps, make_room, make_unfinished, set_aside
from wands.checkpoint.step_folders import STATE_FILE, step_name
from wands.config.recipe import CheckpointConfig

KEEP_ONE = CheckpointConfig(keep=1)


def write_step(folder: Path, name: str, *files: str) -> Path:
    for file in files or (STATE_FILE, "transformer/state_rank_00000.safetensors", "epoch.json"):
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    return folder / name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_are_deleted(tmp_path: Path):
    for step in (1, 2, 3):
        write_step(tmp_path, step_name(step))
    delete_old_steps(tmp_path / step_name(3), KEEP_ONE)
    assert names(tmp_path) == [step_name(3)]


@pytest.mark.parametrize("suffix", ["", ".abandoned"])
def test_what_is_no_checkpoint_of_wands_is_not_deleted(tmp_path: Path, suffix: str):
    """Also if it has such a name. A link counts as none, although its target has checkpoints of wands."""
    elsewhere = write_step(tmp_path / "elsewhere", step_name(1))
    folder = tmp_path / "checkpoints"
    foreign = write_step(folder, f"{step_name(1)}{suffix}", "pytorch_model.bin")
    (folder / f"{step_name(2)}{suffix}").symlink_to(elsewhere)
    for step in (3, 4, 5):
        write_step(folder, f"{step_name(step)}{suffix}")
    newest = write_step(folder, step_name(5))
    delete_old_steps(newest, KEEP_ONE)
    kept = {foreign.name, f"{step_name(2)}{suffix}", f"{step_name(5)}{suffix}", newest.name}
    assert set(names(folder)) == kept
    assert (foreign / "pytorch_model.bin").is_file()
    assert (elsewhere / STATE_FILE).is_file()


def test_nothing_is_deleted_through_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    elsewhere = tmp_path / "elsewhere"
    for name in (*map(step_name, range(1, 4)), f"{step_name(9)}.tmp", f"{step_name(8)}.abandoned"):
        write_step(elsewhere, name)
    folder = tmp_path / "checkpoints"
    folder.symlink_to(elsewhere)
    before = names(elsewhere)
    for step in (1, 2, 3):
        delete_old_steps(folder / step_name(step), KEEP_ONE)
    assert names(elsewhere) == before
    assert caplog.text.count("is a link: wands deletes no old checkpoints through it") == 1
    assert make_unfinished(folder, 9) == folder / f"{step_name(9)}.1.tmp"
    assert names(elsewhere) == sorted([*before, f"{step_name(9)}.1.tmp"])
    make_room(folder / step_name(3))
    assert (elsewhere / f"{step_name(3)}.abandoned" / STATE_FILE).is_file()


def test_files_of_a_killed_save_are_deleted_and_foreign_ones_stay(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    write_step(folder, f"{step_name(7)}.tmp", "transformer/state_rank_00001.safetensors", "epoch.json")
    write_step(folder, f"{step_name(8)}.1.tmp", ".wands_state.123.tmp.json")
    write_step(folder, "step_by_step.tmp", "notes.txt")
    write_step(folder, f"{step_name(5)}.tmp", "notes.txt")
    elsewhere = write_step(tmp_path / "elsewhere", "notes", "notes.txt")
    (folder / f"{step_name(9)}.tmp").symlink_to(elsewhere)
    (folder / f"{step_name(9)}.1.tmp").symlink_to("missing")
    made = make_unfinished(folder, 9)
    assert made == folder / f"{step_name(9)}.2.tmp"
    kept = [
        f"{step_name(5)}.tmp",
        "step_by_step.tmp",
        *(f"{step_name(9)}{end}" for end in (".1.tmp", ".2.tmp", ".tmp")),
    ]
    assert names(folder) == sorted(kept)
    assert os.listdir(elsewhere) == ["notes.txt"]
    assert list(made.iterdir()) == []


def test_a_folder_in_the_place_of_a_checkpoint_is_set_aside(tmp_path: Path):
    """The checkpoint of a step that is saved again is replaced, everything else is renamed."""
    make_room(tmp_path / step_name(1))
    make_room(write_step(tmp_path, step_name(1)))
    assert names(tmp_path) == []
    make_room(write_step(tmp_path, step_name(2), "notes.txt"))
    (tmp_path / step_name(2)).symlink_to("missing")
    set_aside(tmp_path / step_name(2))
    assert names(tmp_path) == [f"{step_name(2)}.abandoned", f"{step_name(2)}.abandoned1"]
    assert (tmp_path / f"{step_name(2)}.abandoned" / "notes.txt").is_file()
