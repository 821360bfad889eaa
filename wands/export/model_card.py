"""Build the model card of an exported pipeline or LoRA.

A card may become public, so `without_paths` removes the paths of the machine that trained the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from huggingface_hub import ModelCard, ModelCardData

from wands.export.export_record import SAMPLES_FILE, read_sample_rows
from wands.model.files.hub import is_hub_id
from wands.texts import last_part, printable, redact, without_paths
from wands.variants import VARIANTS, Variant

MARKER = (
    "<!-- wands:model-card (wands push writes this file again; delete this line to keep your own text) -->"
)
LOSS_FILE = "loss.png"
STRIPS_FILE = "samples_during_training.png"  # written by `wands export`


@dataclass(frozen=True)
class LoraFile:
    """One LoRA file, with diffusers' keys, in a folder that is pushed to the Hub.

    Attributes:
        name: path in the repository.
        targets: for each DiT, the prefix of its keys and the component of the pipeline that loads them.
    """

    name: str
    targets: tuple[tuple[str, str], ...] = (("transformer", "transformer"),)

    @property
    def location(self) -> str:
        """Arguments of diffusers' `load_lora_weights` that select this file in its repository, as Python code."""
        folder, _, name = self.name.rpartition("/")
        return (f"subfolder={json.dumps(folder)}, " if folder else "") + f"weight_name={json.dumps(name)}"


@dataclass(frozen=True)
class FolderContents:
    """Contents of a folder that is pushed to the Hub: a pipeline, or LoRAs.

    Attributes:
        class_name: diffusers class of the pipeline; empty for LoRAs.
        folders: names of the subfolders that belong to the pipeline or the LoRAs.
    """

    class_name: str = ""
    loras: tuple[LoraFile, ...] = ()
    folders: tuple[str, ...] = ()


def loss_points(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the (step, loss) pairs of an export record that have a finite loss; [] if there are fewer than two."""
    points = [(step, loss) for step, loss in record.get("loss") or [] if loss is not None]
    return points if len(points) > 1 else []


def build_card(
    directory: Path, repo_id: str, record: Mapping[str, Any], contents: FolderContents, license_id: str
) -> str:
    """Return the model card of the folder `directory`: Markdown that starts with a YAML block.

    The card shows the samples in the subfolder ``samples``, and loss.png if the record has a loss curve. It leaves out what the
    record, the contents of wands_export.json, does not contain. `license_id` is the Hub's identifier of the license.
    """
    variant = _variant_of(record)
    parts = record.get("parts") or ()
    loras = contents.loras
    base = str(record.get("base", ""))
    name = str(record.get("variant") or "")
    base_id = base if is_hub_id(base) else ""
    class_name = contents.class_name if contents.class_name.isidentifier() else ""
    class_name = class_name or ("WanImageToVideoPipeline" if variant.num_images else "WanPipeline")
    images = {"image": "first_frame.png"} if "ImageToVideo" in class_name else {}
    if images and variant.num_images == 2:
        images["last_image"] = "last_frame.png"
    tasks = ["image-to-video", "text-to-video"] if images else ["text-to-video", "image-to-video"]
    tasks = tasks if "first_frame" in variant.conditions else tasks[:1]
    samples = _samples(directory)
    tags = ("wan", "video", "diffusers", "lora" if loras else "", "deepspeed", "wands", *tasks, name)
    head = ModelCardData(
        license=license_id,
        base_model=base_id or None,
        base_model_relation=("adapter" if loras else "finetune") if base_id else None,
        library_name="diffusers",
        pipeline_tag=tasks[0],
        tags=list(filter(None, tags)),
        widget=[{"text": sample["caption"], "output": {"url": sample["link"]}} for sample in samples] or None,
    )
    recipe = record.get("recipe")
    card = ModelCard.from_template(
        head,
        template_path=str(Path(__file__).with_name("model_card_template.md")),
        marker=MARKER,
        record=_escape_all(record),
        experts=[expert for expert in variant.experts if expert.name and expert.subfolder in parts],
        lora_settings=_escape_all((recipe or {}).get("lora")),
        base_id=base_id,
        local_base=_in_code(last_part(base)),
        checkpoint=_in_code(last_part(str(record.get("checkpoint") or ""))),
        quoted=json.dumps,
        samples=samples,
        escape=_escape,
        loss_file=LOSS_FILE if loss_points(record) else "",
        strips_file=STRIPS_FILE if (directory / STRIPS_FILE).is_file() else "",
        recipe=recipe and _fenced(yaml.safe_dump(without_paths(recipe), sort_keys=False, allow_unicode=True)),
        repo_id=repo_id,
        source="base" if loras else "repo",
        loras=loras,
        class_name=class_name,
        images=images,
        with_clip=bool(images) and "clip" in variant.conditions,
        dtype="float32" if record.get("dtype") == "fp32" else "bfloat16",
        variant=variant,
    )
    return redact(f"{card}\n").encode("utf-8", "backslashreplace").decode()


def _escape(text: str) -> str:
    """Escape a text so that a Markdown table shows it literally, and remove paths and control characters."""
    return re.sub(r"([\\`*_~\[\]<>|&#!])", r"\\\1", printable(without_paths(str(text))))


def _escape_all(value: Any) -> Any:
    """Return nested JSON values with every text, and every key that is no plain word, escaped for Markdown."""
    if isinstance(value, Mapping):
        keys = {key: key if re.fullmatch(r"[\w -]+", key) else _escape(key) for key in value}
        return {keys[key]: _escape_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_all(item) for item in value]
    return _escape(value) if isinstance(value, str) else value


def _in_code(text: str) -> str:
    """Return a text that stays inside the backticks of a code span in a table."""
    return re.sub(r"[`|<>]", "_", printable(text))


def _fenced(text: str) -> str:
    """Return a text that cannot end the code block that contains it."""
    return text.replace("```", "'''")


def _variant_of(record: Mapping[str, Any]) -> Variant:
    """Return the variant that an export record names, else the first published one of its family, such as "wan2.1-t2v".

    Without a published family, return a text-to-video variant with one DiT.
    """
    name = str(record.get("variant", ""))
    family = (row for row in VARIANTS.values() if row.name.rpartition("-")[0] == name.rpartition("-")[0])
    return VARIANTS.get(name) or next(family, VARIANTS["wan2.1-t2v-1.3b"])


def _samples(directory: Path) -> list[dict[str, Any]]:
    """Return {"caption", "link", "is_image"} for each video and image in the subfolder ``samples``, sorted by file name."""
    folder = directory / "samples"
    prompts = {row.get("file"): row.get("prompt") for row in read_sample_rows(folder / SAMPLES_FILE)}
    samples = []
    for path in sorted(path for path in folder.glob("*") if path.suffix in (".mp4", ".png")):
        caption = " ".join(str(prompts.get(path.name) or path.stem).split())
        caption = caption.replace("[", "(").replace("]", ")")
        link = f"samples/{quote(path.name)}"
        samples.append({"caption": caption, "link": link, "is_image": path.suffix == ".png"})
    return samples
