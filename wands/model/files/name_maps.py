"""Translate tensor names of Wan's DiT, VAE, UMT5 and CLIP between the official files and diffusers or transformers.

A DiT block has three layer norms, but only the one in front of the cross-attention has parameters: norm3 in official files, norm2
in diffusers.

Sources: `model.py`, `vae.py`, `vae2_2.py`, `t5.py` and `clip.py` of the official Wan 2.1 and 2.2 repositories, and diffusers'
conversions of the published files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from wands.errors import CheckpointError

EXPERTS = ("transformer", "transformer_2")
"""diffusers' names of the DiTs in a pipeline: the only DiT or the high-noise expert, and the low-noise expert."""
COMFYUI_DIT = "model.diffusion_model."
COMFYUI_LORA = "diffusion_model."
DIT_PREFIXES = (COMFYUI_DIT, COMFYUI_LORA, "model.")
"""Prefixes of the names of a DiT in files of other programs: ComfyUI's two, and that of Self-Forcing and its relatives."""

Shapes = Mapping[str, tuple[int, ...]]
"""Maps the name of a tensor to its shape."""


@dataclass(frozen=True)
class NameMap:
    """One-to-one map between a model's official module names and those in diffusers; for UMT5 and CLIP, those in transformers.

    A suffix after the module name in a tensor name, such as ".weight", does not change.

    Attributes:
        outside: official to diffusers names outside the numbered blocks.
        block: official to diffusers names inside a numbered block, without the prefix of the block.
        prefixes: text before a block's number in (official, diffusers) names.
    """

    outside: Mapping[str, str]
    block: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, str] = ("blocks.", "blocks.")

    def to_diffusers(self, name: str) -> str:
        """Translate the official name of a tensor or module to its diffusers name; raise KeyError for an unknown module."""
        number = re.match(re.escape(self.prefixes[0]) + r"(\d+)\.", name) if self.block else None
        start, table = (f"{self.prefixes[1]}{number[1]}.", self.block) if number else ("", self.outside)
        words = name[number.end() if number else 0 :].split(".")
        for end in range(len(words), 0, -1):
            if new := table.get(".".join(words[:end])):
                return start + ".".join([new, *words[end:]])
        raise KeyError(name)

    def to_official(self, name: str) -> str:
        """Translate the diffusers name of a tensor or module to its official name; raise KeyError for an unknown module."""
        return self.inverse.to_diffusers(name)

    @cached_property
    def inverse(self) -> NameMap:
        """Map from diffusers names to official names. Its method `to_diffusers`, despite the name, returns official names."""
        outside, block = ({new: old for old, new in table.items()} for table in (self.outside, self.block))
        return NameMap(outside, block, self.prefixes[::-1])


_PROJECTIONS = {
    **{"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"},
    **{"norm_q": "norm_q", "norm_k": "norm_k"},
}
DIT = NameMap(
    outside={
        "patch_embedding": "patch_embedding",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
        "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
        "head.modulation": "scale_shift_table",
        "head.head": "proj_out",
    },
    block={
        "modulation": "scale_shift_table",
        "norm3": "norm2",
        "ffn.0": "ffn.net.0.proj",
        "ffn.2": "ffn.net.2",
        **{f"self_attn.{old}": f"attn1.{new}" for old, new in _PROJECTIONS.items()},
        **{f"cross_attn.{old}": f"attn2.{new}" for old, new in _PROJECTIONS.items()},
        "cross_attn.k_img": "attn2.add_k_proj",
        "cross_attn.v_img": "attn2.add_v_proj",
        "cross_attn.norm_k_img": "attn2.norm_added_k",
    },
)
UMT5 = NameMap(
    outside={"token_embedding": "shared", "norm": "encoder.final_layer_norm"},
    block={
        "norm1": "layer.0.layer_norm",
        **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in "qkvo"},
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
        "norm2": "layer.1.layer_norm",
        "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
        "ffn.fc1": "layer.1.DenseReluDense.wi_1",
        "ffn.fc2": "layer.1.DenseReluDense.wo",
    },
    prefixes=("blocks.", "encoder.block."),
)
UMT5_TIED = "encoder.embed_tokens.weight"
"""Second name of the tensor `shared.weight` in transformers. Official files store this tensor once."""
CLIP = NameMap(
    outside={
        "visual.patch_embedding": "vision_model.embeddings.patch_embedding",
        "visual.cls_embedding": "vision_model.embeddings.class_embedding",
        "visual.pos_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.pre_norm": "vision_model.pre_layrnorm",
        "visual.post_norm": "vision_model.post_layernorm",
    },
    block={
        "norm1": "layer_norm1",
        "norm2": "layer_norm2",
        **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkv"},
        "attn.proj": "self_attn.out_proj",
        "mlp.0": "mlp.fc1",
        "mlp.2": "mlp.fc2",
    },
    prefixes=("visual.transformer.", "vision_model.encoder.layers."),
)
"""Name map of CLIP's vision encoder. Official files store attn.q, attn.k and attn.v together in one tensor, attn.to_qkv."""
CLIP_RESHAPED = ("visual.cls_embedding", "visual.pos_embedding")
"""Official names of CLIP tensors whose official shapes have extra leading dimensions of 1."""
CLIP_UNUSED = ("textual.", "visual.head", "log_scale")
"""Tensors of the official CLIP file that transformers' `CLIPVisionModel` does not have."""

