"""The parts of a Wan model in any layout, and what each of their tensors is called in another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wands.errors import CheckpointError, ConfigError
from wands.model.files.encoder_names import (
    T5_TIED,
    TensorSource,
    clip_config,
    clip_to_diffusers,
    t5_config,
    t5_to_diffusers,
    t5_to_official,
    vae_config,
    vae_to_diffusers,
    vae_to_official,
)
from wands.model.files.names import (
    COMFYUI_DIT,
    EXPERTS,
    is_official,
    rename_all,
    shorten,
    strip_prefix,
    to_diffusers,
    to_official,
)
from wands.model.files.official import DIFFUSERS_CLASS, DIT_STEM, OFFICIAL_CLASS, config_of, find_expert
from wands.model.files.tensor_files import PICKLES, LazyTensor, TensorFiles, find_weights

PARTS = (*EXPERTS, "vae", "text_encoder", "image_encoder")
STEMS = {"vae": DIT_STEM, "text_encoder": "model", "image_encoder": "model"}
"""Of the weights' file names in a diffusers folder."""
_OFFICIAL_FILES = {"vae": "Wan2.*_VAE", "text_encoder": "models_t5_*", "image_encoder": "models_clip_*"}


@dataclass(frozen=True)
class SourceComponent:
    """One model of a pipeline where it lies.

    Attributes:
        name: as diffusers calls it, one of `PARTS`.
        files: of its weights.
        config: what lies beside them as config.json; None for a bare file.
    """

    name: str
    files: tuple[Path, ...]
    config: dict[str, Any] | None

    def open(self) -> TensorFiles:
        """Its tensors."""
        return TensorFiles(
            self.files, f"SRC {self.files[0].parent if len(self.files) > 1 else self.files[0]}"
        )


@dataclass(frozen=True)
class ComponentMapping:
    """A part in another layout.

    Attributes:
        config: diffusers' (or transformers') config of it.
        taken: where each tensor of the new layout comes from.
        unused: tensors of the source that the new layout has no place for.
    """

    config: dict[str, Any]
    taken: dict[str, TensorSource]
    unused: tuple[str, ...]


@dataclass(frozen=True)
class ComponentSummary:
    """What became of one part.

    Attributes:
        name: of the part.
        read: tensors of the source.
        written: tensors of the result.
        renamed: of those written, how many have another name than in the source.
        num_bytes: of the result.
        unused: tensors of the source that the layout has no place for.
        forward: how source and result were compared by computing; "" where they were not.
    """

    name: str
    read: int
    written: int
    renamed: int
    num_bytes: int
    unused: tuple[str, ...] = ()
    forward: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.read} tensors read, {self.written} written, {self.renamed} renamed, "
            f"{self.num_bytes / 1e6:.1f} MB; read back equal, bit for bit"
        )
        if self.unused:
            text += f"; {len(self.unused)} without a place there ({shorten(self.unused, 3)})"
        return f"{text}; {self.forward}" if self.forward else text


def find_parts(source: Path) -> list[SourceComponent]:
    """Every part of a model: of a diffusers pipeline, an official repository, a folder of one DiT, or one file.

    Raises:
        ConfigError: there is none.
        CheckpointError: a file cannot be read.
    """
    if source.is_file():
        return [_part_of_file(source)]
    parts = []
    for name in PARTS:
        folder = source / name
        if (folder / "config.json").is_file():
            parts.append(
                SourceComponent(
                    name, tuple(find_weights(folder, STEMS.get(name, DIT_STEM))), _read_json(folder)
                )
            )
    if not parts and (source / "config.json").is_file():
        config = _read_json(source)
        if config.get("_class_name") == DIFFUSERS_CLASS:
            parts.append(SourceComponent(EXPERTS[0], tuple(find_weights(source, DIT_STEM)), config))
    for expert in EXPERTS if not parts else ():
        folder_or_none = find_expert(source, expert)
        if folder_or_none is not None:
            config = _read_json(folder_or_none)
            if config.get("_class_name") not in (OFFICIAL_CLASS, None):
                raise ConfigError(
                    f"SRC {source} holds a {config['_class_name']}; give a Wan 2.1 or 2.2 model, diffusers' or official."
                )
            parts.append(SourceComponent(expert, tuple(find_weights(folder_or_none, DIT_STEM)), config))
    if parts and not (source / "model_index.json").is_file():
        for name, pattern in _OFFICIAL_FILES.items():
            files = [p for p in sorted(source.glob(f"{pattern}.*")) if p.suffix in (*PICKLES, ".safetensors")]
            if files:
                parts.append(SourceComponent(name, (files[0],), None))
    if not parts:
        raise ConfigError(
            f"SRC {source} holds no Wan model (no model_index.json, config.json or high_noise_model); give a diffusers "
            "pipeline, an official repository, or one file of weights."
        )
    empty = [part.name for part in parts if not part.files]
    if empty:
        raise CheckpointError(f"SRC {source} has no weights of {', '.join(empty)}; fetch it again.")
    return parts


