"""wands tools score: pairs of samples and clips, frames and sizes that differ, and numbers that numpy computes, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wands.commands.score import score
from wands.config.options import ScoreOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, save_video
from wands.errors import ConfigError


def movie(seed: int, frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / 5 + columns / (6 + seed) + t / 3 + c) for t in range(frames) for c in range(3)]
    values = np.stack(waves).reshape(frames, 3, height, width).transpose(0, 2, 3, 1)
    return np.round(127.5 + 127.5 * values).astype(np.uint8)


def run(samples: Path, reference: Path, **options: Any) -> tuple[str, list[dict[str, Any]]]:
    out = samples / "score.json"
    text = score(ScoreOptions(samples=samples, reference=str(reference), json_path=out, **options))
    return text, json.loads(out.read_text())


def test_numbers_of_pairs_by_file_name(tmp_path: Path):
    samples = tmp_path / "samples"
    clips = tmp_path / "clips"
    for name, seed in (("a", 0), ("b", 1), ("other", 2)):
        save_video(samples / "deep" / f"{name}.mp4", movie(seed), 16)
    save_video(clips / "a.mp4", movie(0), 16)  # without captions
    save_video(clips / "b.mp4", movie(7), 16)
    text, rows = run(samples, clips)
    assert [Path(row["sample"]).stem for row in rows] == ["a", "b"]
    assert rows[0]["SSIM"] == 1
    assert rows[0]["PSNR"] is None, "infinite"
    mine, theirs = (
        next(decode_clip(path / "b.mp4", ClipSpec(16, max_pixels=32 * 48))).frames.astype(float)
        for path in (samples / "deep", clips)
    )
    psnr = np.mean(
        [10 * math.log10(255**2 / np.mean((a - b) ** 2)) for a, b in zip(mine, theirs, strict=True)]
    )
    assert rows[1]["PSNR"] == pytest.approx(psnr, rel=1e-5)
    assert rows[1]["SSIM"] < 0.9
    assert rows[1]["latent_correlation"] is None
    lines = text.splitlines()
    assert lines[0].split() == [
        "SSIM",
        "PSNR",
        "sample,",
        "reference",
    ]  # without --model, there are no latents
    assert "nan" not in text
    assert lines[2].split()[:2] == [f"{rows[1]['SSIM']:.3f}", f"{psnr:.3f}"]
    assert lines[-2].endswith("mean, 2 of 3 samples")
    assert lines[-1] == f"without a reference clip in {clips}: {samples / 'deep' / 'other.mp4'}"


def test_pairs_by_caption_and_frames_that_differ(tmp_path: Path):
    """A clip of another size, length and frame rate. Two folders name the videos of samples.jsonl differently."""
    run_dir = tmp_path / "run"
    clips = tmp_path / "clips"
    step = run_dir / "samples" / "step_00000010"
    save_video(step / "000_raw.mp4", movie(0, frames=5), 8)
    row = {"step": 10, "video": "samples/step_00000010/000_raw.mp4", "prompt": "a wave"}
    (run_dir / "samples" / "samples.jsonl").write_text(json.dumps(row) + "\n")
    save_video(tmp_path / "infer" / "000_a-wave.mp4", movie(0, frames=9), 8)
    row = {"file": "000_a-wave.mp4", "prompt": "a wave"}
    (tmp_path / "infer" / "samples.jsonl").write_text(json.dumps(row) + "\n")
    large = movie(0, frames=7).repeat(2, axis=0).repeat(2, axis=1).repeat(2, axis=2)
    save_video(clips / "wave.mp4", large, 16)
    (clips / "wave.txt").write_text("a wave")
    for samples in (run_dir / "samples", tmp_path / "infer"):
        (result,) = run(samples, clips)[1]
        assert Path(result["reference"]).name == "wave.mp4"
        assert result["SSIM"] > 0.9


def test_rows_of_another_type_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The samples are the current folder, which has no parent."""
    save_video(tmp_path / "infer" / "000.mp4", movie(0), 16)
    save_video(tmp_path / "clips" / "wave.mp4", movie(0), 16)
    (tmp_path / "clips" / "wave.txt").write_text("a wave")
    rows = [
        *({"file": name, "prompt": "a wave"} for name in (None, 3, [])),
        *({"file": "000.mp4", "prompt": prompt} for prompt in (None, ["a wave"], "a wave")),
    ]
    (tmp_path / "infer" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path / "infer")
    (result,) = run(Path(), tmp_path / "clips")[1]
    assert Path(result["reference"]).name == "wave.mp4"


def test_latents(tmp_path: Path, tiny_pipeline: Path):
    samples = tmp_path / "samples"
    clips = tmp_path / "clips"
    for folder, seed in ((samples, 0), (clips, 3)):
        save_video(folder / "a.mp4", movie(seed), 16)
        save_video(folder / "same.mp4", movie(1), 16)
    text, rows = run(samples, clips, model=str(tiny_pipeline))
    assert text.splitlines()[0].split()[:3] == ["SSIM", "PSNR", "latent_correlation"]
    assert text.splitlines()[-1].endswith("mean, 2 of 2 samples")
    encoded = [row["latent_correlation"] for row in rows]
    assert encoded[1] == pytest.approx(1)
    assert encoded[0] < 0.99


def test_nothing_to_compare(tmp_path: Path):
    save_video(tmp_path / "samples" / "a.mp4", movie(0), 16)
    save_video(tmp_path / "clips" / "b.mp4", movie(0), 16)
    with pytest.raises(ConfigError, match=r"has a reference clip in --reference=.*Give each video"):
        run(tmp_path / "samples", tmp_path / "clips")
