"""`wands tools verify`: read all files of a run, a cache or a model, and compare them with their stored hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.checkpoint.step_folders import list_steps
from wands.config.options import VerifyOptions
from wands.data.cache.format import MANIFEST_NAME
from wands.data.cache.reader import LatentCache
from wands.errors import ConfigError, WandsError
from wands.model.files.hashes import find_changed_files
from wands.texts import plural


def verify(options: VerifyOptions) -> str:
    """Compare all files of a run, a cache or a model with their stored hashes, and return a text with their number.

    Raises:
        WandsError: with one line for each damaged checkpoint, sample or file.
        ConfigError: if the folder contains nothing with hashes.
    """
    path = options.path
    if not path.is_dir():
        raise ConfigError(f"PATH={path} is not a folder; give the folder of a run, a cache or a model.")
    steps = list_steps(path)
    if (path / MANIFEST_NAME).is_file():
        cache = LatentCache(path, verify=True)
        thing = "sample"
        (number, problems) = _check_all(range(len(cache.keys)), partial(_read_sample, cache))
    elif steps or (path / "checkpoints").is_dir():
        thing = "checkpoint"
        (number, problems) = _check_all(steps, partial(find_checkpoint, verify=True))
    else:
        thing = "file"
        (number, problems) = find_changed_files(path)
        if not number:
            raise ConfigError(
                f"PATH={path} contains no checkpoint, no cache, and no file with a stored hash. Hashes are stored by wands "
                "export, by wands convert, and by a download from the Hub. Write or download the model again."
            )
    if problems:
        raise WandsError(
            [*problems, f"{path}: {len(problems)} of {number} {thing}s are damaged; restore these {thing}s"]
        )
    return f"intact: {plural(number, thing)} in {path}"


def _read_sample(cache: LatentCache, i: int) -> None:
    cache.meta(i)  # compares the sample's own facts with the index; training does so once for each shard
    cache.read(i)


def _check_all(items: Sequence[Any], read: Callable[[Any], object]) -> tuple[int, list[str]]:
    """Call `read` on each item, in several threads. Return the number of items, and the message of each WandsError."""

    def problem_of(item: Any) -> str | None:
        try:
            read(item)
        except WandsError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        return len(items), list(filter(None, pool.map(problem_of, items)))
