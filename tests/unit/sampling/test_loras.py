"""`add_loras`: each part of a foreign LoRA file gives what the same differences in the state dict of the stock DiT give."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from tests.support.packs import CONFIG, randomize
from wands.errors import ConfigError
from wands.sampling.loras import add_loras, find_loras

INPUTS = {
    "hidden_states": torch.randn(1, 4, 1, 4, 4, generator=torch.Generator().manual_seed(1)),
    "timestep": torch.tensor([500.0]),
    "encoder_hidden_states": torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(2)),
}
PARTS = {  # keys of a file without the prefix -> parameter of the stock model that they change
    "norm": (
        {"blocks.1.norm3.diff": "blocks.1.norm2.weight", "blocks.1.norm3.diff_b": "blocks.1.norm2.bias"}
    ),
    "norm of q and k": {
        "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "blocks.2.cross_attn.norm_k.diff": "blocks.2.attn2.norm_k.weight",
    },
    "patch embedding": {
        "patch_embedding.diff": "patch_embedding.weight",
        "patch_embedding.diff_b": "patch_embedding.bias",
    },
    "modulation of a block": {"blocks.1.diff_m": "blocks.1.scale_shift_table"},
    "modulation as ComfyUI reads it": {"blocks.1.modulation.diff": "blocks.1.scale_shift_table"},
    "modulation of the head": {"head.diff_m": "scale_shift_table"},
    "bias of one module only": {"blocks.0.self_attn.q.diff_b": "blocks.0.attn1.to_q.bias"},
    "time projection without a pair": {"time_projection.1.diff_b": "condition_embedder.time_proj.bias"},
    "head without a bias": {"head.head.diff": "proj_out.weight"},
}
LINEAR = {
    "blocks.0.self_attn.q": "blocks.0.attn1.to_q",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
}


def build() -> WanPipeline:
    torch.manual_seed(0)
    model = WanTransformer3DModel(**CONFIG).eval()
    randomize(model)
    return WanPipeline(None, None, None, None, model)


def predict(pipeline: WanPipeline) -> Tensor:
    with torch.no_grad():
        return pipeline.transformer(**INPUTS, return_dict=False)[0]


def add(
    pipeline: WanPipeline, path: Path, state: dict[str, Tensor], prefix: str = "diffusion_model."
) -> None:
    save_file({prefix + key: value for key, value in state.items()}, path)
    add_to_one_dit(pipeline, [f"{path}=0.7"])


def add_to_one_dit(pipeline: WanPipeline, paths: list[str]) -> None:
    add_loras(pipeline, [lora.assigned(two_experts=False) for lora in find_loras(paths)])


def normal(*shape: int) -> Tensor:
    return 0.3 * torch.randn(*shape)


def linear_pairs(
    sizes: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A LoRA of two layers with alpha, one of them outside the blocks; and the differences that it is."""
    state = {}
    changes = {}
    for name, module in LINEAR.items():
        rows, columns = sizes[f"{module}.weight"].shape
        down = normal(4, columns).to(dtype)
        up = normal(rows, 4).to(dtype)
        state |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.alpha": torch.tensor(3.0),
        }
        changes[f"{module}.weight"] = 3 / 4 * up.float() @ down.float()
    return state, changes


def expected(changes: dict[str, Tensor], scale: float = 0.7) -> Tensor:
    """Add the differences to the state dict of the stock model."""
    stock = build()
    state = stock.transformer.state_dict()
    stock.transformer.load_state_dict(
        state | {name: state[name] + scale * value for name, value in changes.items()}
    )
    return predict(stock)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "part", [*PARTS, "pairs with alpha", "pairs in bf16", "convolution", "bias of lora_B", "everything"]
)
def test_a_part_is_the_merged_part(part: str, tmp_path: Path):
    pipeline = build()
    torch.manual_seed(3)
    sizes = pipeline.transformer.state_dict()
    state: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for keys in PARTS.values() if part == "everything" else [PARTS.get(part, {})]:
        for key, name in keys.items():
            if name not in changes:  # the modulation has two spellings
                state[key] = changes[name] = normal(*sizes[name].shape)
    if part in ("pairs with alpha", "pairs in bf16", "bias of lora_B", "everything"):
        more, update = linear_pairs(sizes, torch.bfloat16 if part == "pairs in bf16" else torch.float32)
        state = state | more
        changes = changes | update
    if part == "convolution":
        down = normal(4, *sizes["patch_embedding.weight"].shape[1:])
        up = normal(48, 4, 1, 1, 1)
        state = {"patch_embedding.lora_down.weight": down, "patch_embedding.lora_up.weight": up}
        changes = {"patch_embedding.weight": torch.einsum("or,rifhw->oifhw", up.flatten(1), down)}
    if part == "bias of lora_B":
        state["blocks.0.self_attn.q.lora_B.bias"] = bias = normal(48)
        changes["blocks.0.attn1.to_q.bias"] = 3 / 4 * bias
    add(pipeline, tmp_path / "foreign.safetensors", state)
    wanted = expected(changes)
    assert (wanted - expected({})).abs().max() > 1e-3 * wanted.abs().max()  # the part matters
    assert_close(predict(pipeline), wanted)


