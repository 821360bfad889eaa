"""Read recipes, and check them before a model or data is loaded.

Defaults have the lowest precedence, then the YAML file, then `--set section.key=value`. A recipe is used exactly as it is
written, or refused with one report of all its problems. No value is corrected.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from wands.config.base import invalid_reason
from wands.config.recipe import DataConfig, ParallelConfig, Recipe, inner_section
from wands.errors import ConfigError, Problems, failed_rules, one_line, suggest

MAX_REPEATED = 10_000
"""Largest number of values that the aliases of a YAML text repeat, so that a short text with nested aliases cannot fill the
memory."""

_SHIPPED = Path(str(resources.files("wands.recipes")))


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides of the form `section.key=value` with a YAML value, and return the checked recipe.

    `path` is a YAML file, or the name of a shipped recipe, such as `wan2.1-t2v-1.3b-finetune`. None uses all defaults.

    Raises:
        ConfigError: if a key is unknown, a value is invalid, or keys contradict each other, with one line per problem.
    """
    problems = Problems()
    recipe = read_recipe(path, overrides, problems)
    problems.raise_all()
    return recipe


def read_recipe(path: str | Path | None, overrides: Sequence[str], problems: Problems) -> Recipe:
    """Read a recipe as `load_recipe` does, but add wrong keys and values to `problems`, so that other checks can continue.

    `problems` gets one error named "recipe", and the name of each section with a wrong key or value as a failed check, so that
    checks that need the section are skipped. In the returned recipe, these sections have the defaults.

    Raises:
        ConfigError: if the file is missing or is not a YAML mapping.
    """
    values = read_yaml(_find_recipe(path)) if path is not None else {}
    messages = [message for item in overrides if (message := _apply_override(values, item))]
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        messages += _validation_problems(error)
    else:
        messages += _cross_checks(recipe)
    if not messages:
        return recipe
    problems.add("recipe", ConfigError(messages))
    sections = Recipe.model_fields.keys()
    problems.failed |= {name for name in sections if any(re.search(rf"\b{name}[.=]", m) for m in messages)}
    return Recipe.model_validate({name: values[name] for name in sections & values.keys() - problems.failed})


def shipped_recipes() -> dict[str, str]:
    """Return the YAML text of each shipped recipe by name, in alphabetical order."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_SHIPPED.glob("*.yaml"))}


class _RecipeLoader(yaml.SafeLoader):
    """YAML loader that refuses tags, a key that a mapping has twice, and aliases that repeat more than `MAX_REPEATED` values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = self._num_repeated = 0
        self._sizes = dict[int, int]()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next YAML node, and count its values. An alias counts as many as the node that it repeats."""
        event = self.peek_event()
        before = self._num_nodes
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError(f"YAML tag {event.tag} in line {event.start_mark.line + 1} is not allowed")
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            # An alias inside its own anchor has no size yet, and would expand without end.
            size = self._sizes.get(id(node), MAX_REPEATED + 1)
            self._num_nodes += size
            self._num_repeated += size
            if self._num_repeated > MAX_REPEATED:
                raise yaml.YAMLError(f"the aliases of the file repeat more than {MAX_REPEATED} values")
        else:
            self._num_nodes += 1
        self._sizes[id(node)] = self._num_nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next YAML mapping. YAML would keep the last of two equal keys without a word."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                first = lines[key.value]
                raise yaml.YAMLError(f"the key {key.value} is in line {first} and again in line {line}")
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, {} if the file is empty.

    Raises:
        OSError: if the file cannot be read.
        ConfigError: if the file is not YAML of plain values, a mapping has a key twice, or the file is no mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"recipe={path} is not valid YAML ({one_line(error)}); fix the file.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"recipe={path} contains a {type(values).__name__}; write lines like key: value.")
    return values


def _find_recipe(name: str | Path) -> Path:
    places = (Path(name), _SHIPPED / f"{str(name).removesuffix('.yaml')}.yaml")
    path = next(filter(Path.is_file, places), None)
    if path is None:
        fix = f"use a path, or one of {', '.join(shipped_recipes())}."
        raise ConfigError(f"recipe={name} is neither a file nor a shipped recipe; {fix}")
    return path


def _apply_override(values: dict[str, Any], item: str) -> str | None:
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        return f"--set {item} must have the form section.key=value, for example --set train.max_steps=100."
    try:
        value = yaml.load(text, _RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return f"--set {item}: the value is not valid YAML ({one_line(error)}); put the value in quotes."
    if isinstance(value, str):
        if text.strip()[:1] not in ("'", '"'):  # in YAML, " #" in a path would start a comment
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


def _validation_problems(error: ValidationError) -> Iterator[str]:
    """Yield one message per invalid key. If a key accepts several types, the message lists one reason for each type."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in error.errors():
        # Without the names of types, such as "list[str]" and "constrained-int".
        path = tuple(str(part) for part in item["loc"] if not re.search(r"\[|^constrained-", str(part)))
        if item["type"] in ("extra_forbidden", "invalid_key"):
            prefix = "".join(f"{part}." for part in path[:-1])
            fix = suggest(path[-1], _section_at(path[:-1]).model_fields, prefix)
            yield f"{prefix}{path[-1]} is not a key of the recipe; {fix}"
        else:
            value = "" if item["type"] == "missing" else f"={item['input']!r}"
            reason = invalid_reason(item)
            reason = reason[0].lower() + reason[1:]
            reasons.setdefault((".".join(path), value), []).append(reason)
    for (name, value), messages in reasons.items():
        key = re.sub(r"\.\d+", "", name)
        yield f"{name}{value} is invalid: {', or '.join(messages)}; `wands recipes {key}` describes the key."


