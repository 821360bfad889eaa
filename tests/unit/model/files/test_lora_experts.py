"""The expert that a LoRA file changes: by the option, else the metadata, else the tensor names, else a word of the name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wands.config.recipe import LoraConfig, MergeConfig
from wands.errors import ConfigError
from wands.model.files.lora_experts import assign_experts, expert_in_name, find_lora_files
from wands.model.lora import MergedLoras, load_start
from wands.sampling.loras import find_loras
from wands.variants import VARIANTS

HIGH = "transformer"
LOW = "transformer_2"
EXPERTS = VARIANTS["wan2.2-t2v-a14b"].experts
ONE_DIT = VARIANTS["wan2.1-t2v-1.3b"].experts[0]
MODULE = "blocks.0.attn1.to_q"


def write(path: Path, value: float = 1.0, prefix: str = "transformer.", **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pair = {"A": torch.full((2, 4), value), "B": torch.ones(4, 2)}
    save_file({f"{prefix}{MODULE}.lora_{half}.weight": pair[half] for half in "AB"}, path, metadata)
    return path


def found(path: Path, chosen: str | None = None) -> list[tuple[str, tuple[str, ...]]]:
    return [(file.path.name, file.experts) for file in find_lora_files(path, "--lora", chosen)]


NAMES = "high HIGH High style_high_noise style-high-noise style_HIGH_fp16 HighNoise highnoise HIGHNOISE wan22HighNoise14B"
SILENT = "style highway slow flow overFlow follow yellow HIGHWAY lowres thigh HighLow high_and_low high_noise_low_noise"


@pytest.mark.parametrize(
    "name", [*NAMES.split(), "T2VHigh", "high2", "14b.high.v2", "my-lora-high", "low_poly_high_noise"]
)
def test_a_word_of_the_name_says_the_expert(name: str):
    swaps = {"high": "low", "HIGH": "LOW", "High": "Low", "low": "high"}
    assert expert_in_name(name) == HIGH
    assert expert_in_name(re.sub("|".join(swaps), lambda word: swaps[word[0]], name)) == LOW


@pytest.mark.parametrize("name", ["", "glow_noise", *SILENT.split()])
def test_other_words_or_both_say_nothing(name: str):
    assert expert_in_name(name) is None


def test_the_order_is_option_metadata_tensor_names_name_and_folder(tmp_path: Path):
    plain = write(tmp_path / "a" / "style.safetensors")
    assert found(plain) == [("style.safetensors", ())]
    in_folder = write(tmp_path / "high_noise" / "style.safetensors")
    assert found(in_folder)[0][1] == (HIGH,)
    title = write(tmp_path / "high_noise" / "renamed.safetensors", ss_output_name="style_low")
    assert found(title)[0][1] == (LOW,)
    named = write(tmp_path / "high_noise" / "style_low.safetensors", ss_output_name="style_high")
    assert found(named)[0][1] == (LOW,)
    keys = write(tmp_path / "style_high.safetensors", prefix="transformer_2.")
    assert found(keys)[0][1] == (LOW,)
    stated = write(tmp_path / "style_low.safetensors", prefix="transformer_2.", expert="high_noise")
    assert found(stated)[0][1] == (HIGH,)
    [chosen] = find_lora_files(stated, "--lora", LOW)
    assert chosen.experts == (LOW,)
    assert (
        str(chosen)
        == "style_low.safetensors changes the low-noise expert (your choice, against its metadata)"
    )


@pytest.mark.parametrize(
    ("high", "low"),
    [
        ("style_high_noise", "style_low_noise"),
        ("style_HIGH_fp16", "style_LOW_fp16"),
        ("style-high-noise", "style-low-noise"),
        ("my-lora-high", "my-lora-low"),
        ("high_noise/comfyui", "low_noise/comfyui"),
        ("high/x", "low/x"),
        ("z_high/x", "a_low/x"),
    ],
)
def test_a_folder_with_a_file_for_each_expert_is_a_pair(high: str, low: str, tmp_path: Path):
    for value, name in ((1.0, high), (2.0, low)):
        write(tmp_path / f"{name}.safetensors", value)
    names = [f"{Path(name).name}.safetensors" for name in (high, low)]
    assert found(tmp_path) == [(names[0], (HIGH,)), (names[1], (LOW,))]
    assert found(tmp_path, LOW) == [(names[1], (LOW,))]
    entries = [MergeConfig(path=str(tmp_path))]
    for expert, value in zip(EXPERTS, (1.0, 2.0), strict=True):
        start = load_start(LoraConfig(rank=2, init_from=str(tmp_path)), expert)
        assert start is not None
        assert float(start[MODULE].lora_A[0, 0]) == value
        merged = MergedLoras.load(entries, expert)
        assert float(merged(f"{MODULE}.weight", torch.zeros(4, 4))[0, 0]) == 2 * value
    with pytest.raises(ConfigError, match="is for a model with two experts, but this model has one"):
        assign_experts(find_lora_files(tmp_path, "--lora"), "--lora=x", two_experts=False)


def test_other_folders_with_several_files_are_refused(tmp_path: Path):
    for name in ("a_high_noise", "b_high_noise", "low_noise"):
        write(tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ConfigError, match=r"^--lora=\S+ contains 3 \.safetensors files: .*Keep one LoRA, or one LoRA"
    ):
        find_loras([tmp_path])
    (tmp_path / "b_high_noise.safetensors").rename(tmp_path / "style.safetensors")
    with pytest.raises(ConfigError, match=r"contains 3 \.safetensors files: .*, style\.safetensors\. Keep"):
        find_loras([tmp_path])


def test_a_file_of_one_expert_changes_only_this_expert(tmp_path: Path):
    """In training as in sampling."""
    path = write(tmp_path / "style_high_noise.safetensors")
    [lora] = [lora.assigned(two_experts=True) for lora in find_loras([path])]
    assert [file.experts for file in lora.files] == [(HIGH,)]
    for expert, changed in zip(EXPERTS, (True, False), strict=True):
        merged = MergedLoras.load([MergeConfig(path=str(path))], expert)
        assert bool(merged(f"{MODULE}.weight", torch.zeros(4, 4)).any()) == changed
    config = LoraConfig(rank=2, init_from=str(path))
    assert load_start(config, EXPERTS[0])
    with pytest.raises(
        ConfigError, match=r"^lora.init_from=\S+ contains no LoRA of the low-noise expert: style_high"
    ):
        load_start(config, EXPERTS[1])
    with pytest.raises(ConfigError, match=r"model\.experts=low trains only the other"):
        MergedLoras.load([MergeConfig(path=str(path))], EXPERTS[1], "low")


def test_a_file_that_says_no_expert_is_refused_with_two_ways_to_say_it(tmp_path: Path):
    path = write(tmp_path / "style.safetensors")
    says_nothing = (
        "neither metadata nor tensor names nor the name of style.safetensors say for which of the two experts"
    )
    with pytest.raises(ConfigError) as caught:
        find_loras([path])[0].assigned(two_experts=True)
    assert f"--lora={path}: {says_nothing}" in str(caught.value)
    assert f"Write high_noise or low_noise into the file name, or use --lora-1 {path}" in str(caught.value)
    entry = MergeConfig(path=str(path))
    with pytest.raises(
        ConfigError, match=f"{says_nothing} .*, or set expert: high or expert: low next to path"
    ):
        MergedLoras.load([entry], EXPERTS[0])
    config = LoraConfig(rank=2, init_from=str(path))
    with pytest.raises(ConfigError, match=f"{says_nothing} .*, or set model.experts to high or low"):
        load_start(config, EXPERTS[0])
    # The ways.
    for flag, expert in (("lora_1", HIGH), ("lora_2", LOW)):
        [lora] = find_loras([], **{flag: [path]})
        assert [file.experts for file in lora.assigned(two_experts=True).files] == [(expert,)]
        with pytest.raises(
            ConfigError, match=r"^--lora-[12]=\S+ is for one of two experts, but --model has only one"
        ):
            lora.assigned(two_experts=False)
    low = MergedLoras.load([entry.model_copy(update={"expert": "low"})], EXPERTS[1])
    assert low(f"{MODULE}.weight", torch.zeros(4, 4)).any()
    assert MergedLoras.load([entry], EXPERTS[1], "low")(f"{MODULE}.weight", torch.zeros(4, 4)).any()
    assert load_start(config, EXPERTS[1], "low")


def test_names_do_not_matter_for_a_model_with_one_dit(tmp_path: Path):
    path = write(tmp_path / "low_poly.safetensors")
    [lora] = [lora.assigned(two_experts=False) for lora in find_loras([path])]
    assert [file.experts for file in lora.files] == [(HIGH,)]
    assert load_start(LoraConfig(rank=2, init_from=str(path)), ONE_DIT)
    keys = write(tmp_path / "keys.safetensors", prefix="transformer_2.")
    with pytest.raises(ConfigError, match="is for a model with two experts"):
        load_start(LoraConfig(rank=2, init_from=str(keys)), ONE_DIT)
    with pytest.raises(ConfigError, match=r"model\.merge_loras: expert=high is for a model with two experts"):
        MergedLoras.load([MergeConfig(path=str(path), expert="high")], ONE_DIT)


def test_entries_for_the_other_expert_keep_the_numbers_of_the_entries(tmp_path: Path):
    high, low = (write(tmp_path / f"{name}.safetensors") for name in ("high", "low"))
    merged = MergedLoras.load([MergeConfig(path=str(path)) for path in (high, low)], EXPERTS[1])
    with pytest.raises(ConfigError, match=r"model\.merge_loras, entry 2: the LoRA changes 1 parameters"):
        merged.check_fit(nn.Module())
