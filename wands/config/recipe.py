"""Training recipe: typed, immutable, checked before anything is loaded.

Precedence: defaults, then the YAML file, then ``--set section.key=value``. A recipe is used as it is written or refused
with all its problems at once; no value is corrected.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from wands.config.base import StrictModel
from wands.config.model_sections import (  # noqa: F401, this module is where the sections are imported from
    AttentionConfig,
    EmaConfig,
    LoraConfig,
    MergeConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
)
from wands.config.training_sections import (  # noqa: F401
    FLOW_PRESETS,
    CheckpointConfig,
    DataConfig,
    FlowConfig,
    LossConfig,
    MockConfig,
    OptimConfig,
    PackingConfig,
    SourceConfig,
    TrainConfig,
)
from wands.errors import ConfigError, one_line, suggest


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
    """Return the names of the shipped recipes."""
    names = (file.name for file in resources.files("wands.recipes").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def shipped_recipe(name: str) -> str:
    """Return the YAML text of a shipped recipe.

    Raises:
        ConfigError: if there is no shipped recipe of that name.
    """
    name, names = name.removesuffix(".yaml"), list_recipes()
    if name not in names:
        raise ConfigError(f"{name} is not a shipped recipe; {suggest(name, names)}")
    return (resources.files("wands.recipes") / f"{name}.yaml").read_text(encoding="utf-8")


def inner_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a key of this type contains, also inside an optional value or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(inner_section, get_args(annotation))), None)


def _find_recipe(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    shipped = resources.files("wands.recipes") / f"{str(path).removesuffix('.yaml')}.yaml"
    if shipped.is_file():
        return Path(str(shipped))
    raise ConfigError(
        f"recipe={path} is neither a file nor a shipped recipe; use a path, or one of {', '.join(list_recipes())}."
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe={path} is not valid YAML ({one_line(error)}); fix the file.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"recipe={path} must be a mapping of sections, not {type(values).__name__}; fix the file."
        )
    return values


def _apply_override(values: dict[str, Any], item: str) -> str | None:
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        return f"--set {item} is not section.key=value; write for example --set train.max_steps=100."
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return f"--set {item}: the value is not valid YAML; quote it."
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
            fix = suggest(str(key), section.model_fields, prefix)
            problems.append(f"{prefix}{key} is not a key of the recipe; {fix}")
        elif (inner := inner_section(field.annotation)) is not None:
            items = {f"{key}.{i}.": item for i, item in enumerate(value)} if isinstance(value, list) else {}
            for name, item in (items or {f"{key}.": value}).items():
                if isinstance(item, dict):
                    problems += _unknown_keys(inner, item, f"{prefix}{name}")
    return problems


def _validation_problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield (key, problem); the messages of a key with several types are joined."""
    reasons: dict[tuple[str, ...], list[str]] = {}
    values = {}
    for item in error.errors():
        if item["type"] != "extra_forbidden":  # _unknown_keys reports these with a suggestion
            path = tuple(str(part) for part in item["loc"] if "[" not in str(part))  # without "list[str]"
            reasons.setdefault(path, []).append(item["msg"][0].lower() + item["msg"][1:])
            values[path] = "" if item["type"] == "missing" else f"={item['input']!r}"
    for path, messages in reasons.items():
        name, key = ".".join(path), ".".join(part for part in path if not part.isdigit())
        reason = ", or ".join(messages)
        yield name, f"{name}{values[path]} is refused: {reason}; `wands config {key}` describes the key."


def _cross_checks(recipe: Recipe) -> Iterator[str]:
    for name in ("trainable", "freeze"):
        if recipe.lora and getattr(recipe.model, name):
            yield f"model.{name} is for full finetunes, but a lora section freezes all weights; remove it or use lora.targets."
    yield from _check_checkpointing(recipe)
    yield from _check_data(recipe.data)
    level_bins, bins_per_step = recipe.packing.level_bins, recipe.train.bins_per_step
    if level_bins and bins_per_step % level_bins:
        yield (
            f"packing.level_bins={level_bins} does not divide train.bins_per_step={bins_per_step}; set it to dp_size, or "
            "remove it."
        )
    parallel = recipe.parallel
    degrees = {
        name: value for name in ("ulysses_degree", "ring_degree") if (value := getattr(parallel, name))
    }
    product = (parallel.ulysses_degree or 1) * (parallel.ring_degree or 1)
    both = len(degrees) == 2
    if parallel.cp_size and (parallel.cp_size != product if both else parallel.cp_size % product):
        factors = " x ".join(f"parallel.{name}={value}" for name, value in degrees.items())
        rule = "be" if both else "be a multiple of"
        yield f"parallel.cp_size={parallel.cp_size} must {rule} {factors}; remove one of them."


def _check_checkpointing(recipe: Recipe) -> Iterator[str]:
    model, mode = recipe.model, recipe.model.checkpointing
    for key, modes in (("saved_tensors", ("selective", "offload")), ("offloaded_tensors", ("offload",))):
        names = getattr(model, key)
        if names is None:
            continue
        setting = f"model.{key}=[{', '.join(names)}]"
        if mode not in modes:
            yield (
                f"{setting} has no effect with model.checkpointing={mode}; remove it, or set model.checkpointing to "
                f"{' or '.join(modes)}."
            )
        elif not names and mode == modes[0]:
            instead = "full" if mode == "selective" else "selective or full"
            yield (
                f"{setting} leaves nothing to do for model.checkpointing={mode}; add a tensor, or set model.checkpointing "
                f"to {instead}."
            )
        if len(set(names)) < len(names):
            yield f"{setting} contains a name twice; remove one."
    for name in sorted(set(model.saved_tensors or ()) & set(model.offloaded_tensors or ())):
        yield (
            f"model.saved_tensors and model.offloaded_tensors both contain {name}, but a tensor is kept in one place; "
            "remove it from one list."
        )
    if "attn_input" in (*model.kept_on_device, *model.kept_on_host) and not recipe.parallel.fused_all_to_all:
        yield (
            "parallel.fused_all_to_all=false cannot keep attn_input; remove attn_input from model.saved_tensors and "
            "model.offloaded_tensors, or set parallel.fused_all_to_all=true."
        )


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
                "remove one of them."
            )
    weighted = [bool(source.weight) for source in data.sources or []]
    if any(weighted) and not all(weighted):
        yield (
            f"data.sources.{weighted.index(False)} has no weight, but {sum(weighted)} of {len(weighted)} sources have one; "
            "give every source a weight, or none."
        )
    if data.split == "holdout" and not data.holdout:
        yield "data.split=holdout needs held-out clips, but data.holdout=0; set for example data.holdout=0.02."
    if data.mock:
        wrong_lengths = [length for length in data.mock.text_lens if not 0 < length <= 512]
        if wrong_lengths:
            yield f"data.mock.text_lens={wrong_lengths} must be between 1 and 512 text tokens; change these lengths."
