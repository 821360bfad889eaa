"""Damaged and hostile files through the commands: a sample or a reason, no crash, no hang, no other change, nothing is run."""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.support.caption_servers import Server
from tests.support.hostile import CONDITIONS, write_sources
from tests.support.hostile_archives import archives
from tests.support.hostile_box import Sandbox, time_limit
from tests.support.hostile_media import png, write_hostile_media, write_mutations
from tests.support.hostile_tables import GOOD, tables
from wands.commands.check import check
from wands.config.options import CheckOptions
from wands.data.cache.reader import LatentCache
from wands.data.clips.layouts import load_source
from wands.data.clips.video import probe
from wands.errors import ConfigError, DataError
from wands.preprocess.clip_rules import read_source
from wands.texts import printable

SIZES = ("--max-pixels", 6144, "--max-frames", 9)
NUM_MUTATIONS = 240
FIX = re.compile(r"; \w|\. [A-Z]\w|.{4000}", re.DOTALL)
"""A reason has a fix after its fact, unless it is cut after 4,096 characters, because the source has such long names."""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    import datasets

    box = Sandbox(tmp_path / "box")
    monkeypatch.chdir(box.root)
    # Clips of archives and datasets are stored in this folder, which is a folder of results, too.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", box.out / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield box
    box.listener.close()


def commands(source: Path, out: Path, model: Path, url: str) -> dict[str, tuple[object, ...]]:
    ask = (
        "--model",
        "m",
        "--endpoint",
        url,
        "--frames",
        2,
        "--prompt",
        "Describe {caption} of {video}",
        "--overwrite",
    )
    machine = ("--model", model, "--gpu-memory", 24)
    return {
        "check": ("check", "--json", out / "check.json", "--html", out / "check.html", *SIZES, "--", source),
        "preprocess": ("preprocess", "--out", out / "latents", "--model", model, *SIZES, "--", source),
        "split": (
            "split",
            "--out",
            out / "shots.csv",
            "--html",
            out / "shots.html",
            "--min-seconds",
            0.5,
            "--",
            source,
        ),
        "measure": ("measure", "--out", out / "measured.csv", "--", source),
        "caption": ("caption", "--out", out / "captioned.csv", *ask, "--", source),
        "init": ("init", "--out", out / "project", *machine, *SIZES, "--", source),
    }


def run_all(box: Sandbox, source: Path, out: Path, model: Path, url: str) -> tuple[dict[str, Any], list[str]]:
    """Run the commands on a source. Return the result of each command, and what is wrong."""
    results = {}
    before = box.snapshot()
    wrong = list[str]()
    for name, words in commands(source, out, model, url).items():
        if name == "caption" and "check" in results:  # the prompt names columns that the clips have
            known = load_columns(source)
            words = tuple(
                word for word in words if word != "Describe {caption} of {video}" or "video" in known
            )
            words = words if "video" in known else tuple(word for word in words if word != "--prompt")
        done, problems = box.run(*words)
        after = box.snapshot()
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        problems += [f"changes {path}" for path in changed]
        problems += [f"connects {count} times" for count in [box.calls()] if count]
        allowed = (0, 1, 2) if name == "check" else (0, 2)
        problems += [] if done.exit_code in allowed else [f"exits with {done.exit_code}"]
        if done.exit_code == 2 and not FIX.search(done.stderr):
            problems.append(f"gives no fix: {done.stderr[-300:]}")
        wrong += [f"{name} {source.name}: {problem}" for problem in problems]
        results[name] = done
        before = after
    return results, wrong + contradictions(results, out) + stored(box)


@pytest.fixture
def preloaded() -> None:
    """Import the modules of all commands once, in the process from which their workers are forked."""
    footage = [f"data_tools.footage.{name}" for name in ("shots", "measures", "write_captions")]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["wands.commands.check.check", *footage])
    forkserver.ensure_running()


def load_columns(source: Path) -> set[str]:
    try:
        return {name for record in load_source(str(source), needs_caption=False)[0] for name in record.row}
    except DataError:
        return set()


def stored(box: Sandbox) -> list[str]:
    """Files from archives and datasets have names that are digests, and are not larger than the clips."""
    files = [
        path for path in (box.out / "cache").rglob("*") if path.is_file() and "wands_clips" in path.parts
    ]
    return [
        f"stores {path}"
        for path in files
        if not re.fullmatch(r"[0-9a-f]{64}(\.\w+)?", path.name) or path.stat().st_size > 1 << 26
    ]


