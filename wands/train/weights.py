"""Model of a training run: variant, experts, and the parameters as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wands.config.recipe import Recipe
from wands.errors import ConfigError
from wands.model.files.loading import build_empty, load_config, load_index
from wands.model.freezing import freeze_parameters
from wands.model.lora import MergedLoras, check_lora, find_targets, load_start
from wands.planning.activations import FP32
from wands.planning.workload import Weight
from wands.train.precision import weight_dtype_policy
from wands.variants import Expert, Variant, variant_of


def read_model(recipe: Recipe) -> tuple[dict[str, Any], Variant, tuple[Expert, ...]]:
    """Return the DiT's config, the variant, and the experts that the recipe trains.

    Raises:
        ConfigError: if the model does not exist, is not a Wan model, or does not have these experts.
    """
    path = recipe.model.path
    if not path:
        raise ConfigError(
            "model.path is not set; give a diffusers pipeline folder or a Hub id, for example --set model.path=DIR."
        )
    index, config = load_index(path), load_config(path)
    try:
        variant = variant_of(config, index)
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {error}; give a pipeline of Wan 2.1 or 2.2.") from None
    experts = choose_experts(variant, recipe.model.experts)
    for expert in experts:
        expert_config = load_config(path, expert.subfolder)
        differing = [key for key in config if key[0] != "_" and expert_config.get(key) != config[key]]
        if differing:
            raise ConfigError(
                f"model.path={path}: the two experts differ in {', '.join(differing)}, but must have the same architecture; "
                "give another pipeline."
            )
    return config, variant, experts


def choose_experts(variant: Variant, name: str | None) -> tuple[Expert, ...]:
    """Return the DiTs that `model.experts` names.

    Raises:
        ConfigError: if a name is given for a model with one DiT.
    """
    if len(variant.experts) == 1 and name is not None:
        raise ConfigError(
            f"model.experts={name} applies to models with two experts, and {variant.name} has one; remove the key."
        )
    return tuple(expert for expert in variant.experts if name in (None, "both", expert.name))


def list_weights(
    recipe: Recipe, config: dict[str, Any], experts: Sequence[Expert], is_new: bool = True
) -> tuple[Weight, ...]:
    """Return the parameters of each expert as a run stores them.

    Args:
        recipe: LoRA, frozen parameters, weight dtypes.
        config: diffusers config of the DiT.
        experts: trained experts.
        is_new: False for a resumed run, which does not read `lora.init_from`.

    Raises:
        ConfigError: if a pattern or a LoRA does not fit the model.
    """
    model = build_empty(config)
    for expert in experts:
        MergedLoras.load(recipe.model.merge_loras, expert).check_fit(model)
    added: list[Weight] = []
    if recipe.lora is None:
        freeze_parameters(model, recipe.model.trainable, recipe.model.freeze)
    else:
        for expert in experts:
            check_lora(model, recipe.lora, load_start(recipe.lora, expert) if is_new else None)
        rank = recipe.lora.rank
        for name, linear in find_targets(model, recipe.lora.targets).items():
            shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
            added += [Weight(f"{name}.{part}.weight", shape, FP32, True) for part, shape in shapes.items()]
        model.requires_grad_(False)
    weight_dtype_policy(recipe).apply(model)
    stored = [
        Weight(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
    return (*stored, *added)
