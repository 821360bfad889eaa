"""Recipe sections about the model: weights, adapters, precision, attention and context parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wands.config.base import StrictModel

SavedTensor = Literal["attn_output", "attn_input", "query_proj", "key_proj", "value_proj", "ffn_activation"]


class MergeConfig(StrictModel):
    """A LoRA to merge into the base weights when they are loaded."""

    path: str
    """LoRA to merge: a safetensors file, or a folder that contains one. All layouts that `wands convert` reads are accepted."""
    scale: float = 1.0
    """Factor of the LoRA update. 1 merges the LoRA as it was trained; smaller values weaken it."""


class ModelConfig(StrictModel):
    """Weights to train, activation checkpointing and dropout."""

    path: str = ""
    """Diffusers pipeline folder or Hub id of the model to train. The transformer is trained, and its config gives the model
    variant. Required for training."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Initial weights. `pretrained` loads the weights at `path`. `random` reads only the config at `path` and initialises the
    weights as Wan does; use it for pretraining from scratch."""
    experts: Literal["high", "low", "both"] | None = None
    """Experts to train of a model with two experts (A14B): `high` noise, `low` noise, or `both`. Unset trains both. Each expert
    draws sigma from its own range. With `both`, a step updates first the high-noise and then the low-noise expert, on the same
    clips. One expert needs half the memory of both."""
    merge_loras: list[MergeConfig] = Field(default_factory=list)
    """Full finetunes, and exports with `--merge`, contain the merged LoRAs. Empty merges none."""
    trainable: list[str] = Field(default_factory=list)
    """Name patterns of the parameters to train in a full finetune, such as `blocks.*.attn1.*`. Empty trains all parameters."""
    freeze: list[str] = Field(default_factory=list)
    """Name patterns of the parameters to freeze in a full finetune. A parameter that matches both `trainable` and `freeze` is
    frozen. Empty freezes none."""
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Activation checkpointing: saves memory in exchange for time.

    - `none` keeps all activations: fastest, most memory.
    - `selective` keeps the input of each block and `saved_tensors`, and recomputes the rest in backward.
    - `full` keeps only the input of each block: about one more forward per step.
    - `offload` is `full` with `offloaded_tensors` in host memory; the copies overlap with the computation.

    The default suits small models. Use `full` for videos on 80 GB GPUs; `wands plan` compares all four."""
    saved_tensors: list[SavedTensor] | None = None
    """Tensors of each block to keep in GPU memory with `selective` or `offload` checkpointing.

    - `attn_output`: result of self-attention. The attention kernel and its communication do not run again in backward.
    - `attn_input`: query, key and value after the Ulysses all-to-all. The all-to-all does not run again.
    - `query_proj`, `key_proj`, `value_proj`: outputs of these projections.
    - `ffn_activation`: hidden state of the feed-forward layer, the largest tensor.

    Unset keeps `attn_output` with `selective` and nothing with `offload`."""
    offloaded_tensors: list[Literal["block_input", SavedTensor]] | None = None
    """Tensors of each block to move to host memory with `offload` checkpointing: `block_input` and the names of
    `saved_tensors`. Unset moves `block_input`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the attention outputs and of the feed-forward hidden states in training. The mask of a clip does not
    depend on packing or on the number of GPUs. 0 disables dropout; small data sets may profit from 0.1."""

    @property
    def kept_on_device(self) -> tuple[str, ...]:
        """`saved_tensors`, or their default."""
        default = ["attn_output"] if self.checkpointing == "selective" else []
        return tuple(default if self.saved_tensors is None else self.saved_tensors)

    @property
    def kept_on_host(self) -> tuple[str, ...]:
        """`offloaded_tensors`, or their default."""
        default = ["block_input"] if self.checkpointing == "offload" else []
        return tuple(default if self.offloaded_tensors is None else self.offloaded_tensors)