def _part_of_file(path: Path) -> SourceComponent:
    beside = _read_json(path.parent) if (path.parent / "config.json").is_file() else None
    with TensorFiles([path], f"SRC {path}") as files:
        names = set(strip_prefix(files.shapes))
    if "patch_embedding.weight" in names:
        return SourceComponent(EXPERTS[0], (path,), beside)
    for name, sign in (
        ("vae", ("decoder.middle.0.residual.0.gamma", "decoder.mid_block.resnets.0.norm1.gamma")),
        ("text_encoder", ("token_embedding.weight", "shared.weight")),
        ("image_encoder", ("visual.patch_embedding.weight",)),
    ):
        if names & set(sign):
            return SourceComponent(name, (path,), beside)
    raise ConfigError(
        f"SRC {path} holds no part of Wan ({shorten(names, 3)}); give a DiT, a VAE, UMT5, CLIP or a LoRA of Wan 2.1 or 2.2."
    )


def _read_json(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"SRC {folder / 'config.json'} is not JSON ({error}); mend it.") from None
    return found if isinstance(found, dict) else {}


def convert_part(part: SourceComponent, files: TensorFiles, to: str) -> ComponentMapping:
    """Find out what every tensor of a part is called in another layout, and that it fits the stock model.

    Args:
        part: where it lies.
        files: its open tensors.
        to: "diffusers", "official" or "comfyui".

    Raises:
        CheckpointError: unknown names, missing tensors, or other shapes than the config's.
    """
    convert = {
        "vae": _convert_vae,
        "text_encoder": _convert_text_encoder,
        "image_encoder": _convert_image_encoder,
    }.get(part.name, _convert_dit)
    return convert(part, files, to)


def _convert_dit(part: SourceComponent, files: TensorFiles, to: str) -> ComponentMapping:
    from diffusers import WanTransformer3DModel

    shapes, where = files.shapes, files.where
    stored = strip_prefix(shapes)
    # Published files carry these for nothing; diffusers does not load them.
    ignored = tuple(
        n for n in stored if any(i in n for i in WanTransformer3DModel._keys_to_ignore_on_load_unexpected)
    )
    bare = [name for name in stored if name not in ignored]
    names = rename_all(bare, to_diffusers if is_official(bare) else lambda n: to_official(n) and n, where)
    by_official = {to_official(new): shapes[stored[old]] for new, old in names.items()}
    said = part.config or {}
    if said.get("_class_name") == DIFFUSERS_CLASS:
        config = said
    else:
        config = config_of(by_official, said, where=where)
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(config)
    _check_fit(model, {new: shapes[stored[old]] for new, old in names.items()}, where)
    prefix, rename = {
        "diffusers": ("", lambda name: name),
        "official": ("", to_official),
        "comfyui": (COMFYUI_DIT, to_official),
    }[to]
    taken = {prefix + rename(new): TensorSource(stored[old]) for new, old in names.items()}
    return ComponentMapping(dict(config), taken, tuple(stored[name] for name in ignored))


