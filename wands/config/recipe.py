"""Training recipe: all settings of a run as immutable, typed sections.

The docstring of a key is its description in `wands config` and in the reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, model_validator

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
    """Use it to train on top of an existing LoRA. Full finetunes, and exports with `--merge`, contain the merged LoRAs. Empty
    merges no LoRA."""
    trainable: list[str] = Field(default_factory=list)
    """Name patterns of the parameters to train in a full finetune, such as `blocks.*.attn1.*`. Empty trains all parameters.
    Set it to train, for example, only the attention layers."""
    freeze: list[str] = Field(default_factory=list)
    """Name patterns of the parameters to freeze in a full finetune. A parameter that matches both `trainable` and `freeze` is
    frozen. Empty freezes no parameter."""
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Activation checkpointing: saves memory in exchange for time.

    - `none` keeps all activations: fastest, most memory.
    - `selective` keeps the input of each block and `saved_tensors`, and recomputes the rest in backward.
    - `full` keeps only the input of each block, and recomputes the block: about one more forward per step.
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
    """Tensors of each block to move to host memory with `offload` checkpointing: `block_input`, or a name that `saved_tensors`
    also accepts. Unset moves `block_input`."""
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
    """Scale of the update: B @ A is multiplied by alpha / rank. Unset means alpha = rank, a factor of 1. Set it to keep the
    factor of another training when you change the rank."""
    targets: Literal["attention", "attention+ffn", "all-linear"] | list[str] = "attention"
    """Linear layers that get an adapter: all attention projections (`attention`), also the feed-forward layers
    (`attention+ffn`), every linear layer (`all-linear`), or a list of module name patterns."""
    init_from: str | None = None
    """LoRA to continue training from: a safetensors file, or a folder that `wands export` wrote. Unset starts a new LoRA."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter inputs in training. 0 disables dropout."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Quantization of the frozen linear layers, with bitsandbytes. `int8` takes 1.0 byte per weight, with one scale per row.
    `nf4` takes 0.56 bytes, as in QLoRA. LoRAs of `model.merge_loras` are merged before quantization. Exports with
    `--merge` use the weights before quantization. Use `int8` or `nf4` if the base model does not fit the GPU."""

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
    """Steps between two updates of the average. Each update uses decay ** every, so that the averaging time does not depend on
    this key. Raise it if the updates cost too much time."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Memory for the average: host (`cpu`) or GPU (`gpu`). All ranks together need 4 bytes per trained parameter. Use `gpu` if
    host memory is short."""


class PrecisionConfig(StrictModel):
    """Dtypes. Master weights, timesteps, modulation, norms and loss are always fp32."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """Dtype of matrix multiplications and attention. `fp32` is for CPU runs and comparisons."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage dtype of the weights. `bf16` stores linear layers and patch embedding in 2 bytes per weight. Matrix
    multiplications in bf16 round these weights anyway, so the frozen base of a LoRA gives the same result bit by bit.
    In a full finetune `bf16` needs ZeRO-1 or ZeRO-2, which keep fp32 master weights. Use `bf16` for LoRAs."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced and ZeRO-3 gathers weights. `bf16` halves the communication and rounds gradients.
    Use `bf16` if communication limits the speed."""


class AttentionConfig(StrictModel):
    """Attention kernel."""

    backend: Literal["auto", "reference", "cpu", "torch", "flash2", "flash3", "flash4"] = "auto"
    """Kernel of self-attention. `auto` uses the first of flash4, flash3, flash2 (flash-attn packages) and torch that is
    installed, supports the GPU and passes a check of its results. A kernel that is set by name must pass the same check."""


class ParallelConfig(StrictModel):
    """Context parallelism: world size = dp x ring x ulysses. Set `cp_size` or degrees; unset means no context parallelism."""

    cp_size: int | None = Field(default=None, ge=1)
    """Ranks that share one bin. If only cp_size is set, the largest valid Ulysses degree is used and the ring takes the rest.
    Unset means the product of the degrees. Raise it if one clip does not fit a GPU."""
    ulysses_degree: int | None = Field(default=None, ge=1)
    """Ranks that share attention heads; it must divide the number of heads. Unset derives the degree from `cp_size`, else 1. Keep
    the degree within the GPUs of a node."""
    ring_degree: int | None = Field(default=None, ge=1)
    """Ranks that share the tokens of each sample. Unset derives the degree from `cp_size`, else 1. Use it across nodes, or if
    the number of heads limits the Ulysses degree."""
    fused_all_to_all: bool = True
    """Send query, key and value in one Ulysses all-to-all. False sends three all-to-alls, as DeepSpeed does, with identical
    results."""

    @property
    def group_size(self) -> int:
        """Ranks that share one bin: `cp_size`, or the product of the degrees."""
        return self.cp_size or (self.ulysses_degree or 1) * (self.ring_degree or 1)


class MockConfig(StrictModel):
    """Random latents instead of a cache, for benchmarks and tests: no files, real shapes."""

    num_samples: int = Field(gt=0)
    """Number of samples in an epoch."""
    shapes: list[tuple[int, int, int]] = Field(min_length=1)
    """Latent shapes (frames, height, width). Sample i has shape i modulo the length of the list."""
    text_lens: list[Annotated[int, Field(ge=1, le=512)]] = Field(default=[16], min_length=1)
    """Caption lengths in tokens, 1 to 512. Sample i has length i modulo the length of the list."""


class SourceConfig(StrictModel):
    """One of several latent caches, and its part of an epoch."""

    path: str
    """Cache folder, written by `wands preprocess`."""
    weight: float | None = Field(default=None, gt=0)
    """Relative part of this source in an epoch: weight / sum of all weights. An epoch has as many samples as all sources
    together. Unset means no weighting. Set a weight for all sources or for none."""
    repeat: float | None = Field(default=None, gt=0, le=1000)
    """Number of times that an epoch uses each sample. Unset means 1. With 1.5, an epoch uses all samples once and 50 % of the
    samples a second time; the next epoch repeats the other samples."""


class DataConfig(StrictModel):
    """Training data: set exactly one of `cache`, `sources` and `mock`."""

    cache: str | None = None
    """Cache folder, written by `wands preprocess`. Short for `sources: [{path: ...}]`. Unset uses `sources` or `mock`."""
    sources: list[SourceConfig] | None = Field(default=None, min_length=1)
    """Use it to mix several caches. All caches must be made with the same encoders. Unset uses `cache` or `mock`."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the clips to hold out of training. A hash of the clip name decides, so all samples of a clip are on one side
    and new clips do not move other clips. 0 holds out no clip; use for example 0.02 to have an evaluation set."""
    split: Literal["train", "holdout", "all"] = "train"
    """Clips to use: the training clips, the clips that `holdout` holds out, or all clips."""
    mock: MockConfig | None = None
    """Unset uses `cache` or `sources`."""
    verify: bool = False
    """Verify the checksum of each sample when it is read. Set it if you suspect the storage; reading gets slower."""
    prefetch: int = Field(default=2, ge=0)
    """Number of optimizer steps whose batches a thread reads ahead. 0 reads in the training loop. Raise it for slow storage."""


class PackingConfig(StrictModel):
    """Sequence packing: samples of different lengths share a bin, which one forward processes without padding."""

    enabled: bool = True
    """Process each bin in one forward. False processes the same bins one sample at a time: equal steps, slower."""
    max_tokens: int = Field(default=32760, gt=0)
    """Capacity of a bin in video tokens. A bin holds the clips of one forward pass. The default is one clip of 480 x 832 pixels
    and 81 frames. Increase the capacity until memory is full. It must be at least the tokens of the longest sample."""
    level_bins: int | None = Field(default=None, gt=0)
    """Number of bins that are balanced to equal cost; must divide `train.bins_per_step`. Unset balances all bins of a step. Set
    it to dp_size (ranks / cp_size) if a step has several micro steps: the samples of a step then have more different lengths."""
    buffer_size: int | None = Field(default=None, gt=0)
    """Number of samples that are packed together. Set it for slow storage: a run then reads from few cache shards at once, in
    random order. Unset packs the whole epoch together. A buffer of a few dozen steps fills the bins equally well."""


FLOW_PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {"timestep_sampling": "logit_normal", "flow_shift": 2.5, "mix_uniform": 0.2},
    "finetune": {"timestep_sampling": "uniform", "flow_shift": 3.0, "mix_uniform": 0.0},
}


class FlowConfig(StrictModel):
    """Flow matching: distribution and weights of the noise level sigma (0 is clean, 1 is noise), and dropout of conditions."""

    preset: Literal["pretrain", "finetune"] = "finetune"
    """Values of the keys that are not set. `finetune`: timestep_sampling uniform, flow_shift 3.0, mix_uniform 0. `pretrain`:
    timestep_sampling logit_normal, flow_shift 2.5, mix_uniform 0.2."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution of sigma before the shift. `uniform` draws all levels equally often. `logit_normal` prefers middle levels;
    `mode` does too, with heavier tails (Esser et al. 2024). `wands train --show-timesteps` prints the result."""
    logit_mean: float = 0.0
    """Mean of logit(sigma) with `logit_normal`. 0 centers the distribution at sigma 0.5; larger values move it towards noise."""
    logit_std: float = Field(default=1.5, gt=0)
    """Standard deviation of logit(sigma) with `logit_normal`. Smaller values give more middle levels."""
    mode_scale: float = Field(default=1.29, ge=-1.0, le=1.75192)
    """Scale s of `mode` sampling. Larger values give more middle levels, negative values more low and high levels. The limits
    keep the mapping monotone. Source: Esser et al. 2024 (arXiv 2403.03206), eq. 20."""
    flow_shift: float = Field(default=3.0, gt=0)
    """Shift s of every sampled sigma: s * sigma / (1 + (s - 1) * sigma). Values above 1 train more noise; larger videos need
    larger shifts. The shipped recipes use the shift of official inference."""
    mix_uniform: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the samples whose sigma is uniform and not shifted. 0 uses only the distribution above."""
    weighting: Literal["none", "linear", "bell"] = "none"
    """Weight of a sample in the loss, as a function of sigma. `none`: always 1. `linear`: 1 + flow_shift * sigma. `bell`: a
    Gaussian around sigma 0.5 with mean 1."""
    cfg_dropout: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the samples that train with the empty caption, for classifier-free guidance. 0 never drops the caption."""
    i2v_ratio: float = Field(default=0.5, ge=0, le=1)
    """Fraction of the samples with a given first frame (clean, at timestep 0), only for TI2V models. The other samples train
    text-to-video."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**FLOW_PRESETS.get(values.get("preset", "finetune"), {}), **values}


