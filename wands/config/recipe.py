"""The recipe: typed, immutable, refused early. Defaults < YAML file < ``--set section.key=value``.

Nothing here edits what the user asked for: a value is taken, or all problems are reported at once.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wands.errors import ConfigError


class StrictModel(BaseModel):
    """A part of the recipe: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, protected_namespaces=(), allow_inf_nan=False
    )


class MergeConfig(StrictModel):
    """A LoRA that becomes part of the base before training."""

    path: str
    """Safetensors file or a folder with one, of any known layout."""
    scale: float = 1.0
    """What its update is multiplied by."""


SavedTensor = Literal["attn_output", "attn_input", "query_proj", "key_proj", "value_proj", "ffn_activation"]


class ModelConfig(StrictModel):
    """Which weights are trained, and how activations are kept."""

    path: str = ""
    """Diffusers pipeline folder or Hub id. Its DiT is trained; its config names the variant."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` takes only the config of `path` and starts from Wan's own initialisation."""
    experts: Literal["high", "low", "both"] | None = None
    """Models of two experts (A14B): which to train, both by default. Each draws its noise levels inside its own range. `both`
    makes two updates a step: first the high-noise expert learns from the step's clips, then the low-noise one from the same."""
    merge_loras: list[MergeConfig] = []
    """LoRAs that are added to the weights when they are loaded; exports with `--merge` and full finetunes contain them."""
    trainable: list[str] = []
    """Patterns of parameters that a full finetune trains, such as `blocks.*.attn1.*`; all by default."""
    freeze: list[str] = []
    """Patterns of parameters that it does not train; they win over `trainable`."""
    checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """`full` keeps only each block's input and runs the block again in backward. `selective` also keeps `saved_tensors`.
    `offload` moves `offloaded_tensors` to host memory and back beside the computation."""
    saved_tensors: list[SavedTensor] | None = None
    """What `selective`, and `offload` beside what it moves, keeps on the device: attn_output, the result of self-attention, so
    that neither its kernel nor the ring nor the all-to-all behind it runs twice; attn_input, its q, k and v behind the
    all-to-all, which then does not run twice either; query_proj, key_proj, value_proj; ffn_activation, the hidden state of the
    feed-forward. By default `selective` keeps attn_output, `offload` nothing."""
    offloaded_tensors: list[Literal["block_input", SavedTensor]] | None = None
    """What `offload` moves: block_input, which it does by default, and the names above."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share that is zeroed in training of what the attentions return and of the feed-forward's hidden state. A clip has the same
    mask in any pack and on any number of GPUs."""

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
    """Train low-rank updates of linear layers instead of the weights themselves, with PEFT."""

    rank: int = Field(gt=0)
    """Of every update; B @ A has this many dimensions."""
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The update is multiplied by alpha / rank; the rank by default."""
    targets: Literal["attention", "attention+ffn", "all-linear"] | list[str] = "attention"
    """Which linear layers: the projections of all attentions, the feed-forwards too, every one, or patterns of modules."""
    init_from: str | None = None
    """LoRA to go on from: a safetensors file, or a folder that `wands export` wrote."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the updates' inputs that is zeroed in training."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Keep the frozen linear layers of the blocks in 8 bits (`int8`, a scale for each row) or 4 (`nf4`, as QLoRA), with
    bitsandbytes: 1.0 or 0.56 bytes a weight. LoRAs are merged before; exports with `--merge` take the weights as they were."""

    @property
    def scaled_alpha(self) -> float:
        """`alpha`, or its default."""
        return float(self.rank) if self.alpha is None else self.alpha


class EmaConfig(StrictModel):
    """Keep an exponential moving average of the trained weights, in fp32; `--ema` exports it and samples with it."""

    decay: float = Field(default=0.9999, gt=0, lt=1)
    """Share of itself that the average keeps in an optimizer step."""
    warmup: bool = True
    """The n-th step keeps at most (1 + n) / (10 + n), so that the weights of the start are soon forgotten."""
    every: int = Field(default=1, gt=0)
    """Steps from one update to the next, which then keeps decay ** every: the average reaches back as far as with 1."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where each rank has its share, 4 bytes a trained parameter over all ranks: in host memory, or beside its weights."""


