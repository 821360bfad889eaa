"""Files of other programs become the model that they hold: prefixes, several models in one file, fp8, pickles of a training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.commands import convert
from tests.support.official import WanModel, random_state
from wands.convert import pipeline_folder
from wands.errors import CheckpointError, ConfigError
from wands.model.files.name_maps import EXPERTS
from wands.variants import VARIANTS

WEIGHTS = "diffusion_pytorch_model.safetensors"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def dit(tiny_pipeline: Path) -> dict[str, Tensor]:
    """The DiT of the tiny pipeline under official names."""
    config = json.loads((tiny_pipeline / "transformer" / "config.json").read_text())
    return random_state(WanModel(config))


def is_linear(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and name.startswith("blocks.") and name.endswith(".weight")


def quantized(
    dit: dict[str, Tensor], spelling: str, rows: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a file in scaled fp8, and the values that it stands for."""
    stored = {}
    values = {}
    for name, value in dit.items():
        stored[name] = values[name] = value.half() if not is_linear(name, value) else value
        if is_linear(name, value):
            largest = value.abs().amax(1, keepdim=True) if rows else value.abs().max()
            scale = largest / 448
            stored[name] = (value / scale).to(FP8)
            stored[name.removesuffix("weight") + spelling] = scale
            values[name] = stored[name].float() * scale
    return stored, values


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda dit: {prefix + name: value for name, value in dit.items()}


def converted(path: Path, out: Path, **options: object) -> tuple[dict[str, Tensor], list[str]]:
    """Return the written tensors under official names, and the notes."""
    report = convert(path, out, to="official", **options)
    assert "output in a forward pass of diffusers is unchanged" in report.summaries[0].forward
    return load_file(report.out / WEIGHTS), report.notes


