"""Interface of an objective: inputs and targets of a step, its loss, its held-out loss, and facts for the planner.

Letters: N clips of the data, E entries of `RankSlice.entries` (one for each sample, without chunks), L tokens of a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from wands.attention.units import UnitRule
from wands.config.recipe import Recipe
from wands.data.collate import RankSlice
from wands.distributed.engine_protocol import Engines
from wands.variants import Expert, Variant

Model = Callable[..., Tensor]
"""The DiT of a step: a DeepSpeed engine, called with the result of `RankSlice.model_inputs`."""


class Forwards(NamedTuple):
    """Forward passes that the loss of one bin makes, for the planner's FLOPs and memory."""

    with_gradient: int = 1
    without_gradient: int = 0


@dataclass(frozen=True)
class ClipFacts:
    """Facts about clips that are known before they are read.

    Attributes:
        grids: int64 [N, 3], number of tokens along (frame, row, column).
        trained_tokens: float64 [N], sum of the token weights in the loss, without a first frame that is given to the model. For
            clips that are only planned, its expected value.
    """

    grids: np.ndarray
    trained_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def num_tokens(self) -> np.ndarray:
        """Number of tokens of each clip, int64 [N]."""
        return self.grids.prod(axis=1)


class ClipCosts(NamedTuple):
    """Costs of clips in one forward pass.

    Attributes:
        tokens: int64 [N], tokens that the model sees. `packing.max_tokens` limits their sum in a bin.
        pairs: int64 [N], pairs of a query and a key of self-attention.
    """

    tokens: np.ndarray
    pairs: np.ndarray


class Prepared(Protocol):
    """Inputs and targets of a bin: a dataclass of tensors, whose names are the objective's own except `sigmas`."""

    @property
    def sigmas(self) -> Tensor:
        """Noise level of each entry of `RankSlice.entries`, fp32 [E], for the log."""


class Loss(NamedTuple):
    """Loss of a bin on this rank.

    Attributes:
        total: weighted sum over this rank's tokens, a scalar with gradient. wands divides it by `Schedule.denominator`.
        errors: [E] without gradient, the sum of (error * token weight) over this rank's tokens of each entry. The sum over the
            context-parallel group, divided by `LossEntry.trained_len`, is the entry's error in the logs.
    """

    total: Tensor
    errors: Tensor


class Objective(ABC):
    """Inputs, targets and loss of a training step.

    Pass a child of this class, or of `FlowMatching`, as `wands.Trainer(objective=...)`. Take random numbers from
    `wands.flow.rng.rng(seed, key, purpose)` with a key of `RankSlice.keys`, so that results do not depend on the ranks, the
    packing or a restart.

    Attributes:
        name: name in checkpoints. A run can be resumed only with an objective of the same name and version.
        version: raise it if a resumed run would continue with another meaning of the same state.
        forwards: forward passes of `loss` for one bin.
        unit_rule: function from the token grid of a clip to its units, see `wands.attention.units`. None: a clip is one unit,
            whose tokens see each other.
    """

    name: str
    version: int = 1
    forwards: Forwards = Forwards()
    unit_rule: UnitRule | None = None

    def setup(self, recipe: Recipe, variant: Variant) -> None:  # noqa: B027
        """Take settings from the recipe, once, before anything is planned.

        Raises:
            ConfigError: if the recipe or the model does not fit the objective.
        """

    def costs(self, clips: ClipFacts) -> ClipCosts:
        """Return the costs of clips, by which they are packed. The default is one bidirectional pass over the clip's tokens."""
        tokens = clips.num_tokens
        return ClipCosts(tokens=tokens, pairs=tokens * tokens)

    @abstractmethod
    def weights(self, clips: ClipFacts) -> np.ndarray:
        """Return the weight of each clip in the loss, float64 [N].

        The loss of a step is divided by the mean sum of these weights in a step of the epoch; the logged loss by their sum in the
        step.
        """

    @abstractmethod
    def prepare(self, part: RankSlice, expert: Expert) -> Prepared:
        """Return the inputs and targets of a bin, in host memory. A thread calls this method while the device computes.

        The clean tokens `part.tokens` are not sent to the device. The DiT's noise levels are in `expert.sigma_range`.
        """

    @abstractmethod
    def prepare_at(self, part: RankSlice, sigmas: Sequence[float]) -> Prepared:
        """Return the inputs and targets of a bin for the held-out loss, at a given noise level for each sample."""

    @abstractmethod
    def loss(self, model: Model, part: RankSlice, prepared: Prepared) -> Loss:
        """Return the loss of a bin on this rank. `part`, without clean tokens, and `prepared` are on the device.

        Every rank must call the model equally often, also for a bin whose only sample is a padding sample of weight 0.
        """

    @abstractmethod
    def evaluate(self, model: Model, part: RankSlice, prepared: Prepared) -> Tensor:
        """Return the held-out errors of a bin, as `Loss.errors`, without the weights of samples and noise levels.

        The model has no gradient and no dropout. `prepared` is the result of `prepare_at`.
        """

    def after_step(self, engines: Engines) -> None:  # noqa: B027
        """Act after an optimizer step, on every rank. `engines` maps the subfolder of each DiT to its engine."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to store in checkpoints, equal on every rank. Each tensor has at least one dimension."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state_dict` from a checkpoint. The tensors are in host memory."""
        if state:
            raise ValueError(
                f"the objective {self.name} has no state, but the checkpoint has {sorted(state)}"
            )
