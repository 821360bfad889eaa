"""The tables of names against diffusers' own conversions and against official modules built by name."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from tests.support.official import WanModel
from tests.support.packs import CONFIG, KINDS
from wands.errors import CheckpointError
from wands.model.files.name_maps import DIT, rename_all, split_prefix
from wands.variants import VARIANTS


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def published_config(name: str) -> dict:
    """The diffusers config of a published variant, two layers deep."""
    dit = VARIANTS[name].dit
    config = {
        "num_attention_heads": dit.num_heads,
        "attention_head_dim": dit.head_dim,
        "in_channels": dit.in_channels,
        "out_channels": dit.out_channels,
        "text_dim": dit.text_dim,
        "freq_dim": dit.freq_dim,
        "ffn_dim": dit.ffn_dim,
        "num_layers": 2,
    }
    if dit.image_dim:
        config |= {"image_dim": dit.image_dim, "added_kv_proj_dim": dit.dim}
        config["pos_embed_seq_len"] = dit.image_positions or None
    return config


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_to_one_over_every_parameter_of_every_variant(variant: str):
    config = published_config(variant)
    with torch.device("meta"):
        official = shapes(WanModel(config))
        diffusers = shapes(WanTransformer3DModel(**config))
    assert {DIT.to_diffusers(name): shape for name, shape in official.items()} == diffusers
    assert {DIT.to_official(name): shape for name, shape in diffusers.items()} == official
    for name in official:
        assert DIT.to_official(DIT.to_diffusers(name)) == name


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_conversion_of_diffusers(kind: str):
    with torch.device("meta"):
        official = list(WanModel(CONFIG | KINDS[kind]).state_dict())
    theirs = convert_wan_transformer_to_diffusers({name: name for name in official})
    # The library forgets the positions of first and last frame; the script that made the published model has them.
    positions = theirs.pop("img_emb.emb_pos", None)
    assert (positions is not None) == (kind == "flf2v")
    if positions:
        theirs["condition_embedder.image_embedder.pos_embed"] = positions
    assert rename_all(official, DIT.to_diffusers, "here") == theirs


def test_the_norms_change_places():
    """Both models have a norm2 and a norm3; carrying the names over gives weights to the wrong one."""
    assert DIT.to_diffusers("blocks.3.norm3.weight") == "blocks.3.norm2.weight"
    assert DIT.to_official("blocks.3.norm2.weight") == "blocks.3.norm3.weight"
    with pytest.raises(KeyError):
        DIT.to_diffusers("blocks.3.norm2.weight")


@pytest.mark.parametrize(
    "name", ["blocks.0.attn1.to_q.weight", "vace_blocks.0.q.weight", "blocks.x.norm3.weight", "head"]
)
def test_what_is_not_official_is_refused(name: str):
    with pytest.raises(KeyError):
        DIT.to_diffusers(name)


def test_unknown_names_are_all_listed():
    with pytest.raises(CheckpointError, match=r"a\.pth has 2 tensor names that no Wan model has \(b, c\)"):
        rename_all(["patch_embedding.weight", "b", "c"], DIT.to_diffusers, "a.pth")
    with pytest.raises(
        CheckpointError, match=r"here has two tensors for one parameter of the model: a and b"
    ):
        rename_all(["a", "b"], lambda _: "x", "here")


def test_prefixes():
    name = "model.diffusion_model.head.head.bias"
    assert split_prefix([name, "vae.conv1.weight"]) == ({"head.head.bias": name}, ["vae.conv1.weight"])
    assert split_prefix(["diffusion_model.a", "b"]) == ({"a": "diffusion_model.a"}, ["b"])
    assert split_prefix(["model.a"]) == ({"a": "model.a"}, [])
    assert split_prefix(["a", "b"]) == ({"a": "a", "b": "b"}, [])


def test_the_tables_are_one_to_one():
    for table in (DIT.block, DIT.outside):
        assert len(set(table.values())) == len(table)
        assert len({old.replace(".", "_") for old in table}) == len(table)
