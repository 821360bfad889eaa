"""`wands convert`: weights from one layout to another, every bit compared with the source and a forward run on both."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wands.commands.convert.convert_lora import convert_lora, find_loras
from wands.commands.convert.convert_parts import (
    STEMS,
    ComponentMapping,
    ComponentSummary,
    SourceComponent,
    convert_part,
    find_parts,
    make_entries,
)
from wands.commands.convert.convert_pipeline import check_rest, copy_path, write_pipeline, write_stock_config
from wands.commands.convert.round_trip import compare_bits, compare_forwards, stock_names
from wands.errors import ConfigError, WandsError
from wands.files import publish
from wands.model.files.encoder_names import LATENTS_22
from wands.model.files.hub import fetch_model
from wands.model.files.lora_files import EXPERT_NAMES
from wands.model.files.names import EXPERTS
from wands.model.files.official import DIT_STEM, EXPERT_FOLDERS, boundary_of, to_official_config
from wands.model.files.tensor_files import LazyTensor, write_safetensors, write_sharded
from wands.variants import Variant, variant_of

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENIZER = "google/umt5-xxl"
_T5_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
# What of an official repository no other layout has.
_OFFICIAL_REST = ("models_clip_*", "models_t5_*", "Wan2.*_VAE.*", "google", "xlm-roberta-large")
_DIT_FILES = ["transformer/*.safetensors", "transformer_2/*.safetensors", f"{DIT_STEM}*", "*_noise_model/*"]
_LEFT_OUT = {
    "official": {
        "image_encoder": "official Wan's file has a text half too; --rest-of takes it from an official repository"
    },
    "comfyui": {
        "text_encoder": "ComfyUI's file has the tokenizer in it; take the published umt5_xxl",
        "image_encoder": "take the published clip_vision_h",
    },
}


@dataclass(frozen=True)
class ConvertResult:
    """What `convert` did.

    Attributes:
        out: the folder.
        rows: one for each part that was written.
        notes: what the folder lacks and what to do about it.
    """

    out: Path
    rows: tuple[ComponentSummary, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), *(f"note: {note}" for note in self.notes), str(self.out)])


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

    Tensors go over one at a time. The result is read back and compared with the source bit by bit, and stock
    diffusers runs a forward on either, one after the other, whose outputs must be equal.

    Args:
        source: folder, Hub id or file: a diffusers pipeline or DiT, an official repository, a ComfyUI file, a LoRA.
        out: folder to create; an existing one must be empty.
        to: "diffusers", "official" or "comfyui".
        rest_of: folder or Hub id, in the layout `to`, whose other parts are taken.
        dtype: "fp32" or "bf16" of the DiT and of LoRAs, but for what diffusers keeps in fp32; None leaves it.
        forward: whether to compare forwards of the DiT.

    Raises:
        ConfigError: no model at `source`, something at `out`, or `rest_of` is of another model.
        CheckpointError: unknown names, missing or damaged tensors, a pickle with code, or a comparison failed.
        WandsError: `out` cannot be written; nothing is left beside it.
    """
    out = out.resolve()
    if os.path.ismount(out):
        raise ConfigError(
            f"--out {out} is a mount point, which the finished folder cannot replace; give a folder in it, such as "
            f"{out / 'converted'}."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out} is there already; choose a new or an empty folder, nothing is overwritten."
        )
    root = _find_source(source)
    loras = find_loras(root)
    if rest_of and (to == "comfyui" or loras):
        what = "a LoRA" if loras else "ComfyUI's files"
        raise ConfigError(f"--rest-of {rest_of} has nothing to give: {what} stand alone; leave it out.")
    rest = fetch_model(rest_of, key="--rest-of", ignore=_DIT_FILES) if rest_of else None
    partial = out.with_name(f"{out.name}.tmp")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"--out {out} needs the name {partial}; delete that folder if no conversion is running."
        ) from None
    except OSError as error:
        raise WandsError(f"--out {out} cannot be made ({error.strerror}); choose another folder.") from error
    try:
        rows: list[ComponentSummary] = []
        notes: list[str] = []
        for expert, lora in loras.items():
            done = convert_lora(lora, partial, to=to, dtype=_DTYPES.get(dtype or ""), expert=expert)
            rows, notes = rows + done[0], notes + done[1]
        if not loras:
            rows, notes = _Job(root, partial, to, rest, _DTYPES.get(dtype or ""), forward).run()
        if out.exists():
            out.rmdir()
        publish(partial, out)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "writ" not in str(error):  # torch.save says so of a full disk
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise WandsError(
            f"--out {out} cannot be written ({reason}); free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ConvertResult(out, tuple(rows), tuple(notes))


def _find_source(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    allow = ["*.json", "*.safetensors", "*.pth", "*.txt", "*.model"]
    return fetch_model(source, key="SRC", allow=allow)


class _Job:
    """One conversion of a model: source and target, and what has come about so far."""

    def __init__(
        self, root: Path, out: Path, to: str, rest: Path | None, dtype: torch.dtype | None, forward: bool
    ) -> None:
        self.root, self.out, self.to, self.rest = root, out, to, rest
        self.dtype, self.forward = dtype, forward
        self.parts = {part.name: part for part in find_parts(root)}
        self.rows: list[ComponentSummary] = []
        self.notes: list[str] = []
        self.config: dict[str, Any] = {}

    def run(self) -> tuple[list[ComponentSummary], list[str]]:
        for part in self.parts.values():
            if reason := self._left_out(part):
                self.notes.append(f"{part.name} is left out: {reason}.")
                continue
            with part.open() as files:
                converted = convert_part(part, files, self.to)
                if part.name in EXPERTS:
                    self.config = self.config or converted.config
                entries = make_entries(converted, files, self._cast(part, converted))
                written = self._write(part, converted, entries)
                compare_bits(entries, written)
                forward = ""
                if part.name in EXPERTS and self.forward:
                    forward = compare_forwards(converted.config, converted.taken, files, entries, written)
                renamed = sum(taken.name != name for name, taken in converted.taken.items())
                size = sum(entry.num_bytes for entry in entries)
                self.rows.append(
                    ComponentSummary(
                        part.name, len(files.shapes), len(entries), renamed, size, converted.unused, forward
                    )
                )
        {"diffusers": self._finish_diffusers, "official": self._finish_official}.get(self.to, lambda: None)()
        return self.rows, self.notes

    def _left_out(self, part: SourceComponent) -> str | None:
        official = part.config is None or part.config.get("_class_name") == "WanModel"
        if part.name == "image_encoder" and self.to == "official" and official:
            return None
        if (
            part.name == "vae"
            and self.to != "diffusers"
            and not official
            and not _is_wans_own(part.config or {})
        ):
            return (
                "its latents_mean and latents_std are not Wan's own, and only diffusers' layout can say them"
            )
        return _LEFT_OUT.get(self.to, {}).get(part.name)

    def _cast(
        self, part: SourceComponent, converted: ComponentMapping
    ) -> Callable[[str], torch.dtype | None]:
        if self.dtype is None or part.name not in EXPERTS:
            return lambda name: None
        from diffusers import WanTransformer3DModel

        dtype, kept = self.dtype, set(WanTransformer3DModel._keep_in_fp32_modules)
        names = stock_names(converted.taken)
        return lambda name: torch.float32 if kept & set(names[name].split(".")) else dtype

    @property
    def variant(self) -> Variant | None:
        """What model it is; None where there is no DiT."""
        if not self.config:
            return None
        index: dict[str, Any] = {}
        if EXPERTS[1] in self.parts:
            said = self.parts[EXPERTS[1]].config or {}
            task = {
                "model_type": "t2v" if self.config["in_channels"] == self.config["out_channels"] else "i2v"
            }
            index = {"boundary_ratio": boundary_of(said if "model_type" in said else task)}
        return variant_of(self.config, index)

    def _write(
        self, part: SourceComponent, converted: ComponentMapping, entries: Sequence[LazyTensor]
    ) -> list[Path]:
        write = {
            "diffusers": self._write_diffusers,
            "official": self._write_official,
            "comfyui": self._write_comfyui,
        }
        return write[self.to](part, converted, entries)

    def _write_diffusers(
        self, part: SourceComponent, converted: ComponentMapping, entries: Sequence[LazyTensor]
    ) -> list[Path]:
        folder = self.out / part.name
        folder.mkdir()
        write_stock_config(part.name, converted.config, folder)
        return write_sharded(folder, STEMS.get(part.name, DIT_STEM), entries)

    def _write_official(
        self, part: SourceComponent, converted: ComponentMapping, entries: Sequence[LazyTensor]
    ) -> list[Path]:
        if part.name in EXPERTS:
            variant = self.variant
            assert variant is not None
            folder = self.out / EXPERT_FOLDERS[part.name] if EXPERTS[1] in self.parts else self.out
            folder.mkdir(exist_ok=True)
            config = to_official_config(converted.config, variant)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            return write_sharded(folder, DIT_STEM, entries)
        name = {"text_encoder": _T5_FILE, "image_encoder": part.files[0].stem + ".pth"}.get(part.name)
        path = self.out / (
            name or ("Wan2.2_VAE.pth" if converted.config.get("z_dim") == 48 else "Wan2.1_VAE.pth")
        )
        torch.save({entry.name: entry.read() for entry in entries}, path)
        return [path]

    def _write_comfyui(
        self, part: SourceComponent, converted: ComponentMapping, entries: Sequence[LazyTensor]
    ) -> list[Path]:
        if part.name in EXPERTS:
            variant = self.variant
            assert variant is not None
            side = f"_{EXPERT_NAMES[part.name]}" if EXPERTS[1] in self.parts else ""
            path = self.out / "diffusion_models" / f"{variant.name.replace('-', '_')}{side}.safetensors"
        else:
            path = self.out / "vae" / ("wan2.2_vae" if converted.config.get("z_dim") == 48 else "wan_2.1_vae")
            path = path.with_name(f"{path.name}.safetensors")
        path.parent.mkdir(exist_ok=True)
        write_safetensors(path, entries)
        return [path]

    def _finish_diffusers(self) -> None:
        """Make a pipeline of the parts, if there is enough for one."""
        rest = self.rest or (self.root if (self.root / "model_index.json").is_file() else None)
        if rest is not None:
            check_rest(rest, self.config, EXPERTS[1] in self.parts)
            for path in sorted(rest.iterdir()):
                if not path.name.startswith((".", "README")) and not (self.out / path.name).exists():
                    copy_path(path, self.out / path.name)
            return
        has_tokenizer = (self.root / _TOKENIZER).is_dir()
        missing = [name for name in ("transformer", "vae", "text_encoder") if name not in self.parts]
        variant = self.variant
        if variant is not None and "clip" in variant.conditions and "image_encoder" not in self.parts:
            missing.append("image_encoder")
        if missing or not has_tokenizer:
            lacking = ", ".join([*missing, *([] if has_tokenizer else ["tokenizer"]), "scheduler"])
            self.notes.append(
                f"no whole pipeline, for want of {lacking}: --rest-of DIR takes them from a diffusers pipeline of the same model."
            )
            return
        assert variant is not None
        write_pipeline(self.out, self.root / _TOKENIZER, variant)

    def _finish_official(self) -> None:
        tokenizer = self.root / "tokenizer"
        if tokenizer.is_dir():
            copy_path(tokenizer, self.out / _TOKENIZER)
        roots = [root for root in (self.root, self.rest) if root is not None and root.is_dir()]
        for root in roots:
            for pattern in _OFFICIAL_REST:
                for path in sorted(root.glob(pattern)):
                    if not any(self.out.glob(f"{path.stem}*")):
                        copy_path(path, self.out / path.name)
        if any(self.out.glob("models_clip_*")):
            self.notes = [note for note in self.notes if not note.startswith("image_encoder ")]


def _is_wans_own(config: dict[str, Any]) -> bool:
    """Whether a VAE's statistics are those of the published VAE of its channels, which official Wan has in its code."""
    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    first = {key: list(defaults[key].default) for key in LATENTS_22}
    own = LATENTS_22 if config.get("z_dim") == 48 else first
    return all(list(config.get(key, first[key])) == own[key] for key in own)
