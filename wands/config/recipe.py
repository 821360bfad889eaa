"""Training recipe: all settings of a training run as immutable, typed sections.

The docstring of a key is its description in `wands recipes` and in the reference page.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from wands.config.base import StrictModel

SavedTensor = Literal["attn_output", "attn_input", "query_proj", "key_proj", "value_proj", "ffn_activation"]


def split_scale(text: str) -> tuple[str, float]:
    """Return path and scale of a LoRA from "PATH=SCALE" or "PATH". The name of a file that exists is a path, also with an "=".

    Raises:
        ValueError: if the scale is not a finite number.
    """
    path, equals, number = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise ValueError(
            f"there is no file {text}, and the scale {number!r} is not a finite number. Write PATH or PATH=SCALE, such as "
            "lora.safetensors=0.8"
        )
    return path, scale


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class MergeConfig(StrictModel):
    """Path, scale and expert of a merged LoRA."""

    @model_validator(mode="before")
    @classmethod
    def _split_text(cls, values: Any) -> Any:
        if not isinstance(values, str):
            return values
        path, scale = split_scale(values)
        return {"path": path, "scale": scale}

    path: str
    """LoRA to merge: a safetensors file, or a folder that contains such a file. The LoRA may have any layout that
    `wands convert` reads."""
    scale: float = 1.0
    """Factor by which the LoRA's update is multiplied. 1 merges the LoRA as it was trained; values below 1 weaken the
    LoRA."""
    expert: Literal["high", "low"] | None = None
    """Expert that the LoRA is merged into, for a model with two experts (A14B). If this key is unset, the file says it: by its
    metadata, its tensor names, or the word high or low in its name. For both experts, list the file twice."""


class ModelConfig(StrictModel):
    """Weights to train, activation checkpointing and dropout."""

    path: str = ""
    """Diffusers pipeline folder or Hub id of the model to train. wands trains the transformer of this model, and reads
    the model variant from the transformer's config. This key is required for training."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start training from the pretrained weights or from random weights. `pretrained` loads the weights at
    `model.path`. `random` reads only the config of this model, and initializes the weights as official Wan does. Use
    `random` to pretrain a model from scratch. With `random`, model.path may also be the name of a published
    model, such as wan2.1-t2v-1.3b. No model files are then needed."""
    experts: Literal["high", "low", "both"] | None = None
    """Choose the experts to train in a model with two experts (A14B). `high` trains the high-noise expert, `low` the
    low-noise expert, and `both` trains both. If this key is unset, both are trained. Each expert draws the noise level
    sigma from its own range. With `both`, each step updates first the high-noise and then the low-noise expert, on the
    same clips. Training one expert needs half the memory of training both."""
    merge_loras: Annotated[list[MergeConfig], BeforeValidator(_as_list)] = Field(default_factory=list)
    """LoRA that is merged into the base weights before training, or a list of them, each as PATH or PATH=SCALE, such as
    style.safetensors=0.8. An entry with the keys below can also choose an expert. The checkpoints of a full finetune contain
    the merged LoRAs, and so does the result of `wands export --merge`. An empty list merges no LoRA."""
    trainable: list[str] = Field(default_factory=list)
    """Train only the parameters whose full names match one of these shell patterns, such as `blocks.*.attn1.*`. The key
    cannot be used together with a `lora` section. An empty list trains all parameters. Set this key, for example, to train
    only the attention layers."""
    freeze: list[str] = Field(default_factory=list)
    """Freeze the parameters whose full names match one of these shell patterns, such as `blocks.0.*`. The key cannot be used
    together with a `lora` section. A parameter that matches both `trainable` and `freeze` is frozen. An empty list freezes no
    parameter."""
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Choose the activations that are kept for the backward pass. Keeping fewer activations saves memory, but takes more
    time.

    - `none` keeps all activations. This mode is the fastest and needs the most memory.
    - `selective` keeps the input of each block and the tensors in `saved_tensors`. The backward pass recomputes the other
      activations.
    - `full` keeps only the input of each block. The backward pass recomputes the whole block, which adds about one
      forward pass per step.
    - `offload` works like `full`, but keeps the input of each block in host memory. `offloaded_tensors` can choose other
      tensors for the host. The tensors are copied while the GPU computes.

    The default `none` suits small models. Use `full` for videos on 80 GB GPUs. `wands plan` compares all four modes."""
    checkpoint_blocks: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Number of blocks whose activations `checkpointing` recomputes, counted from the first block. The other blocks keep all
    activations. A smaller number is faster and needs more memory. `auto` recomputes all blocks. `wands plan` finds the
    smallest number that fits. The key has no effect with `checkpointing: none`."""
    swap_blocks: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """Number of blocks whose frozen weights live in host memory and are copied to the GPU while it computes. Use it for a LoRA
    whose base model does not fit the GPU. The result does not change. The blocks need activation checkpointing, and ZeRO stage 0
    to 2. `auto` swaps as few blocks as fit the GPU. The default 0 keeps all weights on the GPU."""
    saved_tensors: list[SavedTensor] | None = None
    """List of the tensors of each block to keep in GPU memory. The key can be used only with `checkpointing: selective`
    or `offload`.

    - `attn_output`: output of self-attention. The backward pass then does not repeat the attention kernel and the
      communication of attention.
    - `attn_input`: query, key and value after the Ulysses all-to-all. The backward pass then does not repeat the
      all-to-all.
    - `query_proj`, `key_proj`, `value_proj`: outputs of these linear layers.
    - `ffn_activation`: hidden activations of the feed-forward layer, the largest of these tensors.

    If this key is unset, `selective` keeps `attn_output`, and `offload` keeps none of these tensors."""
    offloaded_tensors: list[Literal["block_input", SavedTensor]] | None = None
    """List of the tensors of each block to move to host memory. The key can be used only with `checkpointing: offload`.
    Valid names are `block_input`, which is the input of the block, and all names that are valid in `saved_tensors`. If this
    key is unset, only `block_input` is moved."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the pointwise parts of the transformer blocks with torch.compile: norms, modulation, rotary embedding and
    residual additions. Compiled parts read and write less GPU memory, so that a step is faster. Results differ by rounding
    errors only. The first step takes longer. `auto` compiles on GPUs, and not on CPUs. `true` always compiles, `false` never."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability in training, for the attention outputs and the hidden activations of the feed-forward layers. 0
    disables dropout. The dropped values of a clip do not depend on packing or on the number of GPUs. Try 0.1 if a small
    data set overfits."""

    def num_recomputed(self, num_layers: int) -> int:
        """Return the number of blocks under activation checkpointing, in a model with `num_layers` blocks."""
        blocks = num_layers if self.checkpoint_blocks == "auto" else min(self.checkpoint_blocks, num_layers)
        return 0 if self.checkpointing == "none" else blocks

    def num_swapped(self, num_layers: int) -> int:
        """Return the number of blocks whose frozen weights are in host memory. `swap_blocks: auto` counts as many as possible,
        until `wands.planning.search.settle_swapping` has replaced it.
        """
        most = self.num_recomputed(num_layers)
        return most if self.swap_blocks == "auto" else min(self.swap_blocks, most)

    @property
    def kept_on_device(self) -> tuple[str, ...]:
        """Names of a block's tensors that activation checkpointing keeps in GPU memory until the backward pass.

        If `saved_tensors` is None, the names are the default of the mode in `checkpointing`. Otherwise, the names are
        `saved_tensors`.
        """
        default = ["attn_output"] if self.checkpointing == "selective" else []
        return tuple(default if self.saved_tensors is None else self.saved_tensors)

    @property
    def kept_on_host(self) -> tuple[str, ...]:
        """Names of a block's tensors that activation checkpointing moves to host memory until the backward pass.

        If `offloaded_tensors` is None, the names are the default of the mode in `checkpointing`. Otherwise, the names are
        `offloaded_tensors`.
        """
        default = ["block_input"] if self.checkpointing == "offload" else []
        return tuple(default if self.offloaded_tensors is None else self.offloaded_tensors)


class LoraConfig(StrictModel):
    """Low-rank adapters (LoRA) of linear layers, trained with PEFT while the base weights are frozen."""

    rank: int = Field(gt=0)
    """Rank of the update B @ A that the LoRA adds to a weight matrix. Higher ranks can learn more and need more memory.
    16 to 128 are usual."""
    alpha: float | None = Field(default=None, gt=0)
    """Strength of the LoRA's update: B @ A is multiplied by alpha / rank. If this key is unset, alpha equals rank, so the
    factor is 1. To keep the factor when you change the rank, change alpha in proportion."""
    targets: Literal["attention", "attention+ffn", "all-linear"] | list[str] = "attention"
    """Choose the linear layers that get an adapter. `attention` means all projections of the attention layers.
    `attention+ffn` also includes the feed-forward layers, and `all-linear` means every linear layer. You can also give a
    list of patterns of layer names, such as `blocks.*.attn1.to_q`."""
    init_from: str | None = None
    """Continue training from this LoRA: a safetensors file, or a folder that `wands export` wrote. If this key is unset,
    a new LoRA is trained."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the inputs of the adapters in training. 0 disables dropout."""
    quantize: Literal["none", "int8", "nf4", "fp8"] = "none"
    """Quantize the frozen linear layers to save GPU memory, if the base model does not fit the GPU. `int8` and `nf4` use
    bitsandbytes. `int8` needs 1 byte per weight, and each row of a weight matrix has its own scale. `nf4` needs 0.56
    bytes per weight, as in QLoRA. `fp8` needs 1 byte per weight and also multiplies in fp8, which is faster than bf16. It
    needs a GPU of compute capability 8.9 or higher. LoRAs in `model.merge_loras` are merged before the quantization. Exports
    with `--merge` add the LoRA to the original, unquantized weights."""

    @property
    def scaled_alpha(self) -> float:
        """Value of the LoRA's `alpha`, or of its `rank` if `alpha` is None."""
        return float(self.rank) if self.alpha is None else self.alpha


