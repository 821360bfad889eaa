"""The model card of a pushed pipeline or LoRA: what it was trained from, on what, how, with what result, how to load.

A card is public one day: nothing in it may name a place on the machine that trained it (`without_paths`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from wands.errors import WandsError
from wands.variants import VARIANTS, Variant

MARKER = (
    "<!-- wands:model-card (wands push writes this file again; delete this line to keep your own text) -->"
)
RECORD_FILE = "wands_export.json"
LOSS_FILE = "loss.png"
SAMPLES_FILE = "samples.jsonl"  # beside the samples, by `wands infer`
DEFAULT_LICENSE = "apache-2.0"  # the licence of every Wan release

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL = re.compile(r"(?:[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:)")
_INNER_PATH = re.compile(r"(?<![\w:/.~-])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+)+[/\\]([\w.@+-]+)")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class LoraFile:
    """One LoRA of a pushed folder.

    Attributes:
        name: of the file, with its folder in the repository, in diffusers' keys.
        parts: (first word of its keys, DiT of the pipeline that these are for).
    """

    name: str
    parts: tuple[tuple[str, str], ...] = (("transformer", "transformer"),)


@dataclass(frozen=True)
class FolderContents:
    """What a pushed folder holds.

    Attributes:
        class_name: diffusers class of the pipeline; of a LoRA's, "" when it follows from the variant.
        loras: its LoRAs; none in a pipeline folder.
    """

    class_name: str = ""
    loras: tuple[LoraFile, ...] = ()


def without_paths(value: Any) -> Any:
    """Return a copy of a JSON value in which every path of this machine is cut to its last component.

    Hub ids, URLs and relative paths (``runs/default``) stay: they say nothing about a machine.
    """
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if _LOCAL.match(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return _INNER_PATH.sub(r"\1", value)


def is_local(text: str) -> bool:
    """Whether a string is written like a path of a machine: absolute, under home, or starting with a dot."""
    return bool(_LOCAL.match(text))


def hub_id(base: str) -> str | None:
    """Return `base` when it is the id of a Hub repository (``org/name``), None when it is a folder."""
    return base if _HUB_ID.fullmatch(base) and not Path(base).exists() else None


def loss_points(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the finite (step, loss) pairs of a record; fewer than two make no curve and give none."""
    points = [(int(step), float(loss)) for step, loss in record.get("loss") or []]
    points = [(step, loss) for step, loss in points if math.isfinite(loss)]
    return points if len(points) > 1 else []


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a jsonl file that `wands infer` wrote; none when there is no such file.

    Raises:
        WandsError: the file is damaged.
    """
    try:
        # not splitlines: JSON leaves U+2028 and its like in a prompt as they are, and they end no line of the file
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise WandsError(f"{path} cannot be read ({error}); mend or remove it.") from error


def sample_files(directory: Path) -> list[Path]:
    """Return the videos and pictures of ``DIR/samples``, by name."""
    return sorted(path for path in (directory / "samples").glob("*") if path.suffix in (".mp4", ".png"))


def build_card(
    directory: Path, repo_id: str, record: Mapping[str, Any], contents: FolderContents, license_id: str
) -> str:
    """Write the text of the model card.

    Args:
        directory: the pushed folder; its samples are shown.
        repo_id: ``owner/name``, for the title and the loading example.
        record: what `wands export` recorded; every part may be missing, its section is then left out.
        contents: what the folder holds.
        license_id: the Hub's short name of a licence.

    Returns:
        Markdown with a YAML head; ``![loss]`` points at `LOSS_FILE` when the record holds a curve.
    """
    variant = _row_of(record)
    sections = [
        MARKER,
        f"# {repo_id.split('/')[-1]}",
        _introduction(record, contents, variant),
        _table("Training data", _data_rows(record)),
        _samples(sample_files(directory)),
        f"## Loss\n\n![loss curve]({LOSS_FILE})" if loss_points(record) else "",
        _recipe(record),
        _usage(repo_id, record, contents, variant),
    ]
    head = yaml.safe_dump(
        _front_matter(directory, record, contents, variant, license_id), sort_keys=False, allow_unicode=True
    )
    return f"---\n{head}---\n" + "\n\n".join(section for section in sections if section) + "\n"


def _row_of(record: Mapping[str, Any]) -> Variant | None:
    """The variant's row; that of the first of its family for a shape that was never published."""
    name = str(record.get("variant", ""))
    family = [row for row in VARIANTS.values() if row.name.rpartition("-")[0] == name.rpartition("-")[0]]
    return VARIANTS.get(name) or next(iter(family), None)


