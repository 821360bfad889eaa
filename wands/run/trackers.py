"""Send the numbers, images and videos of a run to TensorBoard, Weights & Biases and other experiment trackers of accelerate."""

from __future__ import annotations

import importlib.util
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from accelerate import tracking
from transformers.utils import logging as transformers_logging

from wands.config.recipe import LoggingConfig, Recipe
from wands.errors import ConfigError, one_line
from wands.files import write_text
from wands.texts import without_paths

_log = logging.getLogger(__name__)

_MEDIA = {"Image": ("tensorboard", "wandb", "trackio", "swanlab"), "Video": ("wandb", "trackio")}


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ConfigError if the package of a tracker, which has the name of the tracker, is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(missing)
        raise ConfigError(
            f"logging.trackers needs these packages, which are not installed: {packages}. Run pip install {packages}, or remove "
            "the names from logging.trackers."
        )


class Trackers:
    """Experiment trackers of a run on rank 0, from its first step `step` on; on other ranks, the methods do nothing.

    A tracker that fails never stops the training. Its first failure is logged as a warning. After a failed call, it pauses for
    ten times the duration of the call, and does not get the values of this time. The next call starts it again.
    """

    def __init__(self, recipe: Recipe, rank: int, step: int) -> None:
        self._trackers: dict[str, Any] = {}
        self._started: set[str] = set()
        self._retry_at: dict[str, float] = {}
        # accelerate's own logger needs a PartialState, which sets devices and environment variables.
        tracking.logger = transformers_logging.get_logger("accelerate.tracking")
        self._step = step
        self._recipe = without_paths(recipe.model_dump(mode="json"))
        for name in dict.fromkeys(recipe.logging.trackers if rank == 0 else ()):
            self._trackers[name] = _build(name, recipe.logging, Path(recipe.output_dir), step)
            self._trackers[name].main_process_only = False  # else accelerate would make a PartialState
            self._try(name, lambda: None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the curves with these names, such as "train/loss"."""
        for name, tracker in self._of_step(step, tuple(self._trackers)):
            self._try(name, partial(tracker.log, dict(values), step=step))

    def log_media(self, step: int, kind: Literal["Image", "Video"], values: Mapping[str, Any]) -> None:
        """Send images (uint8 [H, W, 3]) or videos (paths of mp4 files), by name, to the trackers that support them.

        TensorBoard gets images as arrays, other trackers objects of their package, such as `wandb.Image`.
        """
        for name, tracker in self._of_step(step, _MEDIA[kind]):
            self._try(name, partial(_send_media, tracker, step, kind, values))

    def close(self) -> None:
        """Finish the trackers, which may wait here until everything is uploaded."""
        for name in tuple(self._started):
            self._try(name, self._trackers[name].finish)
        self._trackers.clear()

    def _of_step(self, step: int, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return (name, tracker) of the trackers that need the values of a step: wandb may have them from an earlier process."""
        # wandb would warn of each step that a resumed run repeats. Its curves contain these steps already.
        is_past = {"wandb": step < getattr(getattr(self._trackers.get("wandb"), "run", None), "step", 0)}
        return [(k, tracker) for k, tracker in self._trackers.items() if k in names and not is_past.get(k)]

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Call `action`, with the tracker started. A failure pauses the tracker; only its first one is logged."""
        began = time.monotonic()
        tracker = self._trackers[name]
        if began < self._retry_at.get(name, 0):
            return
        try:
            if name not in self._started:
                tracker.start()
                self._started.add(name)
                if name == "tensorboard":  # it would show hyperparameters as one more run
                    text = f"```yaml\n{yaml.safe_dump(self._recipe, sort_keys=False)}```"
                    tracker.log({"recipe": text}, step=self._step)
                else:
                    tracker.store_init_configuration(self._recipe)
            action()
        except Exception as error:  # each tracker has its own errors
            if name not in self._retry_at:
                _log.warning("the tracker %s fails (%s); the training continues.", name, one_line(error))
            self._retry_at[name] = time.monotonic() + 10 * (time.monotonic() - began)
            self._started.discard(name)
            with suppress(Exception):
                tracker.finish()
            if name == "tensorboard":  # a new file must not hide the steps of this process
                tracker.init_kwargs.clear()


def _build(name: str, config: LoggingConfig, folder: Path, step: int) -> Any:
    """Return a tracker that is not started. TensorBoard hides values that an earlier process wrote from `step` on."""
    run_name = config.run_name or folder.resolve().name
    if name == "tensorboard":
        _quiet_writer()
        return tracking.TensorBoardTracker(name, folder, purge_step=step)
    id_file = folder / "tracker_id"
    if not id_file.is_file():
        write_text(id_file, secrets.token_hex(11)[:21])  # the length that SwanLab requires
    same_run = {"resume": "allow", "id": id_file.read_text().strip()}
    options = {
        "wandb": {"name": run_name, "dir": str(folder), **same_run},
        "swanlab": {"experiment_name": run_name, "logdir": str(folder), **same_run},
        "trackio": {"name": run_name, "resume": "allow"},
        "mlflow": {"run_name": run_name},
    }
    return tracking.LOGGER_TYPE_TO_CLASS[name](config.project, **options.get(name, {}))


def _quiet_writer() -> None:
    """Let TensorBoard's thread end without a traceback after a failed write. The next call of the tracker raises the error."""
    from tensorboard.summary.writer import event_file_writer

    class QuietThread(event_file_writer._AsyncWriterThread):
        """Thread whose error is only stored."""

        def run(self) -> None:
            with suppress(Exception):  # stored in `exception`
                super().run()

    if event_file_writer._AsyncWriterThread.__name__ != QuietThread.__name__:
        event_file_writer._AsyncWriterThread = QuietThread


def _send_media(tracker: Any, step: int, kind: str, values: Mapping[str, Any]) -> None:
    if tracker.name == "tensorboard":
        images = {name: image[None] for name, image in values.items()}
        return tracker.log_images(images, step=step, dataformats="NHWC")
    build = getattr(importlib.import_module(tracker.name), kind)
    tracker.log({name: build(value) for name, value in values.items()}, step=step)
