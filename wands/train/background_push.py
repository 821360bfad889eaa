"""Push checkpoints to the Hugging Face Hub while the training continues.

A thread runs `wands push` in a subprocess with low priority. An empty file in the folder of a checkpoint marks that the
checkpoint must be pushed. The run does not delete a marked checkpoint. A resumed run pushes it.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

from wands.train.trainer import Trainer

PUSH_MARK = "push_is_pending"
"""Name of the empty file that marks the folder of a checkpoint that must be pushed."""
# The command is not a rank of the run, and must not slow down the run.
_COMMAND = ("env", "-uRANK", "-uLOCAL_RANK", "-uWORLD_SIZE", "nice", sys.executable, "-m", "wands", "push")


class BackgroundPush:
    """Pushes the checkpoints that the recipe's section `hub` selects, one at a time. Only rank 0 pushes.

    A failed push causes a warning and a row in `events.jsonl`, and never ends the run. If a checkpoint waits for its push
    and a newer checkpoint is saved, only the newer checkpoint is pushed. The constructor also pushes a checkpoint whose
    push was not finished when an earlier process of the run ended.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._lock, self._thread = trainer, Lock(), Thread()
        for mark in (trainer.run.output_dir / "checkpoints").glob(f"step_????????/{PUSH_MARK}"):
            self.add(mark.parent)

    def add(self, step: Path | None) -> None:
        """Start to push a checkpoint, if its step is a multiple of `hub.every` or the last step of the run.

        Args:
            step: folder of the complete checkpoint; None does nothing.
        """
        hub, last = self._trainer.run.recipe.hub, self._trainer.run.sampler.total_steps
        if step is None or self._trainer.rank:
            return
        mark, number = step / PUSH_MARK, int(step.name.removeprefix("step_"))
        with suppress(OSError):
            if hub is None or (number != last and number % hub.every):
                return mark.unlink(missing_ok=True)  # the mark of a run with other settings
            mark.touch()
            command = [*_COMMAND, str(step), hub.repo, *["--public"] * hub.public]
            self._thread = Thread(target=self._push, args=(mark, command), daemon=True)
            self._thread.start()

    def _push(self, mark: Path, command: list[str]) -> None:
        with self._lock:
            # Otherwise a newer checkpoint waits.
            if mark == max(mark.parent.parent.glob(f"step_????????/{PUSH_MARK}"), default=mark):
                done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
                lines = done.stderr.decode(errors="replace").splitlines()
                error = (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else None
                self._trainer.events.write("push", checkpoint=mark.parent.name, error=error)
                if error:
                    self._trainer.log(f"{mark.parent} was not pushed ({error}); the training continues")
            mark.unlink(missing_ok=True)

    def close(self, wait: float) -> None:
        """Wait at most `wait` seconds for the pushes that were started. A resumed run repeats an unfinished push."""
        if wait and self._thread.is_alive():
            self._trainer.log(f"waiting at most {wait:g} s for the upload of the last checkpoint")
            self._thread.join(wait)
