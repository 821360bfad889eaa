"""`wands convert`: write a model in another layout, compare every bit with the source, and run a forward on both."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wands.commands.convert.convert_result import ComponentSummary, ConvertResult
from wands.commands.convert.lora_layouts import convert_lora, find_loras
from wands.commands.convert.pipeline_folder import check_rest, copy_path, write_pipeline, write_stock_config
from wands.commands.convert.round_trip import compare_forwards, stock_names
from wands.commands.convert.source_components import (
    KINDS,
    ComponentMapping,
    SourceComponent,
    find_components,
    map_component,
    new_tensors,
)
from wands.errors import ConfigError
from wands.files import atomic_folder
from wands.model.files.hub import fetch_model
from wands.model.files.lora_files import EXPERT_NAMES
from wands.model.files.name_maps import EXPERTS
from wands.model.files.official import (
    DIT_STEM,
    EXPERT_FOLDERS,
    LATENTS_22,
    OFFICIAL_CLASS,
    boundary_of,
    to_official_config,
)
from wands.model.files.tensor_files import LazyTensor, check_written, write_safetensors, write_sharded
from wands.variants import Variant, variant_of

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENIZER = "google/umt5-xxl"
_T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
_SOURCE_FILES = ["*.json", "*.safetensors", "*.pth", "*.txt", "*.model"]
# Files of an official repository that no other layout has.
_OFFICIAL_REST = ("models_clip_*", "models_t5_*", "Wan2.*_VAE.*", "google", "xlm-roberta-large")
_DIT_FILES = ["transformer/*.safetensors", "transformer_2/*.safetensors", f"{DIT_STEM}*", "*_noise_model/*"]
_NOT_CONVERTED = {
    (
        "official",
        "image_encoder",
    ): "official Wan's file has a text half too; --rest-of takes it from an official repository",
    ("comfyui", "text_encoder"): "ComfyUI's file has the tokenizer in it; take the published umt5_xxl",
    ("comfyui", "image_encoder"): "take the published clip_vision_h",
}


def convert(
    source: str,
    out: Path,
    *,
    to: str,
    rest_of: str | None = None,
    dtype: str | None = None,
    forward: bool = True,
) -> ConvertResult:
    """Write a model or a LoRA in another layout.

    Tensors are converted one at a time. The result is read back and compared with the source bit by bit. Stock
    diffusers then runs a forward on the source and on the result, and the outputs must be equal.

    Args:
        source: folder, Hub id or file: a diffusers pipeline or DiT, an official repository, a ComfyUI file, a LoRA.
        out: folder to create; an existing one must be empty.
        to: "diffusers", "official" or "comfyui".
        rest_of: folder or Hub id, in the layout `to`, whose other parts are copied.
        dtype: "fp32" or "bf16" for the DiT and LoRAs, except layers that diffusers keeps in fp32; None keeps dtypes.
        forward: whether to compare forwards of the DiT.

    Raises:
        ConfigError: if `source` is not a model, `out` is not empty, or `rest_of` is another model.
        CheckpointError: if names are unknown, tensors are missing or damaged, or a comparison fails.
        WandsError: if `out` cannot be written; nothing is left behind.
    """
    out = out.resolve()
    with atomic_folder(out) as partial:
        root = Path(source) if Path(source).is_file() else fetch_model(source, key="SRC", allow=_SOURCE_FILES)
        loras = find_loras(root)
        if rest_of and (to == "comfyui" or loras):
            complete = "a LoRA has" if loras else "ComfyUI's files have"
            raise ConfigError(f"--rest-of {rest_of} cannot be used: {complete} no other parts; leave it out.")
        rest = fetch_model(rest_of, key="--rest-of", ignore=_DIT_FILES) if rest_of else None
        summaries: list[ComponentSummary] = []
        notes: list[str] = []
        for expert, path in loras.items():
            results = convert_lora(path, partial, to=to, dtype=_DTYPES[dtype], expert=expert)
            summaries, notes = summaries + results[0], notes + results[1]
        if not loras:
            conversion = ModelConversion(root, partial, to, rest, _DTYPES[dtype], forward)
            conversion.run()
            summaries, notes = conversion.summaries, conversion.notes
    return ConvertResult(out, tuple(summaries), tuple(notes))


class ModelConversion:
    """Conversion of one model.

    Args:
        root: folder or file of the source.
        out: existing folder for the result.
        to: "diffusers", "official" or "comfyui".
        rest: folder whose other parts are copied.
        dtype: dtype of the DiT; None keeps the source's.
        forward: whether to compare forwards of the DiT.

    Attributes:
        summaries: summary of each component that was converted.
        notes: missing parts and how to get them.
    """

    def __init__(
        self, root: Path, out: Path, to: str, rest: Path | None, dtype: torch.dtype | None, forward: bool
    ) -> None:
        self.root, self.out, self.to, self.rest = root, out, to, rest
        self.dtype, self.forward = dtype, forward
        self.components = {component.name: component for component in find_components(root)}
        self.two_experts = EXPERTS[1] in self.components
        self.variant: Variant | None = None
        self.dit_config: dict[str, Any] = {}
        self.summaries: list[ComponentSummary] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """Convert every component and add the other parts of the layout."""
        for component in self.components.values():
            if reason := self._reason_to_skip(component):
                self.notes.append(f"{component.name} is left out: {reason}.")
            else:
                self._convert(component)
        if self.to == "diffusers":
            self._complete_pipeline()
        if self.to == "official":
            self._complete_official()

    def _reason_to_skip(self, component: SourceComponent) -> str | None:
        config = component.config or {"_class_name": OFFICIAL_CLASS}
        is_official = config.get("_class_name") == OFFICIAL_CLASS
        if component.name == "image_encoder" and self.to == "official" and is_official:
            return None
        if (
            component.name == "vae"
            and self.to != "diffusers"
            and not is_official
            and not _is_wans_own(config)
        ):
            return "its latents_mean and latents_std are not Wan's own, and only diffusers' layout can store them"
        return _NOT_CONVERTED.get((self.to, component.name))

    def _convert(self, component: SourceComponent) -> None:
        is_dit = component.name in EXPERTS
        with component.open() as files:
            mapping = map_component(component, files, self.to)
            if is_dit and self.variant is None:
                self.dit_config, self.variant = mapping.config, self._find_variant(mapping.config)
            tensors = new_tensors(mapping, files, self._cast(mapping) if is_dit else lambda name: None)
            paths = self._write(component, mapping, tensors)
            check_written(tensors, paths, "convert")
            forward = compare_forwards(mapping, files, tensors, paths) if is_dit and self.forward else ""
            renamed = sum(source.name != name for name, source in mapping.sources.items())
            self.summaries.append(
                ComponentSummary.of(
                    component.name,
                    len(files.shapes),
                    tensors,
                    renamed,
                    unused=mapping.unused,
                    forward=forward,
                )
            )

    def _find_variant(self, config: Mapping[str, Any]) -> Variant:
        index: dict[str, Any] = {}
        if self.two_experts:
            low_noise = self.components[EXPERTS[1]].config or {}
            model_type = "t2v" if config["in_channels"] == config["out_channels"] else "i2v"
            index["boundary_ratio"] = boundary_of({"model_type": model_type} | low_noise)
        return variant_of(config, index)

    def _cast(self, mapping: ComponentMapping) -> Callable[[str], torch.dtype | None]:
        """Return the function of a DiT tensor's name that gives its new dtype, None to keep it."""
        from diffusers import WanTransformer3DModel

        if self.dtype is None:
            return lambda name: None
        kept, names = set(WanTransformer3DModel._keep_in_fp32_modules), stock_names(mapping.sources)
        return lambda name: torch.float32 if kept & set(names[name].split(".")) else self.dtype

    def _write(
        self, component: SourceComponent, mapping: ComponentMapping, tensors: Sequence[LazyTensor]
    ) -> list[Path]:
        """Write the tensors of a component, and its config where the layout has one."""
        name, variant = component.name, self.variant
        has_vae_22 = mapping.config.get("z_dim") == len(LATENTS_22["latents_mean"])
        if self.to == "diffusers":
            (self.out / name).mkdir()
            write_stock_config(name, mapping.config, self.out / name)
            return write_sharded(self.out / name, KINDS[name].stem, tensors)
        if self.to == "official" and name in EXPERTS:
            assert variant is not None
            folder = self.out / EXPERT_FOLDERS[name] if self.two_experts else self.out
            folder.mkdir(exist_ok=True)
            text = json.dumps(to_official_config(mapping.config, variant), indent=2)
            (folder / "config.json").write_text(text + "\n", encoding="utf-8")
            return write_sharded(folder, DIT_STEM, tensors)
        if self.to == "official":
            file_names = {
                "vae": "Wan2.2_VAE.pth" if has_vae_22 else "Wan2.1_VAE.pth",
                "text_encoder": _T5_FILE,
                "image_encoder": f"{component.files[0].stem}.pth",
            }
            path = self.out / file_names[name]
            _write_pickle(path, tensors)
            return [path]
        if name in EXPERTS:
            assert variant is not None
            side = f"_{EXPERT_NAMES[name]}" if self.two_experts else ""
            path = self.out / "diffusion_models" / f"{variant.name.replace('-', '_')}{side}.safetensors"
        else:
            path = self.out / "vae" / ("wan2.2_vae" if has_vae_22 else "wan_2.1_vae")
            path = path.with_name(f"{path.name}.safetensors")
        path.parent.mkdir(exist_ok=True)
        write_safetensors(path, tensors)
        return [path]

    def _complete_pipeline(self) -> None:
        """Add the other parts of a diffusers pipeline if they are known."""
        rest = self.rest or (self.root if (self.root / "model_index.json").is_file() else None)
        if rest is not None:
            check_rest(rest, self.dit_config, self.two_experts)
            for path in sorted(rest.iterdir()):
                if not path.name.startswith((".", "README")) and not (self.out / path.name).exists():
                    copy_path(path, self.out / path.name)
            return
        missing = [name for name in ("transformer", "vae", "text_encoder") if name not in self.components]
        if self.variant and "clip" in self.variant.conditions and "image_encoder" not in self.components:
            missing.append("image_encoder")
        if not (self.root / _TOKENIZER).is_dir():
            missing.append("tokenizer")
        if missing:
            self.notes.append(
                f"the result is not a whole pipeline, because SRC has no {', '.join([*missing, 'scheduler'])}; --rest-of DIR "
                "takes these parts from a diffusers pipeline of the same model."
            )
            return
        assert self.variant is not None
        write_pipeline(self.out, self.root / _TOKENIZER, self.variant)

    def _complete_official(self) -> None:
        """Copy the tokenizer, and the files of official repositories that were not converted."""
        if (self.root / "tokenizer").is_dir():
            copy_path(self.root / "tokenizer", self.out / _TOKENIZER)
        for root in (self.root, self.rest):
            if root is None or not root.is_dir():
                continue
            for path in (path for pattern in _OFFICIAL_REST for path in sorted(root.glob(pattern))):
                if not any(self.out.glob(f"{path.stem}*")):
                    copy_path(path, self.out / path.name)
        if any(self.out.glob("models_clip_*")):
            self.notes = [note for note in self.notes if not note.startswith("image_encoder ")]


def _write_pickle(path: Path, tensors: Sequence[LazyTensor]) -> None:
    """Write a state dict as official Wan does.

    Raises:
        OSError: if the disk is full.
    """
    state = {tensor.name: tensor.read() for tensor in tensors}
    try:
        torch.save(state, path)
    except RuntimeError as error:  # raised by torch.save if a write fails
        raise OSError(str(error)) from error


def _is_wans_own(config: Mapping[str, Any]) -> bool:
    """Return whether a VAE has the latent statistics of the published VAE, which are constants in the official code."""
    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    wan_21 = {key: list(defaults[key].default) for key in LATENTS_22}
    published = LATENTS_22 if config.get("z_dim") == 48 else wan_21
    return all(list(config.get(key, wan_21[key])) == published[key] for key in published)
