"""What a run takes of each rank's memory, worked out before it starts.

Two moments can be the highest of a step: the backward of some block, when activations are there and gradients are coming, or the
optimizer's update, when activations are gone and all gradients are there. Both are added up from the tensors that DeepSpeed and
the model keep; the estimate is the higher. tests/train/test_memory.py holds it against peaks that were measured.

Letters: T tokens of a rank, D width of the residual stream, F hidden width of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wands.config import Recipe
from wands.train.optimizers import kind_of, state_bytes_per_param
from wands.variants import TEXT_LEN, DiTShape

FP32, BF16 = 4, 2
MARGIN = 1.06
"""What the allocator takes beyond the tensors: rounding and holes (fragmentation)."""
CUDA_CONTEXT = 1.5 * 2**30
"""What CUDA, its libraries and NCCL's buffers take of a GPU before the first tensor."""
# DeepSpeed's own defaults, for JSONs that leave them out.
_ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_param_persistence_threshold": 1e5,
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        device: at the highest moment of a step, by component.
        host: what is offloaded, by component.
    """

    device: dict[str, float]
    host: dict[str, float]

    @property
    def peak(self) -> float:
        """Bytes of all tensors on the device at the highest moment."""
        return sum(self.device.values())

    @property
    def needed(self) -> float:
        """`peak` with the allocator's margin."""
        return self.peak * MARGIN


@dataclass(frozen=True)
class Weight:
    """One parameter of a DiT as it is stored.

    Attributes:
        name: as the model calls it.
        shape: of the whole.
        element_size: bytes.
        trained: whether it has a gradient.
    """

    name: str
    shape: tuple[int, ...]
    element_size: int
    trained: bool

    @property
    def numel(self) -> int:
        """Elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Load:
    """What the memory of a run depends on besides its recipe and its DeepSpeed config.

    Attributes:
        shape: the DiT.
        weights: its parameters, a LoRA's included.
        num_models: DiTs that are trained one after the other: all states are there, activations of one.
        world_size: ranks that share the states.
        ulysses_degree: ranks that share heads.
        ring_degree: ranks that share each sample's tokens.
        micro_steps: forwards of a rank in an optimizer step.
        max_tokens: of the fullest bin.
        max_samples: clips in a bin.
        device_type: "cuda" or "cpu".
        text_len: tokens of the longest caption.
    """

    shape: DiTShape
    weights: Sequence[Weight]
    num_models: int
    world_size: int
    ulysses_degree: int
    ring_degree: int
    micro_steps: int
    max_tokens: int
    max_samples: int
    device_type: str
    text_len: int = TEXT_LEN

    @property
    def tokens(self) -> float:
        """Of one rank."""
        return self.max_tokens / (self.ulysses_degree * self.ring_degree)

    @cached_property
    def stored(self) -> int:
        """Bytes of one DiT's parameters."""
        return sum(weight.numel * weight.element_size for weight in self.weights)

    @cached_property
    def trained(self) -> int:
        """Parameters of one DiT that are trained."""
        return sum(weight.numel for weight in self.weights if weight.trained)


def to_gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def estimate_memory(load: Load, recipe: Recipe, ds_config: Mapping[str, Any]) -> Memory:
    """Bytes that one rank holds at the highest moment of a step.

    Args:
        load: sizes.
        recipe: precision, checkpointing, LoRA.
        ds_config: what `build_ds_config` returned.
    """
    states = _States(load, recipe, ds_config)
    activations = _Activations(load, recipe, states.stage)
    moments = [states.during_update()]
    for blocks_left, held in activations.moments():
        moments.append(states.during_backward(blocks_left) | {"activations": held})
    highest = max(moments, key=lambda parts: sum(parts.values()))
    host = states.on_host() | activations.on_host()
    return Memory({name: size for name, size in highest.items() if size}, host)


