"""Predict the time of an optimizer step from FLOPs, bytes and bandwidths; nothing is measured.

`DiTShape` gives the FLOPs, and `ContextPlan` the bytes that ranks communicate and the time that they wait for the rank with the
most work. Data-parallel ranks also wait for the most expensive bin: the packer keeps them busy for at least the fraction `LEVEL`
of the time, so the compute time is divided by `LEVEL`.

- Compute: all linear layers have one speed, in fp8 twice as much plus the time of the casts. The attention kernel has one speed
  per pass. The backward pass has twice the FLOPs in a linear layer (equal FLOPs if the weight is frozen) and 2.5 times in
  attention. Recomputation adds a forward pass, without attention if `attn_output` is kept. Other kept tensors
  (`model.saved_tensors`, `model.offloaded_tensors`) save no compute in the prediction.
- Pointwise operations, such as norms and casts, take the time to read and write their tensors.
- Launches: a pass takes at least the time in which the host starts its kernels one by one.
- Ulysses: the all-to-alls stay inside a node and overlap with nothing. Recomputation repeats those whose results, `attn_input` or
  `attn_output`, are not kept.
- Tensor parallelism divides the FLOPs of the blocks and the hidden channels of the feed-forward. Its sums over the ranks overlap
  with nothing: three of all tokens in the forward pass, three again with recomputation, and in the backward pass five of all
  tokens and two of all text and image tokens.
- Ring: a transfer overlaps with the attention kernel of the same ring step. The last one returns gradients and overlaps with no
  kernel.
- ZeRO: in each micro step, stage 3 gathers the weights twice and reduces the gradients once, and stage 2 reduces the gradients;
  this overlaps with compute, except with attention kernels that already hide the ring. Once per optimizer step, stages 0 and 1
  reduce the gradients, and stages 1 and 2 gather the weights.
- Offload: weights, gradients and activations use the link between GPU and host. The update on the host moves 28 bytes per
  parameter, and is assumed to be as fast as this link.
- Ignored: latency, congestion, slow nodes, the optimizer's time on the device, data loading and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wands.attention.layout import ContextPlan
from wands.config.deepspeed import offloads_optimizer
from wands.config.deepspeed_rules import offload_device
from wands.data.packing import LEVEL
from wands.planning.hardware import Machine
from wands.planning.memory import BF16, FP8, FP32, Activations
from wands.planning.workload import Workload
from wands.variants import TEXT_LEN

# FLOPs of the backward pass / FLOPs of the forward pass
LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5
# Bytes that the pointwise operations of a block move in the forward pass, without and with model.compile, for each token and
# channel of the residual stream, and for each token and hidden channel of the feed-forward layer. The backward pass moves twice
# as many bytes. With recomputation, a step therefore moves the bytes of four forward passes for each token and channel:
# `tests/support/bench_step_traffic.py` counts 1,147 to 1,251 without and 322 to 329 with model.compile, for 1 to 21 clips.
POINTWISE_BYTES = (285, 60)
ACTIVATION_BYTES = 4
# Number of kernels that a block starts in the forward pass: (for the whole bin, for each clip in the bin). The first pair is
# without model.compile, the second pair is with model.compile.
_LAUNCHES = ((40, 6), (25, 0))
# Kernels that a block starts in addition with tensor parallelism: three sums, and four norms in plain PyTorch with a sum each.
_TENSOR_LAUNCHES = 35
FP8_SPEED = 2.0  # FLOP/s of products in fp8 / in bf16, by the data sheets of all GPUs that have both
# Bytes that a cast of a bf16 value to fp8 moves, without and with model.compile.
_CAST_BYTES = (30, 3)
# Bytes per parameter: the update reads gradient, weight and two moments, and writes the last three.
_ADAM_ON_HOST = 28


@dataclass(frozen=True)
class Traffic:
    """Seconds that one rank spends on one kind of data transfer; `exposed` is the part that does not overlap with compute."""

    total: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.total + other.total, self.exposed + other.exposed)

    def __mul__(self, count: float) -> Traffic:
        return Traffic(self.total * count, self.exposed * count)


@dataclass(frozen=True)
class Prediction:
    """Predicted time of an optimizer step that trains one DiT. All numbers are for a micro step on one rank, except `once`.

    Attributes:
        workload: sizes of the run.
        machine: GPUs and links.
        plan: division of a bin's tokens over the context-parallel group.
        flops: FLOPs without recomputation.
        compute: seconds of compute with recomputation.
        all_to_all: transfers of Ulysses.
        ring_traffic: transfers of the ring.
        sums: sums of tensor parallelism over the ranks.
        zero: transfers of ZeRO and of offloaded activations.
        once: seconds per optimizer step outside of micro steps, for example to gather the updated weights.
    """

    workload: Workload
    machine: Machine
    plan: ContextPlan
    flops: float
    compute: float
    all_to_all: Traffic
    ring_traffic: Traffic
    sums: Traffic
    zero: Traffic
    once: float

    @property
    def dp(self) -> int:
        """Number of groups of ranks that share a bin."""
        return self.workload.zero_size // self.workload.cp_size

    @property
    def micro_steps(self) -> int:
        return self.workload.recipe.train.bins_per_step // self.dp

    @property
    def seconds(self) -> float:
        """Predicted seconds of an optimizer step."""
        slowest = self.compute / (LEVEL if self.dp > 1 else 1.0)
        micro_step = slowest + self.all_to_all.exposed + self.ring_traffic.exposed + self.zero.exposed
        micro_step += self.sums.exposed
        return micro_step * self.micro_steps + self.once

    @property
    def mfu(self) -> float:
        """Model FLOP/s utilization: FLOP/s of one rank without recomputation, divided by the peak FLOP/s of one GPU."""
        return self.flops * self.micro_steps / self.seconds / self.machine.peak


def predict(workload: Workload, machine: Machine, lens: Sequence[int]) -> Prediction:
    """Predict the time of an optimizer step in which every bin has clips of `lens` tokens."""
    shape = workload.shape
    cp = workload.cp_size
    model = workload.recipe.model
    layers = shape.num_layers
    ranks = cp * workload.tensor_degree
    plan = ContextPlan.build(lens, ulysses_degree=workload.ulysses_degree, ring_degree=workload.ring_degree)
    share = min(workload.trained, shape.num_params) / shape.num_params

    squares = shape.attention_flops_per_squared_token() * sum(length * length for length in lens)
    pairs = squares * workload.pair_share
    linear_flops = shape.forward_flops(lens) - squares
    again = model.num_recomputed(layers) / layers
    kept = {*model.kept_on_device, *model.kept_on_host}
    attend_again = again * ("attn_output" not in kept)
    passes = _compute_seconds(
        workload,
        machine,
        lens,
        linear_flops=linear_flops,
        attention_flops=pairs / ranks * plan.cost_balance(),
        again=again,
        attend_again=attend_again,
    )

    # Channels of the heads of one rank. Ulysses and the ring send only these.
    own_dim = shape.dim // workload.tensor_degree
    comm = plan.comm_bytes(own_dim, BF16)
    # The forward pass exchanges four tensors: q, k and v (`attn_input`), and the output of attention.
    exchanges = 1.0 + 0.75 * again * ("attn_input" not in kept) + 0.25 * attend_again
    exchanged = layers * (exchanges * comm.ulysses_forward + comm.ulysses_backward) / machine.node_bandwidth
    text_rows = len(lens) * (TEXT_LEN + shape.image_len)
    sums = layers * _sum_seconds(workload, machine, sum(lens) / cp, text_rows, 3 * (1 + again))
    kernels = passes.attention / layers, passes.attention_backward / layers
    one_way, back = ring_traffic(plan, own_dim, kernels, machine.ring_bandwidth(ranks))
    ring_forward = one_way * layers
    ring_backward = (back + one_way * attend_again) * layers

    compute = ((passes.forward, ring_forward), (passes.backward, ring_backward))
    zero, once = _zero_traffic(workload, machine, compute)
    zero += _offloaded_traffic(workload, machine, sum(lens), passes)
    flops = (2 + share) * linear_flops / ranks + 3 * pairs / ranks
    with_gradient, without_gradient = workload.forwards
    repeats = with_gradient + without_gradient * passes.forward / (passes.forward + passes.backward)
    return Prediction(
        workload=workload,
        machine=machine,
        plan=plan,
        flops=with_gradient * flops + without_gradient * (linear_flops + pairs) / ranks,
        compute=(passes.forward + passes.backward) * repeats,
        all_to_all=Traffic(exchanged, exchanged) * repeats,
        ring_traffic=(ring_forward + ring_backward) * repeats,
        sums=Traffic(sums, sums) * repeats,
        zero=zero * repeats,
        once=once,
    )


class _Passes(NamedTuple):
    """Seconds of compute of one rank in the forward and the backward pass, and those of attention in each of them."""

    forward: float
    backward: float
    attention: float
    attention_backward: float


def _compute_seconds(
    workload: Workload,
    machine: Machine,
    lens: Sequence[int],
    *,
    linear_flops: float,
    attention_flops: float,
    again: float,
    attend_again: float,
) -> _Passes:
    """Return the seconds of compute of both passes.

    `linear_flops` are those of the whole bin, `attention_flops` those of the busiest rank, both without recomputation. `again` is
    the share of the blocks that are recomputed, `attend_again` that of the blocks whose attention is recomputed.
    """
    shape = workload.shape
    cp = workload.cp_size
    tensor = workload.tensor_degree
    layers = shape.num_layers
    share = min(workload.trained, shape.num_params) / shape.num_params
    # Every rank of the group computes the text and time embeddings of all samples.
    whole = len(lens) * shape.linear_flops_per_sample()
    matmuls = ((linear_flops - whole) / cp + whole) / tensor
    linear, weight_product = _linear_seconds(workload, machine, matmuls, sum(lens) / cp)
    forward_speed, backward_speed = machine.attention_speeds(workload.recipe.attention.backend)
    attention = attention_flops / forward_speed
    attention_backward = ATTENTION_BACKWARD * attention_flops / backward_speed
    compiled = workload.compiled
    token_bytes = POINTWISE_BYTES[compiled] * shape.dim + ACTIVATION_BYTES * shape.ffn_dim / tensor
    pointwise = layers * token_bytes * sum(lens) / cp / machine.copy_bandwidth
    of_bin, of_clip = _LAUNCHES[compiled]
    of_bin += _TENSOR_LAUNCHES * (tensor > 1)
    launches = layers * (of_bin + of_clip * len(lens)) * machine.launch_seconds
    linear_backward = linear + (LINEAR_BACKWARD - 1.0) * share * weight_product
    device = linear_backward + again * linear + attention_backward + attend_again * attention
    return _Passes(
        forward=max(linear + attention + pointwise, launches),
        backward=max(device + (2 + again) * pointwise, (2 + again) * launches),
        attention=attention,
        attention_backward=attention_backward,
    )


def _offloaded_traffic(workload: Workload, machine: Machine, tokens: int, passes: _Passes) -> Traffic:
    """Return the transfers of offloaded activations and swapped weights in a micro step, which overlap with the computation.

    Activations move to the host and back, weights to the device twice.
    """
    on_host = Activations(workload).on_host()["activations"] * tokens / workload.max_tokens
    moved = 2 * (on_host + workload.swapped[0]) / machine.host_bandwidth
    return Traffic(moved, max(0.0, moved - passes.forward - passes.backward))


def _sum_seconds(
    workload: Workload, machine: Machine, tokens: float, text_rows: int, num_forward: float
) -> float:
    """Return the seconds of the sums of tensor parallelism over the ranks in one layer.

    `num_forward` counts the sums of all video tokens in the forward pass and its recomputation. `text_rows` are the text and
    image tokens of all clips.
    """
    degree = workload.tensor_degree
    values = (num_forward + 5) * tokens + 2 * text_rows
    # An all-reduce sends each value twice, except this rank's share.
    sent = BF16 * workload.shape.dim * values * 2 * (degree - 1) / degree
    return sent / machine.ring_bandwidth(degree)


def _linear_seconds(workload: Workload, machine: Machine, flops: float, tokens: float) -> tuple[float, float]:
    """Return the seconds of all linear layers of a forward pass, and of the products for the weights' gradients.

    In fp8, the casts take the time to read and write their tensors.
    """
    recipe = workload.recipe
    shape = workload.shape
    in_bf16 = flops / machine.linear_flops
    is_stored = recipe.lora is not None and recipe.lora.quantize == "fp8"
    if recipe.precision.linears == "bf16" and not is_stored:
        return in_bf16, in_bf16
    inputs = 7 * shape.dim + shape.ffn_dim  # q, k, v, o; q, o; two layers of the feed-forward
    weights = 8 * shape.dim**2 + 2 * shape.dim * shape.ffn_dim  # fp8 is refused with tensor parallelism
    weight_bytes = 0 if is_stored else (FP32 if recipe.precision.weights == "fp32" else BF16) + FP8
    cast = tokens * inputs * _CAST_BYTES[workload.compiled] + weights * weight_bytes
    in_fp8 = flops / (FP8_SPEED * machine.linear_flops) + shape.num_layers * cast / machine.copy_bandwidth
    return in_fp8, in_bf16 if recipe.precision.fp8_grad_weight == "bf16" else in_fp8


def _zero_traffic(
    workload: Workload, machine: Machine, compute: Sequence[tuple[float, Traffic]]
) -> tuple[Traffic, float]:
    """Return (ZeRO's transfers in a micro step, seconds of ZeRO's work at the end of an optimizer step).

    `compute` has the seconds of compute and the ring's transfers of each pass. ZeRO's transfers overlap only with compute that
    does not already overlap with the ring's; the rest is exposed.
    """
    gpus = workload.zero_size
    num_params = workload.shape.num_params
    stage = workload.zero_stage
    trained = min(workload.trained, num_params)
    if workload.tensor_degree > 1:
        num_params = sum(weight.numel for weight in workload.parts)
        trained = workload.trained_parts
    size = FP32 if workload.recipe.precision.reduce == "fp32" else BF16
    # With tensor parallelism, as many groups of ranks as the degree share the network cards of a node.
    wire = (gpus - 1) / gpus / machine.world_bandwidth(workload.world_size, num_groups=workload.tensor_degree)
    weights = num_params * size * wire
    gradients = trained * size * wire
    once = 0.0
    if stage == 3:
        on_host = offload_device(workload.ds_config["zero_optimization"], "offload_param") != "none"
        fetched = FP32 * num_params / gpus / machine.host_bandwidth if on_host else 0.0
        messages = (weights + fetched, weights + gradients + fetched)
    else:
        messages = (0.0, gradients if stage == 2 else 0.0)
        # Stages 0 and 1 reduce the gradients once per step. Stages 1 and 2 gather the updated weights. At stage 0 the second term
        # is the second half of the all-reduce.
        once = (gradients if stage < 2 else 0.0) + trained * FP32 * wire
    if offloads_optimizer(workload.ds_config):
        once += (2 * FP32 + _ADAM_ON_HOST) * trained / gpus / machine.host_bandwidth
    exposed = 0.0
    for message, (seconds, ring) in zip(messages, compute, strict=True):
        exposed += max(0.0, message - (seconds - (ring.total - ring.exposed)))
    return Traffic(sum(messages), exposed), once


def ring_traffic(
    plan: ContextPlan, dim: int, attention: tuple[float, float], bandwidth: float
) -> list[Traffic]:
    """Return the time of the transfers of ring attention in one layer: [forward pass, backward pass].

    `dim` is the width of the heads before Ulysses divides them, `attention` the seconds of one layer's attention on one rank in
    both passes, and `bandwidth` that of the slowest link in bytes/s.
    """
    degree = plan.ring_degree
    comm = plan.comm_bytes(dim, BF16)
    if degree == 1:
        return [Traffic(), Traffic()]
    block = comm.ring_forward / (degree - 1) / bandwidth
    grads = (comm.ring_backward - comm.ring_forward) / (degree - 1) / bandwidth
    kernel, backward_kernel = (seconds / degree for seconds in attention)
    # The gradients of a block of keys are sent after every ring step, from the second on. The transfer overlaps with the kernel
    # of the next ring step. The last transfer returns the gradients to the owner of the block, and overlaps with nothing.
    backward = [block * (step < degree - 1) + grads * (step > 1) for step in range(degree)]
    late = sum(max(0.0, message - backward_kernel) for message in backward)
    forward = Traffic(block, max(0.0, block - kernel)) * (degree - 1)
    return [forward, Traffic(sum(backward) + grads, late + grads)]