def with_config(path: Path, base: Path) -> Path:
    """Put the config of the tiny DiT next to a file, because its number of heads is unusual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(base / "transformer" / "config.json", path.parent)
    return path


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", "model."])
def test_a_prefix_in_front_of_all_names(
    prefix: str, dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "dit.safetensors", tiny_pipeline)
    save_file(prefixed(prefix)(dit), path)
    found, notes = converted(path, tmp_path / "out")
    assert notes == []
    assert found.keys() == dit.keys()
    assert all(torch.equal(found[name], dit[name]) for name in dit)


def test_the_transformer_is_taken_out_of_an_all_in_one_file(
    dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "all.safetensors", tiny_pipeline)
    others = {"vae.conv1.weight": torch.zeros(4, 4), "text_encoders.umt5xxl.shared.weight": torch.zeros(4, 4)}
    save_file(prefixed("model.diffusion_model.")(dit) | others, path)
    found, notes = converted(path, tmp_path / "out")
    assert found.keys() == dit.keys()
    assert notes == ["only the transformer of all.safetensors is converted, not its text_encoders, vae."]


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_plain_fp8_is_converted(
    dtype: str | None, dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "fp8.safetensors", tiny_pipeline)
    stored = {name: v.to(FP8) if is_linear(name, v) else v.bfloat16() for name, v in dit.items()}
    save_file(stored, path)
    found, notes = converted(path, tmp_path / "out", dtype=dtype)
    num = sum(value.dtype == FP8 for value in stored.values())
    assert notes == [
        f"{num} fp8 weights of fp8.safetensors were converted, to bf16 unless --dtype says otherwise."
    ]
    assert found["blocks.0.ffn.0.weight"].dtype == (torch.float32 if dtype else torch.bfloat16)
    assert all(torch.equal(found[name].float(), stored[name].float()) for name in stored)  # both are exact


@pytest.mark.parametrize(
    ("spelling", "rows"), [("scale_weight", False), ("weight_scale", False), ("weight_scale", True)]
)
def test_scaled_fp8_is_multiplied_by_its_scales(
    spelling: str, rows: bool, dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "scaled.safetensors", tiny_pipeline)
    stored, values = quantized(dit, spelling, rows)
    marks = {"scaled_fp8": torch.zeros(2, dtype=FP8), "blocks.0.ffn.0.scale_input": torch.ones(1)}
    save_file(stored | marks, path)
    found, notes = converted(path, tmp_path / "exact", dtype="fp32")
    assert found.keys() == dit.keys()
    assert all(torch.equal(found[name], values[name].float()) for name in dit)
    assert "fp8 weights of scaled.safetensors were multiplied by their scales and converted" in notes[0]
    found, _ = converted(path, tmp_path / "bf16")
    assert torch.equal(found["blocks.0.ffn.0.weight"], values["blocks.0.ffn.0.weight"].bfloat16())


def test_other_quantized_files_are_refused_by_name(
    dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "dit.safetensors", tiny_pipeline)
    name = "blocks.0.ffn.0.weight"
    stored, _ = quantized(dit, "weight_scale")
    blocks = {"blocks.0.ffn.0.weight_scale": torch.ones(len(dit[name]), 3)}
    save_file(stored | blocks, path)
    with pytest.raises(
        CheckpointError, match=r"blocks\.0\.ffn\.0\.weight_scale has the shape .*not quantized"
    ):
        convert(path, tmp_path / "out", to="official")
    save_file(dit | {name: dit[name].to(torch.int8)}, path)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.ffn\.0\.weight has the dtype int8.*not quantized"):
        convert(path, tmp_path / "out", to="official")
    gguf = tmp_path / "model-Q4_0.gguf"
    gguf.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    with pytest.raises(CheckpointError, match=r"model-Q4_0\.gguf is a GGUF file.*Use the safetensors files"):
        convert(gguf, tmp_path / "out", to="official")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(
    value: float, dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "bad.safetensors", tiny_pipeline)
    bad = dit["blocks.1.ffn.2.bias"].clone()
    bad[3] = value
    save_file(dit | {"blocks.1.ffn.2.bias": bad}, path)
    with pytest.raises(
        CheckpointError, match=r"bad\.safetensors has NaN or infinite values in blocks\.1\.ffn\.2\.bias"
    ):
        convert(path, tmp_path / "out", to="diffusers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keys", [("generator", "generator_ema"), ("generator",)])
def test_a_training_state_of_self_forcing(
    keys: tuple[str, ...], dit: dict[str, Tensor], tiny_pipeline: Path, tmp_path: Path
):
    path = with_config(tmp_path / "in" / "self_forcing.pt", tiny_pipeline)
    wrapped = {"generator": "", "generator_ema": "_fsdp_wrapped_module."}
    states = {
        key: {f"model.{wrapped[key]}{name}": v + i for name, v in dit.items()} for i, key in enumerate(keys)
    }
    torch.save({**states, "step": 600}, path)
    found, notes = converted(path, tmp_path / "out")
    assert all(torch.equal(found[name], dit[name] + (len(keys) - 1)) for name in dit)
    assert notes == [f"the weights are those of {keys[-1]} in self_forcing.pt."]


def test_a_generator_for_self_forcing_comes_back(tiny_pipeline: Path, tmp_path: Path):
    """The file is what its scripts load: `generator.load_state_dict(torch.load(path)["generator"])`, a module with a `model`."""
    official = convert(tiny_pipeline, tmp_path / "official", to="official").out
    dit = load_file(official / WEIGHTS)
    result = convert(tiny_pipeline, tmp_path / "there", to="self-forcing")
    state = torch.load(result.out / "generator.pt", weights_only=True)
    assert state.keys() == {"generator"}
    assert state["generator"].keys() == {f"model.{name}" for name in dit}
    assert all(torch.equal(state["generator"][f"model.{name}"], value) for name, value in dit.items())
    assert [note.split()[0] for note in result.notes] == ["vae", "text_encoder"]
    back = convert(result.out / "generator.pt", tmp_path / "back", to="diffusers", base=tiny_pipeline).out
    found, wanted = (load_file(root / "transformer" / WEIGHTS) for root in (back, tiny_pipeline))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_generator_has_one_dit(tiny_variant: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="has two experts, but a generator file"):
        convert(tiny_variant("wan2.2-t2v-a14b"), tmp_path / "out", to="self-forcing")


def test_the_files_of_two_experts_come_back_in_one_command(
    tiny_variant: Callable[[str], Path], tmp_path: Path
):
    """From the folder that --to comfyui wrote, or from its folder of models. The head dim comes from --base."""
    source = tiny_variant("wan2.2-t2v-a14b")
    there = convert(source, tmp_path / "comfyui", to="comfyui", forward=False).out
    for folder in (there, there / "diffusion_models"):
        back = convert(
            folder, tmp_path / f"back-{folder.name}", to="diffusers", base=source, forward=False
        ).out
        assert (back / "model_index.json").is_file()
        for expert in EXPERTS:
            found, wanted = (load_file(root / expert / WEIGHTS) for root in (back, source))
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_folder_of_comfyui_with_one_transformer_and_its_vae(
    tiny_variant: Callable[[str], Path], tmp_path: Path
):
    source = tmp_path / "source"
    shutil.copytree(tiny_variant("wan2.1-t2v-1.3b"), source)
    config = source / "vae" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({key: said[key] for key in said if not key.startswith("latents_")}))
    there = convert(source, tmp_path / "comfyui", to="comfyui", forward=False).out
    back = convert(there, tmp_path / "back", to="diffusers", base=source, forward=False)
    assert [row.name for row in back.summaries] == ["transformer", "vae"]
    shutil.rmtree(there / "vae")
    save_file({"a": torch.zeros(1)}, there / "diffusion_models" / "third.safetensors")
    with pytest.raises(ConfigError, match="contains no Wan model"):
        convert(there, tmp_path / "two", to="diffusers", base=source)


def test_tensors_that_only_other_programs_read_are_kept(tiny_variant: Callable[[str], Path], tmp_path: Path):
    extra = "blocks.0.attn2.norm_added_q.weight"
    source = tmp_path / "source"
    shutil.copytree(tiny_variant("wan2.1-i2v-14b") / "transformer", source)
    weights = load_file(source / WEIGHTS)
    save_file(weights | {extra: torch.full((8,), 0.5)}, source / WEIGHTS)
    report = convert(source, tmp_path / "out", to="diffusers")
    assert report.summaries[0].unused == ()
    assert torch.equal(load_file(report.out / "transformer" / WEIGHTS)[extra], torch.full((8,), 0.5))
    assert diffusers.WanTransformer3DModel.from_pretrained(report.out / "transformer").config.image_dim


def test_the_scheduler_has_only_the_keys_of_the_published_pipelines(tiny_pipeline: Path, tmp_path: Path):
    """FastVideo's loader refuses keys that its scheduler does not know, such as shift_terminal."""
    variant = VARIANTS["wan2.1-t2v-1.3b"]
    pipeline_folder.write_pipeline(tmp_path, tiny_pipeline / "tokenizer", variant)
    config = json.loads((tmp_path / "scheduler" / "scheduler_config.json").read_text())
    added = {"use_dynamic_shifting", "time_shift_type", "sigma_min", "sigma_max", "shift_terminal"}
    ours = diffusers.UniPCMultistepScheduler.from_pretrained(tmp_path / "scheduler")
    wanted = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=variant.sampling.scheduler_shift
    )
    shown = {key: value for key, value in wanted.config.items() if key[0] != "_"}
    assert config.keys() - {"_class_name", "_diffusers_version"} == shown.keys() - added
    assert {key: ours.config[key] for key in shown} == shown
