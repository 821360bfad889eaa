"""A LoRA that is held to its base model: a second forward pass, with the LoRA off, gives what the base would predict.

wands train RECIPE --set lora.rank=16 --set data.cache=cache --import examples/held_to_base.py
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import wands


class HeldToBase(wands.FlowMatching):
    """Flow matching plus `weight` times the squared distance to the prediction of the base model.

    The weight grows from 0 over the first steps. How many steps were made is a state, which the checkpoints contain.

    Args:
        weight: largest weight of the distance.
        warmup: number of steps until the weight is reached.
    """

    name = "held_to_base"
    forwards = wands.Forwards(with_gradient=1, without_gradient=1)

    def __init__(self, weight: float = 0.1, warmup: int = 100) -> None:
        self.weight = weight
        self.warmup = warmup
        self.num_steps = 0

    def loss(self, model: Any, part: Any, prepared: Any) -> wands.Loss:
        """Return the loss of a bin, see `wands.Objective.loss`."""
        inputs = part.model_inputs(prepared.tokens, prepared.timesteps)
        with wands.adapter_off(model):
            of_base = model(**inputs)
        prediction = model(**inputs)

        rows = prepared.trained
        loss = self.loss_of(prediction, part, prepared)
        distance = self.weighted_sum(self.token_errors(prediction[rows], of_base[rows]), part, prepared)
        weight = self.weight * min(1.0, self.num_steps / self.warmup)
        return wands.Loss(loss.total + weight * distance.total, loss.errors)

    def after_step(self, engines: Mapping[str, Any]) -> None:
        """Count an optimizer step."""
        self.num_steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {"num_steps": torch.tensor([self.num_steps])}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of a checkpoint."""
        self.num_steps = int(state["num_steps"])


plugin = wands.Plugin(objective=HeldToBase())
