"""Hostile tables of clips and configurations of other trainers."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from tests.support.hostile_box import Sandbox
from tests.support.hostile_values import hostile_captions, hostile_paths, hostile_rows


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    import csv

    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def _jsonl(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GOOD = {"video": "good.mp4", "caption": "a good clip"}


def _texts(box: Sandbox) -> list[str]:
    """Paths that are texts of a moderate length."""
    return [path for path in hostile_paths(box) if isinstance(path, str) and len(path) < 9999]


def _tables_of_values(box: Sandbox) -> dict[str, bytes]:
    shell = box.shell
    rows = [GOOD, *(GOOD | row for row in hostile_rows(box))]
    paths = [GOOD, *({"video": path, "caption": "a"} for path in hostile_paths(box))]
    captions = hostile_captions(shell)
    said = [{**GOOD, "start": 0.01 * number, "caption": caption} for number, caption in enumerate(captions)]
    texts = _texts(box)
    return {
        "paths.jsonl": _jsonl(paths),
        "paths.json": json.dumps(paths).encode(),
        "paths.csv": _csv(
            [
                ("video", "caption"),
                ("good.mp4", "a"),
                *((text, "a") for text in texts if "\ud800" not in text),
            ]
        ),
        "rows.jsonl": _jsonl(rows),
        "rows.json": json.dumps({f"good.mp4{' ' * number}": row for number, row in enumerate(rows)}).encode(),
        "rows.csv": _csv(
            [
                ("video", "caption", "crop", "mask", "start"),
                *(
                    ("good.mp4", "a", row.get("crop"), row.get("mask", ""), row.get("start", ""))
                    for row in hostile_rows(box)
                    if "\ud800" not in str(row)
                ),
            ]
        ),
        "captions.jsonl": _jsonl(said),
        "captions.json": json.dumps({"good.mp4": captions}).encode(),
        "formulas.csv": _csv(
            [
                ("video", "caption", "=cmd|'/C calc'!A1"),
                ("good.mp4", f"=cmd|'/C {shell}'!A1", "+1"),
                ("@good.mp4", "-1+1", "=1"),
            ]
        ),
    }


def _csv_files() -> dict[str, bytes]:
    """Encodings, quotes, widths and lengths of CSV files."""
    good = _csv([("video", "caption"), ("good.mp4", "a good clip")])
    return {
        "utf16.csv": good.decode().encode("utf-16"),
        "utf16be.csv": b"\xfe\xff" + good.decode().encode("utf-16-be"),
        "utf16 cut.csv": good.decode().encode("utf-16")[:-1],
        "utf32.jsonl": _jsonl([GOOD]).decode().encode("utf-32"),
        "latin1.csv": good + b"good.mp4,Stra\xdfe\n",
        "nul.csv": good + b"good.mp4,a\0b\n\0\0,\0\n" + bytes(999),
        "empty.csv": b"",
        "header.csv": b"video,caption\n",
        "quote.csv": good + b'good.mp4,"never closed\n' * 99,
        "wide.csv": ("video,caption," + ",".join(map(str, range(50_000))) + "\ngood.mp4,a\n").encode(),
        "twins.csv": b"video,video,caption,CAPTION, caption \n" + b"good.mp4,x,a,b,c\n",
        "long.csv": good + b"good.mp4," + b"x" * 2_000_000 + b"\n",
        "names.csv": b"\x1b[2Jvideo,caption\n" + b"x" * 100_000 + b",\n",
    }


def _json_files() -> dict[str, bytes]:
    """Depths, numbers and encodings of JSON files."""
    nested = "[" * 200_000
    return {
        "lines.jsonl": b"\n".join(
            [
                b"{}",
                b"[]",
                b"null",
                b"1",
                b'"x"',
                b"{",
                nested.encode(),
                b'{"a":' * 99_999,
                b"9" * 9999,
                b"\xff",
                *[_jsonl([GOOD]).strip()] * 3,
            ]
        ),
        "deep.json": nested.encode(),
        "deep objects.json": b'{"a":' * 100_000,
        "digits.json": b"[" + b"9" * 1_000_000 + b"]",
        "infinite.json": b'[{"video": "good.mp4", "caption": "a", "start": Infinity, "end": -Infinity, "crop": NaN}]',
        "null.json": b"null",
        "text.json": b'"good.mp4"',
        "html.json": b"<!DOCTYPE html><html>",
        "pointer.jsonl": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }


def _other_files(box: Sandbox) -> dict[str, bytes]:
    """Tables of kinds that are not read, pickles, and lists of tables and of clips."""
    shell = box.shell
    texts = _texts(box)
    return {
        "table.tsv": b"video\tcaption\ngood.mp4\ta\n",
        "table.xlsx": b"PK\3\4" + bytes(99),
        "table.yaml": f"!!python/object/apply:os.system ['{shell}']".encode(),
        "table.pkl": box.pickled,
        "pickled.csv": box.pickled,
        "pickled.json": box.pickled,
        "merge.txt": "\n".join(
            [
                ".,paths.json",
                "/,/dev/zero",
                f"{box.outside},{box.url}/x.json",
                "a,b,c",
                "\0,\0",
                "x" * 5000 + ",x",
                "~nouser,~nouser",
            ]
        ).encode(),
        "videos.txt": ("good.mp4\n" + "\n".join(text.replace("\n", " ") for text in texts)).encode(
            "utf-8", "replace"
        ),
    }


def _configurations(box: Sandbox) -> dict[str, bytes]:
    """Configurations of other trainers."""
    shell = box.shell
    texts = _texts(box)
    toml = f"[[directory]]\npath = '.'\ncaption = '{shell}'\n"
    return {
        "keys.toml": ("a." * 30_000 + "b = 1").encode(),
        "deep.toml": b"a = " + b"[" * 30_000,
        "digits.toml": b"[[directory]]\npath = '.'\nnum_repeats = " + b"9" * 5000,
        "shell.toml": toml.encode() + f"caption_prefix = '''$({shell})'''\n".encode(),
        "folders.toml": "".join(
            f"[[directory]]\npath = {json.dumps(text)}\n"
            for text in texts
            if text.isprintable() and text not in ("/", "..")
        ).encode(),
        "sizes.toml": toml.encode()
        + b"resolutions = [[inf, nan], [1e308, -1], [[[]]]]\nframe_buckets = [-1, 1e99]\nsize_buckets = 'x'\n",
        "self.toml": b"[[datasets]]\nvideo_jsonl_file = 'self.toml'\n"
        b"[[datasets]]\nimage_directory = '.'\ncaption_extension = '../../x'\n",
        "bytes.toml": b"\xff\xfe\0\0",
        "training.json": json.dumps(
            {"datasets": [{"data_root": text} for text in texts if text not in ("/", "..", ".", "")]}
        ).encode(),
        "self.json": json.dumps({"datasets": [{"dataset_file": "self.json"}] * 99}).encode(),
        "id.json": json.dumps(
            {"datasets": [{"data_root": ".", "id_token": "\x1b[2J", "caption_options": {"a": [1e308]}}]}
        ).encode(),
    }


def tables(box: Sandbox) -> dict[str, bytes]:
    """Return the hostile tables and configurations: name -> content."""
    return {
        **_tables_of_values(box),
        **_csv_files(),
        **_json_files(),
        **_other_files(box),
        **_configurations(box),
    }
