"""The default objective: rectified flow, in which the model predicts the velocity from the clip to the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from wands.config.recipe import Recipe
from wands.data.collate import RankSlice
from wands.flow.loss import loss_weights, squared_errors, weighted_sum
from wands.flow.noise import NoisyBatch, add_noise
from wands.flow.sigmas import sigma_weight
from wands.objectives.objective import ClipFacts, Loss, Model, Objective, Prepared
from wands.variants import Expert, Variant


class FlowMatching(Objective):
    """Weighted mean of the squared errors of the predicted velocity.

    To change only how errors are measured, override `token_errors`. To add a term, override `loss`.
    """

    name = "flow_matching"

    def setup(self, recipe: Recipe, variant: Variant) -> None:
        self.flow = recipe.flow
        self.reduction = recipe.loss.reduction
        self.seed = recipe.train.seed

    def weights(self, clips: ClipFacts) -> np.ndarray:
        return np.ones(len(clips)) if self.reduction == "sample" else clips.trained_tokens

    def prepare(self, part: RankSlice, expert: Expert) -> NoisyBatch:
        return add_noise(
            part.tokens,
            part.layout,
            part.keys,
            self.flow,
            self.seed,
            num_cond_tokens=part.num_cond_tokens,
            sigma_range=expert.sigma_range,
        )

    def prepare_at(self, part: RankSlice, sigmas: Sequence[float]) -> NoisyBatch:
        return add_noise(
            part.tokens,
            part.layout,
            part.keys,
            self.flow,
            self.seed,
            num_cond_tokens=part.num_cond_tokens,
            given_sigmas=sigmas,
        )

    def loss(self, model: Model, part: RankSlice, prepared: Prepared) -> Loss:
        noisy = cast(NoisyBatch, prepared)
        prediction = model(**part.model_inputs(noisy.tokens, noisy.timesteps))
        return self.loss_of(prediction, part, noisy)

    def loss_of(self, prediction: Tensor, part: RankSlice, noisy: NoisyBatch) -> Loss:
        """Return the loss of a prediction [L, P], see `loss`."""
        rows = noisy.trained  # without tail padding and conditioning tokens
        errors = self.token_errors(prediction[rows], noisy.target[rows])
        return self.weighted_sum(errors, part, noisy)

    def weighted_sum(self, token_errors: Tensor, part: RankSlice, noisy: NoisyBatch) -> Loss:
        """Return the sum of the errors of the tokens `noisy.trained`, with the weights of masks, samples and noise levels."""
        rows = noisy.trained
        of_sigmas = sigma_weight(noisy.sigmas, self.flow)
        lens = [part.trained_lens[entry.sample] for entry in part.entries]
        weights = loss_weights(lens, part.entry_weights, of_sigmas, self.reduction)
        ids = noisy.entry_ids[rows]
        total, errors = weighted_sum(token_errors, ids, weights, part.token_weights[rows])
        return Loss(total, errors)

    def evaluate(self, model: Model, part: RankSlice, prepared: Prepared) -> Tensor:
        noisy = cast(NoisyBatch, prepared)
        prediction = model(**part.model_inputs(noisy.tokens, noisy.timesteps))
        rows = noisy.trained
        errors = self.token_errors(prediction[rows].double(), noisy.target[rows].double())
        ones = torch.ones(len(part.entries), device=errors.device)
        return weighted_sum(errors, noisy.entry_ids[rows], ones, part.token_weights[rows])[1]

    def token_errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the error of each token, [L], of a prediction [L, P] in any float dtype and a target [L, P] in fp32 or fp64."""
        return squared_errors(prediction, target)
