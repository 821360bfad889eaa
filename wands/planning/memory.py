"""Predict the memory of each rank before a run starts.

The prediction adds up the tensors that DeepSpeed and the model keep at each moment that can be the peak: the backward pass of a
block, with activations and the gradients so far; the optimizer's update, with all gradients and no activations; and with sample
videos, the forward pass of a video and the decoding of its latents. The largest sum is the predicted peak.
tests/distributed/planning/test_memory.py compares it with measured peaks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from wands.config.deepspeed import REDUCE_BUCKET_SIZE
from wands.config.deepspeed_rules import offload_device
from wands.config.optimizer_kinds import kind_of, state_bytes
from wands.planning.workload import Workload

FP32 = 4
BF16 = 2
FP8 = 1
"""Bytes of one value in fp32, bf16 and fp8."""
MARGIN = 1.06
"""Factor on the predicted bytes, for rounding and fragmentation in the memory allocator."""
CUDA_CONTEXT = 1.0 * 2**30
"""Bytes of GPU memory that CUDA and its libraries use before the first tensor is allocated."""
NCCL_COMMUNICATOR = 0.4 * 2**30
"""Bytes of GPU memory that the buffers of one NCCL communicator use."""
# DeepSpeed's defaults of stage3_param_persistence_threshold and stage3_max_live_parameters.
_PERSISTENCE_THRESHOLD = 1e5
_MAX_LIVE_PARAMETERS = 1e9


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of each component of one rank, such as "activations": on the device at the peak, and on the host."""

    device: dict[str, float]
    host: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes of all tensors on the device at the peak of the run."""
        return sum(self.device.values())

    @property
    def needed(self) -> float:
        """Bytes of device memory that one rank needs: the peak with `MARGIN`."""
        return self.peak * MARGIN


def to_gib(size: float) -> str:
    """Return a number of bytes as text in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def reserved_memory(workload: Workload) -> float:
    """Return the bytes of one device's memory that tensors cannot use: CUDA's context and the buffers of NCCL. 0 on CPUs.

    There are communicators for all ranks, the context-parallel group, Ulysses, the ring (two: keys and values, and their
    gradients), and with tensor parallelism for its group and for the ranks with the same part of the weights. A group of one rank
    has none.
    """
    if workload.device_type == "cpu":
        return 0.0
    groups = [workload.world_size, workload.cp_size, workload.ulysses_degree, *[workload.ring_degree] * 2]
    if workload.tensor_degree > 1:
        groups += [workload.tensor_degree, workload.zero_size]
    return CUDA_CONTEXT + NCCL_COMMUNICATOR * sum(size > 1 for size in groups)


def estimate_memory(workload: Workload) -> Memory:
    """Predict the memory of one rank at the peak of a run, in a training step or while it samples videos."""
    states = _States(workload)
    activations = Activations(workload)
    moments = [states.during_update()]
    for blocks_left, held in activations.moments():
        moments.append(states.during_backward(blocks_left) | {"activations": held})
    if workload.video_tokens:
        moments += states.during_samples(activations.without_gradients())
    highest = max(moments, key=lambda parts: sum(parts.values()))
    on_host = states.on_host() | activations.on_host()
    return Memory(
        device={name: size for name, size in highest.items() if size},
        host={name: size for name, size in on_host.items() if size},
    )


def checkpoint_bytes(workload: Workload) -> int:
    """Return the bytes of a checkpoint, summed over all ranks. A LoRA run saves no frozen weights."""
    recipe = workload.recipe
    num_trained = workload.trained
    trained = [(weight.name, weight.shape) for weight in workload.weights if weight.trained]
    num_frozen = 0 if recipe.lora else sum(weight.numel for weight in workload.weights) - num_trained
    states = state_bytes(recipe.optim.name, trained, workload.zero_stage)
    states = 0.0 if recipe.checkpoint.weights_only else states
    copies = 1 + (recipe.ema is not None)  # fp32 weights, and their moving average
    return workload.num_models * (FP32 * (num_frozen + copies * num_trained) + round(states))


