"""A robust loss: errors far above `scale` count linearly instead of squared (the Charbonnier loss).

wands train RECIPE --set data.cache=cache --import examples/robust_loss.py
"""

from torch import Tensor

import wands


class Robust(wands.FlowMatching):
    """Flow matching whose large errors pull less than their square.

    Args:
        scale: size of an error at which the loss changes from squared to linear.
    """

    name = "robust"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def token_errors(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the error of each token, [L], from predictions and targets of [L, P]."""
        squares = (prediction.to(target.dtype) - target).square()
        return (self.scale * ((squares + self.scale**2).sqrt() - self.scale)).mean(dim=1)


plugin = wands.Plugin(objective=Robust())
