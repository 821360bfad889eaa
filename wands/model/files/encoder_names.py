"""Names of the frozen parts: official Wan's VAE, UMT5 and CLIP files against diffusers' and transformers' modules.

Sources: `vae.py`, `vae2_2.py`, `t5.py` and `clip.py` of the official Wan 2.1 and 2.2 repositories, and diffusers'
conversion of the published VAEs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wands.errors import CheckpointError
from wands.model.files.names import shorten

_LEVELS = 4  # of a VAE: 1, 2, 4, 4 times the base width
_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_RESAMPLE = {"resample.1": "resample.1", "time_conv": "time_conv"}
_ATTENTION = {"norm": "norm", "to_qkv": "to_qkv", "proj": "proj"}
_T5_BLOCK = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_T5_OUTSIDE = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
T5_TIED = "encoder.embed_tokens.weight"
"""The second name of transformers' `shared.weight`; official Wan has one."""
_CLIP_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.proj": "self_attn.out_proj",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
_CLIP_OUTSIDE = {
    "patch_embedding": "embeddings.patch_embedding",
    "pre_norm": "pre_layrnorm",
    "post_norm": "post_layernorm",
}
_CLIP_UNUSED = ("textual.", "visual.head", "log_scale")

LATENTS_22 = {
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}  # fmt: skip
"""Statistics of the Wan 2.2 VAE's 48 channels; diffusers' defaults are those of Wan 2.1's 16."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorSource:
    """Where a tensor of the new file comes from.

    Attributes:
        name: in the old file.
        third: of its rows, 0 to 2 where queries, keys and values lie in one; None for all of it.
        squeezed: whether its dimensions of 1 go.
    """

    name: str
    third: int | None = None
    squeezed: bool = False

    def __call__(self, value: Tensor) -> Tensor:
        """The new tensor out of the old one."""
        if self.third is not None:
            value = value.chunk(3)[self.third]
        return value.squeeze() if self.squeezed else value


def vae_to_diffusers(shapes: Shapes, where: str) -> dict[str, TensorSource]:
    """{diffusers name: official tensor} of a VAE, Wan 2.1's or Wan 2.2's.

    Raises:
        CheckpointError: names that are none of the official VAE's.
    """
    nested = any(name.startswith("encoder.downsamples.0.downsamples.") for name in shapes)
    pattern = r"encoder\.downsamples\.0\.downsamples\.(\d+)\." if nested else r"encoder\.downsamples\.(\d+)\."
    samplers = [int(m[1]) for name in shapes if (m := re.match(pattern + "resample", name))]
    if not samplers:
        raise CheckpointError(f"{where} is no VAE of official Wan (it never halves a picture).")
    return _take(shapes, _vae_modules(min(samplers), nested), where)


def vae_to_official(shapes: Shapes, where: str) -> dict[str, TensorSource]:
    """{official name: diffusers tensor} of a VAE.

    Raises:
        CheckpointError: names that are none of diffusers' `AutoencoderKLWan`.
    """
    nested = any(".downsampler." in name for name in shapes)
    resnets = {m[1] for name in shapes if (m := re.match(r"decoder\.up_blocks\.0\.resnets\.(\d+)\.", name))}
    table = _vae_modules(len(resnets) - 1, nested)
    return _take(shapes, {new: old for old, new in table.items()}, where)


def vae_config(shapes: Shapes) -> dict[str, Any]:
    """The diffusers config of an official VAE; statistics of the latents are those of the published VAE of its channels."""
    base, pixels = shapes["encoder.conv1.weight"][:2]
    z_dim, decoder_base = shapes["conv2.weight"][0], shapes["decoder.head.2.weight"][1]
    nested = any(name.startswith("encoder.downsamples.0.downsamples.") for name in shapes)
    table = vae_to_diffusers(shapes, "the VAE")
    resnets = {name.split(".")[4] for name in table if name.startswith("decoder.up_blocks.0.resnets.")}
    config: dict[str, Any] = {"base_dim": base, "z_dim": z_dim, "num_res_blocks": len(resnets) - 1}
    if nested:
        config |= {"is_residual": True, "decoder_base_dim": decoder_base}
    if pixels == 12:
        patch = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
        config |= patch | {"scale_factor_temporal": 4}
    if z_dim == len(LATENTS_22["latents_mean"]):
        config |= LATENTS_22
    return config


def t5_to_diffusers(shapes: Shapes, where: str) -> dict[str, TensorSource]:
    """{transformers name: official tensor} of the UMT5 encoder.

    Raises:
        CheckpointError: names that are none of the official encoder's.
    """
    return _take(
        shapes, lambda name: _in_block(name, "blocks.", "encoder.block.", _T5_BLOCK, _T5_OUTSIDE), where
    )


def t5_to_official(shapes: Shapes, where: str) -> dict[str, TensorSource]:
    """{official name: transformers tensor} of the UMT5 encoder.

    Raises:
        CheckpointError: names that are none of `UMT5EncoderModel`.
    """
    block, outside = ({new: old for old, new in table.items()} for table in (_T5_BLOCK, _T5_OUTSIDE))
    names = {
        name: shape for name, shape in shapes.items() if name != T5_TIED or "shared.weight" not in shapes
    }
    return _take(names, lambda name: _in_block(name, "encoder.block.", "blocks.", block, outside), where)


def t5_config(shapes: Shapes) -> dict[str, Any]:
    """The arguments of transformers' `UMT5Config` for an official encoder."""
    vocab_size, d_model = shapes["token_embedding.weight"]
    num_buckets, num_heads = shapes["blocks.0.pos_embedding.embedding.weight"]
    return {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_kv": shapes["blocks.0.attn.q.weight"][0] // num_heads,
        "d_ff": shapes["blocks.0.ffn.fc1.weight"][0],
        "num_layers": _num_blocks(shapes, "blocks."),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "feed_forward_proj": "gated-gelu",
    }