def test_several_files_add_up(tmp_path: Path):
    """The full differences of the second file also reach layers to which the first file has added matrices."""
    pipeline = build()
    torch.manual_seed(3)
    state, changes = linear_pairs(pipeline.transformer.state_dict())
    bias = {"blocks.0.self_attn.q.diff_b": normal(48)}
    for name, keys in {"first": state, "second": bias}.items():
        save_file(
            {f"diffusion_model.{key}": value for key, value in keys.items()}, tmp_path / f"{name}.safetensors"
        )
    add_to_one_dit(pipeline, [f"{tmp_path / name}.safetensors=0.7" for name in ("first", "second")])
    changes["blocks.0.attn1.to_q.bias"] = bias["blocks.0.self_attn.q.diff_b"]
    assert_close(predict(pipeline), expected(changes))


def test_bf16_keeps_the_dtypes_of_the_weights(tmp_path: Path):
    pipeline = build()
    pipeline.transformer.to(torch.bfloat16).scale_shift_table = torch.nn.Parameter(torch.zeros(1, 2, 48))
    state = {"patch_embedding.diff_b": normal(48).bfloat16(), "head.diff_m": normal(1, 2, 48).bfloat16()}
    add(pipeline, tmp_path / "a.safetensors", state)
    assert pipeline.transformer.patch_embedding.bias.dtype == torch.bfloat16
    assert pipeline.transformer.scale_shift_table.dtype == torch.float32
    assert torch.equal(pipeline.transformer.scale_shift_table, (0.7 * state["head.diff_m"].double()).float())


def test_what_the_model_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    pipeline = build()
    state = {
        "blocks.0.self_attn.q.diff_b": torch.ones(48),
        "blocks.9.norm3.diff": torch.ones(48),
        "blocks.9.self_attn.q.lora_A.weight": torch.ones(2, 48),
        "blocks.9.self_attn.q.lora_B.weight": torch.ones(48, 2),
    }
    with caplog.at_level(logging.WARNING, "wands"):
        add(pipeline, tmp_path / "a.safetensors", state)
    assert (
        "2 of the LoRA's 3 parameters are not in the transformer and are skipped: "
        "blocks.9.attn1.to_q.weight, blocks.9.norm2.weight"
    ) in caplog.text
    assert_close(predict(pipeline), expected({"blocks.0.attn1.to_q.bias": torch.ones(48)}))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"patch_embedding.diff": torch.ones(48, 9, 1, 2, 2)},
            "changes a parameter patch_embedding.weight of shape [48, 9, 1, 2, 2]",
        ),
        (
            {"blocks.0.self_attn.q.dora_scale": torch.ones(48, 1)},
            "uses DoRA (diffusion_model.blocks.0.self_attn.q.dora_scale)",
        ),
        (
            {"blocks.0.self_attn.q.lokr_w1": torch.ones(4, 4)},
            "uses LoKr (diffusion_model.blocks.0.self_attn.q.lokr_w1)",
        ),
        ({"blocks.0.self_attn.q.alpha": torch.tensor(4.0)}, "lacks lora_A or lora_B of 1 modules"),
        (
            {"vace_blocks.0.norm3.diff": torch.ones(48)},
            "is not a LoRA of Wan. Unknown keys: diffusion_model.vace_blocks",
        ),
        ({}, "Unknown keys: none, because the file is empty"),
    ],
)
def test_what_cannot_be_applied_is_refused(state: dict[str, Tensor], words: str, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        add(build(), tmp_path / "a.safetensors", state)
    text = str(caught.value)
    assert words in text
    assert text.startswith(f"--lora={tmp_path / 'a.safetensors'}")
    assert "\n" not in text