def _class_name(contents: FolderContents, variant: Variant | None) -> str:
    from_picture = variant is not None and variant.num_images > 0
    return contents.class_name or ("WanImageToVideoPipeline" if from_picture else "WanPipeline")


def _front_matter(
    directory: Path,
    record: Mapping[str, Any],
    contents: FolderContents,
    variant: Variant | None,
    license_id: str,
) -> dict[str, Any]:
    tasks = ["image-to-video" if "ImageToVideo" in _class_name(contents, variant) else "text-to-video"]
    if variant and "first_frame" in variant.conditions:
        tasks += [task for task in ("text-to-video", "image-to-video") if task not in tasks]
    head: dict[str, Any] = {"license": license_id}
    base = hub_id(str(record.get("base", "")))
    if base:
        head |= {"base_model": base, "base_model_relation": "adapter" if contents.loras else "finetune"}
    tags = ["wan", "video", "diffusers", *(["lora"] if contents.loras else []), "deepspeed", "wands", *tasks]
    if record.get("variant"):
        tags.append(str(record["variant"]))
    head |= {"library_name": "diffusers", "pipeline_tag": tasks[0], "tags": tags}
    samples = sample_files(directory)
    if samples:
        head["widget"] = [{"text": _caption(path), "output": {"url": _link(path)}} for path in samples]
    return head


def _introduction(record: Mapping[str, Any], contents: FolderContents, variant: Variant | None) -> str:
    base = str(record.get("base", ""))
    known = hub_id(base)
    origin = f"[{known}](https://huggingface.co/{known})" if known else f"`{_last(base)}`" if base else ""
    named = f" ({record['variant']})" if record.get("variant") else ""
    what = "A LoRA for a Wan video pipeline" if contents.loras else "A Wan video pipeline in diffusers layout"
    rows = {
        "Base": origin,
        "Trained": _trained_experts(record, variant),
        "LoRA": _lora_numbers(record, merged=not contents.loras),
        "Checkpoint": f"`{_last(str(record['checkpoint']))}`" if record.get("checkpoint") else "",
        "Optimizer steps": f"{record['step']:,}" if isinstance(record.get("step"), int) else "",
        "Weights": ", ".join(filter(None, [str(record.get("dtype", "")), _average(record)])),
        "wands": str(record.get("wands_version", "")),
    }
    return "\n\n".join([f"{what}{named}, trained with wands.", _rows(rows)]).rstrip()


def _trained_experts(record: Mapping[str, Any], variant: Variant | None) -> str:
    """Which experts of two were trained."""
    if variant is None or len(variant.experts) == 1:
        return ""
    trained = [expert for expert in variant.experts if expert.subfolder in (record.get("parts") or ())]
    return " and ".join(f"{expert.name}-noise expert (`{expert.subfolder}`)" for expert in trained)


def _average(record: Mapping[str, Any]) -> str:
    """That the weights are an average of training's, not their last values."""
    settings = record.get("ema") or {}
    return f"exponential moving average (decay {settings.get('decay')})" if settings else ""


def _lora_numbers(record: Mapping[str, Any], merged: bool) -> str:
    settings = (record.get("recipe") or {}).get("lora") or {}
    told = {key: settings[key] for key in ("rank", "alpha", "targets") if settings.get(key) is not None}
    words = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in told.items()
    ]
    return ", ".join([*words, "merged into the weights"] if words and merged else words)


def _data_rows(record: Mapping[str, Any]) -> dict[str, str]:
    data = record.get("data") or {}
    names = {"num_samples": "Clips", "num_frames_total": "Frames", "num_tokens": "Video tokens"}
    rows = {title: f"{data[key]:,}" for key, title in names.items() if isinstance(data.get(key), int)}
    if data.get("fingerprint"):
        rows["Cache fingerprint"] = f"`{data['fingerprint']}`"
    return rows


def _rows(rows: Mapping[str, str]) -> str:
    body = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return f"| | |\n|---|---|\n{body}" if body else ""


def _table(title: str, rows: Mapping[str, str]) -> str:
    return f"## {title}\n\n{_rows(rows)}" if rows else ""


