"""A job that writes the mean loss of every clip to a file, so that clips the model cannot learn stand out.

wands train RECIPE --set data.cache=cache --import examples/loss_per_clip.py
"""

import json
from collections import defaultdict
from statistics import fmean

import wands


class LossPerClip(wands.Job):
    """Job that writes `loss_per_clip_rank0.json`, and the file of each other rank, into the run folder.

    Args:
        every: number of steps between two writes.
    """

    def __init__(self, every: int = 50) -> None:
        self.every = every
        self.losses: dict[str, list[float]] = defaultdict(list)

    def start(self, training: wands.Training) -> None:
        """Remember where to write."""
        self.path = training.output_dir / f"loss_per_clip_rank{training.rank}.json"

    def run(self, step: wands.FinishedStep) -> None:
        """Collect the losses of the clips that this rank trained on in a step."""
        for result in step.results:
            for clip in result.samples:
                self.losses[clip["sample_id"]].append(clip["loss"])
        if step.number % self.every == 0 or step.ends:
            means = {clip: fmean(losses) for clip, losses in self.losses.items()}
            self.path.write_text(json.dumps(dict(sorted(means.items(), key=lambda item: -item[1])), indent=1))


plugin = wands.Plugin(jobs=(LossPerClip(),))