def _section_at(path: Sequence[str]) -> type[BaseModel]:
    section: Any = Recipe
    for part in path:
        if not part.isdigit():  # a number is a position in a list of sections
            section = inner_section(section.model_fields[part].annotation)
    return section


def _cross_checks(recipe: Recipe) -> list[str]:
    """Return one message for each pair of keys whose values are valid alone, but contradict each other."""
    level_bins = recipe.packing.level_bins
    bins_per_step = recipe.train.bins_per_step
    rules = {
        f"model.{name} is for full finetunes, but the recipe has a lora section; remove model.{name}, and use "
        "lora.targets.": recipe.lora and getattr(recipe.model, name)
        for name in ("trainable", "freeze")
    }
    rules |= _checkpointing_rules(recipe) | _data_rules(recipe.data) | _parallel_rules(recipe.parallel)
    rules |= {
        f"packing.level_bins={level_bins} does not divide train.bins_per_step={bins_per_step}; set packing.level_bins to "
        "dp_size (number of ranks / cp_size), or remove the key.": level_bins and bins_per_step % level_bins
    }
    return failed_rules(rules)


def _parallel_rules(parallel: ParallelConfig) -> dict[str, object]:
    names = ("ulysses_degree", "ring_degree")
    degrees = {name: value for name in names if (value := getattr(parallel, name))}
    factors = " x ".join(f"parallel.{name}={value}" for name, value in degrees.items())
    size = parallel.cp_size
    product = math.prod(degrees.values())
    both = len(degrees) == 2
    message = f"parallel.cp_size={size} must {'equal' if both else 'be a multiple of'} {factors}; remove one of these keys."
    return {message: size and (size != product if both else size % product)}


def _checkpointing_rules(recipe: Recipe) -> dict[str, object]:
    model = recipe.model
    mode = recipe.model.checkpointing
    rules: dict[str, object] = {}
    for key, modes in (("saved_tensors", ("selective", "offload")), ("offloaded_tensors", ("offload",))):
        names = getattr(model, key)
        if names is None:
            continue
        setting = f"model.{key}=[{', '.join(names)}]"
        other_modes = "full" if mode == "selective" else "selective or full"
        rules |= {
            f"{setting} has no effect with model.checkpointing={mode}; remove the key, or set model.checkpointing to "
            f"{' or '.join(modes)}.": mode not in modes,
            f"{setting} is empty, but model.checkpointing={mode} needs a tensor; add a tensor, or set model.checkpointing "
            f"to {other_modes}.": not names and mode == modes[0],
            f"{setting} contains a name twice; remove the second.": len(set(names)) < len(names),
        }
    both = sorted(set(model.saved_tensors or ()) & set(model.offloaded_tensors or ()))
    return rules | {
        f"model.saved_tensors and model.offloaded_tensors both contain {', '.join(both)}, but a tensor can be in only one "
        "list; remove the name from one list.": both,
    }


def _data_rules(data: DataConfig) -> dict[str, object]:
    sources = data.sources or []
    weighted = [bool(source.weight) for source in sources]
    other = f"data.cache={data.cache}" if data.cache else "data.mock"
    missing = f"data.sources.{weighted.index(False)}" if False in weighted else ""
    return {
        f"data.cache={data.cache} and data.mock are both set; keep one of them.": data.cache and data.mock,
        f"data.sources and {other} are both set; keep one of them.": sources and (data.cache or data.mock),
        "data.split=holdout needs held-out clips, but data.holdout=0; set for example "
        "data.holdout=0.02.": data.split == "holdout" and not data.holdout,
        f"{missing} has no weight, but {sum(weighted)} of {len(weighted)} sources have a weight; set weight for all "
        "sources, or for none.": missing and any(weighted),
        **{
            f"data.sources.{number} has weight={source.weight} and repeat={source.repeat}, which exclude each other; "
            "remove one of them.": source.weight and source.repeat
            for number, source in enumerate(sources)
        },
    }