class EmaConfig(StrictModel):
    """Exponential moving average of the trained weights, in fp32. `wands export --ema` and `wands infer --ema` use the
    average.
    """

    decay: float = Field(default=0.9999, gt=0, lt=1)
    """Fraction of the old average that each optimizer step keeps. The default averages over about the last 10,000 steps.
    Use a lower value for short runs."""
    warmup: bool = True
    """Use a decay below `decay` in the first steps, so that the average soon forgets the initial weights. The decay is
    then the smaller of `decay` and (1 + n) / (10 + n). n counts the steps since the average started."""
    every: int = Field(default=1, gt=0)
    """Number of optimizer steps between two updates of the average. One update uses decay ** every, so that the average
    covers the same number of optimizer steps for any value of this key. Increase the number if the updates take too much
    time."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Memory that stores the average: host memory (`cpu`) or GPU memory (`gpu`). All ranks together need 4 bytes per
    trained parameter. Use `gpu` if the host has too little memory."""


class PrecisionConfig(StrictModel):
    """Number formats (dtypes). Master weights, timesteps, modulation, norms and loss are always fp32."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """Dtype of matrix multiplications and attention. Use `fp32` only on CPUs and to compare results."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the weights are stored. `bf16` stores the linear layers and the patch embedding with 2 bytes per
    weight instead of 4. Use `bf16` for LoRAs: matrix multiplications convert the frozen weights to bf16 anyway, so both
    values give identical results. In a full finetune, `bf16` needs ZeRO-1 or ZeRO-2, which keep fp32 master weights."""
    linears: Literal["bf16", "fp8"] = "bf16"
    """Dtype in which the linear layers of the transformer blocks multiply. `bf16` means the dtype of `compute`. `fp8` casts
    inputs, weights and gradients to e4m3 just before each product, with one scale per row. It needs a GPU of
    compute capability 8.9 or higher (RTX 40 series, H100 and later). `fp8` is faster than `bf16`, most of all for large
    models and short clips, but rounds more. Compare the held-out loss of both before a long run."""
    fp8_grad_weight: Literal["fp8", "bf16"] = "fp8"
    """With `linears: fp8`, the dtype of the products that compute the gradients of the weights. Use `bf16` if a full finetune
    in fp8 learns worse than in bf16. A LoRA in fp8 computes no gradients of base weights."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which the GPUs exchange gradients and, with ZeRO-3, also weights. `bf16` sends half as many bytes as
    `fp32`, but rounds the gradients. Use `bf16` if communication limits the speed."""


class AttentionConfig(StrictModel):
    """Choice of the attention kernel."""

    backend: Literal["auto", "reference", "cpu", "torch", "cudnn", "flash2", "flash3", "flash4"] = "auto"
    """Choose the attention kernel. In bf16 on a GPU, `auto` measures all installed kernels that pass a test of their
    results, and uses the fastest. A checkpoint stores this choice for the resumed run. On a CPU, `auto` uses `cpu`. In
    fp32 on a GPU, `auto` uses `reference`, which is plain PyTorch and slow. A GPU kernel that you choose by name must pass
    the same test. `torch` and `cudnn` are part of PyTorch. `flash2`, `flash3` and `flash4` are flash-attn packages. `cudnn`
    uses cuDNN only for clips of 2,048 tokens or more, and the kernel `torch` for shorter clips. `auto` may combine cuDNN
    with another kernel, or use another limit than 2,048 tokens. If ring attention divides a clip, the limit applies to each
    part of the clip."""


class ParallelConfig(StrictModel):
    """Context and tensor parallelism: several ranks (processes) share one bin. The number of
    all ranks is dp x ring_degree x ulysses_degree x tensor_degree, where dp is the number of groups that process different
    bins. For context parallelism, set `cp_size` or its two degrees. If these three keys are unset, there is none.
    """

    cp_size: int | None = Field(default=None, ge=1)
    """Number of ranks that divide the tokens of one bin. Increase the number if one clip does
    not fit a GPU. If only `cp_size` is set, wands uses the largest valid Ulysses degree, and the ring degree is
    cp_size / ulysses_degree. If this key is unset, the number is ulysses_degree x ring_degree."""
    ulysses_degree: int | None = Field(default=None, ge=1)
    """Number of ranks that divide the attention heads among themselves. The number of heads must be a multiple of this
    degree. For speed, the degree should divide the number of GPUs in a node. If this key is unset, wands derives the degree
    from `cp_size` and `ring_degree`, or takes 1 if `cp_size` is unset too."""
    ring_degree: int | None = Field(default=None, ge=1)
    """Degree of ring attention: number of ranks that divide the tokens of each sample and pass keys and values around a
    ring. Set this key if a context-parallel group spans several nodes, or if the model has too few heads for a larger
    Ulysses degree. If this key is unset, the degree is cp_size / ulysses_degree, or 1 if `cp_size` is unset too."""
    tensor_degree: int = Field(default=1, ge=1)
    """Degree of tensor parallelism: number of ranks that divide the weights of each transformer block and process the same
    tokens. The degree must divide the number of heads and the width of the feed-forward. It should divide the number of
    GPUs in a node. The ranks exchange all tokens several times in each block, so context parallelism is faster for large
    bins. `wands plan` predicts the step time of both. The default 1 is no tensor parallelism."""

    @property
    def context_size(self) -> int:
        """Number of ranks that divide the tokens of a bin: `cp_size`, or the product of the Ulysses degree and the ring degree
        if `cp_size` is None.
        """
        return self.cp_size or (self.ulysses_degree or 1) * (self.ring_degree or 1)

    @property
    def group_size(self) -> int:
        """Number of ranks that share one bin: `context_size` x `tensor_degree`."""
        return self.context_size * self.tensor_degree


class MockConfig(StrictModel):
    """Random latents with given shapes, which replace a latent cache in benchmarks and tests."""

    num_samples: int = Field(gt=0)
    """Number of random samples in one epoch."""
    shapes: list[tuple[int, int, int]] = Field(min_length=1)
    """List of latent shapes, each as [frames, height, width] in latent frames and latent pixels. The samples use the
    shapes in turn: sample i has the shape at index i modulo the length of the list."""
    text_lens: list[Annotated[int, Field(ge=1, le=512)]] = Field(default=[16], min_length=1)
    """List of caption lengths in tokens, from 1 to 512. The samples use the lengths in turn: sample i has the length at
    index i modulo the length of the list."""


class SourceConfig(StrictModel):
    """A latent cache to train on, and settings for the samples of this cache."""

    path: str
    """Cache folder, written by `wands preprocess`."""
    weight: float | None = Field(default=None, gt=0)
    """Weight of this cache. The fraction of an epoch that comes from this cache is this weight divided by the sum
    of the weights of all caches. An epoch has as many samples as all caches together. Set a weight for all caches
    or for none. If this key is unset, the fraction follows from the size of the cache and `repeat`."""
    repeat: float | None = Field(default=None, gt=0, le=1000)
    """Number of times that an epoch uses each sample of this cache. If this key is unset, the number is 1. With 1.5, an
    epoch uses each sample once and half of the samples a second time. The next epoch repeats the other half."""
    loss_weight: float = Field(default=1.0, gt=0)
    """Factor that multiplies the loss of each clip from this cache. With 0.5, the clips of this cache change the model
    half as much. The factors are not normalized: if all caches have the same factor, the whole gradient is multiplied
    by this factor."""
    caption_dropout: float | None = Field(default=None, ge=0, le=1)
    """Probability of replacing the caption of a clip from this cache by the empty caption. If this key is unset,
    `flow.cfg_dropout` is the probability."""


def _read_keys(value: Any) -> Any:
    try:
        text = Path(value).read_text("utf-8", "surrogateescape") if isinstance(value, str) else ""
    except OSError as error:
        raise ValueError(f"the file {value} cannot be read ({error.strerror}); correct the path") from None
    return list(filter(str.strip, text.splitlines())) if isinstance(value, str) else value


class DataConfig(StrictModel):
    """Training data. Set exactly one of `cache`, `sources` and `mock`."""

    cache: str | None = None
    """Train on this cache folder, written by `wands preprocess`. This key is a short form of `sources: [{path: ...}]`.
    Leave this key unset if you use `sources` or `mock`."""
    sources: list[SourceConfig] | None = Field(default=None, min_length=1)
    """Use this list to train on several caches. All caches must be made with the same encoders. Leave the list unset if
    you use `cache` or `mock`."""
    holdout: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the clips to hold out of training, for evaluation. 0 holds out no clip, and 0.02 holds out about one
    clip in 50. `auto` holds out a tenth of the clips: at least 2, or 4 from 40 clips on, and none of fewer than 12. Of more
    than 200 clips, it holds out 20, or a fiftieth if that is more. A hash of the clip's name decides whether the clip is
    held out. If you add clips, the decision for the other clips does not change with a fraction, and may change with
    `auto`. All samples of a clip are held out together. If the data has only a few long clips (films), a part of each
    film is held out instead. Samples just before and after this part are then not used. Training samples that are nearly
    equal to a held-out sample are not used either."""
    split: Literal["train", "holdout", "all"] = "train"
    """Choose the clips that the run trains on. `data.holdout` sets how many clips are held out. The value `train`
    uses the clips that are not held out. The value `holdout` uses only the held-out clips, and `all` uses all clips."""
    exclude: Annotated[list[str], BeforeValidator(_read_keys)] = Field(default_factory=list)
    """Exclude samples from training: a list of sample keys, or the path of a text file with one sample key per line. In
    the file events.jsonl of a run, the key of a sample is its `sample_id`. You may change the list when you resume a
    run. The other samples stay in their steps and bins: an excluded sample only makes its bin
    shorter. A step whose samples are all excluded is counted, but changes no weight."""
    mock: MockConfig | None = None
    """Train on random data instead of a cache. Leave this section unset if you use `cache` or `sources`."""
    verify: bool = True
    """Verify the checksum of each sample when the sample is read. The check runs in the background, but each rank must
    then read whole samples. If this is too slow with context parallelism, set this key to false: each rank then reads
    only the frames that contain its tokens."""
    prefetch: int = Field(default=2, ge=0)
    """Number of optimizer steps, beyond the next one, whose data and noise a background thread prepares in advance. 0
    prepares the next step in the training loop. Increase the number if the storage is slow."""


