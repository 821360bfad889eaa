"""Samples while a run trains: the videos of `wands infer --checkpoint`, on every grid, and a training that they do not change."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.runs import run_training
from tests.support.sampling import infer
from tests.support.world import WorldPool
from wands.checkpoint.step_folders import step_name
from wands.files import read_rows
from wands.model.transformer import PackedWanBlock
from wands.train import samples

CLOSE = 1e-5
"""Root mean square of the difference of two fp32 latents / root mean square of the latents."""
SMALL = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 2}
SECTION = ", ".join(f"{key}: {value}" for key, value in SMALL.items())


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


SHARDED = zero(3)


def train(model: Path, out: Path, overrides: tuple[str, ...], ds: Any = None) -> Any:
    """Train. Return the rows of metrics.jsonl, and the latents of the videos that this rank has decoded."""
    decode = samples.decode_latents
    save = samples.save_video
    found = {}
    latents: list[torch.Tensor] = []

    def decode_latents(view: Any, given: torch.Tensor) -> np.ndarray:
        latents.append(given.clone())
        return decode(view, given)

    def save_video(path: Path, frames: np.ndarray, fps: float) -> None:
        found[int(path.parent.name.removeprefix("step_")), path.stem] = latents.pop()
        save(path, frames, fps)

    with (
        mock.patch.object(samples, "decode_latents", decode_latents),
        mock.patch.object(samples, "save_video", save_video),
    ):
        return run_training(model, out, overrides, ds), found


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def write_images(folder: Path) -> None:
    for number, name in enumerate(("first.png", "last.png")):
        values = np.random.default_rng(number).integers(0, 256, (4, 8, 3), dtype=np.uint8)
        Image.fromarray(values).resize((64, 32)).save(folder / name)


FIRST = {"image": "first.png"}
LAST = {"last_image": "last.png"}
CASES: dict[str, tuple[str, int, tuple[str, ...], Any, list[dict[str, Any]]]] = {
    "t2v": ("wan2.1-t2v-1.3b", 1, (), None, [{"guidance_scale": 1}]),
    "t2v-lora-dp": ("wan2.1-t2v-1.3b", 2, ("lora={rank: 4}",), None, [{}, {"num_inference_steps": 3}, {"num_frames": 5}]),
    "t2v-ulysses-ema": ("wan2.1-t2v-1.3b", 2, ("parallel.ulysses_degree=2", "ema={}"), None, [{}]),
    "t2v-tensor-ema-zero0": ("wan2.1-t2v-1.3b", 2, ("parallel.tensor_degree=2", "ema={}"), zero(0), [{}]),
    "i2v-tensor-dp-zero3": ("wan2.1-i2v-14b", 4, ("parallel.tensor_degree=2", "train.bins_per_step=2"), SHARDED, [FIRST, FIRST]),
    "i2v-ring-zero3": ("wan2.1-i2v-14b", 2, ("parallel.ring_degree=2",), SHARDED, [FIRST]),
    "flf2v-dp": ("wan2.1-flf2v-14b", 2, (), None, [FIRST | LAST, FIRST | LAST]),
    "a14b-dp-zero3": ("wan2.2-t2v-a14b", 2, ("ema={}",), SHARDED, [{}, {"guidance_scale_2": 2.0, "flow_shift": 8.0}, {}]),
    "i2v-a14b-dp": ("wan2.2-i2v-a14b", 2, (), None, [FIRST]),
    "ti2v-ring-zero3": ("wan2.2-ti2v-5b", 2, ("parallel.ring_degree=2",), SHARDED, [FIRST, {}]),
    "ti2v": ("wan2.2-ti2v-5b", 1, (), None, [FIRST, {}]),
}  # fmt: skip
QUICK = ("t2v",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_videos_are_those_of_infer(
    name: str, tiny_variant: Callable[[str], Path], tmp_path: Path, worlds: WorldPool
) -> None:
    variant, world_size, overrides, ds, prompts = CASES[name]
    write_images(tmp_path)
    lines = [{"prompt": f"number {i}", **options} for i, options in enumerate(prompts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    section = f"sample={{every: 2, prompts_file: {tmp_path}/prompts.jsonl, {SECTION}, seed: 5}}"
    keys = ("train.max_steps=3", "checkpoint.every=2", section, *overrides)
    ranks = worlds[world_size].run(train, tiny_variant(variant), tmp_path / "run", keys, ds)
    found = {key: latents for _, latents in ranks for key, latents in latents.items()}
    rows = read_rows(tmp_path / "run" / "samples" / "samples.jsonl")
    kinds = {0: ["raw"], 2: ["raw"], 3: ["raw"]}
    if "ema={}" in overrides:
        kinds |= {2: ["raw", "ema"], 3: ["raw", "ema"]}
    assert [(row["step"], row["weights"], row["number"]) for row in rows] == [
        (step, kind, number) for step in kinds for kind in kinds[step] for number in numbers_in_order(prompts)
    ]
    for step in (2, 3):
        for kind in kinds[step]:
            results = infer(
                tiny_variant(variant),
                [],
                prompts_file=tmp_path / "prompts.jsonl",
                checkpoint=tmp_path / "run" / "checkpoints" / step_name(step),
                ema=kind == "ema",
                out_dir=tmp_path / f"{step}{kind}",
                save_latents=True,
                seed=5,
                **SMALL,
            )
            for number, result in enumerate(results):
                theirs = load_file(result.latents)["latents"]
                assert difference(found[step, f"{number:03d}_{kind}"], theirs) <= CLOSE, (step, number, kind)
    base = found[0, "000_raw"]
    trained = found[3, "000_raw"]
    assert difference(base, trained) > 10 * CLOSE


def numbers_in_order(prompts: list[dict[str, Any]]) -> list[int]:
    """Videos with the same schedule are sampled at the same time."""
    keys = [(p.get("num_inference_steps"), p.get("flow_shift"), p.get("guidance_scale")) for p in prompts]
    return sorted(range(len(prompts)), key=lambda i: keys.index(keys[i]))


# ------------------------------------------------------------------------------------------- training unchanged

ALL_PARTS = (
    "train.max_steps=2",
    "model.dropout=0.1",
    "model.checkpointing=selective",
    "ema={}",
)
SAMPLED = f"sample={{every: 1, prompts: [a, b], {SECTION}}}"


def train_checked(
    model: Path, out: Path, overrides: tuple[str, ...], ds: Any, fault: str | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Train, with a fault in the samples. Return the rows of metrics.jsonl, and the lines of the log."""
    write = samples.RunSamples.write
    block = PackedWanBlock.forward
    lines = []
    calls = []

    def checked(self: Any, step: int) -> None:
        torch.manual_seed(step)
        state = torch.get_rng_state()
        write(self, step)
        assert torch.equal(torch.get_rng_state(), state)
        for engine in self._training.engines.values():
            assert all(module.training for module in engine.module.modules())

    def decode(*_: Any) -> None:
        torch.rand(1)  # a scheduler or a decoder may draw from the global generator
        raise RuntimeError("the decoder failed")

    def forward(self: Any, *args: Any) -> torch.Tensor:
        calls.append(None)
        if not self.training and len(calls) % 2 == 0:  # in the second block
            raise torch.OutOfMemoryError("out of memory")
        return block(self, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(samples.RunSamples, "write", checked))
        if fault == "decode" and os.environ["RANK"] == "0":
            stack.enter_context(mock.patch.object(samples, "decode_latents", decode))
        if fault == "dit":
            stack.enter_context(mock.patch.object(PackedWanBlock, "forward", forward))
        rows = run_training(model, out, overrides, ds, log=lines.append)
    return rows, lines