class LossConfig(StrictModel):
    """Reduction of the squared errors of a step to one loss."""

    reduction: Literal["sample", "token"] = "sample"
    """Unit that counts once in the loss. `sample`: every clip has equal weight. `token`: every token has equal weight, so long
    and large clips count more."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(StrictModel):
    """Optimizer and learning rate. A DeepSpeed JSON may configure optimizer, scheduler or clipping instead."""

    name: Literal["adamw", "adamw8bit", "adafactor", "muon"] = "adamw"
    """Optimizer; AdamW is the usual choice.

    - `adamw`: AdamW of torch; with optimizer offload, AdamW of DeepSpeed on the host.
    - `adamw8bit`: AdamW of bitsandbytes with moments in 8 bits: less memory.
    - `adafactor`: factored second moments; only with ZeRO-0.
    - `muon`: orthogonalised updates for the matrices of the blocks and AdamW for all other parameters; only full finetunes.
      With ZeRO-1 to ZeRO-3 it needs grad_clip 0, and the logged norm is the norm of the update."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate. It has the same meaning for all optimizers: Muon updates are scaled to the size of AdamW updates. The
    default suits full finetunes; LoRAs use about 1e-4."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments of AdamW, also of the AdamW part of Muon."""
    eps: float = Field(default=1e-8, gt=0)
    """Term that AdamW adds to the denominator for numerical stability."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, multiplied by the learning rate. 0 disables it; 0.1 is usual for pretraining."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine or linear decay to lr * min_lr_ratio at the last step."""
    warmup: float = Field(default=0.0, ge=0)
    """Length of the linear warm-up. Values below 1 are a fraction of all steps; values >= 1 are a number of steps. 0 means no
    warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the cosine and linear schedules, as a fraction of lr. 0 decays to zero."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of lr with the batch size. With f = train.bins_per_step / scale_lr_base, `linear` multiplies lr by f, and `sqrt`
    by the square root of f. `none` does not change lr."""
    scale_lr_base: int = Field(default=1, gt=0)
    """Number of bins per step at which `scale_lr` leaves lr unchanged."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; larger gradients are scaled down. 0 disables clipping."""


