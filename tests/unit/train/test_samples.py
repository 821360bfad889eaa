"""The `sample` section of a recipe: official defaults, and errors that name the keys of the section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import make_run
from wands.errors import ConfigError

SMALL = "height: 32, width: 64, num_frames: 9"


def test_unset_keys_are_those_of_infer(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a fish\n")
    section = f"sample={{prompts: [a cat], prompts_file: {tmp_path}/prompts.txt, {SMALL}, seed: 4}}"
    cat, fish = make_run(tiny_pipeline, tmp_path, (section,), world_size=1).samples
    assert (cat.prompt, cat.seed, cat.height, cat.num_inference_steps) == ("a cat", 4, 32, 50)
    assert (fish.prompt, fish.seed, fish.guidance_scale, fish.negative_prompt) == ("a fish", 5, 5.0, "")


@pytest.mark.parametrize(
    ("variant", "section", "words"),
    [
        ("wan2.1-t2v-1.3b", "{}", r"^sample\.prompts is missing\. Add sample\.prompts"),
        ("wan2.1-t2v-1.3b", "{prompts: [a], height: 40}", r"^sample\.height=40 must be a multiple of 16"),
        ("wan2.1-t2v-1.3b", "{prompts_file: no.txt}", r"^sample\.prompts_file=no\.txt cannot be read"),
        ("wan2.1-t2v-1.3b", "{prompts: [a], guidance_scale_2: 3}", r"^sample\.guidance_scale_2=3 is for models of two"),
        ("wan2.1-i2v-14b", f"{{prompts: [a], {SMALL}}}", r"^sample\.image is missing"),
        ("wan2.1-i2v-14b", f"{{prompts: [a], image: no.png, {SMALL}}}", r"^sample\.image=no\.png cannot be used"),
        ("wan2.1-i2v-14b", "{prompts: [a], image: [x, y]}", r"sample\.image has 2 values for 1 prompts"),
    ],
)  # fmt: skip
def test_errors_name_the_keys(
    variant: str, section: str, words: str, tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_run(tiny_variant(variant), tmp_path, (f"sample={section}",), world_size=1)


def test_one_of_two_experts_cannot_sample(tiny_variant: Callable[[str], Path], tmp_path: Path) -> None:
    keys = ("model.experts=high", f"sample={{prompts: [a], {SMALL}}}")
    with pytest.raises(
        ConfigError, match=r"^sample: videos need both experts of wan2\.2-t2v-tiny, but model\.experts=high"
    ):
        make_run(tiny_variant("wan2.2-t2v-a14b"), tmp_path, keys, world_size=1)


def test_a_model_without_encoders_cannot_sample(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "transformer").symlink_to(tiny_pipeline / "transformer")
    with pytest.raises(ConfigError, match=r"^model\.path=.*model_index\.json"):
        make_run(tmp_path, tmp_path / "run", (f"sample={{prompts: [a], {SMALL}}}",), world_size=1)
