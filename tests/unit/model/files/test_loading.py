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