class _States:
    """Bytes of weights, gradients and optimizer states on one rank."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.ema = workload.recipe.ema
        self.stage = workload.zero_stage
        zero = workload.ds_config["zero_optimization"]
        num_ranks = workload.zero_size
        weights = workload.parts
        self.optimizer_away = offload_device(zero) != "none"
        self.weights_away = offload_device(zero, "offload_param") != "none"
        # One fp32 copy of this rank's trained weights, partitioned over the ranks that have the same weights.
        self.share = FP32 * workload.trained_parts / num_ranks
        # At stage 0 the optimizer updates the weights directly, so there are no fp32 master weights. At stage 3 only weights
        # that are not fp32 have masters, because `build_engine` lets fp32 weights and masters share memory.
        copied = sum(w.numel for w in weights if w.trained and w.element_size != FP32)
        self.masters = (0.0, self.share, self.share, FP32 * copied / num_ranks)[self.stage]
        # Each trained DiT has separate weights, optimizer states and a separate moving average.
        away, buffers = workload.swapped
        here = workload.parts_bytes - away + buffers
        self.weights = workload.num_models * here / (num_ranks if self.stage == 3 else 1)
        self.average = workload.num_models * self.share
        self.kind = kind_of(str(workload.ds_config["optimizer"]["type"]))
        trained = [(weight.name, weight.shape) for weight in weights if weight.trained]
        states = (
            state_bytes(self.kind, trained, self.stage) if self.kind else 2 * FP32 * workload.trained_parts
        )
        self.moments = states / (num_ranks if self.stage else 1)
        # build_engine limits the bucket to the size of all gradients.
        bucket = FP32 * min(float(zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)), workload.trained_parts)
        self.bucket = bucket * (2 if self.stage < 3 and zero.get("overlap_comm") else 1)
        # Small parameters that ZeRO-3 keeps whole on every rank, and whole weights that ranks have gathered while a block runs.
        self.persistent = self.gathered = 0.0
        if self.stage == 3 and num_ranks > 1:
            threshold = float(zero.get("stage3_param_persistence_threshold", _PERSISTENCE_THRESHOLD))
            self.persistent = float(sum(w.numel * w.element_size for w in weights if w.numel < threshold))
            live = float(zero.get("stage3_max_live_parameters", _MAX_LIVE_PARAMETERS))
            element_size = workload.parts_bytes / max(sum(w.numel for w in weights), 1)
            self.gathered = float(min(workload.parts_bytes, self.persistent + element_size * live))
        self.gradients = self._gradients()

    def during_backward(self, blocks_left: int) -> dict[str, float]:
        """Return the bytes of each component on the device during the backward pass, without activations.

        With several micro steps, all gradients count. With one, stages 0 and 1 count the gradients of finished blocks, stage 2
        all gradients as soon as one block has finished, and stage 3 all gradients. `blocks_left` blocks have not finished.
        """
        workload = self.workload
        held = self._during_step()
        done = 1 - blocks_left / workload.shape.num_layers
        # At stage 2 DeepSpeed allocates the rank's partition of the gradients with the first bucket.
        if workload.micro_steps > 1 or self.stage == 3 or (self.stage == 2 and done):
            done = 1.0
        held["gradients"] += done * self.gradients
        held["gathered weights"] = self.gathered
        if self.stage in (1, 2) or (self.stage == 3 and workload.zero_size > 1):
            held["buffers"] += self.bucket  # at stage 3, a second buffer while gradients are partitioned
        return held

    def during_update(self) -> dict[str, float]:
        """Return the bytes of each component on the device during the optimizer's update, without activations."""
        held = self._during_step()
        held["gradients"] += self.gradients
        if self.stage and not self.optimizer_away:
            held["gradients"] += self.share  # DeepSpeed's flattened copy
        held["gathered weights"] = self.persistent
        if self.workload.device_type == "cpu" and self.stage and self.kind == "adamw":
            # Temporaries of torch's AdamW on one flat tensor: a root and a quotient.
            held["update"] = 2 * self.share
        return held

    def during_samples(self, forward: float) -> list[dict[str, float]]:
        """Return the bytes of each component on the device during the DiT's forward pass, and during the decoding by the VAE.

        `forward` is the peak of the DiT's activations.
        """
        held = self._during_step() | {"gathered weights": self.gathered, "samples": forward}
        return [held, held | {"gathered weights": self.persistent, "samples": self.workload.decoding_bytes}]

    def on_host(self) -> dict[str, float]:
        """Return the bytes of each component of this rank in host memory."""
        models = self.workload.num_models
        host = {}
        if self.optimizer_away:
            # DeepSpeed keeps masters of all trained weights on the host, also at stage 3.
            host["optimizer"] = models * ((self.share if self.stage else 0.0) + self.moments)
            host["gradients"] = models * self.share
        if self.weights_away:
            host["weights"] = self.weights
        elif swapped := self.workload.swapped[0]:
            host["weights"] = models * swapped
        if self.ema and self.ema.device == "cpu":
            host["ema"] = self.average
        if self.workload.vae_bytes:
            host["VAE"] = self.workload.vae_bytes
        checkpoint = self.workload.recipe.checkpoint
        if checkpoint.asynchronous:
            states = 0.0 if checkpoint.weights_only else self.moments
            masters = self.share if self.stage else FP32 * self.workload.trained_parts
            host["checkpoint copy"] = models * (masters + states) + (self.average if self.ema else 0.0)
            if not self.workload.recipe.lora:  # rank 0 also saves the frozen weights
                frozen = sum(w.numel * w.element_size for w in self.workload.parts if not w.trained)
                num_shares = self.workload.zero_size if self.stage == 3 else 1
                host["checkpoint copy"] += models * frozen / num_shares
        return host

    def _during_step(self) -> dict[str, float]:
        """Return the bytes of each component that stay on the device from the start of a step to its end."""
        models = self.workload.num_models
        held = defaultdict(float)
        held["weights"] = 0.0 if self.weights_away else self.weights
        if not self.optimizer_away:
            held["optimizer"] = models * (self.masters + self.moments)
        if self.ema and self.ema.device == "gpu":
            held["ema"] = self.average
        if self.stage == 3:
            # Each trained DiT has a separate partition of the gradients and a separate bucket.
            held["gradients"] = (models - 1) * self.gradients
            held["buffers"] = models * self.bucket
        return held

    def _gradients(self) -> float:
        if self.stage >= 2:
            return 0.0 if self.optimizer_away else self.share
        trained = [weight for weight in self.workload.parts if weight.trained]
        size = sum(weight.numel * weight.element_size for weight in trained)
        if self.stage == 1 and self.workload.micro_steps > 1:
            # Gradients computed in bf16 are summed over micro batches in a separate fp32 buffer.
            size += sum(weight.numel * FP32 for weight in trained if weight.element_size < FP32)
        return float(size)