class MockConfig(StrictModel):
    """Random latents in place of a cache: no files, real shapes."""

    num_samples: int = Field(gt=0)
    shapes: list[tuple[int, int, int]] = Field(min_length=1)
    """Latent (frames, height, width) that the samples take in turn."""
    text_lens: list[int] = Field(default=[16], min_length=1)
    """Text tokens that the samples take in turn, at most 512."""


class SourceConfig(StrictModel):
    """One cache of several, and how much of an epoch it makes up."""

    path: str
    """Folder written by `wands preprocess`."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Share of the epoch's samples, over the sum of the weights; an epoch has as many samples as all sources together. All
    sources or none have one."""
    repeat: float | None = Field(default=None, gt=0, le=1000)
    """Visits to each sample per epoch, 1 by default. 1.5 is once to all and once more to half of them, to the other half in
    the next epoch."""


class DataConfig(StrictModel):
    """Where the samples come from: exactly one of `cache`, `sources` and `mock`."""

    cache: str | None = None
    """Folder written by `wands preprocess`; short for `sources: [{path: ...}]`."""
    sources: list[SourceConfig] | None = Field(default=None, min_length=1)
    """Several caches made with the same encoders."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the clips that is held out, by a hash of the clip's name: all samples of a clip are on the same side, and
    adding clips moves none."""
    split: Literal["train", "holdout", "all"] = "train"
    """Which side of `holdout` is the data."""
    mock: MockConfig | None = None
    verify: bool = False
    """Check every sample's checksum when it is read."""
    prefetch: int = Field(default=2, ge=0)
    """Optimizer steps whose batches are read ahead in a thread."""


class PackingConfig(StrictModel):
    """How samples become bins."""

    enabled: bool = True
    """False forwards the same bins one sample at a time: the same steps, slower."""
    max_tokens: int = Field(default=32760, gt=0)
    """Video tokens of one bin, the most that one forward holds."""
    level_bins: int | None = Field(default=None, gt=0)
    """Bins whose cost is levelled to each other; the dp_size that is trained on, when a step has several micro steps. Then a
    step takes costly and cheap groups of so many, and its lengths are more mixed. Default: all bins of a step."""
    buffer_size: int | None = Field(default=None, gt=0)
    """Look-ahead in samples for slow storage (`packing_buffer_size`; the section says the first word): shards of the cache are
    taken in random order and so many samples packed at a time, so that a run reads from few shards at once and from each in
    one go. Some tens of steps in a window pack as well as the whole. Default: the whole epoch at once."""


class ParallelConfig(StrictModel):
    """Context parallelism: world = dp x ring x ulysses. Give `cp_size`, or the degrees, or nothing for none."""

    cp_size: int | None = Field(default=None, ge=1)
    """Ranks that share one bin. Alone it takes the largest Ulysses degree that heads and node allow, a ring for the rest."""
    ulysses_degree: int | None = Field(default=None, ge=1)
    """Ranks that share heads; must divide the model's heads."""
    ring_degree: int | None = Field(default=None, ge=1)
    """Ranks that share each sample's tokens."""
    fused_all_to_all: bool = True
    """Send q, k and v in one Ulysses all-to-all; false takes DeepSpeed's three, which bring the same bits."""

    @property
    def group_size(self) -> int:
        """Ranks that share one bin, whichever way they are asked for."""
        return self.cp_size or (self.ulysses_degree or 1) * (self.ring_degree or 1)


class AttentionConfig(StrictModel):
    """Attention kernels."""

    backend: Literal["auto", "reference", "cpu", "torch", "flash2", "flash3", "flash4"] = "auto"
    """`auto` takes the first of flash4, flash3, flash2 (flash-attn packages) and torch that is installed, made for the GPU
    and passes a check of its results; a kernel named here that fails the check is an error."""


FLOW_PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {"timestep_sampling": "logit_normal", "flow_shift": 2.5, "mix_uniform": 0.2},
    "finetune": {"timestep_sampling": "uniform", "flow_shift": 3.0, "mix_uniform": 0.0},
}