@pytest.fixture(scope="module")
def unsampled(
    tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool
) -> Callable[[int], Path]:
    """Run folder of a training without samples, at a ZeRO stage."""

    @cache
    def folder(stage: int) -> Path:
        out = tmp_path_factory.mktemp("unsampled")
        worlds[2].run(run_training, tiny_pipeline, out, ALL_PARTS, zero(stage))
        return out

    return folder


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        pytest.param("decode", 3, marks=pytest.mark.slow),
        pytest.param("dit", 3, marks=pytest.mark.slow),
        *(pytest.param(None, n, marks=pytest.mark.slow) for n in range(4)),
    ],
)
def test_samples_do_not_change_the_training(
    fault: str | None,
    stage: int,
    unsampled: Callable[[int], Path],
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
) -> None:
    """Losses, weights and averages have the same bits, also if samples fail on one rank or on all ranks."""
    (rows, lines), _ = worlds[2].run(
        train_checked, tiny_pipeline, tmp_path, (*ALL_PARTS, SAMPLED), zero(stage), fault
    )
    kinds = ("loss", "grad_norm", "lr", "ema_decay")
    expected = read_rows(unsampled(stage) / "metrics.jsonl")
    assert [[row[kind] for kind in kinds] for row in rows] == [
        [row[kind] for kind in kinds] for row in expected
    ]
    files = list(unsampled(stage).glob("checkpoints/step_00000002/transformer/*.safetensors"))
    assert len(files) > 1
    for path in files:
        ours = load_file(tmp_path / path.relative_to(unsampled(stage)))
        assert all(torch.equal(ours[name], tensor) for name, tensor in load_file(path).items())

    failed = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "sample failed"]
    done = read_rows(tmp_path / "samples" / "samples.jsonl")
    every = [(0, "raw", n) for n in range(2)]
    every += [(step, kind, n) for step in (1, 2) for kind in ("raw", "ema") for n in range(2)]
    wrong = {None: (), "decode": (0,), "dit": (0, 1)}[fault]  # rank 0 decodes the first
    reason = {"decode": "the decoder failed", "dit": "out of memory"}.get(fault)
    assert [(r["step"], r["weights"], r["number"]) for r in failed] == [
        key for key in every if key[2] in wrong
    ]
    assert {row["reason"] for row in failed} <= {reason}
    assert [(r["step"], r["weights"], r["number"]) for r in done] == [
        key for key in every if key[2] not in wrong
    ]
    warnings = [line for line in lines if "could not be made" in line]
    assert len(warnings) == len(failed)
    assert all(f"{reason}. The training continues without it" in line for line in warnings)


