"""Models that others made: no file of a model runs code, whichever component it belongs to."""

from __future__ import annotations

import ast
import builtins
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wands.encoders.image import ImageEncoder
from wands.encoders.text import TextEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CheckpointError, ConfigError
from wands.model.files.loading import load_transformer
from wands.sampling.pipeline import find_pipeline, load_pipeline

ROOT = Path(__file__).resolve().parents[3]
LOADERS: dict[str, Callable[[Path], Any]] = {
    "vae": WanVideoEncoder.load,
    "text_encoder": TextEncoder.load,
    "image_encoder": ImageEncoder.load,
    "transformer": load_transformer,
}


@pytest.fixture
def model(tiny_variant: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_variant("wan2.1-i2v-14b"), tmp_path / "model")


@pytest.mark.parametrize("part", LOADERS)
def test_pickled_weights_are_refused_in_one_sentence(model: Path, part: str):
    for file in (model / part).glob("*.safetensors"):
        old_name = {"model": "pytorch_model"}.get(file.stem, file.stem)
        torch.save(load_file(file), file.with_name(f"{old_name}.bin"))
        file.unlink()
    for load in (LOADERS[part], find_pipeline):
        with pytest.raises(CheckpointError, match=r"model\.bin contains pickled weights") as caught:
            load(model)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", LOADERS)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(model: Path, part: str, value: float):
    """Otherwise, every video of the model is black. The message names the tensor and its file."""
    (file,) = (model / part).glob("*.safetensors")
    weights = load_file(file)
    name = sorted(weights)[-1]
    weights[name].view(-1)[-1] = value
    save_file(weights, file, {"format": "pt"})
    message = rf"{part}/{re.escape(file.name)} has NaN or infinite values in {re.escape(name)}, "
    for load in (LOADERS[part], lambda folder: load_pipeline(find_pipeline(folder))):
        with pytest.raises(CheckpointError, match=message):
            load(model)


def test_an_index_that_lists_a_pickle_is_refused(model: Path):
    for file in (model / "vae").glob("*.safetensors"):
        index = {"weight_map": dict.fromkeys(load_file(file), "part.bin"), "metadata": {}}
        (model / "vae" / f"{file.name}.index.json").write_text(json.dumps(index))
        torch.save(load_file(file), model / "vae" / "part.bin")
        file.unlink()
    with pytest.raises(CheckpointError, match=r"part\.bin contains pickled weights"):
        WanVideoEncoder.load(model)


def test_code_of_a_tokenizer_is_not_run(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """transformers asks on the terminal whether to run the code, and a script may answer yes to everything."""
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = model / "tokenizer" / "tokenizer_config.json"
    values = json.loads(config.read_text()) | {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
    }
    config.write_text(json.dumps(values))
    (model / "tokenizer" / "own.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass\n"
    )
    with pytest.raises(ConfigError, match="text encoder cannot be loaded") as caught:
        TextEncoder.load(model)
    assert not (tmp_path / "executed").exists()
    assert "\n" not in str(caught.value)


def test_code_that_a_pipeline_names_is_refused(model: Path):
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": ["own_scheduler", "Own"]}))
    with pytest.raises(
        ConfigError, match="scheduler is a class of own_scheduler, but wands runs only code of"
    ):
        find_pipeline(model)


def test_every_loader_is_told_to_run_no_code():
    """A loader of transformers, diffusers or datasets without `use_safetensors` or `trust_remote_code` could run code."""
    names = ("from_pretrained", "load_dataset", "lora_state_dict")
    unsafe = []
    for path in [*ROOT.glob("wands/**/*.py"), *ROOT.glob("data_tools/*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in names) else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            values = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            is_safe = values.get("use_safetensors") is True or values.get("trust_remote_code") is False
            if node.func.attr in names and not is_safe:
                unsafe.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not unsafe


def test_no_network_is_said_in_words_of_wands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    from wands.model.files.hub import fetch_model

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"\(no connection to the Hub, and no copy in the local Hub cache\); check the name"
    ):
        fetch_model("owner/name-of-no-model")