class _States:
    """Weights, gradients and the optimizer's states."""

    def __init__(self, load: Load, recipe: Recipe, ds_config: Mapping[str, Any]) -> None:
        self.load, self.recipe = load, recipe
        self.zero = {**_ZERO_DEFAULTS, **ds_config["zero_optimization"]}
        self.stage = int(self.zero.get("stage", 0))
        self._optimizer = str(ds_config["optimizer"]["type"])
        offload = [
            (self.zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")
        ]
        self._optimizer_away = offload[0] != "none" or bool(self.zero.get("cpu_offload"))
        self._weights_away = offload[1] != "none"
        self._share = [load.world_size if self.stage >= stage else 1 for stage in range(4)]

    def during_backward(self, blocks_left: int) -> dict[str, float]:
        """Beside the activations, when so many blocks have not been left yet."""
        load, held = self.load, dict(self._held)
        done = 1.0 if load.micro_steps > 1 or self.stage == 3 else 1 - blocks_left / load.shape.num_layers
        if self.stage == 2 and done:
            done = 1.0  # DeepSpeed allocates the rank's share with the first bucket
        held["gradients"] = held.get("gradients", 0.0) + done * self._gradients
        held["buffers"] = held.get("buffers", 0.0) + (self._bucket() if self.stage in (1, 2) else 0.0)
        if self.stage == 3:
            held["gathered weights"] = self._gathered
            held["buffers"] += self._bucket() if load.world_size > 1 else 0.0  # cut into shards on its way
        return held

    def during_update(self) -> dict[str, float]:
        """When the optimizer works: no activations."""
        load, held = self.load, dict(self._held)
        share = FP32 * load.trained / load.world_size
        held["gradients"] = held.get("gradients", 0.0) + self._gradients
        if self.stage and not self._optimizer_away:
            held["gradients"] += share  # flattened once more
        if self.stage == 3:
            held["gathered weights"] = self._persistent
        if load.device_type == "cpu" and self.stage and kind_of(self._optimizer) == "adamw":
            held["update"] = 2 * share  # torch's AdamW on one flat tensor: a root and a quotient of its size
        return held

    def on_host(self) -> dict[str, float]:
        """What is offloaded or averaged there."""
        load, host = self.load, {}
        if self._optimizer_away:
            host["optimizer"] = load.num_models * (self._masters(apart=True) + self._moments())
            host["gradients"] = load.num_models * FP32 * load.trained / load.world_size
        if self._weights_away:
            host["weights"] = load.num_models * load.stored / self._share[3]
        if self.recipe.ema and self.recipe.ema.device == "cpu":
            host["ema"] = self._average()
        return host

    @cached_property
    def _held(self) -> dict[str, float]:
        """Always there."""
        load, held = self.load, {}
        models = load.num_models
        held["weights"] = 0.0 if self._weights_away else models * load.stored / self._share[3]
        if not self._optimizer_away:
            held["optimizer"] = models * (self._masters() + self._moments())
        if self.recipe.ema and self.recipe.ema.device == "gpu":
            held["ema"] = self._average()
        if self.stage == 3:
            # Of every DiT; what it shares out otherwise is there for one at a time.
            held["gradients"] = (models - 1) * self._gradients
            held["buffers"] = models * self._bucket()
        return held

    def _masters(self, apart: bool = False) -> float:
        """Stage 0 updates the weights themselves, and stage 3 its share of them where that is fp32."""
        trained = self.load.trained
        if self.stage == 3 and not apart:
            trained = sum(w.numel for w in self.load.weights if w.trained and w.element_size != FP32)
        return FP32 * trained / self.load.world_size if self.stage else 0.0

    def _moments(self) -> float:
        kind, trained = kind_of(self._optimizer), self.load.trained
        named = [(weight.name, weight.shape) for weight in self.load.weights if weight.trained]
        each = state_bytes_per_param(kind, named, self.stage) if kind else 2 * FP32
        return each * trained / self._share[1]

    @cached_property
    def _gradients(self) -> float:
        if self.stage == 3 and self._optimizer_away:
            return 0.0
        if self.stage >= 2:
            return FP32 * self.load.trained / self.load.world_size
        return float(sum(w.numel * w.element_size for w in self.load.weights if w.trained))

    def _bucket(self) -> float:
        # build_engine keeps a bucket from being larger than all that goes through it.
        size = FP32 * min(float(self.zero["reduce_bucket_size"]), self.load.trained)
        return size * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    def _average(self) -> float:
        return self.load.num_models * FP32 * self.load.trained / self.load.world_size

    @cached_property
    def _persistent(self) -> float:
        """Whole parameters that are too small for ZeRO-3 to gather each time."""
        if self.load.world_size == 1:
            return 0.0
        threshold = float(self.zero["stage3_param_persistence_threshold"])
        return float(sum(w.numel * w.element_size for w in self.load.weights if w.numel < threshold))

    @cached_property
    def _gathered(self) -> float:
        """Whole weights that ZeRO-3 holds on every rank while a block works."""
        if self.load.world_size == 1:
            return 0.0
        live = float(self.zero["stage3_max_live_parameters"])
        size = self.load.stored / max(sum(w.numel for w in self.load.weights), 1)
        return min(float(self.load.stored), self._persistent + size * live)


@dataclass(frozen=True)
class _Kept:
    """What one block keeps for backward, in rows of a token.

    Attributes:
        wide: fp32 rows of D.
        narrow: rows of D in the compute dtype.
        hidden: rows of F in the compute dtype.
        low: rows of the LoRA's rank in the compute dtype.
    """

    wide: int
    narrow: int
    hidden: int
    low: int


class _Activations:
    """What forward leaves for backward."""

    def __init__(self, load: Load, recipe: Recipe, stage: int) -> None:
        self.load, self.recipe, self.stage = load, recipe, stage
        self.narrow = BF16 if recipe.precision.compute == "bf16" else FP32
        self._quantized = recipe.lora is not None and recipe.lora.quantize != "none"

    def moments(self) -> Iterator[tuple[int, float]]:
        """For each block, from the last to the first: blocks that have not been left, and the bytes at its highest."""
        shape, tokens = self.load.shape, self.load.tokens
        block = self._block()
        # Backward begins with a block's feed-forward: the gradients of both of its ends and of its inside.
        working = tokens * (2 * FP32 * shape.dim + self.narrow * shape.ffn_dim) + self._decoded()
        ends = tokens * FP32 * 8 * 4 * shape.out_channels
        head = (
            tokens * FP32 * shape.dim * 4
        )  # the norm and the modulation before the head, with their gradients
        for left in range(shape.num_layers, 0, -1):
            last = left == shape.num_layers
            if self.recipe.model.checkpointing == "none":
                yield left, left * block + max(working, head if last else 0.0) + ends
            else:
                held = self._held_on_device(left)
                yield left, held + max(block + working, head if last else 0.0) + ends

    def on_host(self) -> dict[str, float]:
        """Of all blocks."""
        sizes = sum(self._named(name) for name in self.recipe.model.kept_on_host)
        return {"activations": sizes * self.load.shape.num_layers} if sizes else {}

    def _held_on_device(self, left: int) -> float:
        """Of the blocks before the one that is computed again; of that one, its input."""
        model = self.recipe.model
        on_host = [self._named(name) for name in model.kept_on_host]
        kept = [self._named(name) for name in model.kept_on_device]
        if "block_input" not in model.kept_on_host:
            kept.append(self._named("block_input"))
        # The last two groups of what is offloaded stay, and the next comes while a block is computed.
        return (left - 1) * sum(kept) + min(left, 2) * sum(on_host)

    def _named(self, name: str) -> float:
        """Bytes of one block's tensor of `model.saved_tensors`."""
        shape, exchanged = self.load.shape, self.load.ulysses_degree > 1
        rows = {
            "block_input": FP32 * shape.dim,
            "attn_output": (1 + exchanged) * self.narrow * shape.dim + FP32 * shape.num_heads,
            "attn_input": 3 * exchanged * self.narrow * shape.dim,
            "ffn_activation": self.narrow * shape.ffn_dim,
        }
        return self.load.tokens * rows.get(name, self.narrow * shape.dim)

    def _block(self) -> float:
        """What one block keeps of a whole forward, with autocast's copies of its weights."""
        shape, kept, narrow = self.load.shape, self._rows(), self.narrow
        rank = self.recipe.lora.rank if self.recipe.lora else 0
        row = (FP32 * kept.wide + narrow * kept.narrow) * shape.dim
        row += narrow * (kept.hidden * shape.ffn_dim + kept.low * rank)
        row += (
            2 * FP32 * shape.num_heads + 15 * FP32
        )  # log-sum-exps of both attentions, statistics of the norms
        # Keys and values of text and pictures; every rank has those of all its samples.
        context = (
            self.load.max_samples
            * (self.load.text_len + shape.image_len)
            * (2 * FP32 + 2 * narrow)
            * shape.dim
        )
        return row * self.load.tokens + context + self._copies()

    def _rows(self) -> _Kept:
        """Counted in PackedWanBlock.forward.

        Always the inputs of the norms, three and those of queries and keys, in fp32; and the inputs of the projections and what
        both attentions save, in the compute dtype. Layers that learn also keep their own input; ZeRO-3's linear layer always.
        """
        lora = self.recipe.lora
        targets = lora.targets if lora else None
        ffn = targets != "attention" or (self.stage == 3 and not self._quantized)
        table = self._table_learns()
        norms = lora is None
        return _Kept(
            wide=6 + 3 * norms + 2 * table,
            narrow=8 + ffn + 2 * table,
            hidden=1 + ffn,
            low=(6 if targets == "attention" else 8) if lora else 0,
        )

    def _table_learns(self) -> bool:
        return self.recipe.lora is None or self.recipe.lora.targets == "all-linear"

    def _copies(self) -> float:
        """Autocast multiplies with a bf16 copy of an fp32 weight, and backward needs it; ZeRO-3's layer keeps the weight."""
        recipe = self.recipe
        if recipe.precision.compute != "bf16" or recipe.precision.weights == "bf16":
            return 0.0
        return 0.0 if self._quantized or self.stage == 3 else float(BF16 * self._linear_params())

    def _decoded(self) -> float:
        """The largest weight of a quantised base, whole, and what its decoding takes beside it."""
        shape = self.load.shape
        return 2.0 * FP32 * shape.dim * shape.ffn_dim if self._quantized else 0.0

    def _linear_params(self) -> int:
        """Of one block."""
        shape = self.load.shape
        return (8 + 2 * bool(shape.image_len)) * shape.dim**2 + 2 * shape.dim * shape.ffn_dim