class PackingConfig(StrictModel):
    """Sequence packing: samples of different lengths share a bin. One forward pass processes one bin, without padding."""

    enabled: bool = True
    """Process all samples of a bin in one forward pass. False processes the samples of each bin one after the other.
    Both values give the same results, but false is slower."""
    max_tokens: int = Field(default=32760, gt=0, lt=2**31)
    """Capacity of a bin in video tokens. The default is the number of tokens of one clip of 832 x 480 pixels and 81 frames.
    Increase the capacity until the GPU memory is full. The capacity must be at least the number of tokens of the longest
    sample."""
    level_bins: int | None = Field(default=None, gt=0, le=2**20)
    """Number of bins in a group. The bins of a group get about the same amount of work, so that the ranks do not wait for
    each other. `train.bins_per_step` must be a multiple of this number. If this key is unset, all bins of a step form one
    group. If each rank processes several bins per step, set this key to dp_size (number of ranks / cp_size). A group then
    contains the bins that the ranks process at the same time. Bins of different groups may have different amounts of work,
    so that one step can contain short and long clips."""
    buffer_size: int | None = Field(default=None, gt=0)
    """Number of samples in the buffer from which wands fills the bins. If this key is unset, the
    buffer contains all samples of the epoch. Set this key if the storage is slow: training then reads only a few cache
    files at a time. A buffer with the samples of a few dozen steps fills the bins as completely as a buffer with
    all samples."""
    plan: str | None = None
    """File with the packing plan of one epoch, written by `wands tools pack --out`. In this epoch, training processes exactly
    the bins and steps in the file. The file must fit the data and the recipe. wands plans the other epochs, and all
    epochs if this key is unset."""