class Activations:
    """Predicted bytes of one rank's activations: on the device during training and during sampling, and on the host."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.shape = workload.shape
        self.recipe = workload.recipe
        # Tokens of the fullest bin on one rank.
        self.tokens = workload.max_tokens / workload.cp_size
        self.stage = workload.zero_stage
        # Channels of the heads of one rank, and of its part of the feed-forward.
        self.own_dim = workload.shape.dim / workload.tensor_degree
        self.own_ffn = workload.shape.ffn_dim / workload.tensor_degree
        self.own_heads = workload.shape.num_heads / workload.tensor_degree
        self.text_rows = workload.max_samples * (workload.text_len + workload.shape.image_len)
        self.num_recomputed = self.recipe.model.num_recomputed(self.shape.num_layers)
        self.narrow = BF16 if self.recipe.precision.compute == "bf16" else FP32
        self._trains_table = self.recipe.lora is None or self.recipe.lora.targets == "all-linear"
        self._quantize = self.recipe.lora.quantize if self.recipe.lora else "none"
        self._fp8 = "fp8" in (self._quantize, self.recipe.precision.linears)
        # Layers that keep neither the inputs of frozen weights nor bf16 copies of weights for the backward pass.
        self._keeps_parameters_only = self._quantize != "none" or self._fp8

    def moments(self) -> Iterator[tuple[int, float]]:
        """Yield (number of the block, peak bytes of activations in its backward pass), from the last block to block 1."""
        shape = self.shape
        tokens = self.tokens
        block = self._block()
        # The backward pass of a block starts with the feed-forward layer: gradients of its input, output and hidden state.
        working = tokens * (2 * FP32 * shape.dim + self.narrow * self.own_ffn)
        if self.workload.tensor_degree > 1:
            working += (
                tokens * self.narrow * shape.dim
            )  # the sum of the gradients of a layer's input over the ranks
        if self._fp8:
            working += self._casts()
        elif self._quantize != "none":
            # The largest weight of the base model after decoding, and the buffer for decoding.
            working += 2.0 * FP32 * shape.dim * shape.ffn_dim
        ends = tokens * FP32 * 8 * 4 * shape.out_channels
        # Norm and modulation before the head, with their gradients. Tensors are saved for them only if the tables are trained.
        head = tokens * FP32 * shape.dim * (4 if self._trains_table else 2)
        # The graphs of the objective's other forward passes wait for their backward pass.
        whole_blocks = shape.num_layers - self.num_recomputed
        waiting = self._held_on_device(self.num_recomputed + 1) + whole_blocks * block
        others = (self.workload.forwards[0] - 1) * waiting
        for left in range(shape.num_layers, 0, -1):
            before_head = head if left == shape.num_layers else 0.0
            # Blocks with all activations. The backward pass starts with them.
            kept = max(left - self.num_recomputed, 0)
            held = self._held_on_device(left - kept + bool(kept))
            yield left, held + max(max(kept, 1) * block + working, kept * block + before_head) + ends + others

    def without_gradients(self) -> float:
        """Return the peak bytes of activations on the device while a DiT generates the run's longest sample video.

        Without gradients, only the activations of one layer exist at a time.
        """
        shape = self.shape
        narrow = self.narrow
        # Query and key are in fp32 while they are normalized and rotated.
        attention = (14 + 6 * narrow) * shape.dim
        ffn = (2 * FP32 + 2 * narrow) * shape.dim + 2 * narrow * self.own_ffn
        tokens = self.workload.video_tokens / self.workload.cp_size
        # Keys and values of causal sampling. The ranks of a ring have those of all tokens.
        cached = self.workload.cached_tokens / self.workload.ulysses_degree * self.workload.num_models
        cache = cached * 2 * shape.dim * shape.num_layers * narrow
        return tokens * (max(attention, ffn) + FP32 * 4 * shape.in_channels) + cache

    def on_host(self) -> dict[str, float]:
        """Return the bytes in host memory of offloaded activations and of the data of prefetched steps."""
        sizes = sum(self._named(name) for name in self.recipe.model.kept_on_host)
        shape = self.shape
        # A DiT has separate noisy tokens and targets. Every rank has the text of all samples.
        noisy = self.workload.num_models * self.tokens * FP32 * 4 * (shape.in_channels + shape.out_channels)
        # The data of the next step is read before a step begins, without prefetch, too.
        num_batches = self.workload.micro_steps * (self.recipe.data.prefetch + 1)
        ahead = num_batches * (noisy + BF16 * self.text_rows * shape.text_dim)
        return {"activations": sizes * self.num_recomputed, "prefetched data": ahead}

    def _held_on_device(self, left: int) -> float:
        """Return the device bytes of the tensors that checkpointed blocks saved in the forward pass.

        The backward pass of `left` such blocks has not ended. One of them is being recomputed; its recomputed activations do not
        count.
        """
        model = self.recipe.model
        on_host = [self._named(name) for name in model.kept_on_host]
        names = (*model.kept_on_device, "block_input")
        kept = [self._named(name) for name in names if name not in model.kept_on_host]
        # The device has the offloaded tensors of two blocks: the block that is recomputed, and the next block.
        return (left - 1) * sum(kept) + min(left, 2) * sum(on_host)

    def _named(self, name: str) -> float:
        """Return the bytes of the activation `name`, see `wands.model.checkpointing`, of one block."""
        shape = self.shape
        exchanged = self.workload.ulysses_degree > 1
        rows = {
            "block_input": FP32 * shape.dim,
            "attn_output": (1 + exchanged) * self.narrow * self.own_dim + FP32 * self.own_heads,
            "attn_input": 3 * exchanged * self.narrow * self.own_dim,
            "ffn_activation": self.narrow * self.own_ffn,
        }
        return self.tokens * rows.get(name, self.narrow * self.own_dim)

    def _block(self) -> float:
        """Return the bytes that the forward pass of one block keeps for the backward pass (see `PackedWanBlock.forward`).

        - in fp32: the inputs of the block's three norms, and of the norms of queries and keys.
        - in the compute dtype: the tensors that self-attention and cross-attention save, and the inputs of linear layers. The
          input of a layer that is not trained, and has no LoRA, is kept only under ZeRO-3.
        - autocast's copies of the weights.
        """
        shape = self.shape
        lora = self.recipe.lora
        narrow = self.narrow
        attention_only = lora is not None and lora.targets == "attention"
        always = self.stage == 3 and not self._keeps_parameters_only
        ffn = not attention_only or always
        table = self._trains_table
        # D is the width of the residual stream, H the channels of this rank's heads, F its hidden channels of the feed-forward.
        # Without tensor parallelism, H is D. Numbers of kept tensors: with D (wide) and H (wide_heads) values per token in fp32;
        # with D (narrow_rows), H (heads) and F (hidden) values per token in the compute dtype. Values per token that LoRA layers
        # keep (low).
        wide = 3 + 2 * table
        wide_heads = 3 + 3 * (lora is None)
        narrow_rows = 2 + ffn + 2 * table
        heads = 6
        hidden = 1 + ffn
        if self.workload.compiled:
            # No normalized tokens are kept. Without tensor parallelism, whose norms are not compiled, queries and keys are kept
            # in the compute dtype before their norm.
            wide = 3
            if self.workload.tensor_degree == 1:
                wide_heads = 0
                heads = heads + 3
        low = (6 if attention_only else 8) * lora.rank if lora else 0
        if lora and lora.dropout:
            # With dropout, every LoRA layer has a separate input. Then only ZeRO-3's linear layer keeps the shared input.
            both = always and not attention_only
            narrow_rows = narrow_rows + (6 if always else 4) + both
            hidden = hidden + both
        row = (FP32 * wide + narrow * narrow_rows) * shape.dim + (
            FP32 * wide_heads + narrow * heads
        ) * self.own_dim
        row += narrow * (hidden * self.own_ffn + low)
        row += FP32 * (2 * self.own_heads + 15)  # log-sum-exps of both attentions, statistics of the norms
        # Every rank has the keys and values of text and images of all samples in the bin.
        context = self.text_rows * (2 * FP32 + 2 * narrow) * self.own_dim
        return row * self.tokens + context + self._copies()

    def _copies(self) -> float:
        """Return the bytes of the bf16 copies that autocast makes of a block's fp32 weights for the backward pass.

        Under ZeRO-3 there are none: DeepSpeed's linear layer keeps a reference to the weight.
        """
        shape = self.shape
        precision = self.recipe.precision
        casts = precision.compute == "bf16" and precision.weights == "fp32"
        if not casts or self._keeps_parameters_only or self.stage == 3:
            return 0.0
        linear_params = (8 + 2 * bool(shape.image_len)) * shape.dim**2 + 2 * shape.dim * shape.ffn_dim
        return float(BF16 * linear_params) / self.workload.tensor_degree

    def _casts(self) -> float:
        """Return the bytes of the largest cast to fp8: of the feed-forward's hidden state or of its weight."""
        weight = self.shape.dim * self.shape.ffn_dim
        hidden = self.tokens * self.shape.ffn_dim
        codes = weight + hidden
        # Without model.compile, a cast makes two fp32 copies of its input, one after the other.
        return codes if self.workload.compiled else codes + 2 * FP32 * max(weight, hidden)