class FlowConfig(StrictModel):
    """Flow matching: which noise levels are trained, and with what weight."""

    preset: Literal["pretrain", "finetune"] = "finetune"
    """Values for the keys below that are not set: see FLOW_PRESETS."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode"] = "uniform"
    logit_mean: float = 0.0
    logit_std: float = Field(default=1.5, gt=0)
    mode_scale: float = Field(default=1.29, ge=-1.0, le=1.75192)
    """Peakedness of `mode` sampling (Esser et al. 2024, eq. 20); the bounds keep it monotone."""
    flow_shift: float = Field(default=3.0, gt=0)
    """s in s*x / (1 + (s-1)*x), applied to every sampled sigma."""
    mix_uniform: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples whose sigma is drawn uniformly instead (and not shifted)."""
    weighting: Literal["none", "linear", "bell"] = "none"
    """none: 1. linear: 1 + flow_shift * sigma. bell: a Gaussian round sigma 0.5, mean 1."""
    cfg_dropout: float = Field(default=0.1, ge=0, le=1)
    """Share of the samples that train with the embedding of the empty caption."""
    i2v_ratio: float = Field(default=0.5, ge=0, le=1)
    """TI2V models: share of the samples whose first frame is given, clean and at timestep 0; the others are text-to-video."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**FLOW_PRESETS.get(values.get("preset", "finetune"), {}), **values}


class LossConfig(StrictModel):
    """How the squared errors of a step become one number."""

    reduction: Literal["sample", "token"] = "sample"
    """sample: every clip counts once. token: every token counts once."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(StrictModel):
    """The optimizer and its learning rate. A DeepSpeed JSON may own optimizer, scheduler or clipping instead."""

    name: Literal["adamw", "adamw8bit", "adafactor", "muon"] = "adamw"
    """`adamw`: torch's, on the host DeepSpeed's. `adamw8bit`: its moments in 8 bits, from bitsandbytes. `adafactor`: rows and
    columns of the second moment alone, at ZeRO-0. `muon`: orthogonal updates for the matrices of the blocks, AdamW for the rest,
    in full finetunes; from ZeRO-1 on without clipping, and the norm that is reported is then the update's."""
    lr: float = Field(default=1e-5, gt=0)
    """Means the same for all: Muon's is scaled for each matrix so that its update is of AdamW's size."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Of AdamW, also where it stands beside Muon."""
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: float = Field(default=0.0, ge=0)
    """Below 1: fraction of all steps. From 1 on: steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where cosine and linear end, as a share of lr."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with train.bins_per_step / scale_lr_base."""
    scale_lr_base: int = Field(default=1, gt=0)
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the whole gradient; 0 never clips."""


class PrecisionConfig(StrictModel):
    """Master weights, timesteps, modulation, norms and loss are fp32 whatever is chosen here."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """dtype of matmuls and attention."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """dtype that weights are kept in. `bf16` halves those of linear layers and patches, which bf16 matmuls round anyway: of the
    frozen base of a LoRA no bit of the result changes. Trained ones keep fp32 masters, at ZeRO-1 and 2."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients are reduced and ZeRO-3 gathers weights."""


class TrainConfig(StrictModel):
    """The loop."""

    seed: int = 0
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; wins over `epochs`."""
    epochs: int = Field(default=1, gt=0)
    bins_per_step: int = Field(default=1, gt=0)
    """Bins of one optimizer step over all ranks; a multiple of dp_size."""
    log_every: int = Field(default=1, gt=0)
    """Steps between two lines on the terminal; TensorBoard and metrics.jsonl get every step."""
    log_samples: bool = False
    """Write every clip's error and sigma to samples-rank*.jsonl, to find the clip behind a spike."""


