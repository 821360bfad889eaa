"""The command `wands profile`: train a few steps with the profiler, without a checkpoint."""

from __future__ import annotations

from wands.config.options import ProfileOptions, TrainOptions

DEFAULTS = ("profile.start=6", "profile.steps=5", "train.max_steps=11")
"""Recipe keys that `wands profile` sets. The user can set other values with --set."""


def train_options(options: ProfileOptions) -> TrainOptions:
    """Return the options of `wands train` for a run that ends after the profiled steps."""
    off = ("checkpoint={every: 0}", "logging.trackers=[]", "eval=null", "sample=null", "hub=null")
    fixed = ("profile.stop=true", f"output_dir={options.out}", *off)
    shared = options.model_dump(exclude={"out", "overrides"})
    return TrainOptions(**shared, overrides=(*DEFAULTS, *options.overrides, *fixed))
