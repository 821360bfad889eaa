"""Folders of the official repositories are read as they are, with the numbers that diffusers' conversion gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import save_file
from torch import Tensor

from tests.support.official import WanModel, random_state
from tests.support.packs import CONFIG, KINDS
from wands.errors import CheckpointError, ConfigError
from wands.model.files import hub
from wands.model.files.loading import check_weights, load_config, load_index, load_transformer
from wands.model.files.official import dit_config, to_official_config
from wands.model.files.tensor_files import LazyTensor, write_sharded
from wands.variants import VARIANTS

STEM = "diffusion_pytorch_model"
FAMILY = {
    "t2v": "wan2.1-t2v-14b",
    "i2v with clip": "wan2.1-i2v-14b",
    "flf2v": "wan2.1-flf2v-14b",
    "i2v": "wan2.2-i2v-a14b",
    "ti2v": "wan2.2-ti2v-5b",
}


def write_official(folder: Path, kind: str = "t2v", seed: int = 0) -> dict[str, Tensor]:
    """An official DiT folder of random weights; returns them."""
    state = random_state(WanModel(CONFIG | KINDS[kind]), seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / f"{STEM}.safetensors")
    stock = WanTransformer3DModel(**(CONFIG | KINDS[kind]))
    config = to_official_config(stock.config, VARIANTS[FAMILY[kind]])
    (folder / "config.json").write_text(json.dumps(config))
    return state


def converted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert an official state with diffusers."""
    theirs = convert_wan_transformer_to_diffusers(dict(state))
    if "img_emb.emb_pos" in theirs:  # forgotten by the library, not by the script of the published conversion
        theirs["condition_embedder.image_embedder.pos_embed"] = theirs.pop("img_emb.emb_pos")
    return theirs


def assert_same(model: torch.nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_official_folder_is_loaded(kind: str, tmp_path: Path):
    state = write_official(tmp_path, kind)
    assert_same(load_transformer(tmp_path), converted(state))
    check_weights(tmp_path)
    stock = WanTransformer3DModel(**(CONFIG | KINDS[kind])).config
    config = load_config(tmp_path)
    assert {key: config.get(key, value) for key, value in stock.items() if key[0] != "_"} == {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in stock.items()
        if key[0] != "_"
    }
    assert load_index(tmp_path) == {}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind.split()[0]
    assert load_transformer(tmp_path, init="random").config["num_layers"] == CONFIG["num_layers"]


def test_an_official_folder_in_shards(tmp_path: Path):
    state = write_official(tmp_path)
    (tmp_path / f"{STEM}.safetensors").unlink()
    entries = [
        LazyTensor(name=name, shape=tuple(v.shape), dtype=v.dtype, read=lambda value=v: value)
        for name, v in state.items()
    ]
    assert len(write_sharded(tmp_path, STEM, entries, max_shard_size=100_000)) > 2
    assert_same(load_transformer(tmp_path), converted(state))
    (tmp_path / f"{STEM}.safetensors.index.json").unlink()  # numbered files say enough
    assert_same(load_transformer(tmp_path), converted(state))


@pytest.mark.parametrize(("kind", "boundary"), [("t2v", 0.875), ("i2v", 0.9)])
def test_two_experts(kind: str, boundary: float, tmp_path: Path):
    high = write_official(tmp_path / "high_noise_model", kind, seed=1)
    low = write_official(tmp_path / "low_noise_model", kind, seed=2)
    assert_same(load_transformer(tmp_path, subfolder="transformer"), converted(high))
    assert_same(load_transformer(tmp_path, subfolder="transformer_2"), converted(low))
    assert load_index(tmp_path) == {
        "boundary_ratio": boundary,
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
    }


def test_an_official_repository_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """diffusers' files are asked for first; only a repository without them is asked for official ones."""
    low = write_official(tmp_path / "low_noise_model", seed=2)
    calls = []

    def fetch(repo_id: str, *, allow_patterns: list[str], ignore_patterns: None) -> str:
        calls.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert_same(load_transformer("someone/wan", subfolder="transformer_2"), converted(low))
    assert [patterns[0] for patterns in calls] == ["transformer_2/config.json", "low_noise_model/*"]


def test_one_expert_has_no_second(tmp_path: Path):
    write_official(tmp_path)
    with pytest.raises(
        ConfigError, match=r"has no transformer_2/config\.json\. Set model\.path .* official Wan"
    ):
        load_transformer(tmp_path, subfolder="transformer_2")


def test_a_config_of_other_weights(tmp_path: Path):
    write_official(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ffn_dim": 7, "dim": 8}))
    with pytest.raises(
        CheckpointError, match=r"ffn_dim=7 \(the weights have 96\), dim=8 \(the weights have 48\)"
    ):
        load_config(tmp_path)


def test_weights_of_something_else(tmp_path: Path):
    state = write_official(tmp_path)
    save_file(state | {"vace.q": torch.zeros(1)}, tmp_path / f"{STEM}.safetensors")
    with pytest.raises(CheckpointError, match=r"has 1 tensor names that no Wan model has \(vace\.q\)"):
        load_transformer(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / f"{STEM}.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor patch_embedding\.weight"):
        load_config(tmp_path)


@pytest.mark.parametrize(("width", "heads"), [(1536, 12), (5120, 40), (192, None), (48, None)])
def test_heads_of_a_file_without_config(width: int, heads: int | None):
    """192 is 1.5 times the usual head dim: one head of 192 would be a silent guess."""
    shapes = {
        "patch_embedding.weight": (width, 16, 1, 2, 2),
        "blocks.0.ffn.0.weight": (64, width),
        "blocks.0.norm3.weight": (width,),
        "blocks.0.self_attn.norm_q.weight": (width,),
        "time_embedding.0.weight": (width, 256),
        "text_embedding.0.weight": (width, 4096),
        "head.head.weight": (64, width),
    }
    if heads is None:
        with pytest.raises(CheckpointError, match=f"width {width} is not a multiple"):
            dit_config(shapes, {}, "model")
        assert dit_config(shapes, {"num_heads": 3}, "model")["num_attention_heads"] == 3
    else:
        assert dit_config(shapes, {}, "model")["num_attention_heads"] == heads
