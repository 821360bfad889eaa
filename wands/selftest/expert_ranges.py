"""Checks that wands trains, at each tested timestep, the expert that diffusers' stock pipeline uses there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import diffusers
import torch

from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import NUM_TRAIN_TIMESTEPS, sample_sigma
from wands.model.files.loading import load_index
from wands.model.files.name_maps import EXPERTS
from wands.selftest.parity_setup import Result, Setup

SHIFTS = (1.0, 3.0, 5.0, 8.0, 12.0)
NUM_DRAWS = 1000


def check_boundary(setup: Setup) -> Result:
    """Check the expert at three timesteps: above, at and below the boundary."""
    sigmas = [_boundary(setup) + offset / NUM_TRAIN_TIMESTEPS for offset in (1.0, 0.0, -1.0)]
    timesteps = [sigma * NUM_TRAIN_TIMESTEPS for sigma in sigmas]
    ranges = [(expert.subfolder, *expert.sigma_range) for expert in setup.variant.experts]
    trained = [next((name for name, low, high in ranges if low <= x < high), "none") for x in sigmas]
    used = _ask_pipeline(setup, timesteps)
    rows = zip(timesteps, used, trained, strict=True)
    texts = [f"t={t:g} {dit}" + ("" if dit == other else f" (trained: {other})") for t, dit, other in rows]
    return Result.of(trained == used, ", ".join(texts), "equal for sampling and training")


def check_draws(setup: Setup) -> Result:
    """Check the expert at the noise levels that training draws."""
    boundary = _boundary(setup) * NUM_TRAIN_TIMESTEPS
    wrong = count = 0
    for shift in SHIFTS:
        flow = FlowConfig(flow_shift=shift)
        for expert in setup.variant.experts:
            ends = [SimpleNamespace(random=lambda end=end: end) for end in (0.0, 1.0 - 2.0**-53)]
            generators: list[Any] = [*ends, *[philox("selftest", expert.name, str(shift))] * (NUM_DRAWS + 1)]
            sigmas = [sample_sigma(generator, flow, *expert.sigma_range) for generator in generators]
            timesteps = torch.tensor(sigmas, dtype=torch.float32) * NUM_TRAIN_TIMESTEPS
            is_high = timesteps.double() >= boundary
            wrong += int((is_high != (expert.subfolder == EXPERTS[0])).sum())
            count += len(sigmas)
    shifts = ", ".join(f"{shift:g}" for shift in SHIFTS)
    return Result.of(wrong == 0, f"{wrong} of {count} noise levels of the other expert, shifts {shifts}", "0")


def _boundary(setup: Setup) -> float:
    assert setup.variant.boundary_ratio is not None  # the model has two experts
    return setup.variant.boundary_ratio


def _ask_pipeline(setup: Setup, timesteps: list[float]) -> list[str]:
    """Return the name of the DiT that diffusers' stock pipeline uses at each of the descending timesteps.

    The sampling loop runs with mock objects in place of the two DiTs, which record the calls.
    """
    latents = torch.zeros(1, 16, 1, 2, 2)
    dits = MagicMock()
    for name in EXPERTS:
        config = SimpleNamespace(in_channels=16, image_dim=None, patch_size=(1, 2, 2))
        getattr(dits, name).configure_mock(config=config, dtype=torch.float32, return_value=(latents,))
    scheduler = MagicMock(order=1, timesteps=torch.tensor(timesteps, dtype=torch.float64))
    scheduler.config.num_train_timesteps = NUM_TRAIN_TIMESTEPS
    scheduler.step.return_value = (latents,)
    vae_config = SimpleNamespace(z_dim=16, scale_factor_temporal=4, scale_factor_spatial=8)
    class_name = load_index(setup.folder, key="--model")["_class_name"]
    pipeline = getattr(diffusers, class_name)(
        tokenizer=None,
        text_encoder=None,
        vae=MagicMock(config=vae_config),
        scheduler=scheduler,
        boundary_ratio=_boundary(setup),
        **{name: getattr(dits, name) for name in EXPERTS},
    )
    pipeline.set_progress_bar_config(disable=True)
    takes_image = class_name == "WanImageToVideoPipeline"
    pipeline.prepare_latents = lambda *_: (latents, latents) if takes_image else latents
    pipeline(
        **({"image": torch.zeros(1, 3, 16, 16)} if takes_image else {}),
        prompt_embeds=torch.zeros(1, 1, 8),
        guidance_scale=1.0,
        output_type="latent",
    )
    return [name for name, _, _ in dits.mock_calls if name in EXPERTS]