# ------------------------------------------------------------------------------------------------- files of a run


def train_counted(model: Path, out: Path, overrides: tuple[str, ...], resume: Any = False) -> tuple[int, Any]:
    """Train. Return how often encoders were loaded, and the arguments of each contact sheet."""
    load = samples.load_components
    draw = samples.save_contact_sheet
    sheets = []

    def record(path: Path, rows: Any, count: int, headings: Any) -> None:
        sheets.append((path.parent.name, headings, [[x is not None for x in row.videos] for row in rows]))
        draw(path, rows, count, headings)

    with (
        mock.patch.object(samples, "load_components", side_effect=load) as loaded,
        mock.patch.object(samples, "save_contact_sheet", record),
    ):
        run_training(model, out, overrides, resume=resume)
    return loaded.call_count, sheets


@pytest.mark.slow
def test_a_resumed_run_has_the_samples_of_one_without_a_break(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
) -> None:
    """Also: prompts are encoded once, and again when they change. A new prompt has no base in the sheet."""

    def run(name: str, steps: int, prompts: str = "[a, b]", resume: Any = False) -> Any:
        section = f"sample={{every: 1, prompts: {prompts}, {SECTION}}}"
        keys = (f"train.max_steps={steps}", "checkpoint.every=1", "checkpoint.keep=3", "ema={}", section)
        return worlds[1].run(train_counted, tiny_pipeline, tmp_path / name, keys, resume)[0]

    loads, sheets = run("a", 2)
    assert loads == 1
    now = ("base", "now", "EMA")
    both = [[True] * 3] * 2
    assert sheets == [
        ("step_00000000", ("base",), [[True]] * 2),
        ("step_00000001", now, both),
        ("step_00000002", now, both),
    ]
    run("b", 2)
    loads, sheets = run("b", 2, resume=tmp_path / "b" / "checkpoints" / "step_00000001")
    assert (loads, sheets) == (0, [("step_00000002", now, both)])
    rows = {name: read_rows(tmp_path / name / "samples" / "samples.jsonl") for name in "ab"}
    assert len(rows["a"]) == len(rows["b"]) == 2 + 4 + 4
    for ours, theirs in zip(rows["a"], rows["b"], strict=True):
        assert ours.pop("seconds") > 0
        assert theirs.pop("seconds") > 0
        assert ours == theirs
        assert (tmp_path / "a" / ours["video"]).stat().st_size > 1000
        thumbnails = [
            np.asarray(Image.open(tmp_path / name / ours["thumbnail"])).astype(int) for name in "ab"
        ]
        assert (
            abs(thumbnails[0] - thumbnails[1]).mean() < 1
        )  # a rounding may change the decisions of a video encoder
    loads, sheets = run("b", 3, "[a, c]", resume=tmp_path / "b" / "checkpoints" / "step_00000002")
    assert (loads, sheets) == (1, [("step_00000003", now, [[True] * 3, [False, True, True]])])
