"""`wands verify`: read all files of a run, a cache or a model, and compare them with their stored hashes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wands.config.options import VerifyOptions
from wands.data.cache.format import MANIFEST_NAME
from wands.data.cache.reader import LatentCache
from wands.errors import CacheError, CheckpointError, ConfigError, WandsError
from wands.model.files.checkpoint_files import STATE_FILE, find_checkpoint, list_steps
from wands.model.files.hashes import find_changed_files


def verify(options: VerifyOptions) -> str:
    """Read all files of a run, a cache or a model, and return a text with the number of intact files.

    Args:
        options: options of the command.

    Raises:
        WandsError: with one line for each damaged checkpoint, sample or file.
        ConfigError: if the folder contains nothing with hashes.
    """
    path = options.path
    if not path.is_dir():
        raise ConfigError(f"PATH={path} is not a folder; give the folder of a run, a cache or a model.")
    if (path / MANIFEST_NAME).is_file():
        number, problems = _verify_cache(path)
        things = "samples"
    elif (path / STATE_FILE).is_file() or list_steps(path) or (path / "checkpoints").is_dir():
        number, problems = _verify_run(path)
        things = "checkpoints"
    else:
        number, problems = find_changed_files(path)
        things = "files"
        if not number:
            raise ConfigError(
                f"PATH={path} contains no checkpoint, no cache, and no file with a stored hash. wands export, wands convert and "
                "the download from the Hub store hashes; write or download the model again."
            )
    if problems:
        raise WandsError([*problems, f"{len(problems)} of {number} {things} in {path} are damaged"])
    return f"{number} {things} in {path} are intact"


def _verify_run(path: Path) -> tuple[int, list[str]]:
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = [path] if (path / STATE_FILE).is_file() else list_steps(folder)
    problems = []
    for step in steps:
        try:
            find_checkpoint(step, verify=True)
        except CheckpointError as error:
            problems.append(str(error))
    return len(steps), problems


def _verify_cache(path: Path) -> tuple[int, list[str]]:
    cache = LatentCache(path, verify=True)

    def problem_of(i: int) -> str | None:
        try:
            cache.read(i)
        except CacheError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        problems = [problem for problem in pool.map(problem_of, range(len(cache.keys))) if problem]
    return len(cache.keys), problems
