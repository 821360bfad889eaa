"""Errors of loading name the option or recipe key that the user typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wands.errors import ConfigError
from wands.model.files.loading import load_config, load_index, load_transformer


@pytest.mark.parametrize("load", [load_config, load_index, load_transformer])
def test_errors_name_what_the_user_typed(load: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^model\.path=nowhere is neither a folder"):
        load("nowhere")
    with pytest.raises(ConfigError, match=r"^--model=nowhere is neither a folder"):
        load("nowhere", key="--model")
    (tmp_path / "transformer").mkdir()
    for name in ("transformer/config.json", "model_index.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=r"^--model=.* cannot be read"):
        load(tmp_path, key="--model")


@pytest.mark.parametrize("load", [load_config, load_index, load_transformer])
def test_one_file_of_weights_names_the_command_that_makes_a_folder(load: Any, tmp_path: Path):
    (tmp_path / "wan.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"^model\.path=.*wan\.safetensors is a file, .*wands convert .*wan\.safetensors --to",
    ):
        load(tmp_path / "wan.safetensors")
    (tmp_path / "wan.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"wan\.gguf is a file, .*does not read GGUF files"):
        load(tmp_path / "wan.gguf")
