"""`wands recipes` and the reference pages: complete, readable, and equal to the committed pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from wands.cli import main
from wands.config.recipe import Recipe
from wands.config.recipe_loading import shipped_recipes
from wands.config.reference import Key, list_sections

ROOT = Path(__file__).resolve().parents[3]
KEYS = [key for section in list_sections() for key in section.keys]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": "100"})


@pytest.mark.parametrize("page", ["cli.md", "recipe.md"])
def test_pages_are_up_to_date(page: str):
    from build_reference import FOLDER, build_pages  # conftest.py puts scripts/ on the path

    message = "run python scripts/build_reference.py and commit docs/reference"
    assert (FOLDER / page).read_text(encoding="utf-8") == build_pages()[page], message


def test_every_key_of_a_resolved_recipe_is_listed():
    def names(values: dict, prefix: str = "") -> set[str]:
        return {
            name
            for key, value in values.items()
            for name in (names(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"})
        }

    full = Recipe.model_validate(
        {
            "lora": {"rank": 4},
            "ema": {},
            "eval": {},
            "sample": {},
            "hub": {"repo": "you/name"},
            "data": {"mock": {"num_samples": 1, "shapes": [[1, 2, 2]]}},
            "profile": {},
        }
    )
    listed = {key.name for key in KEYS if "[]" not in key.name} - {
        "sample.inputs"
    }  # a dict that is empty here
    assert names(yaml.safe_load(full.to_yaml())) - {"model.merge_loras", "data.sources"} == listed
    assert {key.name for key in KEYS if "[]" in key.name} == {
        "model.merge_loras[].path", "model.merge_loras[].scale", "model.merge_loras[].expert",
        "data.sources[].path", "data.sources[].weight", "data.sources[].repeat",
        "data.sources[].loss_weight", "data.sources[].caption_dropout",
    }  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_is_described(key: Key):
    text = " ".join(key.description.split())
    assert text.endswith(".")
    assert 2 <= len(key.summary.split()) <= 30
    assert not re.search(r"\b(likewise|told|beside|those|lies|stands)\b", text, re.IGNORECASE)
    for sentence in re.split(r"[.;:] ", text):
        assert len(sentence.split()) <= 25, sentence
    assert key.default != "unset" or re.search("unset|required", text, re.IGNORECASE), "describe unset"


def test_sections_and_keys_on_the_terminal():
    listing = invoke("recipes", "--keys").output
    assert max(map(len, listing.splitlines())) <= 100
    for key in KEYS:
        assert re.search(rf"^  {key.name.rpartition('.')[2]}\s", listing, re.MULTILINE), key.name
    assert "[number > 0; default: 1e-05]" in listing
    one = invoke("recipes", "model.checkpointing").output
    assert one.startswith("model.checkpointing  [none | selective | full | offload; default: none]\n")
    assert one.count("  - `") == 4
    section = invoke("recipes", "optim").output
    assert section.startswith("optim: Optimizer")
    assert len(re.findall(r"^optim\.", section, re.MULTILINE)) == 12
    assert (
        invoke("recipes", "data.sources.0.weight").output == invoke("recipes", "data.sources[].weight").output
    )
    both = invoke("recipes", "warmup").output
    assert "ema.warmup  [" in both
    assert "optim.warmup  [" in both
    assert invoke("recipes", "output_dir").output.count("output_dir") == 1


@pytest.mark.parametrize(
    ("query", "fix"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("warmpu", "did you mean warmup?"),
        ("qqqq", "`wands recipes` lists the recipes, `wands recipes --keys` all keys."),
        ("wan2.1-t2v-1.3b-lra", "did you mean wan2.1-t2v-1.3b-lora?"),
    ],
)
def test_a_misspelled_key_is_refused_with_a_suggestion(query: str, fix: str):
    result = invoke("recipes", query)
    assert result.exit_code == 2
    assert f"wands: {query} is neither a shipped recipe nor a recipe key; {fix}" in result.stderr


def test_recipes_on_the_terminal():
    lines = invoke("recipes").output.splitlines()
    assert lines[0].split() == ["NAME", "VARIANT", "TRAINS", "DESCRIPTION"]
    assert [line.split()[0] for line in lines[1:]] == list(shipped_recipes())
    for line in lines[1:]:
        name, variant, kind, *description = line.split()
        assert name.startswith(variant) or (name, variant) == ("tiny", "any")
        assert (kind == "LoRA") == name.endswith("-lora")
        assert len(description) > 1
        assert len(line) <= 100
    text = (ROOT / "wands" / "recipes" / "tiny.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "tiny").output.strip() == text.strip()
    refused = invoke("recipes", "tinny")
    assert (refused.exit_code, "did you mean tiny?" in refused.stderr) == (2, True)
    both = invoke("recipes", "tiny", "--keys")
    assert both.exit_code == 2
    assert "--keys lists all keys, so it cannot be used with tiny" in both.stderr
