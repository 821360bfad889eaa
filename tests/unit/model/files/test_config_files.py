"""A config with sizes that no model has is refused by name, before a layer is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import convert
from wands.encoders.components import find_part
from wands.errors import ConfigError
from wands.model.files.config_files import read_model_config
from wands.model.files.loading import check_weights, load_config
from wands.sampling.pipeline import find_pipeline
from wands.variants import VARIANTS


@pytest.fixture
def model(tiny_pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pipeline, tmp_path / "model"))


def change(model: Path, part: str, **values: Any) -> None:
    path = model / part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("value", [10**9, 10**400, 0, -1, True, 2.5, "40", [3, 10**9]])
def test_a_number_of_layers_out_of_range_is_refused_before_it_is_built(model: Path, value: Any) -> None:
    change(model, "transformer", num_layers=value)
    for read in (load_config, check_weights, find_pipeline):
        with pytest.raises(ConfigError, match=r"num_layers=.* must be a whole number from 1 to 1,000"):
            read(model)
    with pytest.raises(ConfigError, match=r"^SOURCE .*config\.json has num_layers="):
        convert(model, model.parent / "out", to="official")


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("vae", "num_res_blocks"),
        ("vae", "base_dim"),
        ("text_encoder", "num_layers"),
        ("text_encoder", "d_model"),
    ],
)
def test_so_are_those_of_the_frozen_components(model: Path, part: str, key: str) -> None:
    change(model, part, **{key: 10**12})
    with pytest.raises(ConfigError, match=rf"{part}/config\.json has {key}=1000000000000, which must be"):
        find_part(model, part)
    with pytest.raises(ConfigError, match=f"{key}=1000000000000"):
        find_pipeline(model)


def test_clip_names_its_sizes_one_level_deeper(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {"num_hidden_layers": 1000000000}}')
    with pytest.raises(ConfigError, match="num_hidden_layers=1000000000"):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_published_config_is_read(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant].dit.to_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path / "config.json") == config
