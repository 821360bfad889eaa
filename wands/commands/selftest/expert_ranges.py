"""Checks of a model with two experts: stock pipeline and training give every timestep to the same DiT."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import diffusers
import torch
from torch import Tensor

from wands.commands.selftest.parity_setup import Outcome, Setup
from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import sample_sigma
from wands.model.files.loading import load_index
from wands.model.files.name_maps import EXPERTS

SHIFTS = (1.0, 3.0, 5.0, 8.0, 12.0)
NUM_DRAWS = 1000


def check_boundary(setup: Setup) -> Outcome:
    """Compare the DiT that the pipeline uses above, at and below the boundary with the DiT that is trained there."""
    num_timesteps, ratio, experts = _read_num_timesteps(setup), setup.boundary_ratio, setup.variant.experts
    offsets = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    timesteps = offsets + ratio * num_timesteps
    stock = ask_pipeline(load_index(setup.folder)["_class_name"], ratio, num_timesteps, timesteps)
    texts, is_equal = [], True
    for offset, t, expected in zip(offsets.tolist(), timesteps.tolist(), stock, strict=True):
        sigma = ratio + offset / num_timesteps
        parts = [e.subfolder for e in experts if e.sigma_range[0] <= sigma < e.sigma_range[1]]
        trained = parts[0] if parts else "none"
        is_equal &= trained == expected
        texts.append(f"t={t:g} {expected}" + ("" if trained == expected else f" (trained: {trained})"))
    return Outcome(is_equal, ", ".join(texts), "equal for sampling and training")


def check_draws(setup: Setup) -> Outcome:
    """Check that training draws no noise level at which sampling uses the other expert."""
    num_timesteps = _read_num_timesteps(setup)
    wrong = count = 0
    for shift in SHIFTS:
        flow = FlowConfig(flow_shift=shift)
        for expert in setup.variant.experts:
            ends = [SimpleNamespace(random=lambda end=end: end) for end in (0.0, 1.0 - 2.0**-53)]
            generators: list[Any] = [*ends, *[philox("selftest", expert.name, str(shift))] * (NUM_DRAWS + 1)]
            sigmas = [sample_sigma(generator, flow, *expert.sigma_range) for generator in generators]
            timesteps = torch.tensor(sigmas, dtype=torch.float32) * num_timesteps
            is_high = timesteps.double() >= setup.boundary_ratio * num_timesteps
            wrong += int((is_high != (expert.subfolder == EXPERTS[0])).sum())
            count += len(sigmas)
    shifts = ", ".join(f"{shift:g}" for shift in SHIFTS)
    return Outcome(wrong == 0, f"{wrong} of {count} draws on the wrong side, shifts {shifts}", "0")


EXPERT_CHECKS = {"experts.boundary": check_boundary, "experts.draws": check_draws}


def _read_num_timesteps(setup: Setup) -> int:
    file = setup.folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return int(config.get("num_train_timesteps", 1000))


def ask_pipeline(class_name: str, boundary_ratio: float, num_timesteps: int, timesteps: Tensor) -> list[str]:
    """Run the stock pipeline's loop with two stand-ins for the DiTs and return which of them each timestep called.

    Args:
        class_name: class of the pipeline.
        boundary_ratio: boundary of the pipeline.
        num_timesteps: number of timesteps of its scheduler.
        timesteps: timesteps of the loop, falling.

    Returns:
        "transformer" or "transformer_2" for each timestep.
    """
    latents = torch.zeros(1, 16, 1, 2, 2)
    config = SimpleNamespace(in_channels=16, image_dim=None, patch_size=(1, 2, 2))
    dits = {name: MagicMock(config=config, dtype=torch.float32, return_value=(latents,)) for name in EXPERTS}
    scheduler = MagicMock(order=1, timesteps=timesteps)
    scheduler.config.num_train_timesteps = num_timesteps
    scheduler.step.return_value = (latents,)
    vae_config = SimpleNamespace(z_dim=16, scale_factor_temporal=4, scale_factor_spatial=8)
    pipeline = getattr(diffusers, class_name)(
        **dict.fromkeys(("tokenizer", "text_encoder")),
        **dits,
        vae=MagicMock(config=vae_config),
        scheduler=scheduler,
        boundary_ratio=boundary_ratio,
    )
    pipeline.set_progress_bar_config(disable=True)
    takes_image = class_name == "WanImageToVideoPipeline"
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
