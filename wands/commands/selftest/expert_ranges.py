"""Checks of a model of two experts: on which side of the boundary a timestep lies, to the stock pipeline and to training."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from torch import Tensor

from wands.commands.selftest.parity_setup import Outcome, Setup
from wands.config.recipe import FlowConfig
from wands.flow.rng import philox
from wands.flow.sigmas import sample_sigma
from wands.variants import Expert

SHIFTS = (1.0, 3.0, 5.0, 8.0, 12.0)
NUM_DRAWS = 1000
WIDTH = 12


class ExpertChecks:
    """Which DiT is whose."""

    def __init__(self, setup: Setup) -> None:
        """Read the number of timesteps from the model's scheduler.

        Args:
            setup: what is tested, a model of two experts.
        """
        file = setup.folder / "scheduler" / "scheduler_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.num_timesteps = int(config.get("num_train_timesteps", 1000))
        self.class_name = setup.index["_class_name"]
        self.experts = setup.variant.experts
        assert setup.variant.boundary_ratio is not None
        self.boundary_ratio = setup.variant.boundary_ratio
        self.boundary = self.boundary_ratio * self.num_timesteps

    def check_boundary(self) -> Outcome:
        """Below, at and above the boundary the pipeline samples with the DiT that training gives these timesteps."""
        timesteps = torch.tensor([self.boundary + 1, self.boundary, self.boundary - 1], dtype=torch.float64)
        stock = ask_pipeline(self.class_name, self.boundary_ratio, self.num_timesteps, timesteps)
        above, _, below = (timesteps / self.num_timesteps).tolist()
        sigmas = (above, self.boundary_ratio, below)
        ours = [next((e.subfolder for e in self.experts if _holds(e, sigma)), "none") for sigma in sigmas]
        pairs = zip(timesteps.tolist(), stock, ours, strict=True)
        number = ", ".join(
            f"t={t:g} {theirs}" + ("" if theirs == mine else f" (here {mine})") for t, theirs, mine in pairs
        )
        return Outcome(stock == ours, number, "the same of both")

    def check_draws(self) -> Outcome:
        """No noise level that an expert is trained at is the other one's at sampling."""
        wrong = count = 0
        for shift in SHIFTS:
            flow = FlowConfig(flow_shift=shift)
            for expert in self.experts:
                generators: list[Any] = [
                    _Ends(0.0),
                    _Ends(1.0 - 2.0**-53),
                    philox("selftest", expert.name, str(shift)),
                ]
                drawn = [
                    sample_sigma(g, flow, *expert.sigma_range)
                    for g in [*generators, *generators[2:] * NUM_DRAWS]
                ]
                timesteps = torch.tensor(drawn, dtype=torch.float32) * self.num_timesteps
                is_high = timesteps.double() >= self.boundary
                wrong += int((is_high != (expert.subfolder == "transformer")).sum())
                count += len(drawn)
        shifts = ", ".join(f"{shift:g}" for shift in SHIFTS)
        return Outcome(wrong == 0, f"{wrong} of {count} draws on the wrong side, shifts {shifts}", "0")

    CHECKS: ClassVar[dict[str, Callable[[Any], Outcome]]] = {
        "experts.boundary": check_boundary,
        "experts.draws": check_draws,
    }


def ask_pipeline(class_name: str, boundary_ratio: float, num_timesteps: int, timesteps: Tensor) -> list[str]:
    """Let the stock pipeline sample with two DiTs that do nothing but note that they were called.

    Args:
        class_name: of the pipeline.
        boundary_ratio: of the pipeline.
        num_timesteps: of its scheduler.
        timesteps: of its loop, falling.

    Returns:
        "transformer" or "transformer_2" for each timestep.
    """
    calls: list[str] = []
    scheduler = _Scheduler(num_timesteps, use_flow_sigmas=True, prediction_type="flow_prediction")
    scheduler.chosen = timesteps
    parts = {name: _Recorder.build(name, calls) for name in ("transformer", "transformer_2")}
    unused = {"tokenizer": None, "text_encoder": None, "vae": _NoVae()}
    options = {"height": 16, "width": 16, "num_frames": 1, "num_inference_steps": len(timesteps)}
    picture = {}
    if class_name == "WanImageToVideoPipeline":
        pipeline = WanImageToVideoPipeline(
            **unused, **parts, scheduler=scheduler, boundary_ratio=boundary_ratio
        )
        latents = torch.zeros(1, 16, 1, 2, 2)
        pipeline.prepare_latents = lambda *_: (latents, latents)
        picture = {"image": torch.zeros(1, 3, 16, 16)}
    else:
        pipeline = WanPipeline(**unused, **parts, scheduler=scheduler, boundary_ratio=boundary_ratio)
    pipeline.set_progress_bar_config(disable=True)
    embeds = torch.zeros(1, 1, WIDTH)
    pipeline(**picture, prompt_embeds=embeds, guidance_scale=1.0, output_type="latent", **options)
    return calls


def _holds(expert: Expert, sigma: float) -> bool:
    low, high = expert.sigma_range
    return low <= sigma < high or sigma == high == 1.0


class _Recorder(WanTransformer3DModel):
    @classmethod
    def build(cls, name: str, calls: list[str]) -> _Recorder:
        sizes = {"num_attention_heads": 1, "attention_head_dim": WIDTH, "text_dim": WIDTH, "freq_dim": WIDTH}
        model: _Recorder = cls(num_layers=1, ffn_dim=WIDTH, **sizes)
        model.note = lambda: calls.append(name)
        return model

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        self.note()
        return (hidden_states[:, :16],)


class _Scheduler(UniPCMultistepScheduler):
    """One that goes through given timesteps and does nothing there."""

    chosen: Tensor

    def set_timesteps(self, num_inference_steps: int, device: Any = None, **_: Any) -> None:
        super().set_timesteps(num_inference_steps, device)
        self.timesteps = self.chosen

    def step(self, _prediction: Tensor, _timestep: Tensor, latents: Tensor, **_: Any) -> tuple[Tensor]:
        return (latents,)


class _NoVae:
    """What a pipeline asks of the VAE that it does not use."""

    config = SimpleNamespace(z_dim=16, scale_factor_temporal=4, scale_factor_spatial=8)


class _Ends:
    """A generator that draws the end of every range."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value