def _convert_vae(part: SourceComponent, files: TensorFiles, to: str) -> ComponentMapping:
    from diffusers import AutoencoderKLWan

    shapes, where = files.shapes, files.where
    official = "encoder.conv1.weight" in shapes
    there = vae_to_diffusers(shapes, where) if official else {name: TensorSource(name) for name in shapes}
    config = (None if official else part.config) or (vae_config(shapes) if official else {})
    with torch.device("meta"):
        model = AutoencoderKLWan.from_config(config)
    _check_fit(model, _new_shapes(there, shapes), where)
    if to == "diffusers":
        return ComponentMapping(config, there, ())
    return ComponentMapping(
        config, {n: TensorSource(n) for n in shapes} if official else vae_to_official(shapes, where), ()
    )


def _convert_text_encoder(part: SourceComponent, files: TensorFiles, to: str) -> ComponentMapping:
    from transformers import UMT5Config, UMT5EncoderModel

    shapes, where = files.shapes, files.where
    official = "token_embedding.weight" in shapes
    there = t5_to_diffusers(shapes, where) if official else {name: TensorSource(name) for name in shapes}
    config = {"architectures": ["UMT5EncoderModel"], **t5_config(shapes)} if official else part.config or {}
    with torch.device("meta"):
        model = UMT5EncoderModel(UMT5Config(**config))
    _check_fit(model, _new_shapes(there, shapes), where, tied=(T5_TIED,))
    if to == "diffusers":
        return ComponentMapping(config, there, ())
    return ComponentMapping(
        config, {n: TensorSource(n) for n in shapes} if official else t5_to_official(shapes, where), ()
    )


def _convert_image_encoder(part: SourceComponent, files: TensorFiles, to: str) -> ComponentMapping:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    shapes, where = files.shapes, files.where
    official = "visual.patch_embedding.weight" in shapes
    if not official or to != "diffusers":
        assert official or to == "diffusers"  # `left_out` says that there is no way back
        return ComponentMapping(part.config or {}, {name: TensorSource(name) for name in shapes}, ())
    there = clip_to_diffusers(shapes, where)
    config = {"architectures": ["CLIPVisionModel"], **clip_config(shapes)}
    with torch.device("meta"):
        model = CLIPVisionModel(CLIPVisionConfig(**config))
    # Releases of transformers differ in whether this model's names have the prefix; all of them read it.
    bare = {name.removeprefix("vision_model."): shape for name, shape in _new_shapes(there, shapes).items()}
    _check_fit(model, bare, where, strip="vision_model.")
    used = {taken.name for taken in there.values()}
    return ComponentMapping(config, there, tuple(name for name in shapes if name not in used))


def _new_shapes(
    taken: Mapping[str, TensorSource], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(one(torch.empty(shapes[one.name], device="meta")).shape) for name, one in taken.items()
    }


def _check_fit(
    model: nn.Module,
    found: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    tied: Sequence[str] = (),
    strip: str = "",
) -> None:
    wanted = {name.removeprefix(strip): tuple(value.shape) for name, value in model.named_parameters()}
    problems = {
        "missing": [name for name in wanted if name not in found and name not in tied],
        "unexpected": [name for name in found if name not in wanted and name not in tied],
        "of another shape": [name for name, shape in wanted.items() if found.get(name, shape) != shape],
    }
    report = "; ".join(f"{len(names)} {what}: {shorten(names)}" for what, names in problems.items() if names)
    if report:
        raise CheckpointError(
            f"{where} is no whole {type(model).__name__} of its config ({report}); use weights and config of the same model."
        )


def make_entries(
    converted: ComponentMapping,
    files: TensorFiles,
    cast: Callable[[str], torch.dtype | None] = lambda name: None,
) -> list[LazyTensor]:
    """What is to be written of a part.

    Args:
        converted: from `convert_part`.
        files: the open tensors of the source.
        cast: new name to the dtype that it gets; None keeps its own.
    """

    def entry(name: str, taken: TensorSource) -> LazyTensor:
        dtype = cast(name) or files.dtype(taken.name)

        def read() -> Tensor:
            return taken(files.read(taken.name)).to(dtype)

        return LazyTensor(name, shapes[name], dtype, read)

    shapes = _new_shapes(converted.taken, files.shapes)
    return [entry(name, converted.taken[name]) for name in sorted(converted.taken)]
