"""Send the numbers, images and videos of a run to TensorBoard, Weights & Biases and other experiment trackers of accelerate."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from accelerate import tracking
from transformers.utils import logging as transformers_logging

from wands.errors import ConfigError, one_line
from wands.export.model_card import without_paths
from wands.files import write_text
from wands.train.run import TrainingRun

_log = logging.getLogger(__name__)

_IMAGES = ("tensorboard", "wandb", "trackio", "swanlab", "clearml")
_VIDEOS = ("wandb", "trackio")


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ConfigError if the package of a tracker is not installed.

    Args:
        names: `logging.trackers` of the recipe. The package of a tracker has the name of the tracker.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        packages = " ".join(missing)
        raise ConfigError(
            f"logging.trackers={packages} cannot be used, because the package is not installed; run pip install {packages}, or "
            "remove the name from logging.trackers."
        )


class Trackers:
    """Experiment trackers of a run. Rank 0 has trackers; on other ranks, the methods do nothing.

    A tracker that fails never stops the training. The first failure is a warning. The tracker is started again at a later
    call, after ten times as long as the failed call took.

    Args:
        run: the checked training run. If it resumes, the trackers continue the curves of the run.
        rank: rank of this process.
    """

    def __init__(self, run: TrainingRun, rank: int) -> None:
        self._trackers: dict[str, Any] = {}
        self._send_recipe: dict[str, Callable[[], None]] = {}
        self._started: set[str] = set()
        self._failed: set[str] = set()
        self._retry_at: dict[str, float] = {}
        if rank != 0:
            return
        # accelerate's own logger needs a PartialState, which sets devices and environment variables.
        tracking.logger = transformers_logging.get_logger("accelerate.tracking")
        step = run.checkpoint.state.step + 1 if run.checkpoint else 0
        recipe = without_paths(run.recipe.model_dump(mode="json"))
        for name in dict.fromkeys(run.recipe.logging.trackers):
            tracker = self._trackers[name] = _build(name, run, step)
            tracker.main_process_only = False  # else accelerate would make a PartialState
            send: Callable[[], None] = partial(tracker.store_init_configuration, _flatten(recipe))
            if name == "tensorboard":  # it would show hyperparameters as one more run
                text = f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False)}```"
                send = partial(tracker.log, {"recipe": text}, step=step)
            self._send_recipe[name] = send
            self._try(name, lambda: None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to the curves. `values` maps the name of a curve, such as "train/loss", to its value."""
        for name, tracker in self._of_step(step, tuple(self._trackers)):
            self._try(name, partial(tracker.log, dict(values), step=step))

    def log_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Send images to the trackers that take images. `images` maps a name to a PIL image or a uint8 array [H, W, 3]."""
        arrays = {name: np.asarray(image) for name, image in images.items()}
        for name, tracker in self._of_step(step, _IMAGES):
            if name == "trackio":  # accelerate has no log_images for trackio
                self._try(name, partial(_log_media, tracker, "Image", arrays, step))
            else:
                options = {"dataformats": "NHWC"} if name == "tensorboard" else {}
                batches = {key: array[None] for key, array in arrays.items()}
                self._try(name, partial(tracker.log_images, batches, step=step, **options))

    def log_videos(self, step: int, videos: Mapping[str, Path]) -> None:
        """Send videos to the trackers that take videos. `videos` maps a name to an mp4 file."""
        paths = {name: str(path) for name, path in videos.items()}
        for name, tracker in self._of_step(step, _VIDEOS):
            self._try(name, partial(_log_media, tracker, "Video", paths, step))

    def close(self) -> None:
        """Finish the trackers. A tracker may wait here until everything is uploaded."""
        for name in tuple(self._started):
            self._try(name, self._trackers[name].finish)
        self._trackers.clear()

    def _of_step(self, step: int, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the (name, tracker) pairs with given names that take values of a step."""
        # wandb would warn of each step that a resumed run repeats. Its curves contain these steps already.
        is_past = {"wandb": step < getattr(getattr(self._trackers.get("wandb"), "run", None), "step", 0)}
        return [(k, tracker) for k, tracker in self._trackers.items() if k in names and not is_past.get(k)]

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Call a function of a tracker, and start the tracker before if it does not run."""
        began, tracker = time.monotonic(), self._trackers[name]
        if began < self._retry_at.get(name, 0):
            return
        try:
            if name not in self._started:
                tracker.start()
                self._started.add(name)
                self._send_recipe[name]()
            action()
        except Exception as error:  # each tracker has its own errors
            if name not in self._failed:
                _log.warning("the tracker %s fails (%s); the training continues.", name, one_line(error))
            self._failed.add(name)
            if name in self._started:
                self._started.discard(name)
                with suppress(Exception):
                    tracker.finish()
            if name == "tensorboard":
                tracker.init_kwargs.pop(
                    "purge_step", None
                )  # the new file must not hide the steps of this process
            self._retry_at[name] = time.monotonic() + 10 * (time.monotonic() - began)


def _build(name: str, run: TrainingRun, step: int) -> Any:
    """Return a tracker that is not started yet.

    Args:
        name: name of the tracker.
        run: the checked training run.
        step: first step of this process. TensorBoard hides earlier values of this step and of later steps.
    """
    folder, project = run.output_dir, run.recipe.logging.project
    run_name = run.recipe.logging.run_name or folder.resolve().name
    if name == "tensorboard":
        return tracking.TensorBoardTracker(name, folder, purge_step=step)
    options: dict[str, Any] = {}
    if name in ("wandb", "swanlab"):
        id_file = folder / "tracker_id"
        if not id_file.is_file():
            write_text(id_file, secrets.token_hex(11)[:21])  # the length that SwanLab requires
        options = {"id": id_file.read_text().strip(), "resume": "allow"}
        places = {"wandb": ("name", "dir"), "swanlab": ("experiment_name", "logdir")}
        options |= dict(zip(places[name], (run_name, str(folder)), strict=True))
    elif name in ("trackio", "mlflow"):
        options = {"name": run_name, "resume": "allow"} if name == "trackio" else {"run_name": run_name}
    return tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)


def _log_media(tracker: Any, kind: str, values: Mapping[str, Any], step: int) -> None:
    """Send images or videos, with the class `kind` of the tracker's package."""
    build = getattr(importlib.import_module(tracker.name), kind)
    tracker.log({name: build(value) for name, value in values.items()}, step=step)


def _flatten(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe by their dotted keys. Lists and inner sections become JSON texts."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in recipe.items()}
    pairs = (
        (f"{name}.{key}".rstrip("."), value) for name, keys in sections.items() for key, value in keys.items()
    )
    return {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in pairs}
