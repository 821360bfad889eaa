"""A run folder without training: metrics, evaluations, samples and events of a LoRA that learns and then memorizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from wands.config.recipe_loading import load_recipe

PROMPTS = ("A red fox runs through <b>snow</b> at dawn", "A paper boat & a candle on a river at night")
SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


def write_run(
    folder: Path,
    steps: int = 400,
    every: int = 50,
    *,
    seed: int = 0,
    media: bool = True,
    overrides: tuple[str, ...] = (),
    **names: Any,
) -> Path:
    """Write the run folder. `names` are values of the recipe and events to plant in the page, such as a path."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(
        "wan2.1-t2v-1.3b-lora",
        [f"output_dir={folder}", f"train.max_steps={steps + steps // 4}", "data.cache=cache", *overrides],
    )
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    _write_events(folder, steps, names.get("reason", "a disk is full"))
    _write_metrics(folder, steps, rng)
    _write_evaluations(folder, steps, every)
    if media:
        write_rows(
            folder / "samples" / "samples.jsonl", _samples(folder, range(0, steps + 1, 2 * every), steps)
        )
    return folder


def _write_events(folder: Path, steps: int, reason: str) -> None:
    data = {"num_samples": 1280, "num_tokens": 41_932_800}
    start = {"wands_version": "1.0", "world_size": 8, "num_nodes": 1, "checkpoint": None, "device": "cuda",
             "variant": "wan2.1-t2v-1.3b", "total_steps": steps + steps // 4, "data": data}  # fmt: skip
    blowup = int(0.6 * steps)
    clips = [{"sample_id": "films/night <drive>#3", "repeat_index": 0, "sigma": 0.91, "loss": 9.5},
             {"sample_id": "films/harbour", "repeat_index": 0, "sigma": 0.12, "loss": 0.2}]  # fmt: skip
    events = [
        {"step": 0, "event": "start", "time": 1.7e9, **start},
        {"step": steps // 4, "event": "save", "time": 1.7e9 + 900, "checkpoint": "step_00000100"},
        {"step": int(0.3 * steps), "event": "error", "time": 1.7e9 + 1000, "reason": reason},
        {"step": steps // 4, "event": "restart", "time": 1.7e9 + 1100, **start, "number": 1, "last_step": int(0.3 * steps)},
        {"step": blowup, "event": "bad update", "time": 1.7e9 + 2400, "expert": "", "skipped": True, "loss": 4.2,
         "grad_norm": 31.0, "clips": clips},
    ]  # fmt: skip
    write_rows(folder / "events.jsonl", events)


def _write_metrics(folder: Path, steps: int, rng: np.random.Generator) -> None:
    blowup = int(0.6 * steps)
    blocks = [f"blocks.{i}" for i in range(30)]
    rows = []
    for step in range(1, steps + 1):
        fall = math.exp(-3 * step / steps)
        by_sigma = [
            0.05 + 0.5 * (0.1 + 0.1 * i) * (0.6 + 0.4 * fall) + 0.02 * rng.normal() for i in range(10)
        ]
        row: dict[str, Any] = {
            "step": step, "epoch": step // 100, "lr": 1e-4 * min(1, step / 40),
            "loss": float(np.mean(by_sigma) + 0.06 * abs(rng.normal())) + 4 * (step == blowup),
            "grad_norm": 0.4 + 0.3 * abs(rng.normal()) + 30 * (step == blowup),
            "tokens": 262_080, "samples": 8, "seconds": 6.1 + 0.3 * rng.normal(), "data_wait": 0.02 + 0.4 * (step % 97 == 0),
            "tokens_per_second": 43_000.0, "tokens_per_second_per_gpu": 5370 + 90 * rng.normal(),
            "tflops": 402 + 8 * rng.normal(), "mfu": 0.41, "fill": 0.97, "imbalance": 1.03,
            "device_peak": 61 * 2**30, "host_peak": 34 * 2**30 + step * 2**20,
            "eta_seconds": 6.1 * (steps + steps // 4 - step),
            "loss_by_sigma": [None if rng.random() < 0.2 else x for x in by_sigma],
        }  # fmt: skip
        if step % max(1, steps // 20) == 0:
            row["grad_norm_blocks"] = {
                name: 0.1 * abs(rng.normal()) + 0.02 * i for i, name in enumerate(blocks)
            }
            row["update_ratio_blocks"] = {
                name: 1e-4 * (1 + 0.2 * rng.normal()) * (1 + fall) for name in blocks
            }
        rows.append(row)
    write_rows(folder / "metrics.jsonl", rows)


def _write_evaluations(folder: Path, steps: int, every: int) -> None:
    evaluations: list[dict[str, Any]] = []
    for step in range(0, steps + 1, every):
        for weights in ("raw", "ema"):
            part = (step if weights == "raw" else 0.8 * step) / steps
            held = -0.05 * (1 - math.exp(-4 * part)) + 0.01 * part**2
            train = -0.09 * (1 - math.exp(-3 * part))
            change, train_change = (
                {"mean": x, "low": x - 0.004, "high": x + 0.004} if step else None for x in (held, train)
            )
            by = [{"name": f"sigma {s}", "sigma": s, "held_out": 0.1 + 0.5 * s + held * (2 - 2 * s),
                   "train": 0.1 + 0.5 * s + train}
                  for s in SIGMAS]  # fmt: skip
            evaluations.append({"step": step, "weights": weights, "held_out": 0.35 + held, "train": 0.34 + train,
                "gap": 0.01 + held - train, "change": change, "train_change": train_change, "by": {"sigma": by},
                "seconds": 11.0, "losses": []})  # fmt: skip
    write_rows(folder / "evaluations.jsonl", evaluations)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _samples(folder: Path, steps: range, last: int) -> list[dict[str, Any]]:
    rows = []
    for step in steps:
        for number, prompt in enumerate(PROMPTS):
            for weights in ("raw", "ema") if step else ("raw",):
                name = f"samples/step_{step:08d}/{number:03d}_{weights}"
                frames = [_frame(step / last, number, t) for t in range(9)]
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _write_video(folder / f"{name}.mp4", frames)
                Image.fromarray(frames[0]).save(folder / f"{name}.webp")
                rows.append({"step": step, "weights": weights, "number": number, "prompt": prompt, "seed": number,
                    "video": f"{name}.mp4", "thumbnail": f"{name}.webp", "width": 208, "height": 120, "num_frames": 9,
                    "num_inference_steps": 20, "guidance_scale": 5.0, "seconds": 8.5})  # fmt: skip
    return rows


def _write_video(path: Path, frames: list[np.ndarray]) -> None:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=8)
        stream.width = 208
        stream.height = 120
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        out.mux(stream.encode())


def _frame(learned: float, number: int, t: int) -> np.ndarray:
    """Return a picture that shows a disc more clearly the more the run has learned, uint8 [120, 208, 3]."""
    y, x = np.mgrid[:120, :208]
    noise = np.random.default_rng(number).integers(0, 256, (120, 208, 3))
    disc = ((x - 40 - 14 * t) ** 2 + (y - 60) ** 2 < 700)[..., None] * np.array(
        [(230, 90, 40), (250, 220, 120)][number]
    )
    scene = np.where(disc, disc, (np.stack([x / 3, 60 + y, 140 + 0 * x], -1)))
    return (learned * scene + (1 - learned) * noise).astype(np.uint8)