FLOW_PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {"timestep_sampling": "logit_normal", "flow_shift": 2.5, "mix_uniform": 0.2},
    "finetune": {"timestep_sampling": "uniform", "flow_shift": 3.0, "mix_uniform": 0.0},
}


class FlowConfig(StrictModel):
    """Flow matching: distribution and loss weight of the noise level sigma (0 is clean, 1 is pure noise). The section also
    sets the fraction of samples that train with the empty caption, and the fraction that trains image-to-video.
    """

    preset: Literal["pretrain", "finetune"] = "finetune"
    """Preset for the keys timestep_sampling, flow_shift and mix_uniform. If the recipe also sets one of these keys, the
    recipe's value is used. `finetune` means timestep_sampling uniform, flow_shift 3.0 and mix_uniform 0. `pretrain` means
    timestep_sampling logit_normal, flow_shift 2.5 and mix_uniform 0.2."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution from which the noise level sigma is drawn, before the shift by `flow_shift`. `uniform` draws all
    noise levels equally often. `logit_normal` draws middle levels more often. `mode` also prefers middle levels, but
    draws low and high levels more often than `logit_normal` (Esser et al. 2024). `wands train --show-timesteps` prints
    the distribution."""
    logit_mean: float = 0.0
    """Mean of logit(sigma), used by `timestep_sampling: logit_normal`. 0 centers the distribution at sigma 0.5. With
    larger values, samples have more noise on average."""
    logit_std: float = Field(default=1.5, gt=0)
    """Standard deviation of logit(sigma), used by `timestep_sampling: logit_normal`. Smaller values draw middle noise
    levels more often."""
    mode_scale: float = Field(default=1.29, ge=-1.0, le=1.75192)
    """Strength of the preference for middle noise levels, used by `timestep_sampling: mode`. Negative values prefer
    low and high levels instead. The value is the scale s in eq. 20 of Esser et al. 2024 (arXiv 2403.03206). Valid
    values are -1 to 1.75192, because the formula is monotone only in this range."""
    flow_shift: float = Field(default=3.0, gt=0)
    """Shift s of the drawn noise levels: sigma becomes s * sigma / (1 + (s - 1) * sigma). Values above 1 train more
    at high noise. Larger videos need larger shifts. Most shipped recipes use the shift of Wan's official inference."""
    shift_by_size: bool = False
    """Whether every clip gets a shift for its own size: flow_shift * sqrt(tokens / 32760), where tokens is the number
    of video tokens of the clip. `flow_shift` is then the shift of a clip of 832 x 480 pixels and 81 frames. With
    flow_shift 3, a clip of 1280 x 720 pixels and 81 frames gets the shift 4.6. Use this key for data with several
    sizes. `weighting: linear` always uses `flow_shift`, and not the shift of the clip."""
    min_timestep: float = Field(default=0.0, ge=0, lt=1000)
    """Smallest timestep to train, after the shift. Timesteps are 1000 * sigma. The distribution is truncated: all
    timesteps are drawn from the range between min_timestep and max_timestep. In a model with two experts, each expert
    uses the part of this range that is inside the expert's own range."""
    max_timestep: float = Field(default=1000.0, gt=0, le=1000)
    """Largest timestep to train, after the shift. If this limit is below 1000, all drawn timesteps are smaller than
    the limit, so that two runs with adjacent ranges do not overlap."""
    stratified: bool = False
    """Whether the noise levels that a clip gets in successive epochs are spread evenly over the distribution, instead
    of drawn independently. The distribution of a single noise level does not change. After a few epochs, the mean loss
    of a clip varies less: see docs/training.md. In the first epoch, the noise levels are as random as without this key."""
    mix_uniform: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the samples whose sigma is drawn uniformly and is not shifted. The other samples use
    `timestep_sampling` and `flow_shift`. With 0, all samples use `timestep_sampling` and `flow_shift`."""
    weighting: Literal["none", "linear", "bell"] = "none"
    """Weight of a sample in the loss, which depends on its sigma. `none` weights all samples with 1. `linear` uses 1 +
    flow_shift * sigma. `bell` uses a bell curve: 0 at sigma 0 and 1, and largest at sigma 0.5. The mean of the curve
    over all sigma is 1."""
    cfg_dropout: float = Field(default=0.1, ge=0, le=1)
    """Fraction of the samples that train with the empty caption instead of their own caption. Classifier-free guidance in
    inference needs a model that was also trained with the empty caption. 0 trains every sample with its own caption."""
    i2v_ratio: float = Field(default=0.5, ge=0, le=1)
    """Fraction of the samples that train image-to-video, with a clean first frame at timestep 0. The other samples train
    text-to-video. The key has an effect only for TI2V (text-image-to-video) models."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**FLOW_PRESETS.get(values.get("preset", "finetune"), {}), **values}

    @model_validator(mode="after")
    def _check_timesteps(self) -> FlowConfig:
        if self.min_timestep >= self.max_timestep:
            raise ValueError(
                f"flow.min_timestep={self.min_timestep} must be < flow.max_timestep={self.max_timestep}; change one key"
            )
        return self

    @property
    def sigma_range(self) -> tuple[float, float]:
        """(smallest, largest) noise level (sigma) on which the model is trained, each between 0 and 1."""
        return self.min_timestep / 1000, self.max_timestep / 1000


