"""LoRA files of every trainer's keys, against diffusers' own readers; `lora` is one of every linear layer of a model."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_musubi_wan_lora_to_diffusers,
    _convert_non_diffusers_wan_lora_to_diffusers,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from tests.support.packs import CONFIG, KINDS
from wands.errors import CheckpointError
from wands.model.files.lora_files import (
    is_lora,
    lora_tensors,
    parse_lora,
    peft_settings,
    read_lora_file,
)
from wands.model.files.lora_update import LoraPair
from wands.model.files.name_maps import DIT
from wands.model.files.tensor_files import TensorFiles

RANK = 4


def make_lora(kind: str = "i2v with clip", only: str = "") -> dict[str, LoraPair]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = WanTransformer3DModel(**(CONFIG | KINDS[kind]))
    return {
        name: LoraPair(
            torch.randn(RANK, module.in_features, generator=generator),
            torch.randn(module.out_features, RANK, generator=generator),
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(only, name)
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("kind", ["t2v", "i2v with clip"])
def test_comfyui_keys_are_read_by_diffusers(kind: str):
    lora = make_lora(kind)
    keys = lora_tensors(lora, "comfyui")
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in keys
    assert "diffusion_model.head.head.lora_B.weight" in keys
    assert is_lora(keys)
    expected = lora_tensors(lora)
    assert_same(_convert_non_diffusers_wan_lora_to_diffusers(dict(keys)), expected)
    assert_same(lora_tensors(parse_lora(keys)["transformer"].pairs), expected)


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key,  # ComfyUI's
        lambda key: key.removeprefix("diffusion_model."),  # official Wan's
        lambda key: key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),  # kohya's halves
        lambda key: (
            key.removeprefix("diffusion_model.")
            .replace("lora_A.", "lora_A.default.")
            .replace("lora_B.", "lora_B.default.")
        ),
        lambda key: f"model.{key}",
    ],
)
def test_official_modules_under_any_prefix(rename):
    lora = make_lora()
    found = parse_lora({rename(key): value for key, value in lora_tensors(lora, "comfyui").items()})
    assert_same(lora_tensors(found["transformer"].pairs), lora_tensors(lora))


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", ""])
@pytest.mark.parametrize("adapter", ["", ".default", ".my-style"])
def test_diffusers_modules_under_any_prefix(prefix: str, adapter: str):
    lora = make_lora()
    keys = {
        f"{prefix}{module}.lora_{half}{adapter}.weight": value
        for module, pair in lora.items()
        for half, value in (("A", pair.lora_A), ("B", pair.lora_B))
    }
    assert_same(lora_tensors(parse_lora(keys)["transformer"].pairs), lora_tensors(lora))


def with_alpha(keys: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    return keys | {
        key.replace(".lora_A.weight", ".alpha"): torch.tensor(alpha) for key in keys if "lora_A" in key
    }


def deltas(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: state[key.replace("lora_A", "lora_B")].double() @ value.double()
        for key, value in state.items()
        if "lora_A" in key
    }


def test_alpha_of_a_file_is_the_scale_that_diffusers_reads():
    """diffusers spreads alpha / rank over both halves, wands puts it into lora_B: the product is the same."""
    keys = with_alpha(lora_tensors(make_lora(only="blocks"), "comfyui"), 6.0)
    ours = deltas(lora_tensors(parse_lora(keys)["transformer"].pairs))
    theirs = deltas(_convert_non_diffusers_wan_lora_to_diffusers(dict(keys)))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6)
    ignored = deltas(
        lora_tensors(parse_lora({k: v for k, v in keys.items() if "alpha" not in k})["transformer"].pairs)
    )
    assert not torch.allclose(next(iter(ignored.values())), next(iter(theirs.values())), rtol=1e-2)


def test_musubi_keys():
    lora = make_lora("i2v with clip", only="blocks")
    keys = {
        re.sub(
            r"^diffusion_model\.(.*)\.(lora_\w+\.weight|alpha)$",
            lambda m: f"lora_unet_{m[1].replace('.', '_')}.{m[2]}",
            key,
        )
        .replace("lora_A", "lora_down")
        .replace("lora_B", "lora_up"): value
        for key, value in with_alpha(lora_tensors(lora, "comfyui"), 2.0).items()
    }
    assert "lora_unet_blocks_0_cross_attn_k_img.lora_down.weight" in keys
    ours = deltas(lora_tensors(parse_lora(keys)["transformer"].pairs))
    theirs = deltas(_convert_musubi_wan_lora_to_diffusers(copy.copy(keys)))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value)  # alpha / rank is a power of two


def test_two_experts_in_one_file():
    high = make_lora(only=r"to_q")
    low = make_lora(only=r"to_k")
    low_keys = {key.replace("transformer.", "transformer_2."): v for key, v in lora_tensors(low).items()}
    keys = lora_tensors(high) | low_keys
    found = parse_lora(keys)
    assert found["transformer"].pairs.keys() == high.keys()
    assert found["transformer_2"].pairs.keys() == low.keys()
    for expert, pairs in {"transformer": high, "transformer_2": low}.items():
        assert_same(lora_tensors(found[expert].pairs), lora_tensors(pairs))


def test_folding_is_exact_for_powers_of_two_and_close_otherwise():
    pair = next(iter(make_lora().values()))
    for scale, exact in ((0.5, True), (1.0, True), (1.7, False)):
        scaled = LoraPair(pair.lora_A, pair.lora_B, scale)
        folded = scaled.folded()
        assert folded.scale == 1.0
        assert torch.equal(folded.delta(), scaled.delta()) or not exact
        torch.testing.assert_close(folded.delta(), scaled.delta(), rtol=1e-6, atol=1e-6)


def test_alpha_in_the_metadata():
    found = peft_settings(
        {"lora_adapter_metadata": '{"transformer.lora_alpha": 8, "transformer.r": 4}'}, Path("x")
    )
    assert found == {"transformer": {"lora_alpha": 8, "r": 4}}
    assert peft_settings({}, Path("x")) == peft_settings({"format": "pt"}, Path("x")) == {}
    lora = make_lora(only="to_q")
    scales = {p.scale for p in parse_lora(lora_tensors(lora), settings=found)["transformer"].pairs.values()}
    assert scales == {8.0 / RANK}
    with pytest.raises(CheckpointError, match=r"uses DoRA \(use_dora\)"):
        peft_settings({"lora_adapter_metadata": '{"transformer.use_dora": true}'}, Path("x"))
    with pytest.raises(CheckpointError, match="is not a JSON"):
        peft_settings({"lora_adapter_metadata": "{"}, Path("x"))


def test_alpha_beside_peft_s_file(tmp_path: Path):
    """PEFT says alpha in another file; who does not look there loads every LoRA at the wrong strength."""
    file = tmp_path / "adapter_model.safetensors"
    config = tmp_path / "adapter_config.json"
    config.write_text('{"lora_alpha": 16, "r": 4, "use_dora": false, "alpha_pattern": {}}')
    assert peft_settings({"format": "pt"}, file)["transformer"]["lora_alpha"] == 16
    assert peft_settings({"format": "pt"}, tmp_path / "other.safetensors") == {}
    config.write_text("[]")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not a JSON object"):
        peft_settings({}, file)


@pytest.mark.parametrize("extra", [{}, {"use_rslora": True}, {"alpha_pattern": {"blocks.1.attn2.to_q": 20}}])
def test_peft_s_settings_give_the_update_of_peft(extra: dict, tmp_path: Path):
    model = WanTransformer3DModel(**CONFIG)
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=6, target_modules=["to_q"], **extra))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(tmp_path)
    files = TensorFiles([tmp_path / "adapter_model.safetensors"], "SOURCE")
    pairs = read_lora_file(files)["transformer"].pairs
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert len(layers) == len(pairs) == 6
    for name, layer in layers.items():
        torch.testing.assert_close(
            pairs[name].delta().float(), layer.get_delta_weight("default"), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("rank_and_alpha", [(4, 4.0), (4, 2.0), (4, 3.0)])
def test_written_musubi_keys_are_read_by_diffusers_and_back(rank_and_alpha: tuple[int, float]):
    rank, alpha = rank_and_alpha
    pairs = {
        name: LoraPair(pair.lora_A, pair.lora_B, alpha / rank)
        for name, pair in make_lora(only="blocks").items()
    }
    keys = lora_tensors(pairs, "musubi")
    assert "lora_unet_blocks_0_cross_attn_k_img.lora_down.weight" in keys
    assert len(keys) == 3 * len(pairs)
    theirs = deltas(_convert_musubi_wan_lora_to_diffusers(dict(keys)))
    for name, pair in parse_lora(keys)["transformer"].pairs.items():
        assert pair.scale == alpha / rank
        assert torch.equal(pair.lora_A, pairs[name].lora_A)
        assert torch.equal(pair.lora_B, pairs[name].lora_B)
        torch.testing.assert_close(
            theirs.pop(f"transformer.{name}.lora_A.weight"), pair.delta(), rtol=1e-5, atol=1e-6
        )
    assert not theirs


DIFFERENCES = {  # key of ComfyUI or LightX2V -> parameter of the stock model
    "patch_embedding.diff": "patch_embedding.weight",
    "patch_embedding.diff_b": "patch_embedding.bias",
    "time_projection.1.diff_b": "condition_embedder.time_proj.bias",
    "img_emb.proj.0.diff": "condition_embedder.image_embedder.norm1.weight",
    "img_emb.emb_pos.diff": "condition_embedder.image_embedder.pos_embed",
    "head.head.diff": "proj_out.weight",
    "head.diff_m": "scale_shift_table",
    "blocks.0.diff_m": "blocks.0.scale_shift_table",
    "blocks.1.modulation.diff": "blocks.1.scale_shift_table",
    "blocks.0.norm3.w_norm": "blocks.0.norm2.weight",
    "blocks.0.norm3.b_norm": "blocks.0.norm2.bias",
    "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
    "blocks.0.self_attn.q.diff_b": "blocks.0.attn1.to_q.bias",
}


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_", "lora_unet__", "transformer_2."])
def test_full_differences_are_read_under_any_prefix(prefix: str):
    values = {key: torch.full((1,), float(i)) for i, key in enumerate(DIFFERENCES)}
    state = {}
    for key, value in values.items():
        stem, _, suffix = key.rpartition(".")
        state[f"{prefix}{stem.replace('.', '_') if 'unet' in prefix else stem}.{suffix}"] = value
    update = parse_lora(state)["transformer_2" if prefix == "transformer_2." else "transformer"]
    assert not update.pairs
    assert update.differences == {name: values[key] for key, name in DIFFERENCES.items()}
    written = lora_tensors({}, "comfyui", update.differences)
    assert "diffusion_model.blocks.0.modulation.diff" in written  # ComfyUI does not read .diff_m
    assert parse_lora(written)["transformer"].differences == update.differences


@pytest.mark.parametrize(
    ("suffix", "method"),
    [
        ("dora_scale", "DoRA"),
        ("lora_magnitude_vector.default.weight", "DoRA"),
        ("lokr_w1", "LoKr"),
        ("hada_w1_a", "LoHa"),
        ("oft_blocks", "OFT"),
        ("lora_mid.weight", "Tucker decomposition"),
        ("set_weight", "replaced weights"),
    ],
)
def test_another_method_is_refused_by_name(suffix: str, method: str):
    key = f"diffusion_model.blocks.0.self_attn.q.{suffix}"
    assert is_lora([key])
    keys = lora_tensors(make_lora(only="to_q"), "comfyui") | {key: torch.ones(4, 1)}
    with pytest.raises(CheckpointError) as caught:
        parse_lora(keys, where="--lora=a.safetensors")
    assert str(caught.value) == (
        f"--lora=a.safetensors uses {method} ({key}), which wands cannot apply. Use a plain LoRA, or merge the file into the "
        "model with the program that made the file."
    )


@pytest.mark.parametrize(
    ("prefix", "names", "halves"),
    [
        ("lycoris_", str, ("lora_down.weight", "lora_up.weight")),
        ("lycoris_", DIT.to_official, ("lora_down.weight", "lora_up.weight")),
        ("lora_transformer_", str, ("lora_down.weight", "lora_up.weight")),
        ("pipe.dit.", DIT.to_official, ("lora_A.default.weight", "lora_B.default.weight")),
        ("pipe.dit.", str, ("lora_A.weight", "lora_B.weight")),
    ],
)
def test_names_of_more_programs_are_plain_loras(
    prefix: str, names: Callable[[str], str], halves: tuple[str, str]
):
    lora = make_lora(only="blocks")
    keys = {}
    for module, pair in lora.items():
        name = names(module).replace(".", "_") if prefix.endswith("_") else names(module)
        keys |= {f"{prefix}{name}.{halves[0]}": pair.lora_A, f"{prefix}{name}.{halves[1]}": pair.lora_B}
    assert is_lora(keys)
    assert_same(lora_tensors(parse_lora(keys)["transformer"].pairs), lora_tensors(lora))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "lora_ga"])
@pytest.mark.parametrize("place", ["metadata", "adapter_config.json"])
def test_a_lora_that_starts_with_a_part_of_the_base_is_refused(init: str, place: str, tmp_path: Path):
    """Its matrices fit the base without this part, so that they are not an update of the whole base."""
    metadata = {}
    settings = {"lora_alpha": 4, "init_lora_weights": init}
    if place == "metadata":
        metadata["lora_adapter_metadata"] = json.dumps({f"transformer.{k}": v for k, v in settings.items()})
    else:
        (tmp_path / place).write_text(json.dumps(settings))
    save_file(lora_tensors(make_lora(only="to_q")), tmp_path / "adapter_model.safetensors", metadata)
    with pytest.raises(
        CheckpointError, match=rf"uses init_lora_weights={init}, which wands cannot apply\. Use"
    ):
        read_lora_file(TensorFiles([tmp_path / "adapter_model.safetensors"], "SOURCE"))


def test_peft_s_olora_moves_a_part_of_the_base_and_its_other_methods_do_not(tmp_path: Path):
    """As PEFT itself does it."""
    for init, is_plain in {"olora": False, "pissa": False, "gaussian": True, "orthogonal": True}.items():
        model = WanTransformer3DModel(**CONFIG)
        before = model.blocks[0].attn1.to_q.weight.clone()
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q"], init_lora_weights=init)
        peft = get_peft_model(model, config)
        assert torch.equal(model.blocks[0].attn1.to_q.base_layer.weight, before) == is_plain
        peft.save_pretrained(tmp_path / init)
        files = TensorFiles([tmp_path / init / "adapter_model.safetensors"], "SOURCE")
        if is_plain:
            assert read_lora_file(files)
        else:
            with pytest.raises(CheckpointError, match=f"uses init_lora_weights={init}"):
                read_lora_file(files)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_by_name(value: float, dtype: torch.dtype, tmp_path: Path):
    keys = {key: tensor.to(dtype) for key, tensor in lora_tensors(make_lora(only="to_q")).items()}
    bad = sorted(keys)[3]
    keys[bad][1, 2] = value
    save_file(keys, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_lora_file(TensorFiles([tmp_path / "a.safetensors"], "--lora=folder"))
    assert str(caught.value).startswith("--lora=folder: ")
    assert f"a.safetensors has NaN or infinite values in {bad}" in str(caught.value)


TENSORS = [torch.ones(2), torch.ones(0), torch.ones(1, 2)]
VALUES = [[4.0], "4", {}, float("nan"), float("inf")]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tensor": value} for value in TENSORS),
        *({"lora_alpha": value} for value in VALUES),
        *({"alpha_pattern": {"to_q": value}} for value in VALUES),
    ],
)
def test_an_alpha_that_is_not_one_number_is_refused(wrong: dict):
    settings = dict(wrong)
    keys = lora_tensors(make_lora(only="to_q"))
    if "tensor" in settings:
        keys["transformer.blocks.0.attn1.to_q.alpha"] = settings.pop("tensor")
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors: the alpha of blocks\.\S+to_q is .* not one number"
    ):
        parse_lora(keys, settings={"transformer": settings}, where="a.safetensors")


def test_settings_that_are_no_settings_are_refused():
    for settings in ({"transformer.alpha_pattern": [1]}, {"transformer.alpha_pattern": "x"}):
        with pytest.raises(CheckpointError, match="alpha_pattern is not a JSON object"):
            peft_settings({"lora_adapter_metadata": json.dumps(settings)}, Path("x"))
    keys = lora_tensors(make_lora(only="to_q"))
    wrong = {"transformer": {"alpha_pattern": {"(": 4}}}
    with pytest.raises(CheckpointError, match="alpha_pattern contains a wrong pattern"):
        parse_lora(keys, settings=wrong)
    empty = {key: tensor[:0] if "lora_A" in key else tensor[:, :0] for key, tensor in keys.items()}
    with pytest.raises(CheckpointError, match=r"lora_A \[0, 48\] and lora_B \[48, 0\], which do not fit"):
        parse_lora(empty)


def broken(change) -> dict[str, Tensor]:
    keys = lora_tensors(make_lora(only="to_q"), "comfyui")
    change(keys)
    return keys


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda keys: keys.update({"diffusion_model.blocks.0.norm9.diff": torch.zeros(3)}),
            r"Unknown keys: .*norm9\.diff",
        ),
        (
            lambda keys: keys.update({"diffusion_model.blocks.0.norm3.alpha": torch.tensor(3.0)}),
            r"lacks lora_A or lora_B of 1 modules \(transformer\.blocks\.0\.norm2",
        ),
        (
            lambda keys: keys.clear(),
            r"Unknown keys: none, because the file is empty",
        ),
        (
            lambda keys: keys.update({"text.layers.0.q.lora_A.weight": torch.zeros(3, 3)}),
            r"Unknown keys: .*text\.layers",
        ),
        (
            lambda keys: keys.pop("diffusion_model.blocks.0.self_attn.q.lora_A.weight"),
            r"lacks lora_A or lora_B of 1 modules",
        ),
        (
            lambda keys: keys.update(
                {"diffusion_model.blocks.0.self_attn.q.lora_A.weight": torch.zeros(3, 48)}
            ),
            r"lora_A \[3, 48\] and lora_B \[48, 4\], which do not fit",
        ),
        (
            lambda keys: keys.update({"blocks.0.self_attn.q.lora_A.b.weight": torch.zeros(4, 48)}),
            r"several LoRAs for the same modules",
        ),
    ],
)
def test_what_is_no_lora_of_wan_is_named(change, says: str):
    with pytest.raises(CheckpointError, match=says):
        parse_lora(broken(change), where="a.safetensors")
