"""The process groups of tensor parallelism in the form in which DeepSpeed asks for them: its argument `mpu`.

DeepSpeed partitions and averages over the data-parallel group. It adds the norms of the gradients of divided parameters over the
model-parallel group, and counts the other parameters on the first rank of this group only.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from wands.distributed.dims import ProcessGroups


class TensorGroups:
    """Argument `mpu` of `deepspeed.initialize`: the tensor-parallel group, and the ranks with the same part of each weight."""

    def __init__(self, tensor: dist.ProcessGroup, zero: dist.ProcessGroup) -> None:
        self._tensor = tensor
        self._zero = zero

    @classmethod
    def of(cls, groups: ProcessGroups) -> TensorGroups | None:
        """Return the groups of this rank, or None without tensor parallelism."""
        if groups.tensor is None or groups.zero is None:
            return None
        return cls(groups.tensor, groups.zero)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._zero

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._zero)

    def get_data_parallel_world_size(self) -> int:
        return self._zero.size()

    def get_data_parallel_rank(self) -> int:
        return self._zero.rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_world_size(self) -> int:
        return self._tensor.size()

    def get_model_parallel_rank(self) -> int:
        return self._tensor.rank()

    # Other parts of DeepSpeed ask for the tensor-parallel group by its name in Megatron.
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def forget_groups() -> None:
    """Let DeepSpeed forget the groups of an engine, so that the next engine of this process can have others."""
    from deepspeed.utils import groups as ds_groups

    modules: Any = ds_groups
    modules.mpu = None