class ObjectiveConfig(StrictModel):
    """Task that the model learns. The causal objectives turn Wan into a model that makes a video chunk by chunk: a chunk
    of latent frames attends to itself and to earlier chunks, and every chunk has its own noise level. A latent frame stands for
    4 frames of the video, except the first, which stands for 1.
    """

    name: Literal["flow_matching", "teacher_forcing", "diffusion_forcing"] = "flow_matching"
    """`flow_matching`: all frames of a clip attend to each other and have one noise level, as in Wan. `teacher_forcing`: a
    noisy chunk attends to itself and to the earlier chunks without noise, which are added to the sequence. `diffusion_forcing`:
    a noisy chunk attends to itself and to the earlier chunks with their noise."""
    chunk_frames: int = Field(default=3, gt=0)
    """Latent frames of a chunk. The last chunk of a clip may be shorter."""
    independent_first_frame: bool = False
    """Whether the first latent frame alone is the first chunk, as for videos that start from an image."""
    window_frames: int | None = Field(default=None, gt=0)
    """A chunk attends only to the chunks that lie whole in this number of latent frames before it. If this key is unset, it
    attends to all earlier chunks."""
    sink_frames: int = Field(default=0, ge=0)
    """With `window_frames`, a chunk also attends to the chunks that lie whole in this number of latent frames at the start of the
    clip."""
    context_noise: float = Field(default=0.0, ge=0, lt=1)
    """Noise level of the earlier chunks in `teacher_forcing`. A small value, such as 0.1, makes the model robust to its
    own mistakes in long videos."""
    stratify_chunks: bool = False
    """Whether the noise levels of a clip's chunks are spread evenly over the distribution of the section `flow`. Otherwise they
    are independent."""

    @model_validator(mode="after")
    def _check_use(self) -> ObjectiveConfig:
        changed = [
            key for key in self.model_fields_set - {"name"} if getattr(self, key) != _default(self, key)
        ]
        if self.name == "flow_matching" and changed:
            raise ValueError(
                f"{', '.join(sorted(changed))} needs a causal objective; set objective.name to teacher_forcing or "
                "diffusion_forcing"
            )
        if self.sink_frames and self.window_frames is None:
            raise ValueError("sink_frames needs window_frames; set window_frames, or remove sink_frames")
        if self.window_frames is not None and self.window_frames < self.chunk_frames:
            raise ValueError(
                f"window_frames={self.window_frames} must be at least chunk_frames={self.chunk_frames}, because a chunk sees "
                "only whole chunks; raise window_frames"
            )
        first = 1 if self.independent_first_frame else self.chunk_frames
        if 0 < self.sink_frames < first:
            raise ValueError(
                f"sink_frames={self.sink_frames} must be 0 or at least {first}, the frames of the first chunk; change sink_frames"
            )
        if self.context_noise and self.name == "diffusion_forcing":
            raise ValueError(
                "context_noise is for teacher_forcing, because earlier chunks have noise in diffusion_forcing; remove "
                "context_noise"
            )
        return self


