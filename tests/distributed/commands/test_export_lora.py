"""A LoRA run exported: what stock diffusers makes of it is what was trained, as files, merged, and for two experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from make_tiny_pipeline import build_tiny_pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.commands import convert, export
from tests.support.runs import make_run, run_training
from tests.support.steps import zero
from wands.checkpoint.checkpoint_files import load_full_weights
from wands.checkpoint.resume import check_resumable
from wands.errors import CheckpointError, ConfigError
from wands.export.export_record import RECORD_FILE
from wands.export.trained_weights import COMFYUI_FILE
from wands.model.files.lora_files import LORA_FILE
from wands.variants import TEXT_LEN

RUN = ("train.max_steps=3", "optim.lr=2e-2", "lora.rank=4", "lora.alpha=6", "lora.targets=all-linear")


@pytest.fixture(scope="module")
def run(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: Any) -> Path:
    folder = tmp_path_factory.mktemp("lora run")
    worlds[2].run(run_training, tiny_pipeline, folder, RUN, zero(3))
    return folder


def forward(model: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        config = model.config
        inputs = normal(1, config.in_channels, 3, 4, 6), torch.tensor([612.5])
        return model(*inputs, normal(1, TEXT_LEN, config.text_dim), return_dict=False)[0]


def expected(pipeline: Path, run_dir: Path, part: str = "transformer") -> torch.Tensor:
    """Prediction of the trained model: the base with W + alpha/R B A in the place of each W."""
    stock = WanTransformer3DModel.from_pretrained(pipeline / part)
    stock.load_state_dict(load_full_weights(run_dir, part))
    return forward(stock)


@pytest.mark.slow
def test_stock_diffusers_predicts_what_was_trained(run: Path, tiny_pipeline: Path, tmp_path: Path):
    truth = expected(tiny_pipeline, run)
    base = WanPipeline.from_pretrained(tiny_pipeline)
    assert (truth - forward(base.transformer)).abs().max() > 1e-2  # three steps have changed something
    folder = export(run, tmp_path / "lora")
    for name in (LORA_FILE, COMFYUI_FILE):
        pipeline = WanPipeline.from_pretrained(tiny_pipeline)
        pipeline.load_lora_weights(folder, weight_name=name)
        assert (forward(pipeline.transformer) - truth).abs().max() <= 1e-5, name
    merged = export(run, tmp_path / "merged", merge=True)
    pipeline = WanPipeline.from_pretrained(merged)
    assert torch.equal(forward(pipeline.transformer), truth)


def test_half_the_scale_is_half_the_update(run: Path, tiny_pipeline: Path, tmp_path: Path):
    """The trap of an alpha that is dropped or counted twice."""
    folder = export(run, tmp_path / "lora")
    pipeline = WanPipeline.from_pretrained(tiny_pipeline)
    pipeline.load_lora_weights(folder, adapter_name="ours")
    pipeline.set_adapters(["ours"], [0.5])
    weights = pipeline.transformer.state_dict()
    whole = load_full_weights(run)
    pipeline.fuse_lora()
    for name in ("blocks.0.attn1.to_q", "blocks.1.ffn.net.2", "condition_embedder.time_proj"):
        base = weights[f"{name}.base_layer.weight"].clone()
        plain = (
            WanTransformer3DModel.from_pretrained(tiny_pipeline / "transformer").get_submodule(name).weight
        )
        torch.testing.assert_close(base - plain, (whole[f"{name}.weight"] - plain) / 2, atol=1e-6, rtol=0)


def test_keys_and_metadata(run: Path, tmp_path: Path):
    folder = export(run, tmp_path / "lora")
    keys = load_file(folder / LORA_FILE).keys()
    assert {key.split(".")[0] for key in keys} == {"transformer"}
    assert all(key.endswith((".lora_A.weight", ".lora_B.weight")) for key in keys)
    comfyui = load_file(folder / COMFYUI_FILE).keys()
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in comfyui
    assert len(comfyui) == len(keys)
    for name in (LORA_FILE, COMFYUI_FILE):  # as the umask says, not for the owner alone
        assert (folder / name).stat().st_mode == (folder / RECORD_FILE).stat().st_mode
    with safe_open(folder / LORA_FILE, "pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == metadata["transformer.lora_alpha"] == 4
    record = json.loads((folder / RECORD_FILE).read_text())
    assert (record["step"], record["recipe"]["lora"]["alpha"]) == (3, 6)


@pytest.mark.slow
def test_a_run_goes_on_from_an_exported_lora(run: Path, tiny_pipeline: Path, tmp_path: Path, worlds: Any):
    """Its first loss is that of the trained model: that of a run from the merged weights."""
    lora = export(run, tmp_path / "lora")
    merged = export(run, tmp_path / "merged", merge=True)

    def first_loss(model: Path, *settings: str) -> float:
        out = tmp_path / "".join(c for c in str(settings) if c.isalnum())[-40:]
        return worlds[2].run(run_training, model, out, ("train.max_steps=1", *settings), zero(2))[0][0][
            "loss"
        ]

    truth = first_loss(merged)
    onwards = (*RUN[2:], f"lora.init_from={lora}")
    assert first_loss(tiny_pipeline, *onwards) == pytest.approx(truth, rel=1e-6)
    merging = f"model.merge_loras=[{{path: {lora}}}]"
    assert first_loss(tiny_pipeline, merging) == pytest.approx(truth, rel=1e-6)
    assert abs(first_loss(tiny_pipeline) - truth) > 1e-3
    assert first_loss(tiny_pipeline, merging.replace("}]", ", scale: 0.5}]")) != pytest.approx(
        truth, rel=1e-4
    )
    with pytest.raises(ConfigError, match=r"expected lora\.rank=2, .* Set lora\.rank=4"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=2", *onwards[1:]), world_size=1)
    with pytest.raises(ConfigError, match=r"lora\.targets=attention excludes"):
        make_run(tiny_pipeline, tmp_path, ("lora.rank=4", onwards[-1]), world_size=1)


def test_merged_loras_are_found_from_another_folder(
    run: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lora = export(run, tmp_path / "lora")
    monkeypatch.chdir(tmp_path)
    training_run = make_run(
        tiny_pipeline, tmp_path, (*RUN, "model.merge_loras=[{path: lora}]"), zero(3), world_size=2
    )
    state = training_run.state
    assert state.recipe["model"]["merge_loras"] == [
        {"path": str(lora.resolve()), "scale": 1.0, "expert": None}
    ]
    check_resumable(state, state, "x")
    elsewhere = {**state.recipe["model"], "merge_loras": [{"path": "/elsewhere/lora", "scale": 1.0}]}
    moved = replace(state, recipe={**state.recipe, "model": elsewhere})
    check_resumable(state, moved, "x")
    unknown = replace(state, base_fingerprint=None)  # as of random weights: the path decides
    with pytest.raises(CheckpointError, match=r"model\.merge_loras=.* must equal the checkpoint's"):
        check_resumable(unknown, moved, "x")


@pytest.mark.slow
def test_each_expert_has_a_lora_of_its_own(tmp_path: Path, worlds: Any):
    model = tmp_path / "a14b"
    build_tiny_pipeline(model, size="test", vae_dir="random", variant="wan2.2-t2v-a14b")
    worlds[2].run(run_training, model, tmp_path / "run", RUN, zero(2))
    folder = export(tmp_path / "run", tmp_path / "lora")
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"high_noise", "low_noise"}
    converted = convert(str(folder), tmp_path / "official", to="official")
    assert [row.name for row in converted.summaries] == [
        f"{side}_noise_{LORA_FILE}" for side in ("high", "low")
    ]
    pipeline = WanPipeline.from_pretrained(model)
    pipeline.load_lora_weights(folder / "high_noise")
    pipeline.load_lora_weights(folder / "low_noise", load_into_transformer_2=True)
    for part in ("transformer", "transformer_2"):
        truth = expected(model, tmp_path / "run", part)
        assert (forward(getattr(pipeline, part)) - truth).abs().max() <= 1e-5, part
    merged = WanPipeline.from_pretrained(export(tmp_path / "run", tmp_path / "merged", merge=True))
    assert torch.equal(forward(merged.transformer_2), expected(model, tmp_path / "run", "transformer_2"))


def test_a_merge_keeps_tensors_that_only_other_programs_read(run: Path, tiny_pipeline: Path, tmp_path: Path):
    """Published I2V models have norm_added_q, which diffusers ignores and FastVideo wants."""
    base = tmp_path / "base"
    shutil.copytree(tiny_pipeline, base)
    file = base / "transformer" / "diffusion_pytorch_model.safetensors"
    extra = "blocks.0.attn2.norm_added_q.weight"
    save_file(load_file(file) | {extra: torch.full((8,), 0.5)}, file)
    merged = export(run, tmp_path / "merged", merge=True, base=base)
    written = load_file(merged / "transformer" / file.name)
    assert torch.equal(written.pop(extra), torch.full((8,), 0.5))
    truth = load_full_weights(run)
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], truth[name].to(written[name].dtype)) for name in truth)
    assert WanPipeline.from_pretrained(merged).transformer.config.num_layers


def test_merge_is_for_lora_runs(tiny_pipeline: Path, tmp_path: Path, worlds: Any):
    worlds[1].run(run_training, tiny_pipeline, tmp_path / "run", ("train.max_steps=1",), zero(2))
    with pytest.raises(ConfigError, match="--merge is for LoRA runs"):
        export(tmp_path / "run", tmp_path / "out", merge=True)
