"""Conversions there and back are the same bits, and stock diffusers computes the same from either end."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import UMT5EncoderModel

from tests.support.commands import convert
from tests.support.converted import VARIANTS, WEIGHTS, assert_same_bits, pipelines, tensors
from tests.support.official import T5Encoder, WanModel, WanVae, XlmRobertaClip, random_state
from tests.support.runs import losses, make_run, run_training
from wands.cli import main
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.model.files import hub, name_maps
from wands.model.files.name_maps import DIT, EXPERTS
from wands.model.files.tensor_files import TensorFiles

__all__ = ["pipelines"]  # fixtures


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name == "wan2.2-i2v-a14b" else pytest.mark.slow) for name in VARIANTS],
)
def test_to_official_and_back(variant: str, pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines[variant]
    there = convert(str(source), tmp_path / "official", to="official")
    back = convert(str(there.out), tmp_path / "back", to="diffusers", base=str(source))
    experts = [name for name in EXPERTS if (source / name).is_dir()]
    for report in (there, back):
        rows = {row.name: row for row in report.summaries}
        assert all(
            "output in a forward pass of diffusers is unchanged" in rows[name].forward for name in experts
        )
        assert {name: rows[name].read for name in experts} == {name: rows[name].written for name in experts}
    for part in (*experts, "vae", "text_encoder"):
        file = WEIGHTS if part != "text_encoder" else "model.safetensors"
        assert_same_bits(tensors(back.out / part / file), tensors(source / part / file))
        if part != "text_encoder":
            ours, stock = (
                json.loads((root / part / "config.json").read_text()) for root in (back.out, source)
            )
            assert ours["_class_name"] == stock["_class_name"]
            stock.pop("_name_or_path", None)
            if part != "vae":
                assert ours == stock
    loaded = DiffusionPipeline.from_pretrained(back.out)
    assert type(loaded) is type(DiffusionPipeline.from_pretrained(source))
    assert bool(there.notes) == (
        variant in ("wan2.1-flf2v-14b", "wan2.2-ti2v-5b")
    )  # CLIP and a VAE without a place


def test_official_names_are_those_of_the_official_modules(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.1-flf2v-14b"]
    report = convert(str(source), tmp_path / "out", to="official")
    config = json.loads((source / "transformer" / "config.json").read_text())
    with torch.device("meta"):
        expected = {n: tuple(v.shape) for n, v in WanModel(config).state_dict().items()}
        vae = {n: tuple(v.shape) for n, v in WanVae(4, 16, 1).state_dict().items()}
    assert {n: tuple(v.shape) for n, v in tensors(report.out / WEIGHTS).items()} == expected
    state = torch.load(report.out / "Wan2.1_VAE.pth", weights_only=True)
    assert {n: tuple(v.shape) for n, v in state.items()} == vae
    said = json.loads((report.out / "config.json").read_text())
    assert (said["_class_name"], said["model_type"], said["in_dim"]) == ("WanModel", "flf2v", 36)
    assert (report.out / "google" / "umt5-xxl" / "tokenizer.json").is_file()
    row = report.summaries[0]
    assert str(row).startswith(
        f"transformer: {len(expected)} tensors read, {len(expected)} written, {len(expected) - 2} renamed"
    )


def test_comfyui_and_back(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.2-i2v-a14b"]
    there = convert(str(source), tmp_path / "comfy", to="comfyui")
    files = sorted(path.name for path in (there.out / "diffusion_models").iterdir())
    assert files == ["wan2.2_i2v_tiny_high_noise.safetensors", "wan2.2_i2v_tiny_low_noise.safetensors"]
    low = there.out / "diffusion_models" / files[1]
    assert all(name.startswith("model.diffusion_model.") for name in tensors(low))
    # A single file does not say how many heads it has, and this width fits none of the published ones.
    with pytest.raises(CheckpointError, match="the number of attention heads is unknown"):
        convert(str(low), tmp_path / "unknown", to="diffusers")
    shutil.copy(source / "transformer" / "config.json", low.parent)
    back = convert(str(low), tmp_path / "back", to="diffusers")
    assert_same_bits(tensors(back.out / "transformer" / WEIGHTS), tensors(source / "transformer_2" / WEIGHTS))
    assert "--base" in back.notes[0]
    stock = WanTransformer3DModel.from_pretrained(back.out / "transformer")
    assert stock.config.num_attention_heads == 4
    assert not (back.out / "model_index.json").exists()


@pytest.fixture(scope="module")
def repository(pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole official repository of Wan 2.1 I2V, written without wands: shards, pickles, a tokenizer."""
    folder = tmp_path_factory.mktemp("repository") / "Wan2.1-I2V"
    folder.mkdir()
    dit = WanModel(
        {
            "num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 36, "out_channels": 16, "text_dim": 32,
            "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "image_dim": 16,
        }
    )  # fmt: skip
    state = random_state(dit)
    halves = [{n: v for n, v in state.items() if ("blocks.0." in n) == half} for half in (True, False)]
    for number, half in enumerate(halves, 1):
        save_file(half, folder / f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "_class_name": "WanModel",
                "model_type": "i2v",
                "dim": 128,
                "num_heads": 1,
                "eps": 1e-6,
                "in_dim": 36,
            }
        )
    )
    torch.save(random_state(WanVae(4)), folder / "Wan2.1_VAE.pth")
    text = T5Encoder(vocab=387, dim=32, dim_attn=32, dim_ffn=64, num_heads=4, num_layers=1)
    torch.save(
        {n: v.bfloat16() for n, v in random_state(text).items()}, folder / "models_t5_umt5-xxl-enc-bf16.pth"
    )
    clip = XlmRobertaClip(dim=16, mlp_dim=32, num_layers=2)
    torch.save(random_state(clip), folder / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")
    shutil.copytree(pipelines["wan2.1-t2v-1.3b"] / "tokenizer", folder / "google" / "umt5-xxl")
    return folder


@pytest.mark.slow
def test_an_official_repository_becomes_a_pipeline(repository: Path, tmp_path: Path):
    report = convert(str(repository), tmp_path / "out", to="diffusers")
    assert report.notes == []
    assert [row.name for row in report.summaries] == ["transformer", "vae", "text_encoder", "image_encoder"]
    assert set(report.summaries[-1].unused) == {"visual.head", "textual.weight", "log_scale"}
    pipeline = DiffusionPipeline.from_pretrained(report.out)
    assert type(pipeline).__name__ == "WanImageToVideoPipeline"
    assert pipeline.transformer.config.image_dim == 16
    assert pipeline.image_encoder.config.num_hidden_layers == 2
    assert torch.equal(pipeline.text_encoder.encoder.embed_tokens.weight, pipeline.text_encoder.shared.weight)
    assert pipeline.scheduler.config.flow_shift == 3.0
    clip = torch.load(next(repository.glob("models_clip*")), weights_only=True)
    layer = pipeline.image_encoder.state_dict()
    key = next(name for name in layer if name.endswith("layers.1.self_attn.k_proj.weight"))
    assert torch.equal(layer[key], clip["visual.transformer.1.attn.to_qkv.weight"][16:32])

    again = convert(str(report.out), tmp_path / "again", to="official", base=str(repository))
    assert again.notes == []
    assert_same_bits(tensors(again.out / WEIGHTS), tensors(*repository.glob("*.safetensors")))
    for file in repository.glob("*.pth"):
        assert_same_bits(tensors(again.out / file.name), tensors(file))
    identity = convert(str(repository), tmp_path / "identity", to="official")
    assert {row.renamed for row in identity.summaries} == {0}
    assert (identity.out / "google" / "umt5-xxl").is_dir()


@pytest.mark.parametrize("name", ["Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"])
def test_one_file_of_a_frozen_part(name: str, repository: Path, tmp_path: Path):
    report = convert(str(repository / name), tmp_path / "out", to="diffusers")
    if "VAE" in name:
        assert AutoencoderKLWan.from_pretrained(report.out / "vae").config.z_dim == 16
    else:
        assert UMT5EncoderModel.from_pretrained(report.out / "text_encoder").config.d_model == 32


@pytest.mark.slow
def test_bf16_keeps_what_diffusers_keeps_in_fp32(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.1-t2v-1.3b"]
    there = convert(str(source), tmp_path / "official", to="official", dtype="bf16")
    found = tensors(there.out / WEIGHTS)
    assert found["blocks.0.self_attn.q.weight"].dtype == torch.bfloat16
    assert {
        found[n].dtype
        for n in ("blocks.0.modulation", "head.modulation", "blocks.0.norm3.weight", "time_embedding.0.bias")
    } == {torch.float32}
    direct = convert(str(source), tmp_path / "direct", to="diffusers", dtype="bf16")
    back = convert(str(there.out), tmp_path / "back", to="diffusers")
    assert_same_bits(
        tensors(back.out / "transformer" / WEIGHTS), tensors(direct.out / "transformer" / WEIGHTS)
    )
    assert "output in a forward pass of diffusers is unchanged" in direct.summaries[0].forward
    assert DiffusionPipeline.from_pretrained(direct.out).transformer.config.num_layers == 2


def test_a_wrong_table_is_found_by_the_forward(
    pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A table that is one to one but wrong passes every comparison of bits; diffusers' own names do not share it."""
    swapped = {
        "blocks.0.attn1.to_k.weight": "blocks.0.self_attn.q.weight",
        "blocks.0.attn1.to_q.weight": "blocks.0.self_attn.k.weight",
    }
    wrong = SimpleNamespace(
        to_diffusers=DIT.to_diffusers, to_official=lambda name: swapped.get(name) or DIT.to_official(name)
    )
    monkeypatch.setattr(name_maps, "DIT", wrong)
    with pytest.raises(
        CheckpointError, match="the output of the converted DiT differs from the output of SOURCE's DiT"
    ):
        convert(str(pipelines["wan2.1-t2v-1.3b"]), tmp_path / "out", to="official")
    assert list(tmp_path.iterdir()) == []
    convert(str(pipelines["wan2.1-t2v-1.3b"]), tmp_path / "out", to="official", forward=False)


def test_a_disk_that_forgets_is_found(
    pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = TensorFiles.read

    def forgetful(self: TensorFiles, name: str) -> Tensor:
        value = read(self, name)
        return value + 1 if self.where == "convert" and name == "head.head.bias" else value

    monkeypatch.setattr(TensorFiles, "read", forgetful)
    with pytest.raises(CheckpointError, match=r"head\.head\.bias in .* is wrong when read back"):
        convert(str(pipelines["wan2.1-t2v-1.3b"]), tmp_path / "out", to="official")
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_and_parts_of_another_model(
    pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The DiT of the model that lends its other parts is not fetched."""
    official = convert(
        str(pipelines["wan2.1-t2v-1.3b"]), tmp_path / "official", to="official", forward=False
    ).out
    calls = {}

    def fetch(repo_id: str, *, allow_patterns: list[str] | None, ignore_patterns: list[str] | None) -> str:
        calls[repo_id] = (allow_patterns, ignore_patterns)
        return str(official if repo_id == "someone/wan" else pipelines["wan2.1-t2v-1.3b"])

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    out = convert("someone/wan", tmp_path / "out", to="diffusers", base="other/wan", forward=False).out
    assert (out / "model_index.json").is_file()
    assert "*.pth" in calls["someone/wan"][0]
    assert "transformer/*.safetensors" in calls["other/wan"][1]


def test_one_tensor_at_a_time(pipelines: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When a tensor is read, the ones before it are gone, but for the one that it is compared with."""
    read = TensorFiles.read
    seen = []
    alive = []

    def spy(self: TensorFiles, name: str) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        value = read(self, name)
        seen.append(weakref.ref(value))
        return value

    monkeypatch.setattr(TensorFiles, "read", spy)
    source = pipelines["wan2.1-t2v-1.3b"] / "transformer"
    report = convert(str(source), tmp_path / "out", to="comfyui", forward=False)
    assert len(alive) == 3 * report.summaries[0].written  # once to write, once from either end to compare
    assert max(alive) <= 1


def test_nothing_is_overwritten(pipelines: dict[str, Path], tmp_path: Path):
    source = str(pipelines["wan2.1-t2v-1.3b"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    for out in (tmp_path / "full", tmp_path / "full" / "precious.txt"):
        with pytest.raises(ConfigError, match=r"(is a file|contains files); choose a new or an empty folder"):
            convert(source, out, to="official")
    assert (tmp_path / "full" / "precious.txt").read_text() == "keep me"
    (tmp_path / "out.tmp").mkdir()
    with pytest.raises(
        ConfigError, match=r"--out .*out\.tmp, but a folder .* already exists, .*delete .*out\.tmp"
    ):
        convert(source, tmp_path / "out", to="official")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", to="official", forward=False)
    with pytest.raises(WandsError, match=r"cannot be created"):
        convert(source, tmp_path / "full" / "precious.txt" / "out", to="official")


def test_a_mount_point_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    with pytest.raises(
        ConfigError,
        match=r"is a mount point.*choose a folder inside the mount point, such as .*volume/output\.",
    ):
        convert("not/fetched", tmp_path / "volume", to="official")
    assert os.listdir(tmp_path) == ["volume"]


@pytest.mark.slow
def test_training_starts_from_an_official_folder_as_it_is(
    pipelines: dict[str, Path], tmp_path: Path, run_world
):
    source = pipelines["wan2.1-t2v-1.3b"]
    official = convert(str(source), tmp_path / "official", to="official", forward=False).out
    zero3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    ours, stock = (
        losses(
            run_world(2, run_training, model, tmp_path / f"run-{model.name}", ("train.max_steps=2",), zero3)[
                0
            ]
        )
        for model in (official, source)
    )
    assert len(ours) == 2
    assert ours == stock


def test_an_official_repository_of_two_experts_is_one_to_training(pipelines: dict[str, Path], tmp_path: Path):
    source = pipelines["wan2.2-i2v-a14b"]
    official = convert(str(source), tmp_path / "official", to="official", forward=False).out
    ours, stock = (make_run(model, tmp_path / "run", ("model.experts=both",)) for model in (official, source))
    assert ours.model.variant == stock.model.variant
    assert [(e.name, e.subfolder) for e in ours.model.experts] == [
        ("high", "transformer"),
        ("low", "transformer_2"),
    ]


def test_the_command(pipelines: dict[str, Path], tmp_path: Path):
    run = CliRunner().invoke
    source = str(pipelines["wan2.1-t2v-1.3b"])
    done = run(main, ["convert", source, "--to", "comfyui", "--out", str(tmp_path / "out"), "--no-forward"])
    assert done.exit_code == 0, done.output
    assert "tensors read" in done.output
    again = run(main, ["convert", source, "--to", "comfyui", "--out", str(tmp_path / "out")])
    assert again.exit_code == 2
    assert "choose a new or an empty folder" in again.output


@pytest.mark.parametrize(("name", "to"), [("vae/LICENSE", "diffusers"), ("tokenizer/LICENSE", "official")])
def test_a_link_out_of_the_model_is_not_copied(
    pipelines: dict[str, Path], tmp_path: Path, name: str, to: str
):
    source = tmp_path / "source"
    shutil.copytree(pipelines["wan2.1-t2v-1.3b"], source)
    (tmp_path / "id_ed25519").write_text("key")
    (source / name).symlink_to(tmp_path / "id_ed25519")
    dit = source if to == "official" else source / "transformer" / WEIGHTS
    base = None if to == "official" else str(source)
    with pytest.raises(WandsError, match=rf"{name} leads to .*id_ed25519.* replace the link by a copy"):
        convert(str(dit), tmp_path / "out", to=to, base=base, forward=False)
    assert not (tmp_path / "out").exists()