class LoraConfig(StrictModel):
    """Low-rank adapters of linear layers, trained with PEFT while the base weights are frozen."""

    rank: int = Field(gt=0)
    """Rank of each update B @ A. Higher ranks can learn more and need more memory; 16 to 128 are usual."""
    alpha: float | None = Field(default=None, gt=0)
    """Scale of the update: it is multiplied by alpha / rank. Unset means alpha = rank, a factor of 1."""
    targets: Literal["attention", "attention+ffn", "all-linear"] | list[str] = "attention"
    """Linear layers that get an adapter: all attention projections (`attention`), also the feed-forward layers
    (`attention+ffn`), every linear layer (`all-linear`), or a list of module name patterns."""
    init_from: str | None = None
    """LoRA to continue training from: a safetensors file, or a folder that `wands export` wrote. Unset starts a new LoRA."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter inputs in training. 0 disables dropout."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Quantization of the frozen linear layers, with bitsandbytes. `int8` takes 1.0 byte per weight, with one scale per row.
    `nf4` takes 0.56 bytes, as in QLoRA. LoRAs of `model.merge_loras` are merged before. Exports with `--merge` use the
    weights before quantization. Use it if the base model does not fit the GPU."""

    @property
    def scaled_alpha(self) -> float:
        """`alpha`, or its default."""
        return float(self.rank) if self.alpha is None else self.alpha


class EmaConfig(StrictModel):
    """Exponential moving average of the trained weights, in fp32. `--ema` of export and infer uses the average."""

    decay: float = Field(default=0.9999, gt=0, lt=1)
    """Decay of the average per optimizer step. The default averages over about 10,000 steps; use a lower value for short runs."""
    warmup: bool = True
    """Limit the decay of step n to (1 + n) / (10 + n), so that the average soon forgets the initial weights."""
    every: int = Field(default=1, gt=0)
    """Steps between two updates of the average. An update then uses decay ** every, so that the averaging time stays the same.
    Raise it if the updates cost too much time."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Memory that holds the average: host (`cpu`) or GPU (`gpu`). All ranks together need 4 bytes per trained parameter."""


class PrecisionConfig(StrictModel):
    """Dtypes. Master weights, timesteps, modulation, norms and loss are always fp32."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """Dtype of matrix multiplications and attention. `fp32` is for CPU runs and comparisons."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage dtype of the weights. `bf16` stores linear layers and patch embedding in 2 bytes per weight. Matrix
    multiplications in bf16 round these weights anyway, so the frozen base of a LoRA gives the same result bit by bit.
    In a full finetune `bf16` needs ZeRO-1 or ZeRO-2, which keep fp32 master weights. Use it for LoRAs."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced and ZeRO-3 gathers weights. `bf16` halves the communication and rounds gradients."""


class AttentionConfig(StrictModel):
    """Attention kernel."""

    backend: Literal["auto", "reference", "cpu", "torch", "flash2", "flash3", "flash4"] = "auto"
    """Kernel of self-attention. `auto` uses the first of flash4, flash3, flash2 (flash-attn packages) and torch that is
    installed, supports the GPU and passes a check of its results. It is an error if a kernel that is set here fails."""


class ParallelConfig(StrictModel):
    """Context parallelism: world size = dp x ring x ulysses. Set `cp_size` or degrees; unset means no context parallelism."""

    cp_size: int | None = Field(default=None, ge=1)
    """Ranks that share one bin. If only cp_size is set, the largest valid Ulysses degree is used and the ring takes the rest.
    Unset means the product of the degrees. Raise it if one clip does not fit a GPU."""
    ulysses_degree: int | None = Field(default=None, ge=1)
    """Ranks that share attention heads; it must divide the number of heads. Unset derives it from `cp_size`, else 1. Keep it
    inside a node."""
    ring_degree: int | None = Field(default=None, ge=1)
    """Ranks that share the tokens of each sample. Unset derives it from `cp_size`, else 1. Use it across nodes, or if the number
    of heads limits the Ulysses degree."""
    fused_all_to_all: bool = True
    """Send query, key and value in one Ulysses all-to-all. False uses the three of DeepSpeed, with identical results."""

    @property
    def group_size(self) -> int:
        """Ranks that share one bin: `cp_size`, or the product of the degrees."""
        return self.cp_size or (self.ulysses_degree or 1) * (self.ring_degree or 1)