class CheckpointConfig(StrictModel):
    """When and how many."""

    every: int = Field(default=500, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that stay on disk."""


class Recipe(StrictModel):
    """Everything that one training run is made of."""

    output_dir: str = "runs/default"
    """Checkpoints, logs and the resolved recipe go here."""
    model: ModelConfig = ModelConfig()
    lora: LoraConfig | None = None
    """Left out, all weights are trained."""
    ema: EmaConfig | None = None
    """Left out, no average is kept; `ema: {}` keeps one as it is by default."""
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
    def drops(self) -> bool:
        """Whether anything is dropped in training."""
        return bool(self.model.dropout or (self.lora and self.lora.dropout))

    def to_yaml(self) -> str:
        """The whole recipe, every default spelled out, as a file that `load_recipe` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply ``section.key=value`` overrides to it.

    Args:
        path: YAML file, name of a shipped recipe (such as ``wan2.1-t2v-1.3b-finetune``), or None for the defaults.
        overrides: ``section.key=value`` strings; a value is YAML.

    Raises:
        ConfigError: if a key is unknown, a value is invalid or keys contradict each other; one line per problem.
    """
    recipe, problems, _ = read_recipe(path, overrides)
    if problems:
        raise ConfigError(problems)
    return recipe


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str], set[str]]:
    """Read a recipe like `load_recipe`, but return the problems, so that other checks can go on.

    Returns:
        The recipe with defaults in every section that a problem names, the problems, and the names of these sections.

    Raises:
        ConfigError: if the file is missing or is not a YAML mapping.
    """
    values = _read_yaml(_find_recipe(path)) if path is not None else {}
    problems = [problem for item in overrides if (problem := _apply_override(values, item))]
    problems += _unknown_keys(Recipe, values, "")
    recipe = Recipe()
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        reported = {problem.split("=")[0].split(" ")[0] for problem in problems}
        problems += [line for name, line in _validation_problems(error) if name not in reported]
    else:
        problems += _cross_checks(recipe)
    sections = {
        name for name in Recipe.model_fields if any(re.search(rf"\b{name}[.=]", text) for text in problems)
    }
    if problems:
        known = Recipe.model_fields.keys() - sections
        recipe = Recipe.model_validate({name: value for name, value in values.items() if name in known})
    return recipe, problems, sections


def list_recipes() -> list[str]:
    """Names of the recipes that ship with wands."""
    return sorted(
        p.name.removesuffix(".yaml")
        for p in resources.files("wands.recipes").iterdir()
        if p.name.endswith(".yaml")
    )


def _find_recipe(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    shipped = resources.files("wands.recipes") / f"{str(path).removesuffix('.yaml')}.yaml"
    if shipped.is_file():
        return Path(str(shipped))
    raise ConfigError(
        f"recipe={path} is neither a file nor a recipe of wands; use a path or one of {', '.join(list_recipes())}."
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"recipe={path} is not YAML ({' '.join(str(error).split())}); mend the file."
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"recipe={path} must be a mapping of sections, not {type(values).__name__}; mend the file."
        )
    return values


def _apply_override(values: dict[str, Any], item: str) -> str | None:
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        return f"--set {item} is not section.key=value; write for example --set train.max_steps=100."
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"--set {item}: the value is not YAML; quote it."
    if isinstance(value, str):
        if text.strip()[:1] not in ("'", '"'):  # YAML would end a path at " #"
            value = text.strip()
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-4 as text
            value = float(value)
    *sections, key = name.strip().split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, dict) else {}
        values = values[section]
    values[key] = value
    return None


def _unknown_keys(section: type[BaseModel], values: dict[str, Any], prefix: str) -> list[str]:
    problems = []
    for key, value in values.items():
        field = section.model_fields.get(str(key))
        if field is None:
            near = difflib.get_close_matches(str(key), list(section.model_fields), n=1, cutoff=0.5)
            cure = (
                f"did you mean {prefix}{near[0]}?"
                if near
                else f"known here: {', '.join(section.model_fields)}."
            )
            problems.append(f"{prefix}{key} is not a key of the recipe; {cure}")
        elif (inner := _inner_section(field.annotation)) is not None:
            items = {f"{key}.{i}.": item for i, item in enumerate(value)} if isinstance(value, list) else {}
            for name, item in (items or {f"{key}.": value}).items():
                if isinstance(item, dict):
                    problems += _unknown_keys(inner, item, f"{prefix}{name}")
    return problems


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, alone, in a list, or where it may also be missing."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner_section, get_args(annotation))), None)


def _validation_problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            continue  # reported by _unknown_keys, with the nearest name
        name = ".".join(str(part) for part in item["loc"])
        yield name, f"{name}={item['input']!r} is refused: {item['msg'][0].lower()}{item['msg'][1:]}."


def _cross_checks(recipe: Recipe) -> Iterator[str]:
    for name in ("trainable", "freeze"):
        if recipe.lora and getattr(recipe.model, name):
            yield f"model.{name} is for full finetunes, and lora freezes all weights; leave it out, or see lora.targets."
    yield from _check_checkpointing(recipe)
    yield from _check_data(recipe.data)
    if recipe.packing.level_bins and recipe.train.bins_per_step % recipe.packing.level_bins:
        yield (
            f"packing.level_bins={recipe.packing.level_bins} must divide train.bins_per_step={recipe.train.bins_per_step}; use "
            "the dp_size that is trained on, or leave it out."
        )
    parallel = recipe.parallel
    known = (parallel.ulysses_degree or 1) * (parallel.ring_degree or 1)
    both = parallel.ulysses_degree and parallel.ring_degree
    if parallel.cp_size and (parallel.cp_size != known if both else parallel.cp_size % known):
        degrees = " x ".join(
            f"parallel.{name}={value}"
            for name, value in (
                ("ulysses_degree", parallel.ulysses_degree),
                ("ring_degree", parallel.ring_degree),
            )
            if value
        )
        rule = "be" if both else "be a multiple of"
        yield f"parallel.cp_size={parallel.cp_size} must {rule} {degrees}; leave one of them out."


def _check_checkpointing(recipe: Recipe) -> Iterator[str]:
    model, mode = recipe.model, recipe.model.checkpointing
    for key, modes in (("saved_tensors", ("selective", "offload")), ("offloaded_tensors", ("offload",))):
        names = getattr(model, key)
        if names is None:
            continue
        said = f"model.{key}=[{', '.join(names)}]"
        if mode not in modes:
            yield f"{said} does nothing with model.checkpointing={mode}; leave it out, or set that to {' or '.join(modes)}."
        elif not names and mode == modes[0]:
            instead = "full" if mode == "selective" else "selective or full"
            yield f"{said} leaves model.checkpointing={mode} nothing to do; name some, or set that to {instead}."
        if len(set(names)) < len(names):
            yield f"{said} has a name twice; drop one."
    for name in sorted(set(model.saved_tensors or ()) & set(model.offloaded_tensors or ())):
        yield f"model.saved_tensors and model.offloaded_tensors both have {name}, which is kept once; drop one."
    if "attn_input" in (*model.kept_on_device, *model.kept_on_host) and not recipe.parallel.fused_all_to_all:
        yield "attn_input cannot be kept with parallel.fused_all_to_all=false; drop the name, or set that to true."


def _check_data(data: DataConfig) -> Iterator[str]:
    if data.cache and data.mock:
        yield f"data.cache={data.cache} and data.mock are both set; keep one of them."
    if data.sources and (data.cache or data.mock):
        other = f"data.cache={data.cache}" if data.cache else "data.mock"
        yield f"data.sources and {other} are both set; keep one of them."
    for number, source in enumerate(data.sources or []):
        if source.weight and source.repeat:
            yield (
                f"data.sources.{number} has weight={source.weight} and repeat={source.repeat}, which exclude each other; "
                "drop one."
            )
    weighted = [bool(source.weight) for source in data.sources or []]
    if any(weighted) and not all(weighted):
        yield (
            f"data.sources.{weighted.index(False)} has no weight, but {sum(weighted)} of {len(weighted)} sources have one; "
            "give all of them a weight, or none."
        )
    if data.split == "holdout" and not data.holdout:
        yield "data.split=holdout needs clips that are held out (data.holdout=0); set for example data.holdout=0.02."
    if data.mock:
        too_long = [length for length in data.mock.text_lens if not 0 < length <= 512]
        if too_long:
            yield f"data.mock.text_lens={too_long} must be between 1 and 512 text tokens; shorten them."