def contradictions(results: dict[str, Any], out: Path) -> list[str]:
    """Each clip has a sample or a reason, and the commands agree."""
    wrong: list[str] = []
    if not (out / "check.json").exists():
        return [] if results["check"].exit_code == 2 else ["check writes no report"]
    clips = json.loads((out / "check.json").read_text())["clips"]
    wrong += [
        f"{clip['key']} has no sample and no reason"
        for clip in clips
        if not (clip["samples"] or clip["reason"])
    ]
    reasons = {clip["key"]: clip["reason"] for clip in clips if clip["reason"]}
    wrong += [f"{key}: no fix in {reason}" for key, reason in reasons.items() if not FIX.search(reason)]
    wrong += [f"{key}: control characters" for key, reason in reasons.items() if reason != printable(reason)]
    wrong += (
        ["the page contains a script of a caption"]
        if "<script>alert" in (out / "check.html").read_text()
        else []
    )
    samples = {sample["key"] for clip in clips if not clip["reason"] for sample in clip["samples"]}
    try:
        encoded = set(LatentCache(out / "latents").keys)
    except Exception:
        encoded = set()
    wrong += [f"check and preprocess disagree on {key}" for key in samples ^ encoded]
    if (rejects := out / "latents" / "rejects.jsonl").exists():
        rows = [json.loads(line) for line in rejects.read_text().splitlines()]
        listed = {row["key"]: row["reason"] for row in rows}
        wrong += [f"preprocess does not list {key}" for key in reasons.keys() - listed.keys()]
    for table, line in (("measured.csv", "not measured: "), ("captioned.csv", "")):
        if (out / table).exists():
            with (out / table).open(newline="") as file:
                rows = list(csv.DictReader(file))
            empty = [row for row in rows if not (row.get("brightness") or row["caption"])]
            said = (
                results["measure"].output.count(f"\n{line}")
                if line
                else sum(bool(row["caption_problem"]) for row in empty)
            )
            wrong += [f"{table}: {len(empty)} rows without reason"] if len(empty) > said + 1 else []
    return wrong


def run_script(project: Path, box: Sandbox) -> list[str]:
    """Run the commands that `wands init` wrote, with programs that print their arguments. Return what is wrong."""
    (box.out / "bin").mkdir()
    for name in ("wands", "deepspeed", "torchrun"):
        (box.out / "bin" / name).write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        (box.out / "bin" / name).chmod(0o755)
    before = box.snapshot()
    path = {"PATH": f"{box.out / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", project / "commands.sh"], capture_output=True, text=True, env=path, cwd=box.root
    )
    same = before == box.snapshot()
    return [] if same and not done.returncode else [f"commands.sh: {done.stderr[-500:]}, changes: {not same}"]


@pytest.mark.full
def test_files(box: Sandbox, tiny_pipeline: Path, preloaded: None) -> None:
    folder = box.data / "$(touch canary) 'media'"
    box.limit = 900
    folder.mkdir()
    paths = write_mutations(folder, NUM_MUTATIONS) + write_hostile_media(box, folder)
    assert len(paths) >= 300
    out = box.out / "media"
    results, wrong = run_all(box, folder, out, tiny_pipeline, Server().url)
    assert wrong == []
    clips = json.loads((out / "check.json").read_text())["clips"]
    found = {clip["path"] for clip in clips}
    assert {printable(str(path)) for path in paths} - found == set()
    assert sum(bool(clip["reason"]) for clip in clips) > 100
    assert len(LatentCache(out / "latents").keys) > 100
    named = results["split"].output + results["measure"].output
    silent = [path for path in paths if printable(path.stem).replace("#", "%23") not in named]
    assert [path for path in silent if path.suffix not in (".png", ".jpg", ".webp", ".bmp", ".gif")] == []
    assert run_script(out / "project", box) == []


@pytest.mark.full
def test_tables_archives_and_configurations(box: Sandbox, tiny_pipeline: Path, preloaded: None) -> None:
    server = Server()
    wrong = list[str]()
    sources = write_sources(box)
    assert len(sources) >= 80
    read = 0
    for number, source in enumerate(sources.values()):
        results, problems = run_all(box, source, box.out / str(number), tiny_pipeline, server.url)
        wrong += problems
        read += results["preprocess"].exit_code == 0
    assert wrong == []
    assert read > len(sources) // 3


# ---------------------------------------------------------------- the default tier


@pytest.mark.slow
def test_a_few_sources_of_each_kind(box: Sandbox) -> None:
    shutil.copy(box.clip, box.data / "good.mp4")
    contents = tables(box)
    writers = archives(box)
    names = (
        "paths.jsonl",
        "rows.jsonl",
        "captions.jsonl",
        "paths.csv",
        "lines.jsonl",
        "folders.toml",
        "training.json",
    )
    for name in (
        *names,
        "digits.json",
        "null.json",
        "names.tar",
        "links.tar",
        "rows.tar",
        "bomb.tgz",
        "sparse.tar",
    ):
        source = box.data / name
        writers[name](source) if name in writers else source.write_bytes(contents[name])
        before = box.snapshot()
        if name in ("digits.json", "null.json"):
            with pytest.raises(DataError, match=r"cannot be read: (?!.*UTF-8).*; correct the file"):
                load_source(str(source))
        else:
            records, rejections = load_source(str(source), log=lambda note: None)
            assert [item.reason for item in rejections if not FIX.search(item.reason)] == []
            assert rejections, name
            assert records, name
        assert box.snapshot() == before
        source.unlink()
    assert stored(box) == []
    assert box.calls() == 0


