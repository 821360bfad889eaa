"""Save checkpoints, and push them to the Hub. The folder of a saved step is either complete or does not exist. A save has four
stages:

1. A thread of each rank writes the rank's part to a folder with a temporary name; with `checkpoint.asynchronous`, from a copy in
   host memory, while the training continues.
2. Rank 0 writes `wands_state.json`, which contains the size and the hash of every file.
3. The file `next` is written with the final name of the folder, and the folder gets this name.
4. The file `next` is renamed to `latest`.

If the process is killed at any moment, the previous checkpoint stays valid. If it is killed between stages 3 and 4, `next` shows
that the new folder is complete.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch.distributed as dist

from wands.checkpoint.buffers import HostBuffers, TensorFile
from wands.checkpoint.checkpoint_files import (
    OBJECTIVE_FILE,
    Checkpoint,
    TrainState,
    average_file,
    state_file,
)
from wands.checkpoint.ema import WeightAverage
from wands.checkpoint.engine_state import engine_tensors
from wands.checkpoint.epoch_files import EPOCH_FILE, epoch_values
from wands.checkpoint.old_steps import PUSH_MARK, delete_old_steps, make_room, make_unfinished
from wands.checkpoint.step_folders import step_name
from wands.config.recipe import CheckpointConfig, HubConfig, Recipe
from wands.data.datasets import Dataset
from wands.data.sampler import StepPlan
from wands.distributed.bootstrap import gather_objects
from wands.distributed.engine_protocol import Engines
from wands.errors import DiskError, WandsError, one_line
from wands.files import publish, sync, write_text
from wands.model.files.tensor_files import LazyTensor, hash_file, write_safetensors
from wands.objectives.objective import Objective
from wands.own_files import open_own_file
from wands.run.append_log import EventLog
from wands.run.data_identity import DataIdentity
from wands.run.run_model import RunModel, base_fingerprint
from wands.texts import Log

_log = logging.getLogger(__name__)

# The command is not a rank of the run, and must not slow down the run.
_COMMAND = ("env", "-uRANK", "-uLOCAL_RANK", "-uWORLD_SIZE", "nice", sys.executable, "-m", "wands", "push")


def build_state(
    recipe: Recipe,
    ds_config: dict[str, Any],
    model: RunModel,
    identity: DataIdentity,
    objective: Objective,
    *,
    world_size: int,
    data_start: tuple[int, int],
) -> TrainState:
    """Return the training state of a run before its first step, with everything that does not change during the run.

    The checkpoint of a step replaces `step`, `epoch`, `loss`, `bad_steps` and `attention`; `TrainState.write` adds `files` and
    `hashes`. `data_start` is the (epoch, step) from which the run uses its current data and packing.
    """
    base = recipe.model.path
    values = recipe.model_dump(mode="json")
    for merge in values["model"]["merge_loras"]:
        merge["path"] = str(Path(merge["path"]).resolve())
    is_folder = Path(base).is_dir()
    return TrainState(
        step=0,
        epoch=0,
        world_size=world_size,
        zero_stage=int(ds_config["zero_optimization"].get("stage", 0)),
        variant=model.variant.name,
        parts=[expert.subfolder for expert in model.experts],
        transformer_config=model.config,
        data_fingerprint=identity.fingerprint,
        data_summary=identity.summary,
        recipe=values,
        base=str(Path(base).resolve()) if is_folder else base,
        loss=[],
        files={},
        hashes={},
        data_contents=identity.contents,
        base_fingerprint=base_fingerprint(recipe, model.experts),
        ds_config=ds_config,
        data_start=data_start,
        objective={"name": objective.name, "version": objective.version},
    )


class _PendingSave(NamedTuple):
    state: TrainState
    is_best: bool
    partial: Path
    work: Future[dict[str, str] | str]


class CheckpointSaver:
    """Writer of the checkpoints of a run; `saved` is the folder of the last complete one, or None.

    With `checkpoint.asynchronous`, `save` copies the state to host memory, and a thread writes the copy while the training
    continues. A later call of `finish` waits for the files of all ranks, and completes the checkpoint.
    """

    def __init__(
        self,
        *,
        config: CheckpointConfig,
        output_dir: Path,
        engines: Engines,
        averages: Mapping[str, WeightAverage],
        objective: Objective,
        data: Dataset,
        resumed: Checkpoint | None,
        log: Log,
    ) -> None:
        self._config = config
        self._folder = output_dir / "checkpoints"
        self._engines = engines
        self._averages = averages
        self._objective = objective
        self._data = data
        self._log = log
        self._last_save = time.perf_counter()
        self._buffers = HostBuffers() if config.asynchronous else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wands-save")
        self._pending: _PendingSave | None = None
        self.saved = resumed.folder if resumed else None

    @property
    def is_pending(self) -> bool:
        """Whether `save` has started a checkpoint that `finish` has not completed; equal on all ranks."""
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its files."""
        return self._pending is not None and not self._pending.work.done()

    def is_due(self, step: int) -> bool:
        """Return whether a step is a multiple of `checkpoint.every`."""
        every = self._config.every
        assert every != "auto", "settle_length has replaced it"
        return bool(every) and step % every == 0

    @property
    def minutes_passed(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed since the last save; may differ between the ranks."""
        minutes = self._config.every_minutes
        return bool(minutes) and time.perf_counter() - self._last_save >= 60 * minutes

    def save(self, state: TrainState, plan: StepPlan, required: bool, is_best: bool = False) -> None:
        """Save a checkpoint. Every rank must call this method.

        With `checkpoint.asynchronous`, the method only starts the save, unless the checkpoint is required. A checkpoint that is
        not required and cannot be saved is logged.

        Args:
            state: training state, without sizes and hashes of the files.
            plan: plan of the last step, with that of its epoch for `epoch.json`.
            required: whether to complete the checkpoint before returning, and to raise failures.
            is_best: whether the file `best` then names this checkpoint.

        Raises:
            DiskError: if the disk is full or not writable, and the checkpoint is required. The previous checkpoint does not
                change.
            ConfigError: if the host has too little memory for a copy of the state.
        """
        with self._tolerant(state.step, required):
            self._start(state, plan, is_best)
        if self.is_pending and (required or not self._config.asynchronous):
            self.finish(required)
        self._last_save = time.perf_counter()

    def finish(self, required: bool = False) -> None:
        """Complete the pending checkpoint, and delete old ones. Every rank must call this method, and only if `is_pending`.

        Raises:
            DiskError: if the checkpoint is required and cannot be written. Other failures are only logged.
        """
        assert self._pending is not None
        pending = self._pending
        self._pending = None
        with self._tolerant(pending.state.step, required):
            self.saved = self._complete(pending)
            self._log(f"saved {self.saved}")

    @contextmanager
    def _tolerant(self, step: int, required: bool) -> Iterator[None]:
        try:
            yield
        except DiskError as error:
            if required or not error.agreed:  # not agreed: the other ranks wait for a rank that failed
                raise
            self._log(f"{error} The training continues without a checkpoint of step {step}.")

    def _start(self, state: TrainState, plan: StepPlan, is_best: bool) -> None:
        rank = dist.get_rank()
        partial = self._make_unfinished(state.step)
        files = []
        for part, engine in self._engines.items():
            if dist.get_rank(engine.seq_data_parallel_group) == 0 or engine.zero_optimization_stage():
                tensors, values = engine_tensors(engine, self._config.weights_only)
                metadata = {"wands_state": json.dumps(values)}
                files.append(TensorFile(f"{part}/{state_file(rank)}", tensors, metadata))
            if part in self._averages:
                tensors, metadata = self._averages[part].stored()
                files.append(TensorFile(f"{part}/{average_file(rank)}", tensors, metadata))
        state_of_objective = self._objective.state_dict()
        if rank == 0 and state_of_objective:
            tensors = [LazyTensor.of(name, tensor) for name, tensor in state_of_objective.items()]
            files.append(TensorFile(OBJECTIVE_FILE, tensors, {}))
        try:
            _check_space(self._folder, files)
        except DiskError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self._buffers is not None:
            files = self._buffers.copy_files(files)
        texts = {}
        if rank == 0:
            values = epoch_values(self._data.keys, self._data.checksums, plan)
            texts = {EPOCH_FILE: json.dumps(values)}
        work = self._thread.submit(_write_files, partial, files, texts)
        self._pending = _PendingSave(copy.deepcopy(state), is_best, partial, work)

    def _make_unfinished(self, step: int) -> Path:
        made: Path | str = ""
        if dist.get_rank() == 0:
            try:
                made = make_unfinished(self._folder, step)
            except OSError as error:
                made = one_line(error)
        made = gather_objects(made)[0]
        if isinstance(made, str):
            raise DiskError(
                f"output_dir={self._folder.parent}: no checkpoint of step {step} can be written to {self._folder} ({made}); make "
                "sure that this is a folder that you may write to.",
                agreed=True,
            )
        return made

    def _complete(self, pending: _PendingSave) -> Path:
        state, is_best, partial, work = pending
        folder = self._folder
        target = folder / step_name(state.step)
        hashes = gather_objects(work.result())
        problem: str | None = next((found for found in hashes if isinstance(found, str)), None)
        if dist.get_rank() == 0 and not problem:
            files = {name: digest for own in hashes if isinstance(own, dict) for name, digest in own.items()}
            try:
                state.write(partial, files)
                # `best` first: a run that is killed after `_publish` and resumed does not evaluate this step again.
                if is_best:
                    write_text(folder / "best", target.name)
                _publish(partial, target)
                self._thread.submit(delete_old_steps, target, self._config)
            except (OSError, WandsError) as error:
                problem = one_line(error)
        try:
            _raise_problem(target, problem)
        except DiskError:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk may be full of these files
            raise
        return target

    def close(self) -> None:
        """Wait for the thread that deletes old checkpoints."""
        self._thread.shutdown()


def _raise_problem(target: Path, problem: str | None) -> None:
    """Raise a DiskError on all ranks if a rank could not write its part of a checkpoint."""
    if found := next(filter(None, gather_objects(problem)), None):
        raise DiskError(
            f"checkpoint {target} could not be written ({found}); free disk space. If this error ended the run, start the run "
            "again with --resume.",
            agreed=True,
        )


def _write_files(folder: Path, files: Sequence[TensorFile], texts: Mapping[str, str]) -> dict[str, str] | str:
    """Write this rank's files of a checkpoint. Return their hashes by name, or the reason of a failure as a text."""
    hashes = {}
    try:
        for name, tensors, metadata in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashes[name] = write_safetensors(path, tensors, metadata)
            sync(path)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            hashes[name] = hash_file(folder / name)
            sync(folder / name)
    except OSError as error:
        return one_line(error)
    return hashes


def _check_space(folder: Path, files: Sequence[TensorFile]) -> None:
    """Raise a DiskError on all ranks, before anything is written, if a rank has too little space or a too small file size limit.

    Otherwise a write could fail on one rank while the others wait for it.
    """
    sizes = [sum(tensor.num_bytes for tensor in file.tensors) for file in files]
    needed = sum(gather_objects(sum(sizes)))
    largest = max(sizes, default=0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    problem = None
    free = needed
    with suppress(OSError):  # a network disk does not answer; the write then shows whether the disk works
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    if needed > free:
        problem = f"needs about {needed / 1e9:.3f} GB, but {free / 1e9:.3f} GB are free. Free disk space, or change output_dir"
    elif limit != resource.RLIM_INFINITY and largest > limit:
        problem = f"needs files of about {largest} bytes, but the file size limit (ulimit -f) is {limit} bytes. Raise the limit"
    if needs_x_and_fix := next(filter(None, gather_objects(problem)), None):
        raise DiskError(f"output_dir={folder.parent}: the checkpoint {needs_x_and_fix}.", agreed=True)


def _publish(partial: Path, target: Path) -> None:
    make_room(target)
    pointer = target.with_name("next")
    write_text(pointer, target.name)
    publish(partial, target)
    publish(pointer, target.with_name("latest"))


class BackgroundPush:
    """Pushes checkpoints that the recipe's section `hub` selects to the Hub, one at a time, while the training continues.

    On rank 0, a thread runs `wands push` in a subprocess with low priority. The file `PUSH_MARK` in a checkpoint's folder keeps
    the run from deleting it until it is pushed. A failed push causes a warning and a row in `events.jsonl`, and never ends the
    run. Of the waiting checkpoints, only the newest is pushed; the constructor continues with one that an earlier process has not
    finished.
    """

    def __init__(
        self, config: HubConfig | None, output_dir: Path, total_steps: int, events: EventLog, log: Log
    ) -> None:
        self._config = config
        self._folder = output_dir / "checkpoints"
        self._total_steps = total_steps
        self._events = events
        self._log = log
        self._lock = Lock()
        self._thread = Thread()
        self._newest = Path()
        for mark in self._marks():
            self.add(mark.parent)

    def add(self, step: Path | None) -> None:
        """Start to push a complete checkpoint if its step is a multiple of `hub.every` or the run's last. None is ignored."""
        hub = self._config
        if step is None or dist.get_rank():
            return
        mark = step / PUSH_MARK
        number = int(step.name.removeprefix("step_"))
        with suppress(OSError, WandsError):
            if hub is None or (number != self._total_steps and number % hub.every):
                return mark.unlink(missing_ok=True)  # the mark of a run with other settings
            os.close(open_own_file(mark, os.O_WRONLY | os.O_CREAT))
            self._newest = mark
            command = [*_COMMAND, str(step), hub.repo, *["--public"] * hub.public]
            self._thread = Thread(target=self._push, args=(mark, command), daemon=True)
            self._thread.start()

    def _push(self, mark: Path, command: list[str]) -> None:
        with self._lock:
            # Threads get the lock in any order, so a newer checkpoint may wait, or may have been pushed.
            if mark == self._newest:
                done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
                lines = done.stderr.decode(errors="replace").splitlines()
                error = (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else None
                self._events.write("push", checkpoint=mark.parent.name, error=error)
                if error:
                    self._log(f"{mark.parent} was not pushed ({error}); the training continues")
            for old in (old for old in self._marks() if old <= mark):
                old.unlink(missing_ok=True)

    def _marks(self) -> list[Path]:
        return sorted(self._folder.glob(f"step_????????/{PUSH_MARK}"))

    def close(self, wait: float) -> None:
        """Wait at most `wait` seconds for the newest upload. A resumed run repeats an unfinished one."""
        if wait and self._thread.is_alive():
            self._log(f"waiting at most {wait:g} s for the upload of the last checkpoint")
            self._thread.join(wait)
