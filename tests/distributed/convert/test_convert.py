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
from make_tiny_pipeline import build_tiny_pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import UMT5EncoderModel

from tests.support.commands import convert
from tests.support.official import T5Encoder, WanModel, WanVae, XlmRobertaClip, random_state
from tests.support.packs import randomize
from tests.support.runs import losses, make_run, run_training
from wands.cli import main
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.model.files import hub, name_maps
from wands.model.files.hashes import HASH_FILE
from wands.model.files.lora_experts import EXPERT_NAMES, describe_file
from wands.model.files.lora_files import LORA_FILE, lora_tensors, parse_lora
from wands.model.files.name_maps import DIT, EXPERTS
from wands.model.files.tensor_files import TensorFiles, as_bytes

WEIGHTS = "diffusion_pytorch_model.safetensors"
VARIANTS = ["wan2.1-t2v-1.3b", "wan2.1-flf2v-14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny pipelines whose DiTs predict something, and whose VAE has Wan's own statistics."""
    made = {}
    for variant in VARIANTS:
        folder = tmp_path_factory.mktemp("pipelines") / variant
        build_tiny_pipeline(folder, size="test", variant=variant)
        for seed, expert in enumerate(EXPERTS):
            if (folder / expert).is_dir():
                model = WanTransformer3DModel.from_pretrained(folder / expert)
                randomize(model, seed)
                model.save_pretrained(folder / expert)
        config = folder / "vae" / "config.json"
        said = json.loads(config.read_text())
        if said["z_dim"] == 16:
            del said["latents_mean"], said["latents_std"]
            config.write_text(json.dumps(said))
        made[variant] = folder
    return made


def tensors(*files: Path) -> dict[str, Tensor]:
    opened = TensorFiles(files, "test")
    return {name: opened.read(name).clone() for name in opened.shapes}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(as_bytes(found[name]), as_bytes(value)), name


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("wan2.1-flf2v-14b", "wan2.2-ti2v-5b") else ())
        for name in VARIANTS
    ],
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
    """Of the model that lends its other parts the DiT is not fetched."""
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


def spoil(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.pop("blocks.1.ffn.0.bias"),
            r"do not fit its config\.json \(1 missing: blocks\.1\.ffn\.net\.0\.proj\.bias",
        ),
        (
            lambda w: w.update({"surprise": torch.zeros(1)}),
            r"has 1 tensor names that no Wan model has \(surprise\)",
        ),
        (
            lambda w: w.update({"head.head.bias": torch.zeros(3)}),
            r"1 of a wrong shape: proj_out\.bias \[3\] instead of \[64\]",
        ),
    ],
)
def test_weights_that_are_not_whole(change, says: str, pipelines: dict[str, Path], tmp_path: Path):
    source = convert(str(pipelines["wan2.1-t2v-1.3b"]), tmp_path / "source", to="official", forward=False).out
    spoil(source, change)
    with pytest.raises(CheckpointError, match=says):
        convert(str(source), tmp_path / "out", to="diffusers")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_published_files_carry_for_nothing(pipelines: dict[str, Path], tmp_path: Path):
    source = tmp_path / "transformer"
    shutil.copytree(pipelines["wan2.1-flf2v-14b"] / "transformer", source)
    extra = "blocks.0.attn2.norm_added_q.weight"
    spoil(source, lambda weights: weights.update({extra: torch.ones(48)}))
    row = convert(str(source), tmp_path / "out", to="official").summaries[0]
    assert row.unused == (extra,)
    assert (row.read, row.forward) == (
        row.written + 1,
        "the DiT's output in a forward pass of diffusers is unchanged",
    )
    assert extra in str(row)


def test_channels_of_no_wan_model(pipelines: dict[str, Path], tmp_path: Path):
    source = tmp_path / "transformer"
    name = "patch_embedding.weight"
    shutil.copytree(pipelines["wan2.1-t2v-1.3b"] / "transformer", source)
    spoil(source, lambda weights: weights.update({name: torch.cat([weights[name], weights[name][:, :4]], 1)}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"in_channels": config["in_channels"] + 4}))
    with pytest.raises(
        ConfigError,
        match=r"SOURCE=.*: the transformer's config has in_channels=20.*Set SOURCE to a Wan model",
    ):
        convert(str(source), tmp_path / "out", to="official")
    assert os.listdir(tmp_path) == ["transformer"]


def test_sources_that_are_no_model(tmp_path: Path, pipelines: dict[str, Path]):
    with pytest.raises(ConfigError, match="neither a folder nor a Hub id"):
        convert("no/such/thing", tmp_path / "out", to="official")
    with pytest.raises(ConfigError, match="contains no Wan model"):
        convert(str(tmp_path), tmp_path / "out", to="official")
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"a\.safetensors contains no model of Wan: its tensors are a\."):
        convert(str(tmp_path / "a.safetensors"), tmp_path / "out", to="official")
    torch.save({"a": Path}, tmp_path / "code.pth")
    with pytest.raises(CheckpointError, match="is a pickle with objects that are not tensors"):
        convert(str(tmp_path / "code.pth"), tmp_path / "out", to="official")
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(ConfigError, match="contains a FluxTransformer2DModel"):
        convert(str(tmp_path), tmp_path / "out", to="official")
    source = pipelines["wan2.1-t2v-1.3b"]
    for rest, says in (
        (pipelines["wan2.2-ti2v-5b"], "does not fit SOURCE's model: in_channels=48 instead of 16"),
        (
            pipelines["wan2.2-i2v-a14b"],
            "does not fit SOURCE's model: .*2 experts instead of 1; set --base to",
        ),
        (tmp_path, r"is not a complete diffusers pipeline: model_index\.json cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            convert(
                str(source / "transformer"),
                tmp_path / "out",
                to="diffusers",
                base=str(rest),
                forward=False,
            )


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
