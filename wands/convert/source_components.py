"""Find the models in the source of a conversion, and map their tensors to the target layout (see `ModelConversion`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wands.convert.pipeline_folder import build_stock
from wands.convert.source_tensors import read_tensors
from wands.encoders.components import WEIGHT_STEMS
from wands.errors import CheckpointError, ConfigError
from wands.model.files import name_maps, official
from wands.model.files.config_files import read_model_config
from wands.model.files.lora_experts import EXPERT_NAMES
from wands.model.files.name_maps import EXPERTS, NameMap, shorten
from wands.model.files.tensor_files import PICKLES, LazyTensor, find_weights

_Config = dict[str, Any]


@dataclass(frozen=True)
class ComponentKind:
    """Files and tensor names of one kind of model: DiT, VAE, text encoder or image encoder.

    Attributes:
        signs: (tensor name that only official files of this kind have, one that only diffusers files of this kind have).
        names: maps all tensor names, and a text that names the files in errors, to the name map.
        config: maps shapes by official name, the official config, and that text to the diffusers config.
        official_files: glob pattern of the file in the repositories of Wan's authors, without suffix; "" if they have a folder.
        unused: parts of names of tensors that are not converted, except from diffusers' layout to itself.
    """

    signs: tuple[str, str]
    names: Callable[[Iterable[str], str], NameMap]
    config: Callable[[name_maps.Shapes, _Config, str], _Config]
    official_files: str = ""
    unused: tuple[str, ...] = ()


_DIT_KIND = ComponentKind(
    signs=("head.head.weight", "proj_out.weight"),
    names=lambda names, where: name_maps.DIT,
    config=official.dit_config,
    unused=("norm_added_q",),  # in published files, but not in the models of diffusers and Wan
)
KINDS: dict[str, ComponentKind] = {
    **dict.fromkeys(EXPERTS, _DIT_KIND),
    "vae": ComponentKind(
        signs=("decoder.middle.0.residual.0.gamma", "decoder.mid_block.resnets.0.norm1.gamma"),
        names=lambda names, where: name_maps.vae_names(*name_maps.vae_structure(names, where)),
        config=lambda shapes, config, where: official.vae_config(shapes),
        official_files="Wan2.*_VAE",
    ),
    "text_encoder": ComponentKind(
        signs=("token_embedding.weight", "shared.weight"),
        names=lambda names, where: name_maps.UMT5,
        config=lambda shapes, config, where: official.umt5_config(shapes),
        official_files="models_t5_*",
    ),
    "image_encoder": ComponentKind(
        signs=("visual.patch_embedding.weight", "vision_model.embeddings.patch_embedding.weight"),
        names=lambda names, where: name_maps.CLIP,
        config=lambda shapes, config, where: official.clip_config(shapes),
        official_files="models_clip_*",
        unused=name_maps.CLIP_UNUSED,
    ),
}
"""Maps the name of a component in a diffusers pipeline to the description of its files and tensor names."""


class SourceComponent(NamedTuple):
    """One model in the source of a conversion, for example the VAE.

    Attributes:
        name: key of `KINDS`, its name in a diffusers pipeline.
        files: files of the weights.
        config: contents of the config.json next to the weights; None without this file.
    """

    name: str
    files: list[Path]
    config: _Config | None


class ComponentMapping(NamedTuple):
    """Tensors of one component, mapped from the source to the new file layout.

    Attributes:
        config: config in the format of diffusers or transformers.
        stored: tensors by name in the source's files.
        sources: the source's tensors by name in the new layout, in its shapes.
        fp8: names in the source's files of the weights that are stored in fp8.
        notes: sentences for the user about the source's files.
    """

    config: _Config
    stored: dict[str, LazyTensor]
    sources: dict[str, LazyTensor]
    fp8: frozenset[str]
    notes: list[str]

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the source's tensors from which no tensor of the new layout is made."""
        used = {source.name for source in self.sources.values()}
        return tuple(name for name in self.stored if name not in used)


