"""LoRAs of every tool, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from tests.support.commands import convert
from tests.support.converted import assert_same_bits, pipelines, tensors
from wands.errors import CheckpointError, ConfigError
from wands.model.files.hashes import HASH_FILE
from wands.model.files.lora_experts import EXPERT_NAMES, describe_file
from wands.model.files.lora_files import LORA_FILE, lora_tensors, parse_lora
from wands.model.files.name_maps import EXPERTS

__all__ = ["pipelines"]  # fixtures


# ---- LoRA ----


def write_lora(path: Path, source: Path, experts: tuple[str, ...] = ("transformer",)) -> dict[str, Tensor]:
    """A LoRA of every linear layer of a pipeline's DiT as diffusers saves it; returns its keys."""
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(source / "transformer"))
    keys = {
        f"{expert}.{name}.lora_{half}.weight": torch.randn(*shape)
        for expert in experts
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        for half, shape in (("A", (2, module.in_features)), ("B", (module.out_features, 2)))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(keys, path)
    return keys


def test_lora_there_and_back(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.1-flf2v-14b"]
    keys = write_lora(tmp_path / "mine.safetensors", source)
    for to, first in (
        ("comfyui", "diffusion_model.blocks.0.cross_attn.k_img.lora_A.weight"),
        ("official", "blocks.0.cross_attn.k_img.lora_A.weight"),
    ):
        there = convert(str(tmp_path / "mine.safetensors"), tmp_path / to, to=to)
        assert first in tensors(there.out / "mine.safetensors")
        row = there.summaries[0]
        assert (row.read, row.written, row.renamed) == (len(keys), len(keys), len(keys))
        back = convert(str(there.out / "mine.safetensors"), tmp_path / f"{to}-back", to="diffusers")
        assert_same_bits(tensors(back.out / "pytorch_lora_weights.safetensors"), keys)
        assert convert(str(back.out), tmp_path / f"{to}-again", to=to).summaries[0].written == len(keys)


def test_comfyui_lora_gives_the_stock_pipeline_the_same_output(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.1-t2v-1.3b"]
    write_lora(tmp_path / "mine.safetensors", source)
    there = convert(str(tmp_path / "mine.safetensors"), tmp_path / "out", to="comfyui")
    inputs = {
        "hidden_states": torch.randn(1, 16, 1, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 32),
    }

    def predict(lora: Path | None) -> Tensor:
        pipeline = DiffusionPipeline.from_pretrained(source)
        if lora is not None:
            pipeline.load_lora_weights(lora)
        with torch.no_grad():
            return pipeline.transformer(**inputs, return_dict=False)[0]

    ours = predict(there.out / "mine.safetensors")
    theirs = predict(tmp_path / "mine.safetensors")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (ours - predict(None)).abs().max() > 0.1


def test_musubi_keys_there_and_back(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.1-flf2v-14b"]
    keys = write_lora(tmp_path / "mine.safetensors", source)
    save_file(keys, tmp_path / "mine.safetensors", {"lora_adapter_metadata": '{"transformer.lora_alpha": 3}'})
    there = convert(str(tmp_path / "mine.safetensors"), tmp_path / "musubi", to="musubi", dtype="bf16")
    found = tensors(there.out / "mine.safetensors")
    assert len(found) == len(keys) // 2 * 3
    name = "lora_unet_blocks_0_cross_attn_k_img"
    lora_B = keys["transformer.blocks.0.attn2.add_k_proj.lora_B.weight"]
    assert torch.equal(found[f"{name}.lora_up.weight"], lora_B.bfloat16())
    assert torch.equal(found[f"{name}.alpha"], torch.tensor(3.0))
    assert not there.notes
    back = convert(str(there.out / "mine.safetensors"), tmp_path / "back", to="diffusers")
    update = tensors(back.out / LORA_FILE)["transformer.blocks.0.attn2.add_k_proj.lora_B.weight"]
    assert torch.equal(update, lora_B.bfloat16() * 1.5)
    with pytest.raises(ConfigError, match=r"--to musubi is for LoRAs, but SOURCE=.* Use --to comfyui"):
        convert(str(source), tmp_path / "model", to="musubi")


def test_full_differences_there_and_back(tmp_path: Path):
    keys = {
        "diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.randn(2, 8),
        "diffusion_model.blocks.0.self_attn.q.lora_B.weight": torch.randn(8, 2),
        "diffusion_model.blocks.0.self_attn.q.diff_b": torch.randn(8),
        "diffusion_model.blocks.0.modulation.diff": torch.randn(1, 6, 8),
        "diffusion_model.head.head.diff": torch.randn(4, 8),
    }
    save_file(keys, tmp_path / "mine.safetensors")
    there = convert(str(tmp_path / "mine.safetensors"), tmp_path / "official", to="official")
    back = convert(str(there.out / "mine.safetensors"), tmp_path / "back", to="comfyui")
    assert_same_bits(tensors(back.out / "mine.safetensors"), keys)
    for to in ("diffusers", "musubi"):
        with pytest.raises(
            CheckpointError, match=rf"full-size updates of 3 parameters \(.*--to {to} cannot contain\. Use"
        ):
            convert(str(tmp_path / "mine.safetensors"), tmp_path / to, to=to)
    save_file(
        {"diffusion_model.blocks.0.self_attn.q.lokr_w1": torch.ones(2, 2)}, tmp_path / "lokr.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"uses LoKr"):
        convert(str(tmp_path / "lokr.safetensors"), tmp_path / "lokr", to="comfyui")


def test_lora_of_two_experts_becomes_two_files(pipelines: dict[str, Path], tmp_path: Path):
    keys = write_lora(tmp_path / "pair.safetensors", pipelines["wan2.2-i2v-a14b"], EXPERTS)
    report = convert(str(tmp_path / "pair.safetensors"), tmp_path / "out", to="comfyui", dtype="bf16")
    files = sorted(path.name for path in report.out.iterdir() if path.name != HASH_FILE)
    assert files == ["high_noise_pair.safetensors", "low_noise_pair.safetensors"]
    low = parse_lora(tensors(report.out / files[1]))["transformer"].pairs["blocks.0.attn1.to_q"]
    assert torch.equal(low.lora_B, keys["transformer_2.blocks.0.attn1.to_q.lora_B.weight"].bfloat16())
    assert [row.read for row in report.summaries] == [len(keys) // 2] * 2
    for_diffusers = convert(str(tmp_path / "pair.safetensors"), tmp_path / "two", to="diffusers")
    assert "load_into_transformer_2=True" in for_diffusers.notes[-1]
    for name in files:  # found again after a user has renamed them
        renamed = (report.out / name).rename(tmp_path / f"{name[0]}.safetensors")
        assert describe_file(renamed, "SOURCE").experts == (EXPERTS[name == files[1]],)


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS[1:]])
def test_a_folder_with_a_lora_for_each_expert(
    pipelines: dict[str, Path], tmp_path: Path, experts: tuple[str, ...]
):
    """As `wands export` writes it, and back from what that became."""
    keys = {}
    for expert in experts:
        folder = tmp_path / "exported" / EXPERT_NAMES[expert]
        folder.mkdir(parents=True)
        keys[expert] = write_lora(folder / LORA_FILE, pipelines["wan2.2-i2v-a14b"])
        save_file({"a": torch.zeros(1)}, folder / "comfyui.safetensors")
    report = convert(str(tmp_path / "exported"), tmp_path / "out", to="comfyui")
    files = sorted(path.name for path in report.out.iterdir() if path.name != HASH_FILE)
    assert files == [f"{EXPERT_NAMES[expert]}_{LORA_FILE}" for expert in experts]
    assert [row.read for row in report.summaries] == [len(keys[expert]) for expert in experts]
    assert all(key.startswith("diffusion_model.") for key in tensors(report.out / files[0]))
    back = convert(str(report.out), tmp_path / "back", to="diffusers")
    assert sorted(path.name for path in back.out.glob("[!.]*")) == files
    for name, expert in zip(files, experts, strict=True):
        assert_same_bits(tensors(back.out / name), keys[expert])
    assert back.notes == [
        *(
            f"{EXPERT_NAMES[each]}_{LORA_FILE} changes the {EXPERT_NAMES[each][:-6]}-noise expert (its metadata)."
            for each in experts
        ),
        f"load low_noise_{LORA_FILE} in diffusers with load_lora_weights(..., load_into_transformer_2=True).",
    ]


@pytest.mark.parametrize(
    ("high", "low"), [("my-lora-high", "my-lora-low"), ("style-high-noise", "style-low-noise")]
)
@pytest.mark.parametrize("to", ["musubi", "diffusers"])
def test_a_folder_with_two_files_named_after_experts(
    high: str, low: str, to: str, pipelines: dict[str, Path], tmp_path: Path
):
    keys = [
        write_lora(tmp_path / "pair" / f"{name}.safetensors", pipelines["wan2.2-i2v-a14b"])
        for name in (high, low)
    ]
    report = convert(str(tmp_path / "pair"), tmp_path / "out", to=to)
    names = [f"high_noise_{LORA_FILE}", f"low_noise_{LORA_FILE}"]
    names = names if to == "diffusers" else [f"{high}.safetensors", f"{low}.safetensors"]
    assert sorted(path.name for path in report.out.glob("[!.]*")) == names
    assert f"{low}.safetensors changes the low-noise expert (its file name)." in report.notes
    for name, stored in zip(names, keys, strict=True):
        [pairs] = parse_lora(tensors(report.out / name)).values()
        assert_same_bits(lora_tensors(pairs.pairs), stored)


def test_folders_of_experts_that_are_not_clear(pipelines: dict[str, Path], tmp_path: Path):
    (tmp_path / "high_noise").mkdir()
    with pytest.raises(ConfigError, match=r"SOURCE=\S* contains no Wan model"):
        convert(str(tmp_path), tmp_path / "out", to="comfyui")
    write_lora(tmp_path / "high_noise" / LORA_FILE, pipelines["wan2.2-i2v-a14b"], EXPERTS[1:])
    report = convert(str(tmp_path), tmp_path / "by keys", to="comfyui")
    assert report.notes == [f"high_noise/{LORA_FILE} changes the low-noise expert (its tensor names)."]
    assert (report.out / f"low_noise_{LORA_FILE}").is_file()
    write_lora(tmp_path / "other.safetensors", pipelines["wan2.2-i2v-a14b"])
    with pytest.raises(
        ConfigError, match=r"contains 2 \.safetensors files: other\.safetensors, .* Keep one LoRA"
    ):
        convert(str(tmp_path), tmp_path / "out", to="comfyui")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ConfigError, match=r"a LoRA and also other\.safetensors, which is none\. .* set SOURCE"
    ):
        convert(str(tmp_path), tmp_path / "out", to="comfyui")


def test_alpha_is_folded_and_told(pipelines: dict[str, Path], tmp_path: Path):
    keys = write_lora(tmp_path / "mine.safetensors", pipelines["wan2.1-t2v-1.3b"])
    save_file(
        keys,
        tmp_path / "mine.safetensors",
        {"lora_adapter_metadata": '{"transformer.lora_alpha": 1, "transformer.r": 2}'},
    )
    report = convert(str(tmp_path / "mine.safetensors"), tmp_path / "out", to="comfyui")
    assert "multiplied into lora_B" in report.notes[0]
    found = tensors(report.out / "mine.safetensors")
    assert torch.equal(
        found["diffusion_model.head.head.lora_B.weight"], keys["transformer.proj_out.lora_B.weight"] * 0.5
    )


def test_a_base_from_which_nothing_can_be_taken(pipelines: dict[str, Path], tmp_path: Path):
    source = str(pipelines["wan2.1-t2v-1.3b"])
    write_lora(tmp_path / "mine.safetensors", Path(source))
    for what, to in ((source, "comfyui"), (str(tmp_path / "mine.safetensors"), "official")):
        with pytest.raises(ConfigError, match=r"(a LoRA|ComfyUI's layout) needs no files of a base model"):
            convert(what, tmp_path / "out", to=to, base=source)


def test_a_folder_of_peft(pipelines: dict[str, Path], tmp_path: Path):
    keys = write_lora(tmp_path / "mine.safetensors", pipelines["wan2.1-t2v-1.3b"])
    (tmp_path / "peft").mkdir()
    peft = {key.replace("transformer.", "base_model.model.", 1): value for key, value in keys.items()}
    save_file(peft, tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text('{"lora_alpha": 8, "r": 2}')
    report = convert(str(tmp_path / "peft"), tmp_path / "out", to="diffusers")
    found = tensors(report.out / "pytorch_lora_weights.safetensors")
    expected = {key: value * 4 if "lora_B" in key else value for key, value in keys.items()}
    assert_same_bits(found, expected)
