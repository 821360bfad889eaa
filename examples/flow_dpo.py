"""Preference training of a LoRA: of two clips with one caption, the model learns to make the first more likely than the second.

The rejected clip of `a.mp4` is `a.rejected.mp4` next to it, or the column `rejected` of a table, in the same size. Both clips of
a pair are in one forward pass, do not see each other, and have the same noise and noise level. The reference is the base model,
with the LoRA off. Not for context parallelism. Source: Wallace et al. 2023, "Diffusion Model Alignment Using Direct Preference
Optimization", with the errors of flow matching.

    wands preprocess pairs --model BASE --out cache --import examples/flow_dpo.py
    wands train wan2.1-t2v-1.3b-lora --set data.cache=cache --import examples/flow_dpo.py
    wands export runs/wan2.1-t2v-1.3b-lora --out lora    # a plain LoRA, which samples without this file
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import wands


class Rejected(wands.Condition):
    """Latents of the rejected clip, as a second clip in the sequence."""

    name = "rejected"
    files = (wands.ClipFile(column="rejected", endings=(".rejected.mp4",)),)
    arrays = (wands.ArraySpec(name="rejected_latents", dtype="bf16", dims=(16, "frames", "rows", "columns")),)

    def encode(self, clip: wands.ClipFrames, encoders: Any) -> dict[str, Tensor]:
        """Return the arrays of a sample, from the frames of its rejected clip, uint8 [F, H, W, 3]."""
        pixels = wands.to_pixels(clip.files["rejected"].to(encoders.device))
        return {"rejected_latents": encoders.vae.encode(pixels)}

    def enter(self, arrays: Any, size: wands.ClipSize) -> wands.SecondClip:
        """Return the tokens of the rejected clip, [tokens, channels of a token]."""
        return wands.SecondClip(wands.patchify(arrays["rejected_latents"].float(), size.patch_size))


class FlowDPO(wands.FlowMatching):
    """Logistic loss of the margin by which the model, compared with its base, prefers the first clip of a pair.

    Args:
        beta: scale of the margin. Larger values keep the model closer to its base.
    """

    name = "flow_dpo"
    forwards = wands.Forwards(with_gradient=1, without_gradient=1)

    def __init__(self, beta: float = 500.0) -> None:
        self.beta = beta

    def setup(self, recipe: wands.Recipe, variant: Any) -> None:
        """Take settings from the recipe."""
        if recipe.parallel.group_size > 1:
            raise ValueError("flow_dpo needs whole clips on a rank; remove the section parallel.")
        super().setup(recipe, variant)

    def unit_rule(self, grid: tuple[int, int, int]) -> tuple[wands.Unit, ...]:
        """Return the units of a pair: two clips that see themselves."""
        length = grid[0] * grid[1] * grid[2]
        return (wands.Unit(0, length), wands.Unit(0, length, ((1, 2),), chunk=1, is_second=True))

    def costs(self, clips: wands.ClipFacts) -> wands.ClipCosts:
        """Return the costs of two clips for each pair."""
        return wands.ClipCosts(tokens=2 * clips.num_tokens, pairs=2 * clips.num_tokens**2)

    def weights(self, clips: wands.ClipFacts) -> np.ndarray:
        """Return 1 for each pair."""
        return np.ones(len(clips))

    def loss(self, model: Any, part: Any, prepared: Any) -> wands.Loss:
        """Return the loss of a bin, see `wands.Objective.loss`."""
        inputs = part.model_inputs(prepared.tokens, prepared.timesteps)
        with wands.adapter_off(model):
            of_base = self._errors(model(**inputs), part, prepared)
        errors = self._errors(model(**inputs), part, prepared)
        lens = torch.tensor([entry.trained_len for entry in part.entries]).to(errors)
        better, worse = ((errors - of_base) / lens).view(-1, 2).unbind(1)
        losses = -logsigmoid(self.beta / 2 * (worse - better))
        return wands.Loss((losses * part.weights.to(losses)).sum(), errors.detach())

    def _errors(self, prediction: Tensor, part: Any, prepared: Any) -> Tensor:
        """Return the sum of the errors of each clip, two for each pair."""
        rows = prepared.trained
        errors = self.token_errors(prediction[rows], prepared.target[rows]) * part.token_weights[rows]
        return errors.new_zeros(len(part.entries)).index_add(0, prepared.entry_ids[rows], errors)


plugin = wands.Plugin(conditions=(Rejected(),), objective=FlowDPO())