class TrainConfig(StrictModel):
    """Training loop: length, step size and logs."""

    seed: int = 0
    """Seed of sample order, noise, dropout and random initial weights. Equal seeds give equal runs on any number of GPUs, except
    for rounding."""
    max_steps: int | None = Field(default=None, gt=0)
    """Number of optimizer steps; overrides `epochs`. Unset trains `epochs` epochs."""
    epochs: int = Field(default=1, gt=0)
    """Passes over the data, if `max_steps` is unset."""
    bins_per_step: int = Field(default=1, gt=0)
    """Bins of one optimizer step on all ranks together: the batch size. Must be a multiple of dp_size; gradient accumulation
    follows from it."""
    log_every: int = Field(default=1, gt=0)
    """Number of steps between two lines on the terminal. TensorBoard and metrics.jsonl contain every step."""
    log_samples: bool = False
    """Write the loss and sigma of every clip to samples-rank*.jsonl. Use it to find the clip that causes a loss spike."""


class CheckpointConfig(StrictModel):
    """Checkpoint interval and number of checkpoints to keep."""

    every: int = Field(default=500, ge=0)
    """Number of steps between two checkpoints. 0 saves only at the end."""
    keep: int = Field(default=2, gt=0)
    """Number of newest checkpoints to keep on disk; older ones are deleted."""


class Recipe(StrictModel):
    """All settings of one training run."""

    output_dir: str = "runs/default"
    """Run folder for checkpoints, logs and the resolved recipe. Use one folder per run."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig | None = None
    """Unset trains all weights; a section with `rank` trains a LoRA."""
    ema: EmaConfig | None = None
    """Unset keeps no average; `ema: {}` keeps an average with the defaults."""
    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    parallel: ParallelConfig = ParallelConfig()
    attention: AttentionConfig = AttentionConfig()
    flow: FlowConfig = FlowConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def uses_dropout(self) -> bool:
        """True if the model or the LoRA has dropout."""
        return bool(self.model.dropout or (self.lora and self.lora.dropout))

    def to_yaml(self) -> str:
        """Return the recipe with all defaults as YAML that `load_recipe` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key of this type contains, also inside an optional value or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(inner_section, get_args(annotation))), None)