def find_components(source: Path, base: Path | None) -> list[SourceComponent]:
    """Return every model in a source: diffusers pipeline, official repository, folder of one DiT, ComfyUI folder, or single file.

    `base` is the folder in --base; if it is a diffusers pipeline, it gives the head dim of a single file.

    Raises:
        ConfigError: if the source contains no Wan model.
        CheckpointError: if a file cannot be read, or a model has no weights.
    """
    if source.is_file():
        return [_component_of_file(source, base)]
    stems = {name: WEIGHT_STEMS.get(name, official.DIT_STEM) for name in KINDS}
    components = [
        SourceComponent(name, find_weights(source / name, stem), _read_source_config(source / name))
        for name, stem in stems.items()
        if (source / name / "config.json").is_file()
    ]
    components = components or _find_dits(source) or _find_files(source, base)
    if components and not (source / "model_index.json").is_file():
        for name in WEIGHT_STEMS:
            paths = sorted(source.glob(f"{KINDS[name].official_files}.*"))
            files = [path for path in paths if path.suffix in (*PICKLES, ".safetensors")]
            components += [SourceComponent(name, [file], None) for file in files[:1]]
    if not components:
        raise ConfigError(
            f"SOURCE={source} contains no Wan model (no model_index.json, config.json or high_noise_model). Set SOURCE to a "
            "diffusers pipeline, an official repository, or one file of weights."
        )
    empty = [component.name for component in components if not component.files]
    if empty:
        raise CheckpointError(f"SOURCE={source} has no weights of {', '.join(empty)}. Download SOURCE again.")
    return components


def _find_dits(source: Path) -> list[SourceComponent]:
    """Return the DiT of a folder with one diffusers DiT, or the DiTs of an official repository; [] for other folders."""
    components = []
    for expert in EXPERTS:
        if (folder := official.find_expert(source, expert)) is None:
            continue
        config = _read_source_config(folder)
        class_name = config.get("_class_name", official.OFFICIAL_CLASS)
        if class_name not in (official.OFFICIAL_CLASS, official.DIFFUSERS_CLASS):
            raise ConfigError(
                f"SOURCE={source} contains a {class_name}, not a Wan DiT. Set SOURCE to a diffusers or official Wan 2.1 or 2.2 "
                "model."
            )
        components.append(SourceComponent(expert, find_weights(folder, official.DIT_STEM), config))
    return components


def _find_files(source: Path, base: Path | None) -> list[SourceComponent]:
    """Return the models in a ComfyUI folder, or the DiTs in its `diffusion_models`; two are the experts that their names say."""
    folder = source / "diffusion_models" if (source / "diffusion_models").is_dir() else source
    found = sorted(folder.glob("*.safetensors"))
    by_expert = {
        expert: [path for path in found if name in path.name.lower()] for expert, name in EXPERT_NAMES.items()
    }
    if all(len(paths) == 1 for paths in by_expert.values()):
        dits = {expert: paths[0] for expert, paths in by_expert.items()}
    else:
        dits = {EXPERTS[0]: found[0]} if len(found) == 1 and folder != source else {}
    components = [_component_of_file(path, base)._replace(name=expert) for expert, path in dits.items()]
    vaes = sorted((source / "vae").glob("*.safetensors")) if components and folder != source else []
    return components + [_component_of_file(path, base) for path in vaes[:1]]


def _component_of_file(path: Path, base: Path | None) -> SourceComponent:
    config = _read_source_config(path.parent) if (path.parent / "config.json").is_file() else None
    names = set(read_tensors([path], f"SOURCE {path}").tensors)
    for name, kind in KINDS.items():
        if names.intersection(kind.signs):
            is_dit = name in EXPERTS
            return SourceComponent(name, [path], config or (_config_from_base(base) if is_dit else None))
    raise ConfigError(
        f"SOURCE={path} contains no model of Wan: its tensors are {shorten(names, 3)}. Set SOURCE to a DiT, VAE, UMT5, CLIP or "
        "LoRA of Wan 2.1 or 2.2."
    )


