"""Whose key is whose between the DeepSpeed JSON and the recipe; schedules; nothing silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wands.config import load_recipe
from wands.errors import ConfigError
from wands.train.engine import build_ds_config, build_schedule, learning_rate, load_ds_config

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("zero.json", "recipe.yaml")


def build(
    user: dict[str, Any], *overrides: str, world_size: int = 2, device_type: str = "cuda"
) -> dict[str, Any]:
    return build_ds_config(
        user, load_recipe(None, overrides), world_size=world_size, device_type=device_type, names=NAMES
    )


def refusal(user: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(user, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_jsons_are_complete_with_any_recipe(path: Path):
    config = build(load_ds_config(path), "train.bins_per_step=8")
    assert config["gradient_accumulation_steps"] == 4
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert "train_batch_size" not in config
    assert config["zero_optimization"] == json.loads(path.read_text())["zero_optimization"]


def test_batch_arithmetic_must_agree():
    assert build(
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "train_batch_size": 6},
        "train.bins_per_step=6",
    )
    text = refusal({"train_micro_batch_size_per_gpu": 4}, "train.bins_per_step=2")
    assert "zero.json: train_micro_batch_size_per_gpu=4 contradicts recipe.yaml, which makes it 1" in text
    assert "gradient_accumulation_steps=5 contradicts" in refusal(
        {"gradient_accumulation_steps": 5}, "train.bins_per_step=2"
    )
    assert build(
        {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}, "train.bins_per_step=2"
    )


def test_keys_without_effect_are_refused_with_their_cure():
    text = refusal({"activation_checkpointing": {}, "communication_data_type": "fp32", "mesh_param": [1, 2]})
    assert (
        "zero.json: activation_checkpointing would do nothing here; use model.checkpointing of the recipe."
        in text
    )
    assert "precision.reduce" in text
    assert "mesh_param" in text


def test_the_json_owns_what_the_recipe_does_not_set():
    user = {
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}},
    }
    config = build(user)
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"]["lr"] == 3e-4
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    text = refusal(user, "optim.lr=1e-4", "optim.grad_clip=1.0")
    assert "zero.json: optimizer.params.lr=0.0003 contradicts recipe.yaml: optim.lr=0.0001" in text
    assert "gradient_clipping=0.5 contradicts recipe.yaml: optim.grad_clip=1.0" in text


def test_other_optimizers_get_only_what_was_asked_for():
    params = build({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "optim.lr=0.1")["optimizer"][
        "params"
    ]
    assert params == {"momentum": 0.9, "lr": 0.1}


def test_scheduler_of_the_json_against_the_recipe():
    user = {"scheduler": {"type": "WarmupLR", "params": {}}}
    assert build(user)["scheduler"] == user["scheduler"]
    assert "scheduler and recipe.yaml: optim.warmup are both set" in refusal(user, "optim.warmup=5")


def test_precision_belongs_to_the_recipe():
    assert "bf16.enabled would cast the fp32 parts" in refusal({"bf16": {"enabled": True}})
    assert build({"bf16": {"enabled": False}})["torch_autocast"]["lower_precision_safe_modules"] == []
    assert build({}, "precision.reduce=bf16")["torch_autocast"]["lower_precision_safe_modules"] == [
        "torch.nn.Linear"
    ]
    assert "torch_autocast" not in build({}, "precision.compute=fp32")
    assert "contradicts" in refusal(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "precision.compute=fp32"
    )


def test_on_a_cpu_nothing_is_compiled_for_adam():
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    config = build(user, device_type="cpu")
    assert config["optimizer"]["params"]["torch_adam"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert "torch_adam" not in build(user, device_type="cuda")["optimizer"]["params"]


def test_unreadable_json(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_ds_config(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_ds_config(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_ds_config(tmp_path / "list.json")


def test_schedules():
    optim = load_recipe(None, ["optim.schedule=cosine", "optim.warmup=10", "optim.min_lr_ratio=0.1"]).optim
    lr = build_schedule(optim, 110)
    assert lr(0) == pytest.approx(0.1)
    assert lr(9) == 1.0
    assert lr(60) == pytest.approx(0.55)
    assert lr(110) == lr(500) == pytest.approx(0.1)
    linear = build_schedule(load_recipe(None, ["optim.schedule=linear", "optim.warmup=0.1"]).optim, 100)
    assert linear(4) == pytest.approx(0.5)  # a tenth of 100 steps of warm-up
    assert linear(55) == pytest.approx(0.5)
    assert build_schedule(load_recipe(None, []).optim, 10)(3) == 1.0


def test_learning_rate_scaling_with_the_batch():
    def scaled(*overrides: str) -> float:
        recipe = load_recipe(
            None, ["optim.lr=1e-4", "train.bins_per_step=8", "optim.scale_lr_base=2", *overrides]
        )
        config = build_ds_config({}, recipe, world_size=1, device_type="cpu", names=NAMES)
        return learning_rate(config, recipe)

    assert scaled() == pytest.approx(1e-4)
    assert scaled("optim.scale_lr=linear") == pytest.approx(4e-4)
    assert scaled("optim.scale_lr=sqrt") == pytest.approx(2e-4)
