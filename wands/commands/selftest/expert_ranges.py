"""Checks of a model with two experts: stock pipeline and training give every timestep to the same DiT."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import diffusers
import torch
from torch import Tensor

from wands.commands.selftest.parity_setup import Group, Outcome, Setup
from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import sample_sigma
from wands.model.files.loading import load_index
from wands.model.files.name_maps import EXPERTS
from wands.variants import Expert

SHIFTS = (1.0, 3.0, 5.0, 8.0, 12.0)
NUM_DRAWS = 1000


class Experts(NamedTuple):
    """Two DiTs and the facts that decide which of them a timestep uses.

    Attributes:
        pipeline: class of the pipeline.
        boundary_ratio: t / num_timesteps at and above which the high-noise expert is used.
        num_timesteps: number of timesteps of the scheduler.
        experts: the DiTs with the noise levels of their training.
    """

    pipeline: str
    boundary_ratio: float
    num_timesteps: int
    experts: tuple[Expert, ...]


def read_experts(setup: Setup) -> Experts:
    """Read the configs of a model with two experts."""
    file = setup.folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    ratio, pipeline = setup.variant.boundary_ratio, load_index(setup.folder, key="--model")["_class_name"]
    assert ratio is not None
    return Experts(pipeline, ratio, int(config.get("num_train_timesteps", 1000)), setup.variant.experts)


def check_boundary(model: Experts) -> Outcome:
    """Compare the DiT that the pipeline uses above, at and below the boundary with the DiT that is trained there."""
    offsets = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    timesteps = offsets + model.boundary_ratio * model.num_timesteps
    texts, is_equal = [], True
    for offset, t, used in zip(
        offsets.tolist(), timesteps.tolist(), _ask_pipeline(model, timesteps), strict=True
    ):
        sigma = model.boundary_ratio + offset / model.num_timesteps
        ranges = {expert.subfolder: expert.sigma_range for expert in model.experts}
        trained = next((name for name, (low, high) in ranges.items() if low <= sigma < high), "none")
        is_equal &= trained == used
        texts.append(f"t={t:g} {used}" + ("" if trained == used else f" (trained: {trained})"))
    return Outcome(is_equal, ", ".join(texts), "equal for sampling and training")


def check_draws(model: Experts) -> Outcome:
    """Check that training draws no noise level at which sampling uses the other expert."""
    wrong = count = 0
    for shift in SHIFTS:
        flow = FlowConfig(flow_shift=shift)
        for expert in model.experts:
            ends = [SimpleNamespace(random=lambda end=end: end) for end in (0.0, 1.0 - 2.0**-53)]
            generators: list[Any] = [*ends, *[philox("selftest", expert.name, str(shift))] * (NUM_DRAWS + 1)]
            sigmas = [sample_sigma(generator, flow, *expert.sigma_range) for generator in generators]
            timesteps = torch.tensor(sigmas, dtype=torch.float32) * model.num_timesteps
            is_high = timesteps.double() >= model.boundary_ratio * model.num_timesteps
            wrong += int((is_high != (expert.subfolder == EXPERTS[0])).sum())
            count += len(sigmas)
    shifts = ", ".join(f"{shift:g}" for shift in SHIFTS)
    return Outcome(wrong == 0, f"{wrong} of {count} draws on the wrong side, shifts {shifts}", "0")


EXPERT_GROUP: Group = (read_experts, {"experts.boundary": check_boundary, "experts.draws": check_draws})


def _ask_pipeline(model: Experts, timesteps: Tensor) -> list[str]:
    """Run the stock pipeline's loop with two stand-ins for the DiTs; return the DiT that each falling timestep called."""
    latents = torch.zeros(1, 16, 1, 2, 2)
    config = SimpleNamespace(in_channels=16, image_dim=None, patch_size=(1, 2, 2))
    dits = {name: MagicMock(config=config, dtype=torch.float32, return_value=(latents,)) for name in EXPERTS}
    scheduler = MagicMock(order=1, timesteps=timesteps)
    scheduler.config.num_train_timesteps = model.num_timesteps
    scheduler.step.return_value = (latents,)
    vae_config = SimpleNamespace(z_dim=16, scale_factor_temporal=4, scale_factor_spatial=8)
    pipeline = getattr(diffusers, model.pipeline)(
        **dict.fromkeys(("tokenizer", "text_encoder")),
        **dits,
        vae=MagicMock(config=vae_config),
        scheduler=scheduler,
        boundary_ratio=model.boundary_ratio,
    )
    pipeline.set_progress_bar_config(disable=True)
    takes_image = model.pipeline == "WanImageToVideoPipeline"
    pipeline.prepare_latents = lambda *_: (latents, latents) if takes_image else latents
    pipeline(
        **({"image": torch.zeros(1, 3, 16, 16)} if takes_image else {}),
        prompt_embeds=torch.zeros(1, 1, 8),
        guidance_scale=1.0,
        output_type="latent",
        **{"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": len(timesteps)},
    )
    called = {
        float(call.kwargs["timestep"]): name for name, dit in dits.items() for call in dit.call_args_list
    }
    return [called[t] for t in timesteps.tolist()]
