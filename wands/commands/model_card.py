"""The model card of a pushed pipeline: what it was trained from, on what, how, with what result, how to load.

A card is public one day: nothing in it may name a place on the machine that trained it (`without_paths`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from wands.errors import WandsError
from wands.variants import VARIANTS

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
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise WandsError(f"{path} cannot be read ({error}); mend or remove it.") from error


def sample_files(directory: Path) -> list[Path]:
    """Return the videos and pictures of ``DIR/samples``, by name."""
    return sorted(path for path in (directory / "samples").glob("*") if path.suffix in (".mp4", ".png"))


def build_card(
    directory: Path, repo_id: str, record: Mapping[str, Any], class_name: str, license_id: str
) -> str:
    """Write the text of the model card.

    Args:
        directory: the pipeline folder; its samples are shown.
        repo_id: ``owner/name``, for the title and the loading example.
        record: what `wands export` recorded; every part may be missing, its section is then left out.
        class_name: the pipeline's diffusers class.
        license_id: the Hub's short name of a licence.

    Returns:
        Markdown with a YAML head; ``![loss]`` points at `LOSS_FILE` when the record holds a curve.
    """
    sections = [
        MARKER,
        f"# {repo_id.split('/')[-1]}",
        _introduction(record),
        _table("Training data", _data_rows(record)),
        _samples(sample_files(directory)),
        f"## Loss\n\n![loss curve]({LOSS_FILE})" if loss_points(record) else "",
        _recipe(record),
        _usage(repo_id, record, class_name),
    ]
    head = yaml.safe_dump(
        _front_matter(directory, record, class_name, license_id), sort_keys=False, allow_unicode=True
    )
    return f"---\n{head}---\n" + "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(
    directory: Path, record: Mapping[str, Any], class_name: str, license_id: str
) -> dict[str, Any]:
    task = "image-to-video" if "ImageToVideo" in class_name else "text-to-video"
    head: dict[str, Any] = {"license": license_id}
    base = hub_id(str(record.get("base", "")))
    if base:
        head |= {"base_model": base, "base_model_relation": "finetune"}
    tags = ["wan", "video", "diffusers", "deepspeed", "wands", task]
    if record.get("variant"):
        tags.append(str(record["variant"]))
    head |= {"library_name": "diffusers", "pipeline_tag": task, "tags": tags}
    samples = sample_files(directory)
    if samples:
        head["widget"] = [{"text": _caption(path), "output": {"url": _link(path)}} for path in samples]
    return head


def _introduction(record: Mapping[str, Any]) -> str:
    base = str(record.get("base", ""))
    known = hub_id(base)
    origin = f"[{known}](https://huggingface.co/{known})" if known else f"`{_last(base)}`" if base else ""
    variant = f" ({record['variant']})" if record.get("variant") else ""
    lines = [f"A Wan video pipeline in diffusers layout{variant}, trained with wands."]
    rows = {
        "Base": origin,
        "Checkpoint": f"`{_last(str(record['checkpoint']))}`" if record.get("checkpoint") else "",
        "Optimizer steps": f"{record['step']:,}" if isinstance(record.get("step"), int) else "",
        "Weights": str(record.get("dtype", "")),
        "wands": str(record.get("wands_version", "")),
    }
    return "\n\n".join([*lines, _rows(rows)]).rstrip()


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


def _usage(repo_id: str, record: Mapping[str, Any], class_name: str) -> str:
    named = str(record.get("dtype", "bf16")).removeprefix("torch.")
    dtype = _DTYPES.get(named, named if named in _DTYPES.values() else "bfloat16")
    variant = VARIANTS.get(str(record.get("variant")))
    image = 'image=load_image("first_frame.png"), ' if "ImageToVideo" in class_name else ""
    helpers = "export_to_video, load_image" if image else "export_to_video"
    code = f"""import torch
from diffusers import AutoencoderKLWan, {class_name}
from diffusers.utils import {helpers}

repo = "{repo_id}"
vae = AutoencoderKLWan.from_pretrained(repo, subfolder="vae", torch_dtype=torch.float32)
pipe = {class_name}.from_pretrained(repo, vae=vae, torch_dtype=torch.{dtype}).to("cuda")
video = pipe({image}prompt="A cyclist crosses a bridge at dusk.", num_frames=81).frames[0]
export_to_video(video, "sample.mp4", fps={variant.fps if variant else 16})"""
    note = "While the repository is private, log in first (`hf auth login`)."
    return f"## How to load\n\n{note}\n\n```python\n{code}\n```"


def _caption(sample: Path) -> str:
    """Return the prompt that `wands infer` recorded for a sample, or the name of the file."""
    prompts = {row.get("file"): row.get("prompt") for row in read_rows(sample.with_name(SAMPLES_FILE))}
    text = str(prompts.get(sample.name) or sample.stem)
    return " ".join(text.split()).replace("[", "(").replace("]", ")")


def _link(sample: Path) -> str:
    return f"samples/{quote(sample.name)}"


def _last(text: str) -> str:
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
