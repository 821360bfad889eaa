"""Official Wan's names of the DiT's parameters and diffusers' names of the same, one to one.

Sources: `WanModel` of the official Wan 2.1 and 2.2 repositories and diffusers' own conversion of both. The norms are
the trap: official norm3, which sits before cross-attention, is diffusers' norm2; the others have no parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from wands.errors import CheckpointError

# official module or parameter -> diffusers'; the rest of a name, such as ".weight", stays as it is.
_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{
        f"{ours}.{old}": f"{theirs}.{new}"
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for old, new in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
}
_OUTSIDE = {
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
}
_TO_DIFFUSERS = (_BLOCK, _OUTSIDE)
_TO_OFFICIAL = tuple({new: old for old, new in table.items()} for table in _TO_DIFFUSERS)

EXPERTS = ("transformer", "transformer_2")
"""diffusers' names of the DiTs of a pipeline: the only one or the high-noise expert, and the low-noise expert."""
COMFYUI_DIT = "model.diffusion_model."
COMFYUI_LORA = "diffusion_model."


def to_diffusers(name: str) -> str:
    """The diffusers name of an official parameter or module; what follows a module's name stays.

    Raises:
        KeyError: official Wan has no such module.
    """
    return _translate(name, *_TO_DIFFUSERS)


def to_official(name: str) -> str:
    """The official name of a diffusers parameter or module; what follows a module's name stays.

    Raises:
        KeyError: diffusers' Wan has no such module.
    """
    return _translate(name, *_TO_OFFICIAL)


def find_module(name: str) -> str:
    """The diffusers name of a module that has weights, whichever of the two names it is given by.

    Raises:
        KeyError: it is neither's.
    """
    number, rest = _split_block(name)
    forward, backward = (_TO_DIFFUSERS[not number], _TO_OFFICIAL[not number])
    return name if rest in backward else number + forward[rest]


def find_musubi_module(flat: str) -> str:
    """The diffusers name of an official module whose dots musubi-tuner made underscores.

    Raises:
        KeyError: there is none.
    """
    number = re.match(r"blocks_(\d+)_", flat)
    table = _BLOCK if number else _OUTSIDE
    rest = flat.removeprefix(number[0]) if number else flat
    found = {old.replace(".", "_"): new for old, new in table.items()}[rest]
    return f"blocks.{number[1]}.{found}" if number else found


def is_official(names: Iterable[str]) -> bool:
    """Whether names, without any prefix, are official Wan's rather than diffusers'."""
    return any(".self_attn." in name or ".cross_attn." in name for name in names)


def strip_prefix(names: Iterable[str]) -> dict[str, str]:
    """{name without ComfyUI's prefix: name as it is}; nothing is cut where not every name has the prefix."""
    names = list(names)
    for prefix in (COMFYUI_DIT, COMFYUI_LORA):
        if names and all(name.startswith(prefix) for name in names):
            return {name.removeprefix(prefix): name for name in names}
    return {name: name for name in names}


def rename_all(names: Iterable[str], rename: Callable[[str], str], where: str) -> dict[str, str]:
    """{new name: old name} of all names.

    Raises:
        CheckpointError: some names are unknown, all of which it lists, or two become one.
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
            raise CheckpointError(f"{where} holds {renamed[new]} and {name}, which are the same; remove one.")
        renamed[new] = name
    if unknown:
        raise CheckpointError(
            f"{where} holds {len(unknown)} names that are none of Wan's ({shorten(unknown)}); give a Wan 2.1 or 2.2 "
            "text-to-video or image-to-video model."
        )
    return renamed


def shorten(names: Iterable[str], most: int = 8) -> str:
    """Some names in one line, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _split_block(name: str) -> tuple[str, str]:
    """("blocks.7.", rest) of a name in a block, ("", name) of any other."""
    number = re.match(r"blocks\.\d+\.", name)
    return (number[0], name[number.end() :]) if number else ("", name)


def _translate(name: str, block: Mapping[str, str], outside: Mapping[str, str]) -> str:
    number, rest = _split_block(name)
    parts = rest.split(".")
    for end in range(len(parts), 0, -1):
        if new := (block if number else outside).get(".".join(parts[:end])):
            return number + ".".join([new, *parts[end:]])
    raise KeyError(name)
