"""Delete old checkpoints, and the files of saves that were killed.

The folder `checkpoints` may be a link, and a user may keep other folders next to the checkpoints. Nothing is deleted through a
link, and nothing that is no checkpoint of wands.
"""

from __future__ import annotations

import itertools
import logging
import re
import shutil
from pathlib import Path

from wands.checkpoint.step_folders import STATE_FILE, list_steps, step_name
from wands.config.recipe import CheckpointConfig
from wands.errors import one_line

_log = logging.getLogger(__name__)

PUSH_MARK = "push_is_pending"
"""Empty file in the folder of a checkpoint that must be pushed to the Hub."""

_OWN_FILE = re.compile(
    rf"(?:\w+/)?(?:state|ema)_rank_\d+\.safetensors|epoch\.json|objective\.safetensors|\.?wands_state\b[\w.]*|{PUSH_MARK}"
)


def make_unfinished(folder: Path, step: int) -> Path:
    """Make the folder for a checkpoint that is not complete yet. Delete those of saves that were killed.

    Raises:
        OSError: if the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("step_????????*.tmp"):
        if _is_own(stale):
            shutil.rmtree(stale, ignore_errors=True)
    for number in itertools.count():
        unfinished = folder / f"{step_name(step)}{f'.{number}' if number else ''}.tmp"
        try:
            unfinished.mkdir()
        except FileExistsError:  # a link, or something that wands did not write
            continue
        return unfinished
    raise AssertionError


def make_room(target: Path) -> None:
    """Delete the earlier checkpoint of a step that was saved again. Set aside what may not be deleted."""
    if _is_own(target):
        shutil.rmtree(target)
    else:
        set_aside(target)


def set_aside(step_folder: Path) -> None:
    """Rename a step folder, if it exists, to `*.abandoned`, so that the run can save this step again."""
    if step_folder.is_symlink() or step_folder.exists():
        names = (
            step_folder.with_name(f"{step_folder.name}.abandoned{number or ''}")
            for number in itertools.count()
        )
        step_folder.rename(next(name for name in names if not (name.is_symlink() or name.exists())))


def delete_old_steps(newest: Path, config: CheckpointConfig) -> None:
    """Delete the checkpoints that the section `checkpoint` of the recipe does not keep. A failure is only logged."""
    older = [path for path in list_steps(newest.parent) if path.name <= newest.name]
    if newest.parent.is_symlink() and len(older) == config.keep + 1:
        _log.warning("%s is a link: wands deletes no old checkpoints through it.", newest.parent)
    abandoned = sorted(newest.parent.glob("step_*.abandoned*"), key=lambda path: path.lstat().st_mtime)
    best = newest.with_name("best")
    best_name = best.read_text() if best.is_file() else ""
    for path in [*filter(_is_own, older)][: -config.keep] + [*filter(_is_own, abandoned)][: -config.keep]:
        step = int(path.name.partition(".")[0].removeprefix("step_"))
        is_kept = (config.keep_every and step % config.keep_every == 0) or (path / PUSH_MARK).exists()
        is_kept = is_kept or path.name == best_name
        if path in abandoned or not is_kept:
            try:
                shutil.rmtree(path)
            except OSError as error:
                _log.error("%s cannot be deleted (%s); delete the folder yourself.", path, one_line(error))


def _is_own(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of wands, complete or not, that may be deleted."""
    if folder.parent.is_symlink() or folder.is_symlink() or not folder.is_dir():
        return False
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return (folder / STATE_FILE).is_file() or all(
        _OWN_FILE.fullmatch(path.relative_to(folder).as_posix()) for path in files
    )
