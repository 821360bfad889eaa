"""Describe the model of a training run: its variant, its trained DiTs, and its parameters with their storage dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.files.loading import build_empty, load_config, load_index
from wands.model.freezing import freeze_parameters
from wands.model.lora import MergedLoras, check_lora, find_targets, load_start
from wands.model.weight_dtypes import WeightDtypePolicy
from wands.planning.memory import FP32
from wands.planning.workload import Weight
from wands.variants import Expert, ExtraInput, Variant, variant_of, with_extra


def read_model(
    recipe: Recipe, name: str | None = None, conditions: Sequence[ExtraInput] = ()
) -> tuple[dict[str, Any], Variant, tuple[Expert, ...]]:
    """Return (diffusers config of the DiT, variant, DiTs to train with their ranges of noise levels) of the recipe's model.

    `name` is a published model, such as "wan2.1-t2v-1.3b", whose config wands contains; None reads `model.path`. A base model
    gets the input channels of `conditions` of outside code.

    Raises:
        ConfigError: if the model does not exist, is not a Wan model, or has experts with different configs. Also if
            `model.experts` is set for a model with one DiT, or the recipe's timesteps do not overlap with an expert's timesteps.
    """
    path = name or recipe.model.path
    flow = recipe.flow
    chosen = recipe.model.experts
    if not path:
        raise ConfigError(
            "model.path is not set; add --set model.path=DIR_OR_HUB_ID. With wands plan, you can instead name a published model, "
            "such as --variant wan2.1-t2v-14b."
        )
    index = load_index(path)
    config = load_config(path)
    try:
        variant = variant_of(config, index, conditions)
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {error}; use a pipeline of Wan 2.1 or 2.2.") from None
    if recipe.lora and variant.dit.in_channels != config["in_channels"]:
        names = ", ".join(condition.name for condition in conditions)
        raise ConfigError(
            f"lora: model.path={path} has no input channels for {names}, and a LoRA does not train new channels; finetune the "
            "model with this input first, or remove the section lora."
        )
    if len(variant.experts) == 1 and chosen is not None:
        raise ConfigError(
            f"model.experts={chosen} applies to models with two experts, but {variant.name} has one DiT; remove the key."
        )
    experts = []
    for expert in (each for each in variant.experts if chosen in (None, "both", each.name)):
        if differing := differing_keys(config, load_config(path, expert.subfolder)):
            raise ConfigError(
                f"model.path={path}: the configs of the two experts differ in {', '.join(differing)}, but must be equal; "
                "use another pipeline."
            )
        (least, most) = expert.sigma_range
        (first, last) = flow.sigma_range
        low = max(least, first)
        high = min(most, last)
        if low >= high:
            raise ConfigError(
                f"flow.min_timestep={flow.min_timestep:g} and flow.max_timestep={flow.max_timestep:g} leave no timestep of the "
                f"{expert.name}-noise expert ({1000 * least:g} to {1000 * most:g}); change the keys or model.experts."
            )
        experts.append(replace(expert, sigma_range=(low, high)))
    return with_extra(config, variant), variant, tuple(experts)


def differing_keys(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys of a diffusers config whose values differ in another config, except keys such as `_class_name`."""
    return [key for key, value in config.items() if key[0] != "_" and other.get(key) != value]


def list_weights(
    recipe: Recipe, config: dict[str, Any], experts: Sequence[Expert], is_new: bool = True
) -> tuple[Weight, ...]:
    """Return the parameters of a trained DiT, and in a LoRA run also those of the LoRA.

    The LoRA files of each DiT in `experts` are checked. A run that is not new does not read `lora.init_from`.

    Raises:
        ConfigError: if a pattern in the recipe matches no parameter, or a LoRA file does not fit the model.
    """
    model = build_empty(config)
    for expert in experts:
        MergedLoras.load(recipe.model.merge_loras, expert, recipe.model.experts).check_fit(model)
    added: list[Weight] = []
    if recipe.lora is None:
        freeze_parameters(model, recipe.model.trainable, recipe.model.freeze)
    else:
        for expert in experts:
            start = load_start(recipe.lora, expert, recipe.model.experts) if is_new else None
            check_lora(model, recipe.lora, start)
        rank = recipe.lora.rank
        for name, linear in find_targets(model, recipe.lora.targets).items():
            shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
            added += [
                Weight(name=f"{name}.{part}.weight", shape=shape, element_size=FP32, trained=True)
                for part, shape in shapes.items()
            ]
        model.requires_grad_(False)
    WeightDtypePolicy.of(recipe).apply(model)
    stored = [
        Weight(
            name=name,
            shape=tuple(parameter.shape),
            element_size=parameter.element_size(),
            trained=parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    ]
    return (*stored, *added)
