"""Interface of a DeepSpeed engine: all that wands uses of it.

DeepSpeed's own types are not checked. The class of an engine's optimizer depends on the ZeRO stage; attributes that only some of
these classes have are read through `Any`, where the stage is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@runtime_checkable
class EngineOptimizer(Protocol):
    """Optimizer of an engine: a torch optimizer at ZeRO-0, and DeepSpeed's wrapper of one at the other stages."""

    param_groups: list[dict[str, Any]]


@runtime_checkable
class EngineSchedule(Protocol):
    """Learning rate schedule of an engine: torch's, or that of a DeepSpeed JSON."""

    def step(self) -> None:
        """Count a step, and set the learning rates of the next one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the result of `state_dict`."""


class ModelParallelGroups(Protocol):
    """Argument `mpu` of `deepspeed.initialize`, see `wands.engine.tensor_groups`."""

    def get_model_parallel_rank(self) -> int:
        """Return the rank in the tensor-parallel group."""


@runtime_checkable
class TrainingEngine(Protocol):
    """A DiT with its optimizer, as DeepSpeed trains it.

    Attributes:
        module: the DiT.
        device: device of this rank.
        mpu: None without tensor parallelism.
        seq_data_parallel_group: ranks among which ZeRO divides the optimizer's state.
        global_steps: number of optimizer steps, `skipped_steps` included.
        global_samples: DeepSpeed's count of samples, from the batch size in its config.
        skipped_steps: number of discarded updates.
    """

    module: nn.Module
    device: torch.device
    optimizer: EngineOptimizer
    lr_scheduler: EngineSchedule
    mpu: ModelParallelGroups | None
    seq_data_parallel_group: dist.ProcessGroup
    global_steps: int
    global_samples: int
    skipped_steps: int

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Run the DiT with autocast and ZeRO's hooks."""

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> object:
        """Add the gradients of a loss; `scale_wrt_gas` divides the loss by the configured number of micro steps."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward pass is the last one before `step`."""

    def step(self) -> None:
        """Update the weights, set the gradients to zero, and call the schedule."""

    def zero_grad(self) -> None:
        """Discard the gradients."""

    def get_global_grad_norm(self) -> Tensor | float | None:
        """Return the norm of the whole gradient of the last update, before clipping; None at ZeRO-0."""

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's state is in host memory."""

    def train(self) -> object:
        """Switch the DiT to training."""

    def eval(self) -> object:
        """Switch the DiT to evaluation."""

    def destroy(self) -> None:
        """Remove the hooks of the engine, and release its buffers."""


Engines = Mapping[str, TrainingEngine]
"""Maps the subfolder of each trained DiT to its engine."""
