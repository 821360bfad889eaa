"""Read a run folder into one dict, from which report.html, the comparison of runs and the model card are made."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps
from pydantic import BaseModel

from wands.config.recipe import Recipe
from wands.config.recipe_loading import read_yaml
from wands.errors import ConfigError
from wands.files import differences, read_rows
from wands.log_rows import is_sound

T = TypeVar("T")
STRIP_SIZE = (256, 144)
"""Width and height of the images in `sample_strips`, in pixels."""
IMAGE_KINDS = {".webp": "image/webp", ".png": "image/png", ".jpg": "image/jpeg"}
VIDEO_KINDS = {".mp4": "video/mp4"}
"""Media types of the images and videos that are shown, by suffix."""
_STATES = {"end": "finished", "stop": "stopped", "error": "failed", "start": "running", "restart": "running"}


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of a run folder, whose run may continue: files, keys of rows and the end of the last row may be missing.

    Returns:
        A dict with these keys, where N is the number of rows of metrics.jsonl:
        `folder`, `name`: the run folder and its name.
        `recipe`: the resolved recipe, {} if it cannot be read.
        `changes`: (value, default) of each recipe key with a changed value.
        `metrics`, `events`, `samples`: rows of these `.jsonl` files, without keys whose value is null.
        `steps`: step of each row of `metrics`, int64 [N].
        `loss_mean`: running mean of the loss over `window` steps, float64 [N]. Steps with a skipped update do not count.
        `window`: number of steps in the running mean.
        `loss_by_sigma`: mean loss of each step in ten equal intervals of sigma, float64 [N, 10], NaN without a sigma there.
        `evaluations`: rows of evaluations.jsonl of the "raw" and of the "ema" weights.
        `start`: last row of `events` with the event "start" or "restart"; {"step": 0} without such a row.
        `state`: running, finished, stopped, failed, or silent (no step for a long time).
        `step`: number of training steps that the run has made.
        `total_steps`: number of steps of the whole run; None if unknown.
        `eta_seconds`: expected seconds until the run ends; None if it is not running.
        `device_hours`: seconds of all steps x number of ranks / 3600.
    """
    recipe = _read_recipe(folder / "recipe.yaml")
    # A section that is off by default has no keys to compare with.
    defaults = {key: value or {} for key, value in Recipe().model_dump(mode="json").items()}
    changes = differences(recipe, defaults)
    metrics = list(_rows(folder / "metrics.jsonl"))
    events = list(_rows(folder / "events.jsonl"))
    evaluations = list(_rows(folder / "evaluations.jsonl"))
    starts = [row for row in events if row["event"] in ("start", "restart")] or [{"step": 0}]
    state = next((_STATES[row["event"]] for row in reversed(events) if row["event"] in _STATES), "running")
    steps = np.array([row["step"] for row in metrics], np.int64)
    seconds = column(metrics, "seconds")
    step = max([*steps[-1:], starts[-1]["step"]])
    total = starts[-1].get("total_steps")
    typical = float(np.nanmedian(seconds[-50:])) if np.isfinite(seconds[-50:]).any() else 0.0
    silence = time.time() - (folder / "metrics.jsonl").stat().st_mtime if metrics else 0.0
    state = "silent" if state == "running" and silence > max(1800.0, 20 * typical) else state
    eta = metrics[-1].get("eta_seconds", typical * (total - step) if total else None) if metrics else None
    ranks = np.array([row.get("world_size", 1) for row in starts])
    begun = np.searchsorted([row["step"] for row in starts], steps) - 1  # the start before each step
    window = smoothing_window(len(metrics))
    skipped = np.isin(steps, [row["step"] for row in events if row.get("skipped")])
    by_sigma = [(row.get("loss_by_sigma", []) + [None] * 10)[:10] for row in metrics]
    return {
        "folder": folder,
        "name": folder.resolve().name,
        "recipe": recipe,
        "changes": {key: pair for key, *pair in changes if pair[0] not in (None, {}, [])},
        "metrics": metrics,
        "events": events,
        "samples": list(_rows(folder / "samples" / "samples.jsonl")),
        "steps": steps,
        "loss_mean": smooth(np.where(skipped, math.nan, column(metrics, "loss")), window),
        "window": window,
        "loss_by_sigma": np.array(by_sigma, np.float64).reshape(-1, 10),
        "evaluations": {key: [row for row in evaluations if row["weights"] == key] for key in ("raw", "ema")},
        "start": starts[-1],
        "state": state,
        "step": int(step),
        "total_steps": total,
        "eta_seconds": eta if state == "running" else None,
        "device_hours": float(np.nansum(seconds * ranks[begun])) / 3600,
    }


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe of a run, which another version may have written, without sections of the wrong kind."""
    recipe = None
    with suppress(OSError, ConfigError):
        recipe = read_yaml(path)
    # As JSON: keys become texts, and dates too.
    values = json.loads(json.dumps(recipe or {}, default=str, skipkeys=True))
    sections = {name for name, value in Recipe() if isinstance(value, BaseModel | None)}
    return {
        name: value
        for name, value in values.items()
        if name not in sections or isinstance(value, dict | None)
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.jsonl` file whose values have the right types, without keys whose value is null."""
    for row in read_rows(path):
        if is_sound(path.name, row):
            yield _without_nulls(row)


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the keys whose value is null from a row and from the objects in it, and then objects without a key."""
    values = {
        key: {name: item for name, item in value.items() if item is not None}
        if isinstance(value, dict)
        else value
        for key, value in row.items()
    }
    return {key: value for key, value in values.items() if value is not None and value != {}}


def column(rows: Iterable[Mapping[str, Any]], key: str) -> np.ndarray:
    """Return the value of a key in each row, float64 [number of rows], with NaN for a row without this key."""
    return np.array([row.get(key) for row in rows], np.float64)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the running mean over `window` values, float64, with NaN for a window without a finite value.

    A window ends at the value with the same index, and is shorter at the start. Values that are not finite are left out.
    """
    assert window > 0, window
    finite = np.isfinite(values)
    sums = np.cumsum(np.pad([np.where(finite, values, 0.0), finite], ((0, 0), (1, 0))), axis=1)
    start = np.maximum(np.arange(1, len(values) + 1) - window, 0)
    total, count = sums[:, 1:] - sums[:, start]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def smoothing_window(num_values: int) -> int:
    """Return the window for `smooth`: a twentieth of `num_values`, at least 1, at most 200."""
    return max(1, min(200, num_values // 20))


def thin(items: Sequence[T], most: int = 2000) -> list[T]:
    """Return at most `most` evenly spaced items of a sequence, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def extremes(values: np.ndarray, most: int) -> np.ndarray:
    """Return the ascending indices of at most `most` (at least 4) points of a finite curve, so that its spikes remain visible.

    A longer curve is divided into sections, and keeps the lowest and highest point of each, and its first and last point.
    """
    if len(values) <= most:
        return np.arange(len(values))
    stretches = np.array_split(np.arange(len(values)), most // 2 - 1)
    chosen = [i for part in stretches for i in (part[values[part].argmin()], part[values[part].argmax()])]
    return np.unique([0, *chosen, len(values) - 1])


def find_file(folder: Path, name: object, kinds: Mapping[str, str]) -> Path | None:
    """Return the path of a run's file that a row of samples.jsonl names.

    Return None if the file is missing, is outside the run folder, or has a suffix that is not in `kinds`.
    """
    root = folder.resolve()
    with suppress(OSError, ValueError):  # such as a name that is too long
        path = (root / str(name)).resolve()
        if path.is_file() and path.is_relative_to(root) and path.suffix in kinds:
            return path
    return None


def sample_strips(run: Mapping[str, Any], weights: str, last_step: int) -> dict[str, np.ndarray]:
    """Return the frames for the model card: for each prompt, the middle frame of its sample videos up to step `last_step`.

    `weights` is "raw" or "ema"; the videos of step 0 are always raw. A title, such as "a cat (steps 0, 100)", maps to uint8
    [steps, rows, columns, 3].
    """
    strips: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for row in run["samples"]:
        path = find_file(run["folder"], row.get("thumbnail"), IMAGE_KINDS)
        is_shown = row["step"] <= last_step and row["weights"] == (weights if row["step"] else "raw")
        if is_shown and path:
            with suppress(Exception):  # a damaged thumbnail is never worth an export
                image = ImageOps.pad(Image.open(path).convert("RGB"), STRIP_SIZE, color="white")
                strips[str(row.get("prompt"))][row["step"]] = np.asarray(image)
    names = {prompt: f"{prompt} (steps {', '.join(map(str, strip))})" for prompt, strip in strips.items()}
    return {names[prompt]: np.stack(list(strip.values())) for prompt, strip in strips.items()}


def describe_start(recipe: Mapping[str, Any]) -> tuple[str, str]:
    """Return a label and a description of the weights before the first step of a run, whose samples have step 0."""
    model = recipe.get("model") or {}
    if (recipe.get("lora") or {}).get("init_from"):
        return "initial", "the base model with the LoRA of lora.init_from"
    if model.get("init") == "random":
        return "random", "the model with random weights"
    merged = " with the LoRAs of model.merge_loras" if model.get("merge_loras") else ""
    return "base", f"the base model{merged}"


def is_learning(run: Mapping[str, Any]) -> list[str]:
    """Return one to three texts that say whether a run learns, from the change of the held-out loss since step 0.

    If this change is unknown, the text gives the reason. If the gradient of every step is 0, the text says "No".
    """
    evaluations = run["evaluations"]["raw"]
    grad_norms = column(run["metrics"], "grad_norm")
    if len(grad_norms) and not grad_norms.any():
        return ["No: the gradient of every step is 0, so no weight changes."]
    means = column([row.get("change") or {} for row in evaluations], "mean")
    if np.all(np.isnan(means)):
        reason = "there is no evaluation after step 0"
        if evaluations and np.all(np.isnan(column(evaluations, "held_out"))):
            reason = "no clip is held out; set data.holdout or eval.cache"
        return [
            f"Not known yet: {reason}. The train loss alone does not show whether the run learns, because each step "
            "draws other noise levels."
        ]
    rows = np.array(evaluations, object)
    best = rows[np.nanargmin(means)]
    last = rows[np.isfinite(means)][-1]
    mean, low, high = (column([last["change"]], key)[0] for key in ("mean", "low", "high"))
    word = "Not visible yet"
    relation = "may be the same as"
    if high < 0 or low > 0:
        word, relation = ("Yes", "is lower than") if high < 0 else ("No", "is higher than")
    interval = f"95 % interval {low:+.5f} to {high:+.5f}" if low <= high else "no interval: too few clips"
    text = f"the loss on held-out clips {relation} at step 0 ({mean:+.5f}, {interval})."
    sentences = [f"{word}: at step {last['step']:,}, {text}"]
    if best is not last:
        rise = mean - best["change"]["mean"]
        sentences.append(f"The loss was lowest at step {best['step']:,} and has risen by {rise:.5f} since.")
    of_train = [column([last.get("train_change") or {}], key)[0] for key in ("mean", "low", "high")]
    parting = mean - of_train[0]
    margin = math.hypot(high - low, of_train[2] - of_train[1]) / 2
    if math.isfinite(parting - margin):
        grows = parting > margin
        text = f"The loss gap between held-out and train clips has {'' if grows else 'not clearly '}grown since step 0"
        count = run["start"].get("data", {}).get("num_samples")
        clips = f"{count:,} train clips" if count else "train clips"
        memorizes = f": the model overfits, because it memorizes its {clips}" if grows else ""
        sentences.append(f"{text} ({parting:+.5f}, margin {margin:.5f}){memorizes}.")
    return sentences
