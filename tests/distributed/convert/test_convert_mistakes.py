"""Weights that are not whole, and sources that are no model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import convert
from tests.support.converted import WEIGHTS, pipelines
from wands.errors import CheckpointError, ConfigError

__all__ = ["pipelines"]  # fixtures


def spoil(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(
            lambda w: w.pop("blocks.1.ffn.0.bias"),
            r"do not fit its config\.json \(1 missing: blocks\.1\.ffn\.net\.0\.proj\.bias",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda w: w.update({"surprise": torch.zeros(1)}),
            r"has 1 tensor names that no Wan model has \(surprise\)",
            marks=pytest.mark.slow,
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
