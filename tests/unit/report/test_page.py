"""report.html: the curves are the rows of metrics.jsonl, texts are escaped and clean, missing files and keys do not matter."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from tests.support import deadly
from tests.support.report_page import Page
from tests.support.run_folder import PROMPTS, write_rows, write_run
from tests.support.samples import narrow_text
from tests.support.secret_texts import ORDINARY_TEXTS, SECRET_TEXTS
from wands.cli import main
from wands.config.options import ReportOptions
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.clips.video import save_video
from wands.files import read_rows
from wands.report import page as module
from wands.report.page import render_page, write_report
from wands.report.run_data import read_run, sample_strips

FILES = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "samples/samples.jsonl")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "fox", steps=40, every=10)


def render(*folders: Path, place: Path | None = None) -> str:
    return render_page([read_run(folder) for folder in folders], place or folders[0])


def curves(text: str) -> dict[tuple[str, str], dict[int, float]]:
    """Return {(chart, curve): {step: value}}, where the values are computed from the points and the axes."""
    found = {}
    for low, high, svg in re.findall(
        r'data-low="(\S+)" data-high="(\S+)".*?\n(<svg.*?</svg>)', text, re.DOTALL
    ):
        chart = ElementTree.fromstring(svg)
        low = float(low)
        high = float(high)
        for line in chart.iter("polyline"):
            points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
            steps = line.attrib["data-x"].split()
            texts = line.attrib["data-y"].split()
            assert len(points) == len(steps) == len(texts)
            values = {}
            for (_, down), step, value in zip(points, steps, texts, strict=True):
                drawn = high - down / 300 * (high - low)
                assert not low <= float(value) <= high or drawn == pytest.approx(
                    float(value), abs=(high - low) / 1000 + 1e-4 * abs(drawn)
                )
                values[float(step)] = float(value)
            found[chart.attrib["aria-label"], line.attrib["data-name"]] = values
    return found


def test_the_curves_are_the_rows(run: Path) -> None:
    found = curves(render(run))
    rows = read_rows(run / "metrics.jsonl")
    evaluations = read_rows(run / "evaluations.jsonl")
    keys = {("Loss", "train, each step"): "loss", ("Gradient norm", "Gradient norm"): "grad_norm",
            ("Learning rate", "Learning rate"): "lr",
            ("TFLOP/s per GPU", "TFLOP/s per GPU"): "tflops", ("Step time, s", "Step time, s"): "seconds",
            ("Wait for data, s per step", "Wait for data, s per step"): "data_wait"}  # fmt: skip
    for name, key in keys.items():
        assert found[name] == {row["step"]: pytest.approx(row[key], rel=1e-4) for row in rows}
    mean = found["Loss", "train, mean of 2 steps"]  # the update of step 24 was skipped
    assert mean[24] == pytest.approx(rows[22]["loss"], rel=1e-4)
    assert mean[26] == pytest.approx((rows[24]["loss"] + rows[25]["loss"]) / 2, rel=1e-4)
    peak = found["Largest memory of a rank, GiB", "device"]
    assert set(peak.values()) == {61}
    for name, weights, key in (("held-out", "raw", "held_out"), ("train clips, EMA", "ema", "train")):
        wanted = {
            row["step"]: pytest.approx(row[key], rel=1e-4) for row in evaluations if row["weights"] == weights
        }
        assert found["Loss", name] == wanted
    last = evaluations[-2]
    assert found["Held-out loss at each sigma", "step 40"] == {
        item["sigma"]: pytest.approx(item["held_out"], rel=1e-4) for item in last["by"]["sigma"]
    }
    assert found["Held-out loss: change since step 0", "held-out"][40] == pytest.approx(
        last["change"]["mean"], rel=1e-4
    )
    fall = 100 * (last["by"]["sigma"][0]["held_out"] / evaluations[0]["by"]["sigma"][0]["held_out"] - 1)
    assert found["Held-out loss at each sigma: change, %", "0.1"][40] == pytest.approx(fall, rel=1e-3)
    assert len([name for chart, name in found if chart == "Train loss by sigma"]) == 10


def test_every_curve_has_the_events(run: Path) -> None:
    text = render(run)
    charts = [svg for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL) if "<polyline" in svg]
    assert len(charts) == 12
    for svg in charts:
        marks = [
            mark.attrib["data-text"]
            for mark in ElementTree.fromstring(svg).iter("line")
            if "data-text" in mark.attrib
        ]
        expected = 0 if 'aria-label="Held-out loss at each sigma"' in svg else 4
        assert len(marks) == expected
    assert "bad update, skipped: True, loss: 4.2" in text
    assert "films/harbour" in text


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    steps = 5000
    write_rows(
        tmp_path / "metrics.jsonl",
        [{"step": i, "loss": 9.0 if i == 3333 else 0.1, "seconds": 1} for i in range(1, steps + 1)],
    )
    found = curves(render(tmp_path))
    raw, smooth = (found["Loss", name] for name in ("train, each step", "train, mean of 200 steps"))
    assert raw[3333] == 9
    assert max(map(len, (raw, smooth))) <= module.MAX_POINTS
    assert {1, steps} <= raw.keys() & smooth.keys()


def test_texts_are_escaped(run: Path, tmp_path: Path) -> None:
    """A tag in any text of the run is shown as text."""
    tag = "\"'><img src=x onerror=alert(1)>"
    for name in FILES:
        rows = [
            json.loads(json.dumps(row).replace("fox", f"fox{json.dumps(tag)[1:-1]}"))
            for row in read_rows(run / name)
        ]
        for row in rows:
            row |= {
                key: value + tag
                for key, value in row.items()
                if key in ("event", "prompt", "reason", "wands_version", "variant")
            }
            row |= {"clips": [clip | {"sample_id": tag} for clip in row["clips"]]} if "clips" in row else {}
            if "grad_norm_blocks" in row:
                row["grad_norm_blocks"] = {tag + key: value for key, value in row["grad_norm_blocks"].items()}
        write_rows(tmp_path / name, rows)
    (tmp_path / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("full", json.dumps(tag)))
    text = render(tmp_path)
    page = Page(text)
    assert tag not in text
    assert text.count("&gt;&lt;img src=x") > 20
    assert "img" not in page.tags  # videos are not in this folder
    assert page.tags.count("script") == 1
    assert "<b>snow" not in text


def test_the_page_needs_no_network_and_tells_nothing_about_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_" + "x1" * 12
    monkeypatch.setenv("MY_API_KEY", "a-value-of-the-environment")
    planted = (
        "model.path=/home/alice/models/wan",
        f"data.exclude=[{secret}, a-value-of-the-environment]",
        "lora.init_from=/data/alice/l",
    )
    run = write_run(
        tmp_path / "fox", 40, 10, overrides=planted, reason=f"/mnt/alice/disk/a.h5 of {secret} is full"
    )
    text = render(run)
    assert all(link.startswith("data:") for link in Page(text).links)
    for word in ("http", "//", "alice", str(tmp_path), secret, "a-value-of-the-environment"):
        assert word not in re.sub(r"base64,[\w+/=]+", "", text), word
    assert "a.h5 of REDACTED is full" in text


def test_the_page_shows_no_secret(tmp_path: Path) -> None:
    """In events, prompts and the recipe. Ordinary texts stay."""
    texts = [text.format(secret) for text, secret in SECRET_TEXTS.items()]
    run = write_run(tmp_path / "fox", 40, 10, overrides=(f"data.exclude={json.dumps(texts)}",))
    texts += ORDINARY_TEXTS
    write_rows(
        run / "events.jsonl",
        [{"step": 1, "event": "error", "reason": text, "db_pass": "geheim"} for text in texts],
    )
    row = {"step": 0, "weights": "raw"}
    samples = [row | {"number": number, "prompt": text} for number, text in enumerate(texts)]
    write_rows(run / "samples" / "samples.jsonl", samples)
    text = html.unescape(render(run))
    assert [
        secret for secret in (*SECRET_TEXTS.values(), "geheim") if len(secret) > 3 and secret in text
    ] == []
    assert [ordinary for ordinary in ORDINARY_TEXTS if ordinary not in text] == []


@pytest.mark.slow
def test_videos_beyond_the_limit_are_links(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest videos are in the page, then the base model's; the others are links, or images if the page is elsewhere."""
    rows = read_rows(run / "samples" / "samples.jsonl")
    size = {
        step: sum((run / row["video"]).stat().st_size * 4 // 3 for row in rows if row["step"] == step)
        for step in (0, 20, 40)
    }
    assert Page(render(run)).tags.count("video") == 10
    monkeypatch.setattr(module, "MAX_VIDEO_BYTES", size[40] + size[0] + 10)
    links = [link for link in Page(render(run)).links if not link.startswith("data:")]
    assert links == [row["video"] for row in sorted(rows, key=lambda row: row["number"]) if row["step"] == 20]
    elsewhere = Page(render(run, place=tmp_path))
    assert all(link.startswith("data:") for link in elsewhere.links)
    assert (elsewhere.tags.count("video"), elsewhere.tags.count("img")) == (6, 4)


def test_a_file_outside_the_run_is_not_shown(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    row = read_rows(run / "samples" / "samples.jsonl")[0] | {
        "video": "../secret.mp4",
        "thumbnail": "/etc/hostname",
    }
    write_rows(tmp_path / "run" / "samples" / "samples.jsonl", [row])
    assert Page(render(tmp_path / "run")).links == []


@pytest.mark.parametrize("missing", [*FILES, "recipe.yaml", "samples", "all"])
def test_missing_files(run: Path, tmp_path: Path, missing: str) -> None:
    for path in run.rglob("*.*"):
        name = path.relative_to(run).as_posix()
        if path.is_file() and missing != "all" and not name.startswith(missing):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).symlink_to(path)
    text = render(tmp_path)
    assert "Is it learning?" in text
    assert ("Not known yet" in text) == (missing in ("evaluations.jsonl", "all"))


@pytest.mark.parametrize("seed", range(6))
def test_missing_keys_and_unfinished_lines(run: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for name in FILES:
        rows = read_rows(run / name)
        keys = sorted({key for row in rows for key in row} - {"step"})
        for key in draw.sample(keys, len(keys) * seed // 5):
            for row in rows:
                row.pop(key, None)
                if draw.random() < 0.5:
                    row[key] = None
        write_rows(tmp_path / name, rows)
        with (tmp_path / name).open("a") as file:
            file.write('7\n"text"\n{"no step": 1}\n{"step": 41, "lo')
    (tmp_path / "recipe.yaml").write_text("model: [unfinished")
    curves(render(tmp_path))


def test_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = write_run(
        tmp_path / "dog", 20, 10, seed=1, media=False, overrides=("lora.rank=8", "optim.lr=3e-4")
    )
    text = render(run, other)
    found = curves(text)
    for folder in (run, other):
        rows = [row for row in read_rows(folder / "evaluations.jsonl") if row["weights"] == "raw"]
        assert found["Loss", f"{folder.name} held-out"] == {
            row["step"]: pytest.approx(row["held_out"], rel=1e-4) for row in rows
        }
    table = text[text.index("keys that differ between") :]
    assert re.search(r"<td>lora.rank</td><td>32</td><td>8</td>", table)
    assert "<td>optim.warmup</td>" not in table
    assert "<td>optim.warmup</td>" in render(run)


def test_the_page_never_ends_a_training(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_report(tmp_path)
    assert (tmp_path / "report.html").is_file()  # of a run that has written nothing
    (tmp_path / "file").write_text("not a folder")
    write_report(tmp_path / "file")
    monkeypatch.setattr(module, "read_run", lambda folder: 1 / 0)
    write_report(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "report.html cannot be written (division by zero)" in caplog.text


def test_the_command(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(run)])
    assert (result.exit_code, result.output.strip()) == (0, str(run / "report.html"))
    out = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(main, ["report", str(run), str(run), "--out", str(out)]).exit_code == 0
    assert "keys that differ between" in out.read_text()
    refused = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "is not a run folder" in refused.output
    assert CliRunner().invoke(main, ["report"]).exit_code == 2


def write_cache(folder: Path, sources: dict[str, Path], shade: int) -> LatentCache:
    """A cache whose samples were made from the second half of these files."""
    with CacheWriter(folder, narrow_text("wan2.1-t2v-1.3b"), {}) as writer:
        for key, source in sources.items():
            meta = {"num_frames": 1, "fps": 8.0, "content": key, "source": str(source), "start_seconds": 0.5}
            latents = torch.full((16, 1, 2, 2), shade, dtype=torch.bfloat16)
            arrays = {"latents": latents, "text_embeds": torch.zeros(1, 8, dtype=torch.bfloat16)}
            writer.add(key, arrays, meta)
        writer.commit(torch.zeros(1, 8, dtype=torch.bfloat16))
    return LatentCache(folder)


def thumbnails(text: str) -> dict[str, np.ndarray]:
    """Return the images in the table of spikes by the name of the clip."""
    found = re.findall(r'<li><img alt="" src="data:image/webp;base64,(.*?)">(.*?) <span', text)
    return {name: np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data, name in found}


@pytest.mark.slow
def test_spikes_show_thumbnails_of_their_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches share a key. Of the other clips, one crashes its decoder, one is damaged, one is gone, one is not in a cache."""
    videos = {name: tmp_path / "private" / f"{name}.mp4" for name in "abcde"}
    videos["a"].parent.mkdir()
    for name, shade in (("a", 40), ("b", 80), ("c", 200)):
        frames = np.full((8, 32, 48, 3), shade, np.uint8)
        frames[:4] = 0  # before the start of the sample
        save_video(videos[name], frames, 8)
    videos["d"].write_bytes(b"not a video")
    write_cache(
        tmp_path / "one", {"b": videos["b"], "d": videos["d"], "e": videos["e"], "same": videos["a"]}, 1
    )
    two = write_cache(tmp_path / "two", {"same": videos["c"]}, 2)
    other = f"same#{two.checksums[0]:08x}"
    sources = f"data.sources=[{{path: {tmp_path / 'one'}}}, {{path: {tmp_path / 'gone'}}}, {{path: {tmp_path / 'two'}}}]"
    run = write_run(tmp_path / "fox", 40, 10, media=False, overrides=("data.cache=null", sources))
    clips = [
        {"sample_id": name, "sigma": 0.5, "loss": 1.0} for name in ("b", "d", "e", "same", other, "lost")
    ]
    write_rows(run / "events.jsonl", [{"step": 9, "event": "spike", "loss": 4.0, "clips": clips}])
    monkeypatch.setattr(module, "decode_clip", deadly.decode_clip)
    result = CliRunner().invoke(main, ["report", str(run)])
    assert (result.exit_code, result.output.strip()) == (0, str(run / "report.html"))
    text = (run / "report.html").read_text()
    images = thumbnails(text)
    assert {name: round(float(image.mean()), -1) for name, image in images.items()} == {
        "same": 40,
        other: 200,
    }
    assert images["same"].shape == (32, 48, 3)
    assert all(name in text for name in ("<li>b ", "<li>d ", "<li>lost "))
    assert "private" not in text
    assert str(tmp_path) not in text
    write_report(run)  # as a training does
    assert thumbnails((run / "report.html").read_text()) == {}
    many = [{"sample_id": f"{number}", "sigma": 0.5, "loss": 1.0} for number in range(30)]
    write_cache(tmp_path / "many", {clip["sample_id"]: videos["a"] for clip in many}, 3)
    run = write_run(tmp_path / "hen", 40, 10, media=False, overrides=(f"data.cache={tmp_path / 'many'}",))
    events = [{"step": step, "event": "bad update", "clips": many[step:][:3]} for step in range(0, 30, 3)]
    write_rows(run / "events.jsonl", events)
    module.report(ReportOptions(runs=(run,)))
    assert sorted(map(int, thumbnails((run / "report.html").read_text()))) == list(range(6, 30))  # the newest


def test_the_state_and_the_time_to_the_end(run: Path, tmp_path: Path) -> None:
    start = {"event": "start", "world_size": 4, "total_steps": 100}
    rows = [{"step": i, "seconds": 9.0} for i in range(1, 21)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    for event, state in (("save", "running"), ("error", "failed"), ("stop", "stopped"), ("end", "finished")):
        write_rows(
            tmp_path / "events.jsonl",
            [{"step": 0, **start}, {"step": 10, **start, "world_size": 8}, {"step": 20, "event": event}],
        )
        data = read_run(tmp_path)
        assert data["state"] == state
        assert data["eta_seconds"] == (720 if state == "running" else None)
        assert data["device_hours"] == pytest.approx(9 * (10 * 4 + 10 * 8) / 3600)
    write_rows(tmp_path / "events.jsonl", [{"step": 0, **start}])
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    assert read_run(tmp_path)["state"] == "silent"


def test_the_samples_are_labelled(run: Path) -> None:
    text = render(run)
    assert text.count("<small>base</small>") == 2
    assert text.count("<small>EMA</small>") == 4
    for prompt in PROMPTS:
        assert prompt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text


def test_strips_of_samples_for_the_model_card(run: Path, tmp_path: Path) -> None:
    strips = sample_strips(read_run(run), "ema", 20)
    assert list(strips) == [f"{prompt} (steps 0, 20)" for prompt in PROMPTS]
    first = strips[f"{PROMPTS[0]} (steps 0, 20)"]
    assert first.shape == (2, 144, 256, 3)
    for image, name in zip(first, ("00000000/000_raw", "00000020/000_ema"), strict=True):
        stored = np.asarray(
            Image.open(run / f"samples/step_{name}.webp").convert("RGB").resize((250, 144)), int
        )
        assert np.abs(image[:, 3:-3] - stored).mean() < 5
    rows = read_rows(run / "samples" / "samples.jsonl")
    for row in rows:  # another size since step 40, and a lost thumbnail
        Image.new("RGB", (8, 8 if row["step"] < 40 else 4)).save(tmp_path / f"{row['step']}.png")
        row["thumbnail"] = f"{row['step']}.png" if row["number"] == 0 else "lost.png"
    write_rows(tmp_path / "samples" / "samples.jsonl", rows)
    assert list(sample_strips(read_run(tmp_path), "raw", 40)) == [f"{PROMPTS[0]} (steps 0, 20, 40)"]


def changed(step: int, mean: float, half: float = 0.01, train: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "change": {"mean": mean, "low": mean - half, "high": mean + half}}
    return row | (
        {"train_change": {"mean": train, "low": train - half, "high": train + half}}
        if train is not None
        else {}
    )


@pytest.mark.parametrize(
    ("rows", "words", "never"),
    [
        ([], ("Not known yet",), ("Yes", "gap")),
        ([{"step": 0, "change": None, "held_out": 0.1}], ("Not known yet", "no evaluation after step 0"), ()),
        ([{"step": 0, "train": 0.1}, {"step": 10, "train": 0.1}], ("Not known yet", "set data.holdout"), ("step 0",)),
        ([changed(10, -0.1)], ("Yes", "-0.11000 to -0.09000"), ("lowest", "gap")),
        ([changed(10, 0.1)], ("No:", "is higher than"), ()),
        ([changed(10, 0.005)], ("Not visible yet", "may be the same"), ()),
        ([changed(10, -0.005)], ("Not visible yet",), ("Yes",)),
        ([changed(10, -0.1), changed(20, -0.05)], ("Yes", "lowest at step 10 and has risen by 0.05000"), ()),
        ([changed(10, -0.1, train=-0.2)], ("has grown since", "overfits", "its 4 train clips", "+0.10000, margin 0.01414"), ()),
        ([changed(10, -0.1, train=-0.11)], ("not clearly grown",), ("memorizes",)),
        ([{"step": 10, "change": {"mean": -0.1, "low": None, "high": None}}], ("Not visible yet", "too few clips"), ("inf",)),
    ],
)  # fmt: skip
def test_is_it_learning(rows: list[dict[str, Any]], words: tuple[str, ...], never: tuple[str, ...]) -> None:
    start = {"data": {"num_samples": 4}}
    run = {"evaluations": {"raw": rows}, "metrics": [{"grad_norm": 0.0}, {"grad_norm": 1.0}], "start": start}
    text = " ".join(module.is_learning(run))
    assert module.is_learning(run | {"metrics": [{"grad_norm": 0.0}] * 3}) == [
        "No: the gradient of every step is 0, so no weight changes."
    ]
    assert all(word in text for word in words), text
    assert not any(word in text for word in never), text
