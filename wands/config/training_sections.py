"""Recipe sections about data and training: sources, packing, noise levels, loss, optimizer, loop and checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from wands.config.base import StrictModel


class MockConfig(StrictModel):
    """Random latents instead of a cache, for benchmarks and tests: no files, real shapes."""

    num_samples: int = Field(gt=0)
    """Number of samples in an epoch."""
    shapes: list[tuple[int, int, int]] = Field(min_length=1)
    """Latent shapes (frames, height, width). Sample i has shape i modulo the length of the list."""
    text_lens: list[int] = Field(default=[16], min_length=1)
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
    """All caches must be made with the same encoders. Unset uses `cache` or `mock`."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the clips to hold out of training. A hash of the clip name decides, so all samples of a clip are on one side
    and new clips move no others. 0 holds out none; use 0.02 for example to have an evaluation set."""
    split: Literal["train", "holdout", "all"] = "train"
    """Clips to use: the training clips, the clips that `holdout` holds out, or all clips."""
    mock: MockConfig | None = None
    """Unset uses `cache` or `sources`."""
    verify: bool = False
    """Verify the checksum of each sample when it is read. Set it if you suspect the storage; reading gets slower."""
    prefetch: int = Field(default=2, ge=0)
    """Optimizer steps whose batches a thread reads ahead. 0 reads in the training loop. Raise it for slow storage."""


class PackingConfig(StrictModel):
    """Sequence packing: samples of different lengths share a bin, which one forward processes without padding."""

    enabled: bool = True
    """Process each bin in one forward. False processes the same bins one sample at a time: equal steps, slower."""
    max_tokens: int = Field(default=32760, gt=0)
    """Bin capacity in video tokens. The default is one clip of 480 x 832 pixels and 81 frames. Raise it until memory is full;
    it must be at least the longest sample."""
    level_bins: int | None = Field(default=None, gt=0)
    """Number of bins that are balanced to equal cost; must divide `train.bins_per_step`. Unset balances all bins of a step. Set
    it to dp_size if a step has several micro steps: sample lengths inside a step are then more mixed."""
    buffer_size: int | None = Field(default=None, gt=0)
    """Samples that are packed together, for slow storage. Cache shards are taken in random order, and a run reads from few shards
    at once. Unset packs the whole epoch together. A buffer of a few dozen steps packs as well."""


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
    """Distribution of sigma before the shift. `logit_normal` prefers the middle; `mode` does too, with heavier tails
    (Esser et al. 2024). `wands train --show-timesteps` prints the result."""
    logit_mean: float = 0.0
    """Mean of logit(sigma) with `logit_normal`. 0 centers the distribution at sigma 0.5; larger values move it towards noise."""
    logit_std: float = Field(default=1.5, gt=0)
    """Standard deviation of logit(sigma) with `logit_normal`. Smaller values concentrate on the middle."""
    mode_scale: float = Field(default=1.29, ge=-1.0, le=1.75192)
    """Scale s of `mode` sampling. Larger values prefer the middle, negative values the ends. The limits keep the mapping
    monotone. Source: Esser et al. 2024 (arXiv 2403.03206), eq. 20."""
    flow_shift: float = Field(default=3.0, gt=0)
    """Shift s of every sampled sigma: s * sigma / (1 + (s - 1) * sigma). Values above 1 train more noise; larger videos need
    larger shifts. The shipped recipes have the shift of official inference."""
    mix_uniform: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the samples whose sigma is uniform and not shifted. 0 uses only the distribution above."""
    weighting: Literal["none", "linear", "bell"] = "none"
    """Loss weight of a sample by its sigma. `none`: 1. `linear`: 1 + flow_shift * sigma. `bell`: a Gaussian around sigma 0.5 with
    mean 1."""
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
    """Scaling of lr with the batch: factor train.bins_per_step / scale_lr_base, its square root, or none."""
    scale_lr_base: int = Field(default=1, gt=0)
    """Bins per step for which lr is meant, if `scale_lr` is set."""
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
    """Steps between two lines on the terminal. TensorBoard and metrics.jsonl contain every step."""
    log_samples: bool = False
    """Write the error and sigma of every clip to samples-rank*.jsonl. Use it to find the clip that causes a loss spike."""


class CheckpointConfig(StrictModel):
    """Checkpoint interval and number of checkpoints to keep."""

    every: int = Field(default=500, ge=0)
    """Steps between two checkpoints. 0 saves only at the end."""
    keep: int = Field(default=2, gt=0)
    """Number of newest checkpoints to keep on disk; older ones are deleted."""
