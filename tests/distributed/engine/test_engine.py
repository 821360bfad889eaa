"""Keys of the DeepSpeed JSON and keys of the recipe; schedules; nothing silently ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.runs import make_run, model_of
from tests.support.steps import zero
from tests.support.world import WorldPool
from wands.config.deepspeed import build_ds_config, learning_rate, load_ds_config
from wands.config.deepspeed_rules import KNOWN_KEYS, UNUSED_KEYS
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine import engine
from wands.engine.engine import build_schedule, check_offload
from wands.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
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
    assert (
        "zero.json: train_micro_batch_size_per_gpu=4 contradicts recipe.yaml, which needs the value 1" in text
    )
    assert "gradient_accumulation_steps=5 contradicts" in refusal(
        {"gradient_accumulation_steps": 5}, "train.bins_per_step=2"
    )
    assert build(
        {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}, "train.bins_per_step=2"
    )


def test_keys_without_effect_are_refused_with_their_cure():
    text = refusal({"activation_checkpointing": {}, "communication_data_type": "fp32", "mesh_param": [1, 2]})
    assert (
        "zero.json: activation_checkpointing is not supported by wands; use model.checkpointing of the recipe."
        in text
    )
    assert "precision.reduce" in text
    assert "mesh_param" in text


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param has no effect at ZeRO stage 2",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer has no effect at ZeRO stage 0",
        ),
        (
            {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
            "round_robin_gradients=true stores",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "compute_grad_norm=false leaves out the norm",
        ),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}},
            "zero_hpz_partition_size and zero_quantized_weights has no effect at ZeRO stage 2; use stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_quantized_gradients=true reads gradients as fp16, but wands has fp32 or bf16 gradients",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            "warmup_num_steps=auto is not supported by wands",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-4}}},
            "optimizer.params.lrr is not a key of AdamW; did you mean lr?",
        ),
    ],
)
def test_what_deepspeed_would_pass_over_or_trip_on(user: dict[str, Any], said: str):
    assert said in refusal(user)


def test_what_zero_plus_plus_needs():
    """Quantized weights need a GPU; groups of ranks with a second copy of the weights have equal sizes."""
    recipe = load_recipe(None, ("train.bins_per_step=12",))

    def merged(key: str, value: Any, device_type: str) -> Any:
        user = {"zero_optimization": {"stage": 3, key: value}}
        return build_ds_config(user, recipe, world_size=12, device_type=device_type)["zero_optimization"][key]

    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        assert merged(key, True, "cuda") is True
        with pytest.raises(ConfigError, match=f"{key} need a GPU|{key} and .* need a GPU"):
            merged(key, True, "cpu")
    assert [merged("zero_hpz_partition_size", size, "cpu") for size in (1, 4, 6, 16)] == [1, 4, 6, 16]
    with pytest.raises(ConfigError, match=r"=8 must divide the number of processes \(12\)"):
        merged("zero_hpz_partition_size", 8, "cuda")


def test_offload_that_does_nothing_may_be_spelt_out():
    none = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
    assert build({"zero_optimization": {"stage": 0, **none}})
    assert build({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})


def test_the_json_owns_what_the_recipe_does_not_set():
    user = {
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.2}},
    }
    config = build(user)
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"]["lr"] == 3e-4
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    text = refusal(user, "optim.lr=1e-4", "optim.grad_clip=2.0")
    assert "zero.json: optimizer.params.lr=0.0003 contradicts recipe.yaml: optim.lr=0.0001" in text
    assert "gradient_clipping=0.5 contradicts recipe.yaml: optim.grad_clip=2.0" in text


def test_other_optimizers_get_only_what_was_asked_for():
    params = build({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "optim.lr=0.1")["optimizer"][
        "params"
    ]
    assert params == {"momentum": 0.9, "lr": 0.1}


def test_scheduler_of_the_json_against_the_recipe():
    user = {"scheduler": {"type": "WarmupLR", "params": {}}}
    assert build(user)["scheduler"] == user["scheduler"]
    for key in ("warmup=5", "lr=1e-4", "scale_lr=linear", "scale_lr_base=4"):
        said = f"scheduler and recipe.yaml: optim.{key.partition('=')[0]} are both set"
        assert said in refusal(user, f"optim.{key}")
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}, **user}
    recipe = load_recipe(None, ["optim.scale_lr=linear", "train.bins_per_step=8"])
    assert learning_rate(config, recipe) == 2e-4


def test_precision_belongs_to_the_recipe():
    assert "bf16.enabled would also cast the layers" in refusal({"bf16": {"enabled": True}})
    assert build({"bf16": {"enabled": False}})["torch_autocast"]["lower_precision_safe_modules"] == []
    assert build({}, "precision.reduce=bf16")["torch_autocast"]["lower_precision_safe_modules"] == [
        "torch.nn.Linear"
    ]
    assert "torch_autocast" not in build({}, "precision.compute=fp32")
    assert "contradicts" in refusal(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "precision.compute=fp32"
    )


OFFLOAD = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def test_nothing_is_compiled_for_adam():
    def params(user: dict[str, Any], device_type: str) -> dict[str, Any]:
        return build(user, device_type=device_type)["optimizer"]["params"]

    assert params(OFFLOAD, "cpu")["torch_adam"] is True
    assert "fused" not in params(OFFLOAD, "cpu")
    assert build(OFFLOAD, device_type="cpu")["zero_force_ds_cpu_optimizer"] is False
    gpu = params({}, "cuda")
    assert (gpu.pop("torch_adam"), gpu["fused"]) == (True, True)
    # DeepSpeed hands the rest to torch together with foreach=None.
    assert torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **gpu, foreach=None).defaults["fused"]
    host = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}}
    assert params(host, "cuda")["torch_adam"] is True
    assert "torch_adam" not in params(OFFLOAD, "cuda")


@pytest.mark.parametrize(
    "own",
    [{"torch_adam": False}, {"torch_adam": True, "fused": False}, {"torch_adam": True, "foreach": True}],
)
def test_the_users_choice_of_adam_stands(own: dict[str, Any]):
    params = build({"optimizer": {"type": "Adam", "params": own}})["optimizer"]["params"]
    assert {key: params[key] for key in ("torch_adam", "fused", "foreach") if key in params} == own


def test_bias_correction_is_a_switch_of_deepspeeds_adam():
    params = build({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}})["optimizer"][
        "params"
    ]
    assert "torch_adam" not in params


def test_an_adam_that_does_not_build_is_refused_early(monkeypatch: pytest.MonkeyPatch):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def load(self: Any, verbose: bool = True) -> None:
        raise RuntimeError("no\n  nvcc")

    monkeypatch.setattr(CPUAdamBuilder, "load", load)
    with pytest.raises(ConfigError, match=r"does not compile on this machine \(no nvcc\); install ninja"):
        check_offload(build(OFFLOAD))
    check_offload(build({}))
    check_offload(build(OFFLOAD, device_type="cpu"))
    torch_adam = {**OFFLOAD, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    check_offload(build(torch_adam))
    assert build(torch_adam)["zero_force_ds_cpu_optimizer"] is False


def test_misspelt_keys_are_refused():
    text = refusal({"zero_optimisation": {"stage": 3}, "gradient_cliping": 1.0, "quux": 1})
    assert (
        "zero.json: zero_optimisation is not a key of a DeepSpeed config; did you mean zero_optimization?"
        in text
    )
    assert "gradient_cliping is not a key of a DeepSpeed config; did you mean gradient_clipping?" in text
    assert "quux is not a key of a DeepSpeed config; use one of zero_optimization, " in text


@pytest.mark.parametrize("key", sorted(UNUSED_KEYS))
def test_each_idle_key_is_refused(key: str):
    assert f"zero.json: {key} is not supported by wands; {UNUSED_KEYS[key]}." in refusal({key: {}})


def test_deepspeed_reads_every_key_that_is_let_through():
    import inspect

    import deepspeed.monitor.config
    from deepspeed.comm import constants as comm
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime import constants
    from deepspeed.runtime.swap_tensor import constants as swap
    from deepspeed.runtime.zero import config as zero
    from deepspeed.utils import config as timers

    modules = (constants, comm, profiling, swap, zero, timers, deepspeed.monitor.config)
    source = "".join(map(inspect.getsource, modules)).replace("'", '"')
    assert [key for key in KNOWN_KEYS if f'"{key}"' not in source] == []


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            {"optimizer": {"params": {}}},
            "optimizer.type must be a name; set optimizer.type, for example to AdamW",
        ),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params=3 must be an object"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}},
            'optimizer.params.lr="fast" must be a number',
        ),
        ({"optimizer": None}, "optimizer=null must be an object"),
        ({"scheduler": {"params": {}}}, "scheduler.type must be a name; set scheduler.type"),
        ({"bf16": True}, "bf16=true must be an object"),
        ({"gradient_clipping": True}, "gradient_clipping=true must be a number"),
        ({"train_batch_size": "2"}, 'train_batch_size="2" must be a whole number'),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown=1 must be true or false"),
        ({"zero_optimization": 3}, "zero_optimization=3 must be an object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: Input should be 0, 1, 2"),
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag: unknown key of a DeepSpeed config"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}},
            "zero_optimization.offload_optimizer.device: Input should be 'none', 'cpu' or 'nvme'",
        ),
    ],
)
def test_wrong_types_join_the_one_report(user: dict[str, Any], said: str):
    text = refusal({**user, "amp": {}, "gradient_accumulation_steps": 7})
    assert f"zero.json: {said}" in text
    assert "amp is not supported by wands" in text
    assert "gradient_accumulation_steps=7 contradicts" in text
    assert len(text.splitlines()) == 4
    assert text.startswith("3 problems:\n")


def test_zero_3s_weights_are_their_own_masters_where_they_are_the_same():
    here = torch.ones(4)
    there = torch.ones(4)
    narrow = torch.ones(4, dtype=torch.bfloat16)
    swapped = torch.empty(0)  # what DeepSpeed keeps of masters on NVMe
    masters = [torch.ones(4) for _ in range(3)] + [swapped]
    optimizer = SimpleNamespace(
        fp16_partitioned_groups_flat=[here, None, narrow, there], fp32_partitioned_groups_flat=masters
    )
    engine._share_masters(optimizer)
    masters[0].add_(1)
    assert here.tolist() == [2.0] * 4
    assert masters[1].tolist() == masters[2].tolist() == [1.0] * 4
    assert masters[2].dtype == torch.float32
    assert len(swapped) == 0
    assert there.tolist() == [1.0] * 4


def shards_of_two_experts(*args: Any) -> list[int]:
    run = make_run(*args)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(run.grid(rank), device)
    models = [model_of(run, groups, device, expert) for expert in run.model.experts]
    weights = [next(p for p in model.parameters() if not p.requires_grad) for model in models]
    torch.nn.functional.linear = _LINEAR  # ZeRO-3 puts its own in the place of torch's
    return [weight.ds_zero_param_process_group.size() for weight in weights]


_LINEAR = torch.nn.functional.linear


@pytest.mark.slow
def test_two_experts_have_shards_inside_a_node(
    tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
):
    """DeepSpeed makes the groups of zero_hpz_partition_size only once."""
    args = tiny_variant("wan2.2-t2v-a14b"), tmp_path, ("lora.rank=2",), zero(3, zero_hpz_partition_size=2)
    assert worlds[2].run(shards_of_two_experts, *args) == [[2, 2], [2, 2]]


def test_auto_is_as_good_as_no_key():
    user = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": "auto",
        "bf16": {"enabled": "auto"},
    }
    config = build(user)
    assert config["zero_optimization"] == {"stage": 3}
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert "scheduler" not in config


@pytest.mark.parametrize(
    "overrides", [(), ("precision.compute=fp32", "precision.reduce=bf16", "optim.lr=3e-4")]
)
def test_a_run_repeats_from_its_own_files(tmp_path: Path, overrides: tuple[str, ...]):
    user = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9]}},
        "gradient_clipping": 0.5,
    }
    recipe = load_recipe(None, ("train.bins_per_step=8", *overrides))
    first = build_ds_config(user, recipe, world_size=2, device_type="cuda", names=NAMES)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    (tmp_path / "deepspeed.json").write_text(json.dumps(first))
    again = load_recipe(str(tmp_path / "recipe.yaml"), [])
    loaded = load_ds_config(tmp_path / "deepspeed.json")
    for theirs in (user, loaded):
        assert build_ds_config(theirs, again, world_size=2, device_type="cuda", names=NAMES) == first


def test_accumulation_without_packing():
    recipe = ("packing.enabled=false", "train.bins_per_step=8")
    for legal in (
        {"gradient_accumulation_steps": 4},
        {"train_batch_size": 8},
        {"gradient_accumulation_steps": 1},
    ):
        assert build(legal, *recipe)["gradient_accumulation_steps"] == 1
    text = refusal({"gradient_accumulation_steps": 3}, *recipe)
    assert "=3 contradicts recipe.yaml, which needs the value 4 (train.bins_per_step=8 / dp_size=2)" in text


def test_unreadable_json(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_ds_config(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(
        ConfigError,
        match=r"bad\.json cannot be read \(Expecting property name.*; pass the path of a JSON file",
    ):
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