def _default(section: BaseModel, key: str) -> Any:
    return type(section).model_fields[key].default


class LossConfig(StrictModel):
    """Rule that combines the squared errors of a step into one loss."""

    reduction: Literal["sample", "token"] = "sample"
    """Choose whether every clip or every token has the same weight in the loss. `sample` gives every clip the same
    weight. `token` gives every token the same weight, so long and large clips count more."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(StrictModel):
    """Optimizer and learning rate. A DeepSpeed JSON may configure the optimizer, the scheduler or gradient clipping
    instead of the recipe.
    """

    name: Literal["adamw", "adamw8bit", "adafactor", "muon"] = "adamw"
    """Optimizer that updates the weights. AdamW is the usual choice.

    - `adamw` is AdamW of torch. With optimizer offload, it is AdamW of DeepSpeed, which runs on the host.
    - `adamw8bit` is AdamW of bitsandbytes. It stores the moments in 8 bits and needs less memory. Tensors with fewer than
      4,096 values keep fp32 moments.
    - `adafactor` stores factored second moments. It works only with ZeRO-0.
    - `muon` uses orthogonalized updates for the matrices of the blocks, and AdamW for all other parameters. It works
      only for full finetunes. With ZeRO-1 to ZeRO-3, `muon` needs grad_clip 0. The logs then show the norm of Muon's
      update in place of the gradient norm."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate. The default suits full finetunes; use about 1e-4 for LoRAs. The value has the same meaning for
    all optimizers, because the updates of Muon are scaled to the size of AdamW's updates."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments. With `optim.name: muon`, these rates apply only to the
    parameters that AdamW updates."""
    eps: float = Field(default=1e-8, gt=0)
    """Small number that AdamW adds to the denominator of its update, for numerical stability."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Strength of the decoupled weight decay: each step multiplies a weight by 1 - learning rate * weight_decay. 0
    disables weight decay; 0.1 is usual for pretraining."""
    decay_norms: bool = True
    """Whether weight decay also applies to norm gains, biases and modulation tables. False applies weight decay only
    to the other weights, such as matrices. LoRAs have only matrices, so the key has no effect on LoRAs. You cannot
    change this key when you resume a run."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Choose how the learning rate changes after the warm-up. `constant` keeps the learning rate at its peak. `cosine`
    and `linear` lower the learning rate to lr * min_lr_ratio at the last step."""
    warmup: float = Field(default=0.0, ge=0)
    """Length of the linear warm-up of the learning rate. Values below 1 are a fraction of all steps. Values of 1 or more
    are a number of steps. 0 means no warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step of the `cosine` and `linear` schedules, as a fraction of lr. 0 means that the
    learning rate falls to zero."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate with the batch size. `linear` multiplies lr by f = train.bins_per_step / scale_lr_base.
    `sqrt` multiplies lr by the square root of f. `none` does not change lr."""
    scale_lr_base: int = Field(default=1, gt=0)
    """Batch size for which lr was chosen, in bins per step. If `train.bins_per_step` has this value,
    `scale_lr` does not change lr."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest allowed norm of the gradient of all parameters together. A larger gradient is scaled down to this norm. 0
    disables clipping."""


class TrainConfig(StrictModel):
    """Training loop: seed, number of steps, batch size and logs."""

    seed: int = 0
    """Seed of the sample order, the noise, the dropout and random initial weights. Two runs with equal seeds give equal
    results on any number of GPUs, except for rounding."""
    max_steps: Literal["auto"] | Annotated[int, Field(gt=0)] | None = None
    """Number of optimizer steps of the whole training. If this key is set, `epochs` has no effect. If this key is unset,
    training lasts `epochs` epochs. `auto` chooses 1,500 steps, or fewer if they have
    more than 12,000 bins, but at least 4 and at most 300 passes over the data."""
    epochs: int = Field(default=1, gt=0)
    """Number of times that training passes over the data. This key has an effect only if `max_steps` is unset."""
    bins_per_step: int = Field(default=1, gt=0, le=2**20)
    """Batch size: number of bins that all ranks together process in one optimizer step. A bin holds the clips of one
    forward pass. The number must be a multiple of dp_size (number of ranks / cp_size). The number of gradient
    accumulation steps is bins_per_step / dp_size."""
    log_every: int = Field(default=1, gt=0)
    """Number of optimizer steps between two lines on the terminal. metrics.jsonl and the trackers always contain every
    step."""
    on_bad_step: Literal["stop", "skip"] = "stop"
    """Choose what happens at a bad step. With `stop`, a loss or a gradient norm that is not finite ends the run. With
    `skip`, all ranks discard the update if the loss or the gradient norm is not finite or is a spike (see
    `train.spike_zscore`). The file `events.jsonl` in the run folder names the clips of each bad step. A skipped
    update changes no weight, no optimizer state and no moving average, but the learning rate schedule counts the
    step. In a model with two experts, the update of each expert is judged and skipped separately."""
    max_bad_steps: int = Field(default=10, ge=0)
    """Largest number of bad updates (see `train.on_bad_step`) that are skipped in the whole run. One more bad update ends the
    run. Raise this number to continue such a run."""
    spike_zscore: float = Field(default=6.0, gt=0)
    """Robust z-score above which a loss or a gradient norm is a spike. With `on_bad_step: skip`, the update of a step
    with a spike is discarded. With `on_bad_step: stop`, a spike is only written to events.jsonl, and the run
    continues. The z-score compares the logarithm of the loss or norm with the logarithms of the last 128 updates.
    The first 20 updates cannot be spikes."""
    log_samples: bool = False
    """Write the loss and sigma (noise level) of every clip to the files samples-rank*.jsonl. Use this key to find the
    clip that causes a loss spike."""
    check_every: int = Field(default=100, ge=0)
    """Number of optimizer steps between two checks of the weights. A check compares, between the ranks, all parameters
    of which every rank has a complete copy. A difference ends the run, and the error names the ranks and the
    parameters. The check also runs after the first step of a process, before each checkpoint, and when the file `check`
    appears in the run folder. 0 turns off the regular checks and the checks before checkpoints."""
    step_timeout: float | None = Field(default=None, gt=0)
    """Time limit of a step in seconds. If a step takes longer, the run stops, and the error names the ranks that do not
    answer. If this key is unset, the limit is 10 times the longest of the last 50 steps, and at least 300 s. A separate
    limit applies to checks, checkpoints, and the start of a run until the end of its first step. This limit is one
    hour, or the number of minutes in the environment variable DEEPSPEED_TIMEOUT."""


class CheckpointConfig(StrictModel):
    """Interval between checkpoints, and number of checkpoints to keep."""

    every: Literal["auto"] | Annotated[int, Field(ge=0)] = 500
    """Number of optimizer steps between two checkpoints. 0 saves a checkpoint only at the end of training. `auto` saves six
    checkpoints in a run, or more if they would be more than 500 steps apart."""
    keep: int = Field(default=2, gt=0)
    """Number of checkpoints to keep on disk. When a new checkpoint is saved, wands deletes the oldest checkpoints beyond
    this number."""
    every_minutes: float = Field(default=0.0, ge=0)
    """Also save a checkpoint when this number of minutes has passed since the last save. With 0, only `every` decides
    when checkpoints are saved."""
    keep_every: int = Field(default=0, ge=0)
    """Never delete checkpoints whose step is a multiple of this number. 0 keeps only the newest `keep` checkpoints."""
    keep_best: bool = False
    """Whether to save a checkpoint when an evaluation reaches a new lowest held-out loss. The best checkpoint is
    never deleted, and the file `checkpoints/best` names it. With an `ema` section, the loss of the moving average
    decides. The key needs an `eval` section."""
    asynchronous: bool = False
    """Whether the training continues while a checkpoint is written. Each rank then needs host memory for a copy of its
    weights and optimizer states."""
    weights_only: bool = False
    """Whether to save only the weights and their moving average, without optimizer states. Such a checkpoint can be
    exported, but the run cannot resume from it."""


Tracker = Literal[
    "tensorboard", "wandb", "trackio", "swanlab", "mlflow", "comet_ml", "aim", "clearml", "dvclive"
]


class EvalConfig(StrictModel):
    """Held-out loss: the loss of fixed clips with fixed noise, measured before the first step, every `eval.every` steps and
    at the end.

    The held-out clips come from `data.holdout` or `eval.cache`. For comparison, the same number of training clips is evaluated.
    The noise levels are fixed quantiles of the recipe's noise distribution. Evaluations do not change the training.
    """

    every: int = Field(default=500, gt=0)
    """Number of optimizer steps between two evaluations."""
    max_share: float = Field(default=0.02, gt=0)
    """Limit for the compute of all evaluations together, as a fraction of the compute of the training. The limit decides how
    many clips and noise levels are evaluated, but at least one clip is evaluated. With 0.02, evaluations take about 2 % of
    the time."""
    max_clips: int = Field(default=64, gt=0)
    """Largest number of held-out clips to evaluate. A hash of the clip names chooses the clips, so that all
    evaluations use the same clips. The same number of training clips is evaluated, for comparison."""
    cache: str | None = None
    """Cache folder with held-out clips, written by `wands preprocess` from a validation set. If this key is unset,
    the evaluation uses the clips that `data.holdout` keeps out of training. Without this key and `data.holdout`,
    only training clips are evaluated."""
    patience: int | None = Field(default=None, gt=0)
    """Save a checkpoint and end the run after this number of evaluations in a row without an improvement. An
    evaluation improves if its held-out loss is clearly lower than the lowest held-out loss so far: the 95 %
    confidence interval of the difference is below 0. If this key is unset, the run never ends early."""


class LoggingConfig(StrictModel):
    """Experiment trackers, and metrics that take extra time. The run always writes its metrics to the file metrics.jsonl."""

    trackers: list[Tracker] = Field(default=["tensorboard"])
    """List of the experiment trackers that get the metrics, samples and recipe of the run. wands uses the trackers of
    accelerate. Install the Python package of a tracker, and log in as its documentation explains, before you add the
    tracker. An empty list uses no tracker."""
    project: str = "wands"
    """Name of the project or experiment to which the trackers add the run. TensorBoard has no projects."""
    run_name: str | None = None
    """Name of the run in the trackers. If this key is unset, the name of the run folder is used."""
    blocks_every: int = Field(default=0, ge=0)
    """Number of optimizer steps between two measurements of each transformer block. A measurement computes the norm
    of the gradient, and the norm of the update divided by the norm of the weights. 0 never measures. A measurement needs
    host memory: each rank copies its part of the trained weights, with 4 bytes per weight. Use 100, for example, to
    see blocks that learn too fast or not at all. The training does not change."""


_PerPrompt = str | list[str] | None


class SampleConfig(StrictModel):
    """Videos that the run samples before the first step, every few steps and at the end. The mp4 files are in the
    folder `samples` of the run. A contact sheet shows the videos of the base model, the trained weights and their
    moving average next to each other.
    """

    every: int = Field(default=500, gt=0)
    """Number of optimizer steps between two sets of samples. The run also samples before its first step and after its last
    step."""
    prompts: list[str] = Field(default_factory=list)
    """Text prompts, one for each video. Set `prompts`, `prompts_file` or both."""
    prompts_file: str | None = None
    """File with prompts, as for `wands infer --prompts-file`. A .txt file contains one prompt per line. A .jsonl file
    contains one JSON object per line, with a prompt and its options. These options override the keys of this section. If
    this key is unset, only `prompts` are used."""
    height: int | None = Field(default=None, gt=0)
    """Height of the videos in pixels. If this key is unset, the official value of the model is used."""
    width: int | None = Field(default=None, gt=0)
    """Width of the videos in pixels. If this key is unset, the official value of the model is used."""
    num_frames: int | None = Field(default=None, gt=0)
    """Number of frames of a video: a multiple of 4 plus 1, such as 49 or 81. If this key is unset, the official value of the
    model is used."""
    num_inference_steps: int | None = Field(default=None, gt=0)
    """Number of denoising steps. 20 to 30 steps are enough to compare the samples of a run. If this key is unset, the official
    value of the model is used."""
    guidance_scale: float | None = Field(default=None, ge=0)
    """Scale of classifier-free guidance. Values up to 1 turn guidance off and halve the time. If this key is unset, the official
    value of the model is used."""
    guidance_scale_2: float | None = Field(default=None, ge=0)
    """Guidance scale of the low-noise expert, in a model with two experts. If this key is unset, the scale is `guidance_scale`,
    or the official value of the model if `guidance_scale` is unset too."""
    flow_shift: float | None = Field(default=None, gt=0)
    """Flow shift of the noise schedule. If this key is unset, the official value of the model is used."""
    seed: int = Field(default=0, ge=0)
    """Seed of the noise of the first video. The seed increases by 1 from video to video. All sets of samples of a run have
    the same seeds, so that only the weights differ."""
    negative_prompt: str | None = None
    """Text that describes what the videos must not show. If this key is unset, the official text of the model is used."""
    image: _PerPrompt = None
    """File with the first frame: an image, or a video whose first frame is used. A list has one file per prompt.
    Models that start from an image need this key. TI2V (text-image-to-video) models sample with or without a first
    frame. If this key is unset, no first frame is given."""
    last_image: _PerPrompt = None
    """File with the last frame: an image, or a video whose last frame is used. A list has one file per prompt.
    Models that end at an image (FLF2V) need this key. Leave the key unset for other models."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Files of further inputs of the model, such as {control: clip.control.mp4}. The files apply to all videos. Only models that
    are trained with an input of your own code need this key."""


class HubConfig(StrictModel):
    """Upload of checkpoints to the Hugging Face Hub during the training, in the background."""

    repo: str
    """Repository on the Hub: OWNER/NAME, or NAME for a repository in your own account. A missing repository is
    created. wands uses the Hub token in HF_TOKEN, or the token that `hf auth login` stored."""
    every: int = Field(default=1, gt=0)
    """Push the checkpoints whose step is a multiple of this number, and the last checkpoint. The default pushes every
    checkpoint. `checkpoint.every` decides when checkpoints are written."""
    public: bool = False
    """Whether a new repository is public. The visibility of an existing repository never changes."""


class ProfileConfig(StrictModel):
    """Steps and ranks to profile. The traces and tables are written to the folder `profile` of the run folder."""

    start: int = Field(default=10, gt=0)
    """First profiled step. The first steps of a process are slower than later steps, so do not profile step 1."""
    steps: int = Field(default=3, gt=0)
    """Number of profiled steps. Profiled steps are slower than other steps, and each adds some MB to the trace."""
    ranks: list[int] = Field(default=[0])
    """List of the ranks that are profiled. The terminal shows the table of rank 0 only."""
    stop: bool = False
    """Whether the run ends after the profiled steps, without a checkpoint."""


class Recipe(StrictModel):
    """All settings of one training run."""

    output_dir: str = "runs/default"
    """Run folder, in which checkpoints, logs and the resolved recipe are written. Use a separate folder for each run."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig | None = None
    """To train a LoRA, set at least `rank` in this section. If this section is unset, the weights of the model are
    trained (full finetune)."""
    ema: EmaConfig | None = None
    """If this section is unset, wands keeps no average of the weights. `ema: {}` keeps an average with the default
    settings."""
    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    parallel: ParallelConfig = ParallelConfig()
    attention: AttentionConfig = AttentionConfig()
    flow: FlowConfig = FlowConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig | None = None
    """If this section is unset, nothing is evaluated. `eval: {}` evaluates the held-out loss with the default settings."""
    logging: LoggingConfig = LoggingConfig()
    sample: SampleConfig | None = None
    """If this section is unset, the run samples no videos."""
    hub: HubConfig | None = None
    """A LoRA run pushes LoRA files to the Hugging Face Hub, and a full finetune pushes a whole pipeline. If this section
    is unset, no checkpoint is pushed."""
    profile: ProfileConfig | None = None
    """If this section is unset, no step is profiled. `profile: {}` profiles three steps with the default settings."""

    @property
    def uses_dropout(self) -> bool:
        """True if the model or the LoRA has a dropout probability above 0."""
        return bool(self.model.dropout or (self.lora and self.lora.dropout))

    def to_yaml(self) -> str:
        """Return the recipe with all defaults as YAML, which `load_recipe` can read again."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that a type annotation contains, or None if the annotation contains no section class.

    For example, the result is `LoraConfig` for `LoraConfig`, `LoraConfig | None` and `list[LoraConfig]`.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(inner_section, get_args(annotation))), None)