_VAE_RESIDUAL = {
    **{"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"},
    "shortcut": "conv_shortcut",
}


def vae_structure(names: Iterable[str], where: str) -> tuple[int, bool]:
    """Return (residual blocks in each level of the encoder, whether each level has a separate list of layers, as in Wan 2.2).

    `names` are tensor names of a VAE in the official or the diffusers layout. `where` starts the error.

    Raises:
        CheckpointError: if the VAE has no downsampling layer, which every Wan VAE has.
    """
    text = "\n".join(names)
    nested = ".downsampler." in text or ".downsamples.0.downsamples." in text
    # The first resampling layer follows the residual blocks of its level.
    pattern = r"(?m)^encoder\.down(?:sample|_block)s\.(?:0\.downsamples\.)?(\d+)\.resample\."
    resamplers = [int(number) for number in re.findall(pattern, text)]
    resnets = set(re.findall(r"(?m)^encoder\.down_blocks\.0\.resnets\.(\d+)\.", text))
    if not resamplers and not resnets:
        raise CheckpointError(
            f"{where} is not a Wan VAE, because it has no downsampling layer. Use the VAE of Wan 2.1 or 2.2."
        )
    return (min(resamplers) if resamplers else len(resnets)), nested


def vae_names(num_res_blocks: int, nested: bool) -> NameMap:
    """Return the name map of a VAE from the result of `vae_structure`; each level of the decoder has one block more."""
    table = {"conv1": "quant_conv", "conv2": "post_quant_conv"}

    def add(old: str, new: str, modules: Mapping[str, str]) -> None:
        table.update({f"{old}.{inner}": f"{new}.{name}" for inner, name in modules.items()})

    for half, way in (("encoder", "down"), ("decoder", "up")):
        add(half, half, {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out"})
        table[f"{half}.middle.1"] = f"{half}.mid_block.attentions.0"
        for index in (0, 1):
            add(f"{half}.middle.{2 * index}", f"{half}.mid_block.resnets.{index}", _VAE_RESIDUAL)
        count = num_res_blocks + (half == "decoder")
        for level, index in itertools.product(range(4), range(count + 1)):
            flat = level * (count + 1) + index
            is_residual = index < count
            old = f"{half}.{way}samples." + (f"{level}.{way}samples.{index}" if nested else f"{flat}")
            new = f"{half}.{way}_blocks."
            if half == "encoder" and not nested:
                new += f"{flat}"
            elif is_residual:
                new += f"{level}.resnets.{index}"
            else:
                new += f"{level}." + (f"{way}sampler" if nested else "upsamplers.0")
            if is_residual:
                add(old, new, _VAE_RESIDUAL)
            else:
                table[old] = new
    return NameMap(table)


def split_prefix(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Remove the prefix of a DiT (see `DIT_PREFIXES`) from tensor names; return ({new name: old name}, other names).

    If names have the prefix, one without it belongs to another model of the same file. If no name has it, all are returned
    unchanged.
    """
    names = list(names)
    for prefix in DIT_PREFIXES:
        if found := [name for name in names if name.startswith(prefix)]:
            others = [name for name in names if not name.startswith(prefix)]
            return {name.removeprefix(prefix): name for name in found}, others
    return {name: name for name in names}, []


def rename_all(names: Iterable[str], rename: Callable[[str], str], where: str) -> dict[str, str]:
    """Translate tensor names with a function such as `NameMap.to_diffusers`; return {new name: old name}.

    `where` starts the errors.

    Raises:
        CheckpointError: if `rename` raises KeyError for a name, or two names get the same new name.
    """
    renamed: dict[str, str] = {}
    unknown = []
    for name in names:
        try:
            new = rename(name)
        except KeyError:
            unknown.append(name)
            continue
        if new in renamed:
            raise CheckpointError(
                f"{where} has two tensors for one parameter of the model: {renamed[new]} and {name}. Remove one of them."
            )
        renamed[new] = name
    if unknown:
        raise CheckpointError(
            f"{where} has {len(unknown)} tensor names that no Wan model has ({shorten(unknown)}). Use a text-to-video or "
            "image-to-video model of Wan 2.1 or 2.2."
        )
    return renamed


def check_fit(found: Shapes, wanted: Shapes, where: str) -> None:
    """Raise CheckpointError unless the tensors in files have the names and shapes of a model's parameters."""
    problems = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "of a wrong shape": [
            f"{name} {[*found[name]]} instead of {[*shape]}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    report = "; ".join(f"{len(names)} {what}: {shorten(names)}" for what, names in problems.items() if names)
    if report:
        raise CheckpointError(
            f"{where} has weights that do not fit its config.json ({report}). Use weights and config of the same model."
        )


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """Return the first `limit` names in alphabetical order as one line, followed by the number of names that are left out."""
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
