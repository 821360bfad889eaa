"""Loading: the numbers of the file arrive, one tensor at a time, at every world size; misfits are named."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.packs import CONFIG, build_pair, make_pack, run_packed, set_attention
from wands.distributed.bootstrap import init_process_group
from wands.errors import CheckpointError, ConfigError
from wands.model.files import hub
from wands.model.files.loading import WEIGHTS_NAME, load_config, load_transformer
from wands.model.files.tensor_files import TensorFiles
from wands.model.transformer import Fp32Linear, PackedWanBlock, PackedWanTransformer


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A folder with a stock DiT's config and weights, saved by diffusers."""
    build_pair()[0].save_pretrained(tmp_path / "transformer")
    return tmp_path


def saved_weights(pipeline: Path) -> dict[str, Tensor]:
    return load_file(pipeline / "transformer" / WEIGHTS_NAME)


def rewrite_weights(pipeline: Path, change) -> None:
    weights = saved_weights(pipeline)
    change(weights)
    save_file(weights, pipeline / "transformer" / WEIGHTS_NAME)


def assert_same_weights(model: PackedWanTransformer, expected: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].requires_grad


def test_loads_what_diffusers_saved(pipeline: Path):
    model = load_transformer(pipeline)
    assert_same_weights(model, saved_weights(pipeline))
    assert model.training
    assert model.config["num_layers"] == CONFIG["num_layers"]
    assert {type(block) for block in model.blocks} == {PackedWanBlock}
    assert type(model.proj_out) is Fp32Linear
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_loaded_model_predicts_as_the_saved_one(pipeline: Path):
    model = load_transformer(pipeline)
    (_, packed) = build_pair()
    set_attention(model, torch.float32)
    pack = make_pack(2)
    with torch.no_grad():
        assert torch.equal(run_packed(model, pack), run_packed(packed, pack))


def test_loads_shards(pipeline: Path, tmp_path: Path):
    WanTransformer3DModel.from_pretrained(pipeline / "transformer").save_pretrained(
        tmp_path / "sharded" / "transformer", max_shard_size="100KB"
    )
    assert len(list((tmp_path / "sharded" / "transformer").glob("*.safetensors"))) > 2
    assert_same_weights(load_transformer(tmp_path / "sharded"), saved_weights(pipeline))


def test_loads_the_dit_folder_itself(pipeline: Path):
    assert_same_weights(load_transformer(pipeline / "transformer", subfolder=""), saved_weights(pipeline))


def test_bf16_files_become_fp32_masters(pipeline: Path):
    rewrite_weights(pipeline, lambda weights: weights.update({k: v.bfloat16() for k, v in weights.items()}))
    model = load_transformer(pipeline)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_weights(model, {name: value.float() for name, value in saved_weights(pipeline).items()})


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_angles_are_the_stock_model_s(pipeline: Path, init: str):
    stock = WanTransformer3DModel(**CONFIG)
    model = load_transformer(pipeline, init=init)
    for name in ("freqs_cos", "freqs_sin"):
        found = getattr(model.rope, name)
        expected = getattr(stock.rope, name)
        assert torch.equal(found, expected)
        assert found.dtype == torch.float32
        assert f"rope.{name}" not in model.state_dict()