def test_a_hostile_row_costs_only_itself(box: Sandbox) -> None:
    shutil.copy(box.clip, box.data / "good.mp4")
    (box.data / "frame0.png").write_bytes(png(64, 48))
    (box.data / "frame%d.png").write_bytes(b"\x89PNG nothing")
    rows = [
        {"start": 1e308},
        {"end": "1e999"},
        {"start_frame": 0, "end_frame": 10**30},
        {"crop": "0,0,1,1", "start": 0.5},
        {"crop": [0, 0, 1e308, 1]},
    ]
    rows += [{"video": "frame%d.png"}, {"mask": "/dev/zero"}, {}]
    (box.data / "t.jsonl").write_text("".join(json.dumps(GOOD | row) + "\n" for row in rows))
    done, wrong = box.run(
        "check", "--json", box.out / "check.json", *SIZES, "--workers", 1, box.data / "t.jsonl"
    )
    assert wrong == []
    assert done.exit_code == 1
    clips = json.loads((box.out / "check.json").read_text())["clips"]
    assert sum(bool(clip["reason"]) for clip in clips) == len(rows) - 1
    assert [clip["key"] for clip in clips if not clip["reason"]] == ["good"]
    assert any("but crop=0,0,1,1 must be in the frame" in clip["reason"] for clip in clips)


@pytest.mark.parametrize(
    "name", ["~nouser", "~nouser/x", "x" * 300, "y/" * 3000, "\udcff", "/dev/zero", "pipe.mp4", "loop.csv"]
)
def test_a_source_that_is_no_source(box: Sandbox, name: str) -> None:
    (box.root / "loop.csv").symlink_to("loop.csv")
    for words in (("check",), ("measure", "--out", box.out / "a.csv")):
        done, wrong = box.run(*words, name)
        assert wrong == []
        assert done.exit_code == 2
        assert re.search(r"SOURCE=.*; \w+", done.stderr)


def test_a_table_that_does_not_fit_into_memory(box: Sandbox) -> None:
    for name in ("a.csv", "a.jsonl", "a.json"):
        with (box.data / name).open("wb") as file:
            file.truncate(1 << 43)
        with pytest.raises(DataError, match="MemoryError"):
            load_source(str(box.data / name))


@pytest.mark.parametrize("ending", [".txt", ".json", ".mask.png"])
@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "/dev/tty", "nowhere"])
def test_a_caption_or_mask_that_is_no_file(box: Sandbox, ending: str, target: str) -> None:
    """A pipe would block forever. A clip without its mask would be trained as a whole."""
    clip = box.data / "a.mp4"
    shutil.copy(box.clip, clip)
    clip.with_suffix(".txt").write_text("a clip") if ending == ".mask.png" else None
    odd = clip.with_suffix(ending)
    os.mkfifo(odd) if target == "pipe" else odd.symlink_to(target)
    with time_limit(5):
        records, rejections = load_source(str(box.data))
    assert records == []
    assert re.search("is a (named pipe|device|link)", rejections[0].reason)


def test_texts_that_take_quadratic_time(box: Sandbox) -> None:
    shutil.copy(box.clip, box.data / "good.mp4")
    accents = "\u0300\u0323" * 500_000  # composing them takes minutes
    rows = [
        GOOD | row
        for row in ({"caption": accents}, {"video": accents}, {"x": f"{accents}.mp4"}, {accents: 1})
    ]
    (box.data / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records, rejections = load_source(str(box.data / "t.jsonl"))
    assert len(records) == 1
    assert any("1,000,000 characters, more than 20,000" in item.reason for item in rejections)


def test_an_image_is_never_a_sequence(box: Sandbox) -> None:
    """FFmpeg reads a%d.png as the images a0.png, a1.png ..."""
    (box.data / "a0.png").write_bytes(png(64, 48))
    (box.data / "a%d.png").write_bytes(png(32, 32))
    assert probe(box.data / "a%d.png").width == 32
    (box.data / "a%d.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(DataError, match="has no frame"):
        probe(box.data / "a%d.png")


def test_an_archive_without_members(box: Sandbox) -> None:
    (box.data / "a.tar").write_bytes(bytes(10240))
    with pytest.raises(DataError, match="contains no clip; add"):
        load_source(str(box.data / "a.tar"))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_never_run(box: Sandbox, condition: str) -> None:
    shutil.copy(box.clip, box.data / "good.mp4")
    (box.data / "t.jsonl").write_text(json.dumps(GOOD | {"motion": 1}))
    before = box.snapshot()
    options = CheckOptions(source=str(box.data / "t.jsonl"), where=condition)
    with time_limit(10), contextlib.suppress(ConfigError):
        read_source(options)
    assert box.snapshot() == before


def test_the_sandbox_notices(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def misbehave(options: object) -> None:
        pickle.loads(box.pickled)
        socket.create_connection(box.listener.getsockname()).close()
        raise ValueError("not one sentence")

    monkeypatch.setattr(check, "check", misbehave)
    before = box.snapshot()
    _, wrong = box.run("check", "x")
    assert wrong == ["crashes: ValueError('not one sentence')"]
    assert [Path(path).name for path in box.snapshot().keys() - before.keys()] == ["canary"]
    assert box.calls() == 1
