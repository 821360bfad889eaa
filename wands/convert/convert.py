"""`wands convert`: write a model or a LoRA in the file layout of another program, and compare the result with the source.

All tensors must be equal bit for bit. The DiTs of both must also give equal outputs in a forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wands.config.options import ConvertOptions
from wands.convert.convert_result import ConvertResult, compare_forwards, stock_names
from wands.convert.pipeline_folder import build_stock, copy_path, write_pipeline, write_stock_config
from wands.convert.source_components import SourceComponent, find_components, map_component
from wands.encoders.components import WEIGHT_STEMS
from wands.errors import CheckpointError, ConfigError
from wands.export.base_pipeline import check_base
from wands.export.trained_weights import DTYPES
from wands.files import atomic_folder
from wands.model.files import lora_files, official
from wands.model.files.hashes import write_hashes
from wands.model.files.hub import fetch_model
from wands.model.files.lora_experts import (
    EXPERT_KEY,
    EXPERT_NAMES,
    FoundLora,
    describe_file,
    expert_in_name,
    find_lora_files,
    list_lora_files,
)
from wands.model.files.name_maps import EXPERTS, shorten
from wands.model.files.tensor_files import (
    LazyTensor,
    TensorFiles,
    check_written,
    write_safetensors,
    write_sharded,
)
from wands.model.weight_dtypes import stock_dtype
from wands.variants import Variant, variant_of

_TOKENIZER = "google/umt5-xxl"
_SOURCE_FILES = ["*.json", "*.safetensors", "*.pth", "*.txt", "*.model"]
# Files of an official repository that are copied if they are not converted.
_OFFICIAL_REST = ("models_clip_*", "models_t5_*", "Wan2.*_VAE.*", "google", "xlm-roberta-large")
_DIT_FILES = [*(f"{expert}/*.safetensors" for expert in EXPERTS), f"{official.DIT_STEM}*", "*_noise_model/*"]
_NOT_CONVERTED = {
    "image_encoder to official": "the official file also needs CLIP's text encoder; --base DIR copies this file from an official "
    "repository",
    "text_encoder to comfyui": "ComfyUI's file also needs the tokenizer; use the file umt5_xxl of ComfyUI",
    "image_encoder to comfyui": "wands cannot write ComfyUI's file; use the file clip_vision_h of ComfyUI",
}


def convert(options: ConvertOptions) -> ConvertResult:
    """Write a model or a LoRA in another layout, read it back, compare it with the source bit for bit, and return a summary.

    Tensors are converted one at a time. With `options.forward`, diffusers runs a forward pass with both DiTs, whose outputs must
    be equal.

    Raises:
        ConfigError: if the source is neither a Wan model nor a LoRA, `--out` is not empty, source and `--base` are different
            models, or options exclude each other.
        CheckpointError: if a tensor name is unknown, tensors are missing or damaged, or the result differs from the source.
        WandsError: if `--out` cannot be written. In this case no file of the result is left.
    """
    result = ConvertResult(options.out.resolve())
    source = options.source
    base = options.base
    with atomic_folder(result.out) as unfinished:
        is_file = Path(source).is_file()
        root = Path(source) if is_file else fetch_model(source, key="SOURCE", allow=_SOURCE_FILES)
        loras = _find_source_loras(root)
        for file in loras:
            if file.experts:
                result.notes.append(f"{file}.")
        if base and (options.to in ("comfyui", "self-forcing") or loras):
            layouts = {"comfyui": "ComfyUI's layout", "self-forcing": "a generator file"}
            layout = "a LoRA" if loras else layouts[options.to]
            raise ConfigError(
                f"--base {base} cannot be used, because {layout} needs no files of a base model. Leave --base out."
            )
        for file in loras:
            named = not is_file and expert_in_name(str(file.path.relative_to(root))) is not None
            _convert_lora(file, unfinished, result, options.to, DTYPES.get(options.dtype), named)
        if loras and options.to == "self-forcing":
            raise ConfigError(
                f"--to self-forcing is for models, but SOURCE={source} is a LoRA. Merge it first, with wands export --merge."
            )
        if not loras and options.to == "musubi":
            raise ConfigError(
                f"--to musubi is for LoRAs, but SOURCE={source} is a model. Use --to comfyui, which musubi-tuner reads."
            )
        if not loras:
            rest = fetch_model(base, key="--base", ignore=_DIT_FILES) if base else None
            ModelConversion(
                options=options, to=options.to, root=root, out=unfinished, rest=rest, result=result
            ).run()
        write_hashes(unfinished)
    return result


# ---- LoRAs


def _find_source_loras(root: Path) -> list[FoundLora]:
    """Return the LoRA in a source: one file, a file for each expert, or [] if the source is not a LoRA.

    Raises:
        CheckpointError: if a file cannot be read.
        ConfigError: if several files could be the LoRA, or the folder also contains another safetensors file.
    """
    if root.is_file() or (root / "model_index.json").is_file():
        paths = [root] if root.is_file() else []
    else:
        paths = list_lora_files(root)
    is_lora = [lora_files.is_lora(TensorFiles([path], f"SOURCE {path}").tensors) for path in paths]
    if not any(is_lora):
        return []
    others = [path.name for path, known in zip(paths, is_lora, strict=True) if not known]
    if others:
        raise ConfigError(
            f"SOURCE={root} contains a LoRA and also {others[0]}, which is none. Move {others[0]} out of the folder, or set "
            "SOURCE to a single file."
        )
    return [describe_file(root, f"SOURCE {root}")] if root.is_file() else find_lora_files(root, "SOURCE")


def _convert_lora(
    source: FoundLora, out: Path, result: ConvertResult, to: str, dtype: torch.dtype | None, named: bool
) -> None:
    """Convert a LoRA file to the layout `to`.

    A file with LoRAs of two experts becomes two, because no program loads both from one. `named` adds the name of the expert to
    the file for one expert. `dtype` None keeps the dtype of the source.

    Raises:
        CheckpointError: if `source` is not a LoRA of Wan, has full differences that the layout cannot store, or values read back
            differ.
    """
    path = source.path
    loras = source.read(f"SOURCE {path}")
    old_names = TensorFiles([path], f"SOURCE {path}").tensors.keys()
    named = named or len(loras) > 1
    for name, update in loras.items():
        pairs = update.pairs
        differences = update.differences
        if differences and to not in ("official", "comfyui"):
            raise CheckpointError(
                f"SOURCE {path} contains full-size updates of {len(differences)} parameters ({shorten(differences, 3)}), "
                f"which a LoRA file of --to {to} cannot contain. Use --to comfyui."
            )
        state = sorted(lora_files.lora_tensors(pairs, to, differences).items())
        # alpha stays fp32
        tensors = [LazyTensor.of(key, value, dtype if value.ndim else None) for key, value in state]
        file_name = lora_files.LORA_FILE if to == "diffusers" else path.name
        is_marked = not named or expert_in_name(Path(file_name).stem) == name
        new = out / (file_name if is_marked else f"{EXPERT_NAMES[name]}_{file_name}")
        write_safetensors(new, tensors, {EXPERT_KEY: EXPERT_NAMES[name]} if source.experts else {})
        check_written(tensors, [new], "convert")
        num_folded = sum(pair.scale != 1.0 for pair in pairs.values())
        if num_folded and to != "musubi":
            result.notes.append(
                f"{new.name}: alpha / rank of {num_folded} modules was multiplied into lora_B, so alpha now equals the rank."
            )
        if source.experts and name == EXPERTS[1] and to == "diffusers":
            result.notes.append(
                f"load {new.name} in diffusers with load_lora_weights(..., load_into_transformer_2=True)."
            )
        num_read = sum(len(loras) == 1 or key.startswith(f"{name}.") for key in old_names)
        num_renamed = sum(tensor.name not in old_names for tensor in tensors)
        result.add(new.name, num_read, tensors, num_renamed)


# ---- models


@dataclass
class ModelConversion:
    """Conversion of one model to the layout `to` of another program: diffusers, official Wan or ComfyUI.

    Attributes:
        options: options of the command.
        to: "diffusers", "official", "comfyui" or "self-forcing".
        root: folder or file of the source.
        out: existing folder for the result.
        rest: folder of a model in the layout `to`, for components that the source lacks; None copies nothing.
        result: receives summaries and notes.
        variant: variant of the DiT; does not exist until the DiT has been converted.
        dit_config: diffusers config of the DiT; empty until the DiT has been converted.
    """

    options: ConvertOptions
    to: str
    root: Path
    out: Path
    rest: Path | None
    result: ConvertResult
    variant: Variant = field(init=False)
    dit_config: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Convert every component of the source. Then add the other files of the new layout, such as the tokenizer."""
        self.components = {component.name: component for component in find_components(self.root, self.rest)}
        self.two_experts = EXPERTS[1] in self.components
        if self.two_experts and self.to == "self-forcing":
            raise ConfigError(
                f"SOURCE={self.options.source} has two experts, but a generator file of --to self-forcing contains one DiT. Use "
                "--to official."
            )
        for component in self.components.values():
            if reason := self._reason_to_skip(component):
                self.result.notes.append(f"{component.name} is left out: {reason}.")
            else:
                self._convert(component)
        if self.to == "diffusers":
            self._complete_pipeline()
        if self.to == "official":
            self._complete_official()

    def _reason_to_skip(self, component: SourceComponent) -> str | None:
        config = component.config or {"_class_name": official.OFFICIAL_CLASS}
        is_official = config.get("_class_name") == official.OFFICIAL_CLASS
        if self.to == "official" and is_official:
            return None
        if self.to == "self-forcing" and component.name not in EXPERTS:
            return "the scripts of Self-Forcing take it from the official repository of Wan"
        if component.name == "vae" and self.to != "diffusers" and not (is_official or _is_wans_own(config)):
            return "its latents_mean and latents_std differ from Wan's, and only diffusers' layout can store them"
        return _NOT_CONVERTED.get(f"{component.name} to {self.to}")

    def _convert(self, component: SourceComponent) -> None:
        is_dit = component.name in EXPERTS
        mapping = map_component(component, self.to)
        if is_dit and not self.dit_config:
            self.dit_config = mapping.config
            self.variant = self._find_variant(mapping.config)
        sources = mapping.sources
        chosen = DTYPES.get(self.options.dtype) if is_dit else None
        stock = stock_names(sources) if is_dit else {}
        tensors = []
        for name, source in sorted(sources.items()):
            dtype = chosen or (torch.bfloat16 if source.name in mapping.fp8 else None)
            new_dtype = stock_dtype(stock[name], dtype) if is_dit and dtype else dtype
            tensors.append(source.derived(name, partial(Tensor.to, dtype=new_dtype)))
        self.result.notes += mapping.notes
        paths = self._write(component, mapping.config, tensors)
        check_written(tensors, paths, "convert")
        forward = compare_forwards(mapping, tensors, paths) if is_dit and self.options.forward else ""
        renamed = sum(source.name != name for name, source in sources.items())
        details = {"unused": mapping.unused, "forward": forward}
        self.result.add(component.name, len(mapping.stored), tensors, renamed, **details)

    def _find_variant(self, config: Mapping[str, Any]) -> Variant:
        index: dict[str, Any] = {}
        if self.two_experts:
            low_noise = self.components[EXPERTS[1]].config or {}
            model_type = "t2v" if config["in_channels"] == config["out_channels"] else "i2v"
            index["boundary_ratio"] = official.boundary_of({"model_type": model_type} | low_noise)
        try:
            return variant_of(config, index)
        except ValueError as error:
            raise ConfigError(f"SOURCE={self.options.source}: {error}. Set SOURCE to a Wan model.") from error

    def _target(self, component: SourceComponent, config: Mapping[str, Any]) -> Path:
        """Return the path for the tensors of a component: a folder, or a file if the layout stores it in one."""
        name = component.name
        if self.to == "self-forcing":
            return self.out / "generator.pt"
        if self.to == "diffusers":
            return self.out / name
        if name in EXPERTS and self.to == "official":
            return self.out / official.EXPERT_FOLDERS[name] if self.two_experts else self.out
        if name in EXPERTS:
            suffix = f"_{EXPERT_NAMES[name]}" if self.two_experts else ""
            return self.out / f"diffusion_models/{self.variant.name.replace('-', '_')}{suffix}.safetensors"
        has_vae_22 = config.get("z_dim") == len(official.LATENTS_22["latents_mean"])
        files = {
            ("vae", "comfyui"): f"vae/{'wan2.2_vae' if has_vae_22 else 'wan_2.1_vae'}.safetensors",
            ("vae", "official"): f"Wan2.{2 if has_vae_22 else 1}_VAE.pth",
            ("text_encoder", "official"): "models_t5_umt5-xxl-enc-bf16.pth",
            ("image_encoder", "official"): f"{component.files[0].stem}.pth",
        }
        return self.out / files[name, self.to]

    def _write(
        self, component: SourceComponent, config: Mapping[str, Any], tensors: Sequence[LazyTensor]
    ) -> list[Path]:
        """Write the tensors of a component and, if the layout has one, its config; return the paths of the tensors."""
        target = self._target(component, config)
        target.parent.mkdir(exist_ok=True)
        if target.suffix in (".pt", ".pth"):
            _write_pickle(target, tensors, key="generator" if target.suffix == ".pt" else None)
            return [target]
        if target.suffix == ".safetensors":
            write_safetensors(target, tensors)
            return [target]
        target.mkdir(exist_ok=True)
        if self.to == "diffusers":
            write_stock_config(component.name, config, target)
        else:
            text = json.dumps(official.to_official_config(config, self.variant), indent=2)
            (target / "config.json").write_text(text + "\n", encoding="utf-8")
        return write_sharded(target, WEIGHT_STEMS.get(component.name, official.DIT_STEM), tensors)

    def _complete_pipeline(self) -> None:
        """Add the remaining parts of a diffusers pipeline, such as tokenizer and scheduler.

        They are copied from --base (`rest`), else from a source that is a diffusers pipeline. Else, if the source has the
        tokenizer and all models, scheduler files and model_index.json are new. Otherwise nothing is added, and a note names the
        missing parts.
        """
        rest = self.rest or (self.root if (self.root / "model_index.json").is_file() else None)
        if rest is not None:
            check_base(rest, self.dit_config, EXPERTS[:1], "SOURCE's model", self.two_experts)
            for path in sorted(rest.iterdir()):
                if not path.name.startswith((".", "README")) and not (self.out / path.name).exists():
                    copy_path(path, self.out / path.name, rest)
            return
        missing = [name for name in ("transformer", "vae", "text_encoder") if name not in self.components]
        if self.dit_config and "clip" in self.variant.conditions and "image_encoder" not in self.components:
            missing.append("image_encoder")
        if not (self.root / _TOKENIZER).is_dir():
            missing.append("tokenizer")
        if missing:
            self.result.notes.append(
                f"the result is not a whole pipeline, because SOURCE has no {', '.join([*missing, 'scheduler'])}. --base DIR "
                "copies these parts from a diffusers pipeline of the same model."
            )
            return
        write_pipeline(self.out, self.root / _TOKENIZER, self.variant)

    def _complete_official(self) -> None:
        """Copy the files that an official result lacks, such as tokenizer and CLIP, from the source or else from --base."""
        if (self.root / "tokenizer").is_dir():
            copy_path(self.root / "tokenizer", self.out / _TOKENIZER, self.root)
        for root in filter(None, (self.root, self.rest)):
            for path in (path for pattern in _OFFICIAL_REST for path in sorted(root.glob(pattern))):
                if not any(self.out.glob(f"{path.stem}*")):
                    copy_path(path, self.out / path.name, root)
        if any(self.out.glob("models_clip_*")):
            notes = self.result.notes
            notes[:] = [note for note in notes if not note.startswith("image_encoder ")]


def _write_pickle(path: Path, tensors: Sequence[LazyTensor], key: str | None = None) -> None:
    """Write tensors as a pickled state dict, the format of the .pth files of Wan's authors. Raises OSError.

    With `key`, the state dict is the value of that key, as in the files of Self-Forcing.
    """
    state = {tensor.name: tensor.read() for tensor in tensors}
    try:
        torch.save({key: state} if key else state, path)
    except RuntimeError as error:  # raised by torch.save if a write fails
        raise OSError(str(error)) from error


def _is_wans_own(config: Mapping[str, Any]) -> bool:
    """Return whether a VAE has the latent mean and standard deviation of the published Wan VAE.

    These are constants in the official code. A VAE with other values can therefore only have diffusers' layout.
    """
    stock = build_stock("vae", config).config
    published = official.LATENTS_22 if stock["z_dim"] == 48 else build_stock("vae", {}).config
    return all(list(stock[key]) == list(published[key]) for key in official.LATENTS_22)
