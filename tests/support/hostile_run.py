"""Run folders of a stranger: a hostile text in one field after another of every file that the page of a run reads."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from tests.support.run_folder import write_rows, write_run
from wands.files import read_rows

ROWS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "samples/samples.jsonl")
MARK = "x-evil"
TEXTS = (
    f"\"'></script></title></style><{MARK} onclick=window.evil=1><script>window.evil=1</script><img src=x onerror=window.evil=1>",
    f"1;background:url(http://{MARK}.example/)",
    f"javascript:window.evil=1//{MARK}",
)
SUFFIXES = (
    '.webp" onerror="window.evil=1',
    '.mp4" onerror="window.evil=1',
    ".svg",
    ".html",
    f".png><{MARK}>",
)


def write_small_run(folder: Path) -> Path:
    """Write a run with a row of each kind, small enough to make its page a hundred times."""
    write_run(folder, 4, 2, media=False)
    sample = {"step": 0, "weights": "raw", "number": 0, "prompt": "a fox", "width": 8, "height": 8}
    sample |= {"video": "samples/a.mp4", "thumbnail": "samples/a.webp"}
    write_rows(folder / "samples" / "samples.jsonl", [sample, sample | {"step": 2, "weights": "ema"}])
    for name in ("a.mp4", "a.webp"):
        (folder / "samples" / name).write_bytes(b"data")
    return folder


def hostile_files(folder: Path) -> None:
    """Give the sample videos and thumbnails of a run names whose suffixes are hostile."""
    rows = []
    for number, suffix in enumerate(SUFFIXES):
        (folder / "samples" / f"a{suffix}").write_bytes(b"<script>window.evil=1</script>")
        name = f"samples/a{suffix}"
        rows.append({"step": 0, "weights": "raw", "number": number, "video": name, "thumbnail": name})
    write_rows(folder / "samples" / "samples.jsonl", rows)


def hostile_runs(run: Path, folder: Path, text: str) -> Iterator[str]:
    """Yield (file, path of the field) for each field, while `folder` is a copy of the run with the text in this field."""
    for name in (*ROWS, "recipe.yaml"):
        content: Any = (
            yaml.safe_load((run / name).read_text()) if name == "recipe.yaml" else read_rows(run / name)
        )
        for field in sorted(
            {field for row in ([content] if isinstance(content, dict) else content) for field in _fields(row)}
        ):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(run, folder)
            changed = _with_text(content, field, text)
            if name == "recipe.yaml":
                (folder / name).write_text(yaml.safe_dump(changed))
            else:
                write_rows(folder / name, changed)
            yield f"{name} {json.dumps(field)}"


def _fields(value: Any, *path: str) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key, "key")  # the text in place of the key
            yield from _fields(item, *path, key)
    elif isinstance(value, list) and value:
        yield from _fields(value[0], *path, "item")
    if path:
        yield (*path, "value")


def _with_text(value: Any, field: tuple[str, ...], text: str) -> Any:
    """Return a copy of nested values with a text in place of a field, in every row of a list."""
    first, *rest = field
    if not rest:
        return text
    if isinstance(value, list):
        return [_with_text(item, tuple(rest) if first == "item" else field, text) for item in value]
    if not isinstance(value, dict) or first not in value:
        return copy.deepcopy(value)
    if rest == ["key"]:
        return {text if key == first else key: item for key, item in value.items()}
    return value | {first: _with_text(value[first], tuple(rest), text)}


class HostileParts(HTMLParser):
    """Parts of a page that a browser would run, or load from another place.

    Attributes:
        found: descriptions of these parts.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._scripts = 0
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self._scripts += tag == "script"
        if self._scripts > 1 or tag in (MARK, "iframe", "object", "embed", "base", "link", "form", "a"):
            self.found.append(f"<{tag}>")
        for name, value in attributes:
            text = value or ""
            is_link = name in ("src", "href", "poster", "action", "srcset")
            kind = text.partition(";")[0]
            is_safe_link = kind in (
                "data:video/mp4",
                "data:image/webp",
                "data:image/png",
                "data:image/jpeg",
                "",
            )
            is_safe_link |= ":" not in text and not text.startswith(("/", "\\"))
            if name.startswith("on") or (is_link and not is_safe_link) or (name == "style" and MARK in text):
                self.found.append(f"{tag} {name}={text[:80]}")

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and MARK in data:
            self.found.append(f"in <{self._tag}>: {data[:80]}")

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""