def test_reads_one_tensor_at_a_time(pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    """When a tensor is read, every earlier one is gone: only the parameters are left."""
    read = TensorFiles.read
    seen = []
    alive = []

    def spy(self: TensorFiles, name: str) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        value = read(self, name)
        seen.append(weakref.ref(value))
        return value

    monkeypatch.setattr(TensorFiles, "read", spy)
    load_transformer(pipeline)
    assert len(alive) == len(saved_weights(pipeline))
    assert set(alive) == {0}


def test_parameters_do_not_hang_on_the_file(pipeline: Path):
    """Weights are mapped from the file: overwriting it later must not change the model."""
    model = load_transformer(pipeline)
    expected = saved_weights(pipeline)
    expected = {name: value.clone() for name, value in expected.items()}
    file = pipeline / "transformer" / WEIGHTS_NAME
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(bytes(size))
    assert_same_weights(model, expected)


def test_mismatches_are_all_named(pipeline: Path):
    def spoil(weights: dict[str, Tensor]) -> None:
        del weights["blocks.0.attn1.to_q.weight"]
        weights["blocks.9.extra"] = torch.zeros(1)
        weights["proj_out.bias"] = torch.zeros(5)
        weights["blocks.0.attn2.norm_added_q.weight"] = torch.zeros(
            1
        )  # which published files carry for nothing

    rewrite_weights(pipeline, spoil)
    with pytest.raises(CheckpointError) as error:
        load_transformer(pipeline)
    text = str(error.value)
    assert "1 missing: blocks.0.attn1.to_q.weight" in text
    assert "1 unexpected: blocks.9.extra" in text
    assert "1 of a wrong shape: proj_out.bias [5] instead of [16]" in text
    assert "norm_added_q" not in text


def test_long_lists_are_cut(pipeline: Path):
    rewrite_weights(
        pipeline, lambda weights: [weights.pop(name) for name in list(weights) if "blocks.1" in name]
    )
    with pytest.raises(CheckpointError, match=r"27 missing: .* and 19 more"):
        load_transformer(pipeline)


def test_damaged_weights_are_one_sentence(pipeline: Path):
    file = pipeline / "transformer" / WEIGHTS_NAME
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cannot be read .*Download the file again"):
        load_transformer(pipeline)


def test_missing_weights(pipeline: Path):
    (pipeline / "transformer" / WEIGHTS_NAME).unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load_transformer(pipeline)
    load_transformer(pipeline, init="random")  # needs only the config


@pytest.mark.parametrize("path", ["no/such/folder", "nowhere"])
def test_a_path_that_is_no_model(path: str):
    with pytest.raises(ConfigError, match="neither a folder nor a Hub id"):
        load_config(path)


def test_a_folder_that_is_no_pipeline(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no transformer/config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"_class_name": "FluxTransformer2DModel"}', "_class_name=Flux"),
        ("{", r"config\.json cannot be read"),
    ],
)
def test_a_config_of_something_else(pipeline: Path, text: str, says: str):
    (pipeline / "transformer" / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_transformer(pipeline)


def test_config_is_the_file(pipeline: Path):
    assert load_config(pipeline) == json.loads((pipeline / "transformer" / "config.json").read_text())
    assert load_config(pipeline)["num_attention_heads"] == CONFIG["num_attention_heads"]


def test_hub_ids_fetch_only_what_is_needed(pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def fetch(repo_id: str, *, allow_patterns: list[str], ignore_patterns: None) -> str:
        calls.append((repo_id, allow_patterns))
        return str(pipeline)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert_same_weights(load_transformer("someone/wan"), saved_weights(pipeline))
    load_transformer("someone/wan", init="random")
    weights = ["transformer/*.safetensors", "transformer/*.safetensors.index.json"]
    assert calls == [
        ("someone/wan", ["transformer/config.json", *weights]),
        ("someone/wan", ["transformer/config.json"]),
    ]


def test_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def fetch(*_, **__) -> str:
        raise LocalEntryNotFoundError("An error happened\nwhile trying to locate the files")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    with pytest.raises(
        ConfigError, match=r"model\.path=someone/wan is not a folder and cannot .*check the name"
    ) as error:
        load_config("someone/wan")
    assert "\n" not in str(error.value)


def test_random_weights_are_wan_s_own(pipeline: Path):
    model = load_transformer(pipeline, init="random", seed=3)
    dim = CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
    assert not model.proj_out.weight.any()
    assert not model.proj_out.bias.any()
    assert torch.equal(model.blocks[1].attn1.norm_q.weight, torch.ones(dim))
    assert torch.equal(model.blocks[1].norm2.weight, torch.ones(dim))
    for linear in (
        model.condition_embedder.text_embedder.linear_1,
        model.condition_embedder.time_embedder.linear_2,
    ):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for weight, fan_in in (
        (model.blocks[0].attn1.to_q.weight, dim),
        (model.blocks[2].ffn.net[2].weight, CONFIG["ffn_dim"]),
        (model.patch_embedding.weight, 16),
    ):
        bound = (6 / (fan_in + dim)) ** 0.5
        assert 0.9 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert model.scale_shift_table.std().item() == pytest.approx(dim**-0.5, rel=0.3)
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith(".bias"))


def test_random_weights_hang_on_seed_and_name_alone(pipeline: Path):
    first, again, other = (load_transformer(pipeline, init="random", seed=seed) for seed in (3, 3, 4))
    assert_same_weights(again, dict(first.named_parameters()))
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, other.blocks[0].attn1.to_q.weight)
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, first.blocks[1].attn1.to_q.weight)
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, first.blocks[0].attn1.to_k.weight)
    config = pipeline / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 3', '"num_layers": 1'))
    assert torch.equal(
        load_transformer(pipeline, init="random", seed=3).blocks[0].attn1.to_q.weight,
        first.blocks[0].attn1.to_q.weight,
    )


def load_partitioned(pipeline: str, init: str) -> dict[str, Tensor]:
    """On one rank: load under zero.Init, check that the parameters are partitioned, return the whole ones."""
    import deepspeed

    init_process_group()
    reads = []
    read = TensorFiles.read
    TensorFiles.read = lambda self, name: reads.append(name) or read(self, name)
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    context = deepspeed.zero.Init(config_dict_or_path=zero3)
    model = load_transformer(pipeline, init=init, zero_init_context=context)
    whole = {}
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    for name, param in model.named_parameters():
        assert param.ds_tensor.numel() == -(-param.ds_numel // world_size), name
        assert param.numel() == 0, name
        with deepspeed.zero.GatheredParameters([param]):
            whole[name] = param.detach().clone().numpy()
    assert len(reads) == (len(whole) if rank == 0 and init == "pretrained" else 0)
    assert torch.equal(model.rope.freqs_cos, WanTransformer3DModel(**CONFIG).rope.freqs_cos)
    return whole


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_zero3_is_filled_parameter_by_parameter(pipeline: Path, init: str, run_world):
    expected = load_transformer(pipeline, init=init)
    for found in run_world(2, load_partitioned, str(pipeline), init):
        assert_same_weights(expected, {name: torch.from_numpy(value) for name, value in found.items()})