def clip_to_diffusers(shapes: Shapes, where: str) -> dict[str, TensorSource]:
    """{transformers name: official tensor} of the half of CLIP that sees; the text's half and the heads stay behind.

    There is no way back: `CLIPVisionModel` lacks what stays behind.

    Raises:
        CheckpointError: names of the seeing half that are none of the official model's.
    """
    taken: dict[str, TensorSource] = {}
    rest: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        split = re.fullmatch(r"visual\.transformer\.(\d+)\.attn\.to_qkv\.(weight|bias)", name)
        if split:
            for third, part in enumerate("qkv"):
                new = f"vision_model.encoder.layers.{split[1]}.self_attn.{part}_proj.{split[2]}"
                taken[new] = TensorSource(name, third=third)
        elif name in ("visual.cls_embedding", "visual.pos_embedding"):
            new = "class_embedding" if "cls" in name else "position_embedding.weight"
            taken[f"vision_model.embeddings.{new}"] = TensorSource(name, squeezed=True)
        elif not name.startswith(_CLIP_UNUSED):
            rest[name] = shape

    def rename(name: str) -> str | None:
        bare = name.removeprefix("visual.")
        new = (
            _in_block(bare, "transformer.", "encoder.layers.", _CLIP_BLOCK, _CLIP_OUTSIDE)
            if bare != name
            else None
        )
        return new and f"vision_model.{new}"

    return taken | _take(rest, rename, where)


def clip_config(shapes: Shapes) -> dict[str, Any]:
    """The arguments of transformers' `CLIPVisionConfig` for an official file; heads are those of the published ViT-H/14."""
    width, _, patch, _ = shapes["visual.patch_embedding.weight"]
    side = round((shapes["visual.pos_embedding"][1] - 1) ** 0.5)
    return {
        "hidden_size": width,
        "intermediate_size": shapes["visual.transformer.0.mlp.0.weight"][0],
        "num_hidden_layers": _num_blocks(shapes, "visual.transformer."),
        "num_attention_heads": 16,
        "image_size": side * patch,
        "patch_size": patch,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    }


def _num_blocks(shapes: Shapes, start: str) -> int:
    return len({name.removeprefix(start).split(".")[0] for name in shapes if name.startswith(start)})


def _vae_modules(num_res_blocks: int, nested: bool) -> dict[str, str]:
    """Official module -> diffusers module. Wan 2.1 has one flat list of steps, which diffusers cuts into blocks when decoding."""
    table = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
    for half in ("encoder", "decoder"):
        ends = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"}
        table |= {f"{half}.{old}": f"{half}.{new}" for old, new in ends.items()}
        for place, new, inner in (
            (0, "resnets.0", _RESIDUAL),
            (1, "attentions.0", _ATTENTION),
            (2, "resnets.1", _RESIDUAL),
        ):
            table |= {
                f"{half}.middle.{place}.{old}": f"{half}.mid_block.{new}.{name}"
                for old, name in inner.items()
            }
        up = half == "decoder"
        steps, blocks = ("upsamples", "up_blocks") if up else ("downsamples", "down_blocks")
        count = num_res_blocks + 1 if up else num_res_blocks
        for level in range(_LEVELS):
            for j in range(count + 1):
                inner, flat = (_RESIDUAL if j < count else _RESAMPLE), level * (count + 1) + j
                if nested:
                    name = f"resnets.{j}" if j < count else steps.removesuffix("s") + "r"
                    old, new = f"{half}.{steps}.{level}.{steps}.{j}", f"{half}.{blocks}.{level}.{name}"
                elif up:
                    name = f"resnets.{j}" if j < count else "upsamplers.0"
                    old, new = f"{half}.{steps}.{flat}", f"{half}.{blocks}.{level}.{name}"
                else:
                    old, new = f"{half}.{steps}.{flat}", f"{half}.{blocks}.{flat}"
                table |= {f"{old}.{a}": f"{new}.{b}" for a, b in inner.items()}
    return table


def _in_block(
    name: str, old_start: str, new_start: str, block: Mapping[str, str], outside: Mapping[str, str]
) -> str | None:
    """The new name of a weight or bias in a numbered block or outside of all; None for an unknown one."""
    module, _, leaf = name.rpartition(".")
    number = re.match(re.escape(old_start) + r"(\d+)\.", module)
    new = block.get(module[number.end() :]) if number else outside.get(module)
    if new is None:
        return None
    return f"{new_start}{number[1]}.{new}.{leaf}" if number else f"{new}.{leaf}"


def _take(
    names: Iterable[str], rename: Mapping[str, str] | Callable[[str], str | None], where: str
) -> dict[str, TensorSource]:
    taken, unknown = {}, []
    for name in names:
        if callable(rename):
            new = rename(name)
        else:
            module, _, leaf = name.rpartition(".")
            new = f"{rename[module]}.{leaf}" if module in rename else None
        if new is None:
            unknown.append(name)
        else:
            taken[new] = TensorSource(name)
    if unknown:
        raise CheckpointError(
            f"{where} holds {len(unknown)} names that are none of Wan's ({shorten(unknown)}); give a file of Wan 2.1 or 2.2."
        )
    return taken