def _config_from_base(base: Path | None) -> _Config | None:
    """Return the part of an official config that the shapes of a DiT do not tell, from a diffusers pipeline in --base."""
    if base is None or not (base / EXPERTS[0] / "config.json").is_file():
        return None
    config = _read_source_config(base / EXPERTS[0])
    head_dim = config.get("attention_head_dim", official.HEAD_DIM)
    return {"_class_name": official.OFFICIAL_CLASS, "head_dim": head_dim}


def _read_source_config(folder: Path) -> _Config:
    path = folder / "config.json"
    return read_model_config(path, label=f"SOURCE {path}")


def map_component(component: SourceComponent, to: str) -> ComponentMapping:
    """Find the source's tensor for each tensor of the layout `to`, and check the shapes.

    Raises:
        CheckpointError: if a file is damaged, a tensor name is unknown, tensors are missing, or shapes differ from the config.
    """
    kind = KINDS[component.name]
    given = component.config or {}
    where = f"SOURCE {component.files[0].parent if len(component.files) > 1 else component.files[0]}"
    source = read_tensors(component.files, where)
    stored = dict(source.tensors)
    by_file_name = {value.name: value for value in stored.values()}
    mapping = partial(ComponentMapping, stored=by_file_name, fp8=source.fp8, notes=source.notes)
    is_official = kind.signs[0] in stored
    is_dit = component.name in EXPERTS
    if component.name == "image_encoder" and not (is_official and to == "diffusers"):
        return mapping(config=given, sources=by_file_name)
    if name_maps.UMT5_TIED in stored:
        stored.setdefault("shared.weight", stored.pop(name_maps.UMT5_TIED))
    unused = {name: stored.pop(name) for name in list(stored) if any(part in name for part in kind.unused)}
    name_map = kind.names(stored, where)
    sources = split_sources(stored)
    stock_names = name_maps.rename_all(sources, name_map.to_diffusers if is_official else str, where)
    official_names = name_maps.rename_all(stock_names, name_map.to_official, where)
    by_stock_name = {new: sources[old] for new, old in stock_names.items()}
    by_official_name = {new: by_stock_name[old] for new, old in official_names.items()}
    has_config = given.get("_class_name") == official.DIFFUSERS_CLASS if is_dit else not is_official
    shapes = {name: value.shape for name, value in (stored if is_official else by_official_name).items()}
    config = given if has_config else kind.config(shapes, given, where)
    parameters = build_stock(component.name, config).named_parameters()
    # Some releases of transformers put a prefix in front of CLIP's names. Every release reads both kinds of names.
    found, expected = (
        {name.removeprefix("vision_model."): tuple(value.shape) for name, value in named}
        for named in (by_stock_name.items(), parameters)
    )
    name_maps.check_fit(found, expected, where)
    if to == "diffusers":
        # diffusers ignores these tensors, but other programs read them.
        kept = {} if is_official else unused
        return mapping(config=config, sources=by_stock_name | kept)
    prefixes = {"comfyui": name_maps.COMFYUI_DIT, "self-forcing": "model."}
    prefix = prefixes.get(to, "") if is_dit else ""
    renamed = {f"{prefix}{name}": source for name, source in by_official_name.items()}
    return mapping(config=config, sources=renamed)


def split_sources(stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Split attn.to_qkv of an official CLIP file into attn.q, attn.k and attn.v, and reshape; other tensors are unchanged.

    The names have no prefix. `LazyTensor.name` stays the name in the file.
    """
    sources: dict[str, LazyTensor] = {}
    for name, value in stored.items():
        if ".attn.to_qkv." in name:
            rows = value.shape[0] // 3
            for third, letter in enumerate("qkv"):
                cut = partial(torch.narrow, dim=0, start=third * rows, length=rows)
                sources[name.replace("to_qkv", letter)] = value.derived(value.name, cut)
        elif name in name_maps.CLIP_RESHAPED:
            sources[name] = value.derived(value.name, torch.squeeze)
        else:
            sources[name] = value
    return sources
