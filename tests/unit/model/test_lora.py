"""LoRA on the packed model: the stock model with the same LoRA, merged or not; and which layers get one."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.packs import KINDS, build_pair, make_pack, run_packed, run_stock
from wands.config.recipe import LoraConfig, MergeConfig
from wands.errors import ConfigError
from wands.model.files.lora_update import LoraPair, LoraUpdate
from wands.model.freezing import freeze_parameters
from wands.model.lora import ADAPTER, MergedLoras, add_lora, check_lora, find_targets, load_start
from wands.variants import Expert

LORA = LoraConfig(rank=3, alpha=6, targets="all-linear")


def random_start(model: nn.Module, lora: LoraConfig = LORA, seed: int = 2) -> dict[str, LoraPair]:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return {
        name: LoraPair(normal(lora.rank, linear.in_features), normal(linear.out_features, lora.rank))
        for name, linear in find_targets(model, lora.targets).items()
    }


def with_lora(kind: str = "t2v", dtype: torch.dtype = torch.float64):
    """The stock and the packed model with the same LoRA, and the pairs."""
    stock, packed = build_pair(torch.float32, kind)
    start = random_start(packed)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(find_targets(stock, "all-linear"))
        ),
        stock,
        adapter_name=ADAPTER,
    )
    add_lora(packed, LORA, 0, start)
    stock.load_state_dict(packed.state_dict())
    return stock.to(dtype), packed.to(dtype), start


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_stock_model(kind: str):
    stock, packed, _ = with_lora(kind)
    pack = make_pack(3, torch.float64, kind=kind)
    grads = []
    for model, output in ((stock, run_stock(stock, pack)), (packed, run_packed(packed, pack))):
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if ".lora_" in name})
    expected, found = grads
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        error = (found[name] - grad).abs().max()
        assert error <= 1e-5 * max(grad.abs().max(), 1e-3 * largest), name
    assert all(p.grad is None for name, p in packed.named_parameters() if ".lora_" not in name)


def test_merged_is_what_it_adds():
    _, packed, start = with_lora()
    _, plain = build_pair(torch.float64)
    pack = make_pack(3, torch.float64)
    # As it was given: `add_lora` brings the pair's own scale of 1 to alpha / rank.
    merged = MergedLoras([(1.0, LoraUpdate(start))])
    merged.check_fit(plain)
    plain.load_state_dict({name: merged(name, value) for name, value in plain.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(run_packed(plain, pack), run_packed(packed, pack), rtol=0, atol=1e-10)


def write_distilled(path: Path) -> dict[str, Tensor]:
    """A LoRA with full differences, as LoRAs for 4 steps have; returns what it adds to each parameter of the stock model."""
    torch.manual_seed(4)
    down = torch.randn(3, 48)
    up = torch.randn(48, 3)
    keys = {
        "blocks.0.self_attn.q.lora_down.weight": down,
        "blocks.0.self_attn.q.lora_up.weight": up,
        "blocks.0.self_attn.q.diff_b": torch.randn(48),
        "blocks.1.diff_m": torch.randn(1, 6, 48),
        "blocks.2.norm3.diff": torch.randn(48),
        "patch_embedding.diff": torch.randn(48, 4, 1, 2, 2),
    }
    save_file({f"diffusion_model.{key}": value for key, value in keys.items()}, path)
    return {
        "blocks.0.attn1.to_q.weight": up @ down,
        "blocks.0.attn1.to_q.bias": keys["blocks.0.self_attn.q.diff_b"],
        "blocks.1.scale_shift_table": keys["blocks.1.diff_m"],
        "blocks.2.norm2.weight": keys["blocks.2.norm3.diff"],
        "patch_embedding.weight": keys["patch_embedding.diff"],
    }


def test_full_differences_are_merged_too(tmp_path: Path):
    changes = write_distilled(tmp_path / "distilled.safetensors")
    stock, packed = build_pair(torch.float64)
    merges = [MergeConfig(path=str(tmp_path / "distilled.safetensors"), scale=0.5)]
    merged = MergedLoras.load(merges, Expert("", "transformer", (0.0, 1.0)))
    merged.check_fit(packed)
    packed.load_state_dict({name: merged(name, value) for name, value in packed.state_dict().items()})
    state = stock.state_dict()
    pack = make_pack(3, torch.float64)
    stock.load_state_dict(state | {name: state[name] + 0.5 * value for name, value in changes.items()})
    with torch.no_grad():
        torch.testing.assert_close(run_packed(packed, pack), run_stock(stock, pack), rtol=0, atol=1e-5)
    lora = LoraConfig(rank=3, init_from=str(tmp_path / "distilled.safetensors"))
    with pytest.raises(
        ConfigError,
        match=r"full-size updates of 4 parameters \(blocks\.0\.attn1\.to_q\.bias, .* model\.merge_loras",
    ):
        load_start(lora, Expert("", "transformer", (0.0, 1.0)))


def test_what_adds_to_fp32_is_fp32_under_autocast():
    _, packed, _ = with_lora(dtype=torch.float32)
    dtypes: dict[str, torch.dtype] = {}
    for name, module in packed.named_modules():
        if name.endswith(f"lora_B.{ADAPTER}"):
            module.register_forward_hook(lambda _, __, out, name=name: dtypes.__setitem__(name, out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        run_packed(packed, make_pack(2))
    end = f".lora_B.{ADAPTER}"
    assert dtypes["condition_embedder.time_proj" + end] == torch.float32
    assert dtypes["proj_out" + end] == torch.float32
    assert dtypes["blocks.0.attn1.to_q" + end] == torch.bfloat16


@pytest.mark.parametrize(
    ("targets", "kind", "number"),
    [
        ("attention", "t2v", 3 * 8),
        ("attention+ffn", "t2v", 3 * 10),
        ("attention", "i2v with clip", 3 * 10),
        ("all-linear", "t2v", 3 * 10 + 6),
        (["blocks.*.attn1.to_[qk]", "proj_out"], "t2v", 3 * 2 + 1),
    ],
)
def test_targets(targets: str | list[str], kind: str, number: int):
    _, packed = build_pair(kind=kind)
    lora = LoraConfig(rank=2, targets=targets)
    assert len(find_targets(packed, targets)) == number
    count = check_lora(packed, lora)
    add_lora(packed, lora, 0)
    trained = [name for name, p in packed.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * number
    assert all(".lora_" in name for name in trained)
    assert sum(p.numel() for p in packed.parameters() if p.requires_grad) == count


def test_a_new_lora_changes_nothing_yet_and_starts_alike_everywhere():
    pack = make_pack(2)
    models = []
    for _ in range(2):
        torch.manual_seed(len(models))
        _, packed = build_pair()
        before = run_packed(packed, pack)
        add_lora(packed, LORA, seed=4)
        assert torch.equal(run_packed(packed, pack), before)
        models.append(packed.state_dict())
    first, second = models
    assert all(torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize(
    ("patterns", "words"),
    [(["blocks.*.attn3.*"], "matches no linear layer"), (["blocks.0.norm2"], "matches no linear")],
)
def test_targets_that_fit_nothing(patterns: list[str], words: str):
    _, packed = build_pair()
    with pytest.raises(ConfigError, match=words):
        check_lora(packed, LoraConfig(rank=2, targets=patterns))


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (
            LoraUpdate({"blocks.0.attn1.to_q": LoraPair(torch.zeros(2, 7), torch.zeros(48, 2))}),
            r"blocks\.0\.attn1\.to_q\.weight of shape \[48, 7\], but this parameter has shape \[48, 48\]",
        ),
        (LoraUpdate({}, {"patch_embedding.bias": torch.zeros(9)}), r"patch_embedding\.bias of shape \[9\]"),
        (
            LoraUpdate({}, {"blocks.9.norm2.bias": torch.zeros(48)}),
            r"1 parameters .* not have \(blocks\.9\.norm2",
        ),
    ],
)
def test_a_lora_of_another_model_is_not_merged(update: LoraUpdate, words: str):
    _, packed = build_pair()
    with pytest.raises(ConfigError, match=words):
        MergedLoras([(1.0, update)]).check_fit(packed)


# ---- freezing


def test_patterns_choose_what_is_trained():
    _, packed = build_pair()
    count = freeze_parameters(packed, ["blocks.*.attn1.*", "proj_out.*"], ["*.bias"])
    trained = {name for name, p in packed.named_parameters() if p.requires_grad}
    assert len(trained) == count == 3 * (4 + 2) + 1
    assert "proj_out.weight" in trained
    run_packed(packed, make_pack(2)).sum().backward()
    for name, parameter in packed.named_parameters():
        assert (parameter.grad is not None) == (name in trained), name


@pytest.mark.parametrize(
    ("trainable", "frozen", "words"),
    [
        (["attn1.*"], [], r"model\.trainable=attn1\.\* matches none"),
        ([], ["blocks.7.*"], r"model\.freeze=blocks\.7\.\* matches none"),
        (["proj_out.*"], ["*"], "freezes all parameters"),
    ],
)
def test_patterns_that_are_mistakes(trainable: list[str], frozen: list[str], words: str):
    _, packed = build_pair()
    with pytest.raises(ConfigError, match=words):
        freeze_parameters(packed, trainable, frozen)
