"""The command `wands train`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from wands.commands.plan import find_model
from wands.config.options import TrainOptions
from wands.config.recipe import FlowConfig
from wands.config.recipe_loading import load_recipe
from wands.errors import ConfigError
from wands.flow.rng import philox
from wands.flow.sigmas import BASE_TOKENS, NUM_TRAIN_TIMESTEPS, sample_sigma
from wands.model.files.named_models import TINY
from wands.plugin import load_plugins
from wands.texts import Log
from wands.train.trainer import Trainer
from wands.variants import VARIANTS
from wands.watch.launcher import Ancestor

BAR_WIDTH = 50
NUM_BARS = 20
"""Width of the longest bar of a histogram in characters, and number of bars."""
NUM_SAMPLES = 20_000
"""Number of random timesteps in a histogram. The standard error of a bar is then below 0.4 % of all samples."""


def run_train(options: TrainOptions, log: Log, launcher: Sequence[Ancestor] = ()) -> None:
    """Train the model that a recipe names, or only check the recipe and its data.

    `launcher` lists the processes from the parent of this process up to its launcher, such as torchrun.

    Raises:
        WandsError: if the run cannot start or fails. One message lists all problems with recipe, model and data.
    """
    overrides = [*_mock_overrides(options.mock), *options.overrides]
    if options.plan is not None:
        overrides.append(f"packing.plan={options.plan}")
    if options.show_timesteps:
        if os.environ.get("RANK", "0") == "0":
            _show_timesteps(options.recipe, overrides, log)
        return
    trainer = Trainer(
        options.recipe,
        overrides,
        deepspeed=options.deepspeed,
        resume=options.resume,
        plugin=load_plugins(options.imports),
        force=options.force,
        log=log,
        launcher=launcher,
    )
    if not options.dry_run:
        trainer.train()
        return
    text = trainer.plan()
    if os.environ.get("RANK", "0") == "0":
        log(text)


def _mock_overrides(name: str | None) -> tuple[str, ...]:
    """Return the recipe overrides of --mock: a named model with random weights, and random clips of its official size."""
    if name is None:
        return ()
    known = VARIANTS | TINY
    if name not in known:
        raise ConfigError(f"--mock {name} is not a published or tiny model; use one of {', '.join(known)}.")
    variant = known[name]
    official = variant.sampling
    size = official.num_frames, official.height, official.width
    mock = f"data={{mock: {{num_samples: 1000, shapes: [{list(variant.latent_size(*size))}]}}}}"
    return f"model.path={name}", "model.init=random", mock, f"packing.max_tokens={variant.num_tokens(*size)}"


def _show_timesteps(recipe_path: str | None, overrides: Sequence[str], log: Log) -> None:
    """Log a histogram of the sampled timesteps for each expert, or one over all noise levels without `model.path`."""
    recipe = load_recipe(recipe_path, overrides)
    experts = find_model(recipe)[2] if recipe.model.path else ()
    for expert in experts or (None,):
        if expert and expert.name:
            log(f"{expert.name}-noise expert ({expert.subfolder})")
        sigma_range = expert.sigma_range if expert else recipe.flow.sigma_range
        log(timestep_histogram(recipe.flow, recipe.train.seed, sigma_range))


def timestep_histogram(flow: FlowConfig, seed: int, sigma_range: tuple[float, float] = (0.0, 1.0)) -> str:
    """Return an ASCII histogram of random timesteps, sampled and shifted as in training, with their mean and quantiles.

    Bars go from high noise to low noise. `sigma_range` is the range of the trained expert.
    """
    generator = philox(seed, "histogram")
    sigmas = [sample_sigma(generator, flow, *sigma_range) for _ in range(NUM_SAMPLES)]
    timesteps = np.array(sigmas) * NUM_TRAIN_TIMESTEPS
    counts, edges = np.histogram(timesteps, bins=NUM_BARS, range=(0, NUM_TRAIN_TIMESTEPS))
    heights = np.round(BAR_WIDTH * counts / counts.max()).astype(int)
    rows = zip(edges, edges[1:], counts / NUM_SAMPLES, heights, strict=False)
    bars = [f"{low:6.0f} - {high:4.0f}  {share:6.1%}  {'#' * height}" for low, high, share, height in rows]
    quantiles = ", ".join(f"{q}% {np.percentile(timesteps, q):.0f}" for q in (5, 25, 50, 75, 95))
    summary = f"mean {timesteps.mean():.0f}; {quantiles}"
    return "\n".join([_heading(flow), "  timestep     share", *reversed(bars), summary])


def _heading(flow: FlowConfig) -> str:
    details = {"logit_normal": f"({flow.logit_mean:g}, {flow.logit_std:g})", "mode": f"({flow.mode_scale:g})"}
    sampling = flow.timestep_sampling + details.get(flow.timestep_sampling, "")
    mixture = f", {flow.mix_uniform:.0%} uniform unshifted" if flow.mix_uniform else ""
    by_size = f", for a clip of {BASE_TOKENS:,} tokens" * flow.shift_by_size
    return f"{flow.preset}: {sampling}, flow_shift {flow.flow_shift:g}{mixture}{by_size}"