def _samples(samples: Sequence[Path]) -> str:
    if not samples:
        return ""
    # The gallery shows the head's widgets, videos among them; pictures and links work without a gallery too.
    lines = [
        f"![{_caption(path)}]({_link(path)})"
        if path.suffix == ".png"
        else f"- [{_caption(path)}]({_link(path)})"
        for path in samples
    ]
    return "## Samples\n\n<Gallery />\n\n" + "\n".join(lines)


def _recipe(record: Mapping[str, Any]) -> str:
    recipe = record.get("recipe")
    if not recipe:
        return ""
    text = yaml.safe_dump(without_paths(recipe), sort_keys=False, allow_unicode=True)
    return f"## Recipe\n\nThe whole configuration, as `wands train` resolved it:\n\n```yaml\n{text}```"


def _usage(repo_id: str, record: Mapping[str, Any], contents: FolderContents, variant: Variant | None) -> str:
    named = str(record.get("dtype", "bf16")).removeprefix("torch.")
    dtype = _DTYPES.get(named, named if named in _DTYPES.values() else "bfloat16")
    class_name = _class_name(contents, variant)
    pictures = {"image": "first_frame.png"} if "ImageToVideo" in class_name else {}
    if variant and variant.num_images == 2:
        pictures["last_image"] = "last_frame.png"
    given = "".join(f'{key}=load_image("{name}"), ' for key, name in pictures.items())
    with_clip = bool(pictures and variant and "clip" in variant.conditions)
    helpers = "export_to_video, load_image" if pictures else "export_to_video"
    base = str(record.get("base", ""))
    source = "base" if contents.loras else "repo"
    lines = [
        "import torch",
        f"from diffusers import AutoencoderKLWan, {class_name}",
        f"from diffusers.utils import {helpers}",
        *(["from transformers import CLIPVisionModel"] if with_clip else []),
        "",
        f'repo = "{repo_id}"',
        *([f'base = "{hub_id(base) or _last(base) or "the base model"}"'] if contents.loras else []),
        f'vae = AutoencoderKLWan.from_pretrained({source}, subfolder="vae", torch_dtype=torch.float32)',
    ]
    parts = "vae=vae"
    if with_clip:
        folder = 'subfolder="image_encoder", torch_dtype=torch.float32'
        lines.append(f"image_encoder = CLIPVisionModel.from_pretrained({source}, {folder})")
        parts += ", image_encoder=image_encoder"
    lines.append(f"pipe = {class_name}.from_pretrained({source}, {parts}, torch_dtype=torch.{dtype})")
    lines += _loading_of(contents.loras)
    lines += [
        'pipe.to("cuda")',
        f'video = pipe({given}prompt="A cyclist crosses a bridge at dusk.", num_frames=81).frames[0]',
        f'export_to_video(video, "sample.mp4", fps={variant.fps if variant else 16})',
    ]
    note = "While the repository is private, log in first (`hf auth login`)."
    if variant and "first_frame" in variant.conditions:
        note += (
            " Loaded as `WanImageToVideoPipeline` the model starts from a picture: `image=load_image(...)`."
        )
    code = "\n".join(lines)
    return f"## How to load\n\n{note}\n\n```python\n{code}\n```"


def _loading_of(loras: Sequence[LoraFile]) -> list[str]:
    """Lines that load each LoRA into the DiT that it is for."""
    lines = []
    for lora in loras:
        folder, _, name = lora.name.rpartition("/")
        where = f'subfolder="{folder}", weight_name="{name}"' if folder else f'weight_name="{name}"'
        for prefix, part in lora.parts:
            if prefix == "transformer_2":  # diffusers knows no such key
                lines += [
                    f"state = pipe.lora_state_dict(repo, {where})",
                    'low = {key: state[key] for key in state if key.startswith("transformer_2.")}',
                    'low = {key.replace("transformer_2.", "transformer."): low[key] for key in low}',
                    "pipe.load_lora_weights(low, load_into_transformer_2=True)",
                ]
                continue
            low = ", load_into_transformer_2=True" if part == "transformer_2" else ""
            lines.append(f"pipe.load_lora_weights(repo, {where}{low})")
    return lines


def _caption(sample: Path) -> str:
    """Return the prompt that `wands infer` recorded for a sample, or the name of the file."""
    prompts = {row.get("file"): row.get("prompt") for row in read_rows(sample.with_name(SAMPLES_FILE))}
    text = str(prompts.get(sample.name) or sample.stem)
    return " ".join(text.split()).replace("[", "(").replace("]", ")")


def _link(sample: Path) -> str:
    return f"samples/{quote(sample.name)}"


def _last(text: str) -> str:
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
