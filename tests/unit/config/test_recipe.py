"""The recipe: every problem is reported with its fix, all problems at once, and no value is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from wands.config.recipe import Recipe
from wands.config.recipe_loading import load_recipe, shipped_recipes
from wands.errors import ConfigError
from wands.variants import VARIANTS, Variant


def problems(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_file_and_set_in_that_order(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("optim: {lr: 3e-4}\ntrain: {max_steps: 7, seed: 3}\n")
    recipe = load_recipe(path, ["train.max_steps=9", "optim.betas=[0.8, 0.9]"])
    assert (recipe.optim.lr, recipe.train.max_steps, recipe.train.seed) == (3e-4, 9, 3)
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.train.epochs == Recipe().train.epochs


def test_scientific_notation_without_a_dot_is_a_number():
    assert load_recipe(None, ["optim.lr=1e-4"]).optim.lr == 1e-4


def test_unknown_key_names_the_nearest():
    assert "train.max_step is not a key of the recipe; did you mean train.max_steps?" in problems(
        "train.max_step=3"
    )
    assert "did you mean optim?" in problems("optm.lr=3")


def test_all_problems_at_once():
    text = problems("train.max_step=3", "flow.flow_shift=-1", "packing.max_tokens=many", "nonsense")
    assert text.startswith("4 problems:")
    for part in ("train.max_step ", "flow.flow_shift=-1", "packing.max_tokens='many'", "--set nonsense"):
        assert part in text


def test_not_yaml_and_not_a_mapping(tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1, 2\n")
    assert "is not valid YAML" in problems(path=path)
    path.write_text("- 1\n- 2\n")
    assert "contains a list; write lines like key: value." in problems(path=path)


def laughs(first: str, nested: str) -> str:
    """YAML of a few hundred bytes whose aliases expand to 9 ** 9 values."""
    lines = [f"a{level}: &a{level} " + nested % ", ".join([f"*a{level - 1}"] * 9) for level in range(1, 10)]
    return "\n".join([f"a0: &a0 {first}", *lines])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (laughs("[x, y]", "[%s]"), "the aliases of the file repeat more than 10000 values"),
        (laughs("{x: y}", "{<<: [%s]}"), "the aliases of the file repeat more than 10000 values"),
        ("train: &train {epochs: *train}", "the aliases of the file repeat more than 10000 values"),
        (
            "train: !!python/object/apply:os.getcwd []",
            "python/object/apply:os.getcwd in line 1 is not allowed",
        ),
        ("output_dir: !!binary aGk=", "binary in line 1 is not allowed"),
        ("train: " + 1000 * "[", "maximum recursion depth"),
        ("train: {max_steps: " + 5000 * "9" + "}", "integer string conversion"),
        ("output_dir: 2001-99-99", "month must be in 1..12"),
    ],
    ids=["aliases", "merge keys", "recursive", "python tag", "binary tag", "depth", "digits", "date"],
)
def test_yaml_that_is_not_plain_data_is_one_sentence(text: str, reason: str, tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    error = problems(path=path)
    assert reason in error
    assert error.startswith(f"recipe={path} is not valid YAML (")
    assert "\n" not in error
    assert "the value is not valid YAML" in problems("output_dir=!!binary aGk=")


def test_aliases_of_a_recipe_are_expanded(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("optim: {betas: &betas [0.8, 0.9], lr: &small 1e-4, eps: *small}\n")
    assert load_recipe(path).optim.eps == load_recipe(path).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train: {epochs: 2}\nmodel: {path: a}\ntrain: {seed: 1}\n",
            "the key train is in line 1 and again in line 3",
        ),
        ("train:\n  seed: 1\n  epochs: 2\n  seed: 3\n", "the key seed is in line 2 and again in line 4"),
        ("train: {seed: 1, seed: 2}", "the key seed is in line 1 and again in line 1"),
    ],
)
def test_a_key_that_is_there_twice_is_named_with_its_lines(text: str, said: str, tmp_path: Path):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    assert said in problems(path=path)
    assert "the key a is in line 1 and again" in problems("sample.inputs={a: x, a: y}")


def test_a_long_list_is_valid_yaml(tmp_path: Path):
    keys = [f"clip-{i}" for i in range(12_000)]
    path = tmp_path / "r.yaml"
    path.write_text("data:\n  exclude:\n" + "".join(f"  - {key}\n" for key in keys))
    assert load_recipe(path).data.exclude == keys


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=true",
        "train.max_steps=yes",
        "optim.betas=[true, 0.9]",
        "train.step_timeout=on",
        "profile.ranks=[false]",
    ],
)
def test_a_boolean_is_not_a_number(override: str):
    found = problems(override)
    assert "true and false are not numbers" in found
    assert "value error" not in found.lower()  # the prefix of pydantic


@pytest.mark.parametrize(
    "override",
    [
        "packing.max_tokens=1e20",
        "train.seed='90071992547409930'",
        "train.seed=-1e300",
        "profile.ranks=[1e17]",
    ],
)
def test_an_integer_that_does_not_fit_is_refused(override: str):
    assert "integer" in problems(override)


@pytest.mark.parametrize(
    "override", ["train.bins_per_step=1e12", "packing.max_tokens=1e12", "packing.level_bins=1e9"]
)
def test_a_batch_that_no_memory_holds_is_refused(override: str):
    assert "less than" in problems(override)


def test_missing_recipe_lists_the_shipped_ones():
    with pytest.raises(
        ConfigError, match=r"neither a file nor a shipped recipe; use a path, or one of .*tiny"
    ):
        load_recipe("no-such-recipe")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda row: row.name)
def test_every_variant_has_a_full_and_a_lora_recipe(variant: Variant):
    full = load_recipe(f"{variant.name}-finetune")
    lora = load_recipe(f"{variant.name}-lora")
    assert (full.lora, lora.lora is not None) == (None, True)
    assert full.model.path == lora.model.path
    assert full.flow.flow_shift == lora.flow.flow_shift
    assert variant.name.split("-")[1] in full.model.path.lower()
    for recipe in (full, lora):
        assert recipe.model.experts == ("both" if variant.boundary_ratio else None)
    # Shifts of official inference, but for T2V of Wan 2.1, whose authors advise lower ones in training.
    if not variant.name.startswith("wan2.1-t2v"):
        assert full.flow.flow_shift == variant.sampling.flow_shift


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_round_trip(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe


def test_presets_fill_only_what_is_not_set():
    assert load_recipe(None, ["flow.preset=pretrain"]).flow.flow_shift == 2.5
    recipe = load_recipe(None, ["flow.preset=pretrain", "flow.flow_shift=8"])
    assert (recipe.flow.flow_shift, recipe.flow.timestep_sampling, recipe.flow.mix_uniform) == (
        8,
        "logit_normal",
        0.2,
    )
    recipe = load_recipe(None, [])
    assert (recipe.flow.timestep_sampling, recipe.flow.flow_shift) == ("uniform", 3.0)


def test_contradictions_inside_the_recipe():
    both = problems("data.cache=x", "data.mock={num_samples: 2, shapes: [[1, 2, 2]]}")
    assert "data.cache=x and data.mock are both set" in both
    assert "data.mock.text_lens.1=600 is invalid: input should be less than or equal to 512; " in problems(
        "data.mock={num_samples: 2, shapes: [[1, 2, 2]], text_lens: [5, 600]}"
    )


def test_a_key_of_several_types_is_one_problem():
    assert problems("lora={rank: 4, targets: 3}") == (
        "lora.targets=3 is invalid: input should be 'attention', 'attention+ffn' or 'all-linear', or input should be a "
        "valid list; `wands recipes lora.targets` describes the key."
    )


def test_merged_loras_may_be_paths_with_a_scale(tmp_path: Path):
    def merged(value: str) -> list[tuple[str, float, str | None]]:
        loras = load_recipe(None, [f"model.merge_loras={value}"]).model.merge_loras
        return [(lora.path, lora.scale, lora.expert) for lora in loras]

    assert merged("style.safetensors") == [("style.safetensors", 1.0, None)]
    assert merged("style.safetensors=0.5") == [("style.safetensors", 0.5, None)]
    assert merged("[a=0.5, b, {path: c, expert: high}]") == [
        ("a", 0.5, None),
        ("b", 1.0, None),
        ("c", 1.0, "high"),
    ]
    (tmp_path / "a=0.5").touch()
    assert merged(f"[{tmp_path}/a=0.5]") == [(f"{tmp_path}/a=0.5", 1.0, None)]


@pytest.mark.parametrize("scale", ["strong", "nan", ""])
def test_a_wrong_scale_of_a_merged_lora_is_refused(scale: str):
    text = problems(f"model.merge_loras=[style={scale}]")
    assert f"model.merge_loras.0='style={scale}' is invalid: " in text
    assert f"the scale '{scale}' is not a finite number. Write PATH or PATH=SCALE" in text


def test_recipe_is_immutable():
    with pytest.raises(Exception, match="frozen"):
        load_recipe(None).train.seed = 3


def test_levelled_bins_must_divide_a_step():
    with pytest.raises(
        ConfigError,
        match=r"packing.level_bins=3 does not divide train.bins_per_step=8; set packing.level_bins to dp_size \(number of ranks",
    ):
        load_recipe(None, ["packing.level_bins=3", "train.bins_per_step=8"])
    assert load_recipe(None, ["packing.level_bins=4", "train.bins_per_step=8"]).packing.level_bins == 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["checkpointing=full", "saved_tensors=[attn_output]"],
            "model.saved_tensors=[attn_output] has no effect with model.checkpointing=full; remove the key, or set "
            "model.checkpointing to selective or offload.",
        ),
        (
            ["checkpointing=selective", "offloaded_tensors=[block_input]"],
            "model.offloaded_tensors=[block_input] has no effect with model.checkpointing=selective; remove the key, or "
            "set model.checkpointing to offload.",
        ),
        (
            ["checkpointing=selective", "saved_tensors=[]"],
            "model.saved_tensors=[] is empty, but model.checkpointing=selective needs a tensor; add a tensor, or set "
            "model.checkpointing to full.",
        ),
        (
            ["checkpointing=offload", "offloaded_tensors=[]"],
            "add a tensor, or set model.checkpointing to selective or full.",
        ),
        (
            [
                "checkpointing=offload",
                "saved_tensors=[key_proj]",
                "offloaded_tensors=[block_input, key_proj]",
            ],
            "model.saved_tensors and model.offloaded_tensors both contain key_proj, but a tensor can be in only one "
            "list; remove the name from one list.",
        ),
        (
            ["checkpointing=selective", "saved_tensors=[key_proj, key_proj]"],
            "model.saved_tensors=[key_proj, key_proj] contains a name twice; remove the second.",
        ),
        (["checkpointing=selective", "saved_tensors=[block_input]"], "input should be 'attn_output', "),
        (["checkpointing=offload", "offloaded_tensors=[hidden]"], "input should be 'block_input', "),
    ],
)
def test_names_of_checkpointing_that_do_nothing(overrides: list[str], said: str):
    text = problems(*(f"model.{one}" for one in overrides))
    assert said in text
    assert len(text.splitlines()) == 1


def test_what_checkpointing_keeps_by_default():
    kept = {
        mode: (model.kept_on_device, model.kept_on_host)
        for mode in ("none", "full", "selective", "offload")
        if (model := load_recipe(None, [f"model.checkpointing={mode}"]).model)
    }
    assert kept == {
        "none": ((), ()),
        "full": ((), ()),
        "selective": (("attn_output",), ()),
        "offload": ((), ("block_input",)),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/my clips #2/cache", "/data/my clips #2/cache"),
        (" /data/clips ", "/data/clips"),
        ("'/data/clips '", "/data/clips "),
        ('"a # b"', "a # b"),
        ("a=b", "a=b"),
        ("null", None),
    ],
)
def test_a_path_is_taken_as_it_is(text: str, expected: str | None):
    assert load_recipe(None, [f"data.cache={text}"]).data.cache == expected


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=inf",
        "optim.lr=.nan",
        "flow.flow_shift=inf",
        "optim.betas=[.nan, 0.9]",
        "optim.betas=[0.9, 1.0]",
    ],
)
def test_numbers_that_train_nothing_are_refused(override: str):
    assert override.partition("=")[0] in problems(override)
