"""Predict the memory of each rank before a run starts.

A step can have its peak at two moments: the backward of a block, with activations and growing gradients, or the optimizer's
update, with all gradients and no activations. Both are sums of the tensors that DeepSpeed and the model keep, and the estimate
is the larger sum. tests/distributed/planning/test_memory.py compares the estimate with measured peaks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from wands.config.deepspeed_rules import offload_device
from wands.config.optimizer_kinds import kind_of, state_bytes_per_param
from wands.planning.activations import FP32, Activations
from wands.planning.workload import Workload

MARGIN = 1.06
"""Factor on the predicted bytes for rounding and fragmentation in the allocator."""
CUDA_CONTEXT = 1.5 * 2**30
"""Bytes of a GPU that CUDA, its libraries and NCCL's buffers use before the first tensor."""
# DeepSpeed's defaults.
_ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_param_persistence_threshold": 1e5,
}


@dataclass(frozen=True)
class Memory:
    """Predicted memory of one rank in bytes.

    Attributes:
        device: component -> bytes at the peak of a step.
        host: component -> offloaded bytes.
    """

    device: dict[str, float]
    host: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes of all tensors on the device at the peak."""
        return sum(self.device.values())

    @property
    def needed(self) -> float:
        """`peak` with the allocator's margin."""
        return self.peak * MARGIN


def to_gib(size: float) -> str:
    """Return bytes as text in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def estimate_memory(workload: Workload) -> Memory:
    """Predict the bytes of one rank at the peak of a step."""
    states, activations = _States(workload), Activations(workload)
    moments = [states.during_update()]
    for blocks_left, held in activations.moments():
        moments.append(states.during_backward(blocks_left) | {"activations": held})
    highest = max(moments, key=lambda parts: sum(parts.values()))
    host = states.on_host() | activations.on_host()
    return Memory({name: size for name, size in highest.items() if size}, host)


class _States:
    """Memory of weights, gradients and optimizer states."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.ema, self.stage = workload, workload.recipe.ema, workload.zero_stage
        self.zero = {**_ZERO_DEFAULTS, **workload.ds_config["zero_optimization"]}
        self._optimizer = str(workload.ds_config["optimizer"]["type"])
        self._optimizer_away = offload_device(self.zero) != "none"
        self._weights_away = offload_device(self.zero, "offload_param") != "none"
        self._share = [workload.world_size if self.stage >= stage else 1 for stage in range(4)]

    def during_backward(self, blocks_left: int) -> dict[str, float]:
        """Return the bytes without activations while the backward of `blocks_left` blocks remains."""
        workload, held = self.workload, defaultdict(float, self._held)
        done = 1 - blocks_left / workload.shape.num_layers
        # At stage 2 DeepSpeed allocates the rank's partition of the gradients with the first bucket.
        if workload.micro_steps > 1 or self.stage == 3 or (self.stage == 2 and done):
            done = 1.0
        held["gradients"] += done * self._gradients
        held["buffers"] += self._bucket() if self.stage in (1, 2) else 0.0
        if self.stage == 3:
            held["gathered weights"] = self._gathered
            if workload.world_size > 1:
                held["buffers"] += self._bucket()  # a second buffer while gradients are partitioned
        return held

    def during_update(self) -> dict[str, float]:
        """Return the bytes during the optimizer's update, without activations."""
        workload, held = self.workload, defaultdict(float, self._held)
        share = FP32 * workload.trained / workload.world_size
        held["gradients"] += self._gradients
        if self.stage and not self._optimizer_away:
            held["gradients"] += share  # DeepSpeed's flattened copy
        if self.stage == 3:
            held["gathered weights"] = self._persistent
        if workload.device_type == "cpu" and self.stage and kind_of(self._optimizer) == "adamw":
            # Temporaries of torch's AdamW on one flat tensor: a root and a quotient.
            held["update"] = 2 * share
        return held

    def on_host(self) -> dict[str, float]:
        """Return the bytes in host memory."""
        workload, host = self.workload, {}
        if self._optimizer_away:
            host["optimizer"] = workload.num_models * (self._masters(apart=True) + self._moments())
            host["gradients"] = workload.num_models * FP32 * workload.trained / workload.world_size
        if self._weights_away:
            host["weights"] = workload.num_models * workload.stored / self._share[3]
        if self.ema and self.ema.device == "cpu":
            host["ema"] = self._average()
        return host

    @cached_property
    def _held(self) -> dict[str, float]:
        """Bytes in device memory during the whole step."""
        workload, held = self.workload, {}
        models = workload.num_models
        held["weights"] = 0.0 if self._weights_away else models * workload.stored / self._share[3]
        if not self._optimizer_away:
            held["optimizer"] = models * (self._masters() + self._moments())
        if self.ema and self.ema.device == "gpu":
            held["ema"] = self._average()
        if self.stage == 3:
            # Each DiT has its own partition of gradients and its own bucket.
            held["gradients"] = (models - 1) * self._gradients
            held["buffers"] = models * self._bucket()
        return held

    def _masters(self, apart: bool = False) -> float:
        """Return the bytes of the fp32 master weights on this rank.

        Stage 0 updates the weights directly, and stage 3 updates the fp32 partition of the weights.

        Args:
            apart: count the masters of all trained weights, as for masters in host memory.
        """
        trained = self.workload.trained
        if self.stage == 3 and not apart:
            trained = sum(w.numel for w in self.workload.weights if w.trained and w.element_size != FP32)
        return FP32 * trained / self.workload.world_size if self.stage else 0.0

    def _moments(self) -> float:
        kind, trained = kind_of(self._optimizer), self.workload.trained
        named = [(weight.name, weight.shape) for weight in self.workload.weights if weight.trained]
        each = state_bytes_per_param(kind, named, self.stage) if kind else 2 * FP32
        return each * trained / self._share[1]

    @cached_property
    def _gradients(self) -> float:
        if self.stage >= 2 and self._optimizer_away:
            return 0.0
        if self.stage >= 2:
            return FP32 * self.workload.trained / self.workload.world_size
        trained = [weight for weight in self.workload.weights if weight.trained]
        size = sum(weight.numel * weight.element_size for weight in trained)
        if self.stage == 1 and self.workload.micro_steps > 1:
            # Gradients computed in bf16 are summed over micro batches in a separate fp32 buffer.
            size += sum(weight.numel * FP32 for weight in trained if weight.element_size < FP32)
        return float(size)

    def _bucket(self) -> float:
        # build_engine limits the bucket to the size of all gradients.
        size = FP32 * min(float(self.zero["reduce_bucket_size"]), self.workload.trained)
        return size * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    def _average(self) -> float:
        return self.workload.num_models * FP32 * self.workload.trained / self.workload.world_size

    @cached_property
    def _persistent(self) -> float:
        """Bytes of small parameters that ZeRO-3 keeps whole on every rank."""
        if self.workload.world_size == 1:
            return 0.0
        threshold = float(self.zero["stage3_param_persistence_threshold"])
        return float(sum(w.numel * w.element_size for w in self.workload.weights if w.numel < threshold))

    @cached_property
    def _gathered(self) -> float:
        """Bytes of whole weights that ZeRO-3 has gathered on every rank while a block runs."""
        if self.workload.world_size == 1:
            return 0.0
        live = float(self.zero["stage3_max_live_parameters"])
        size = self.workload.stored / max(sum(w.numel for w in self.workload.weights), 1)
        return min(float(self.workload.stored), self._persistent + size * live)
