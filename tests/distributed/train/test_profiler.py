"""The profiler changes no number, gives every part of a step its scope, and counts the FLOPs of the custom operators."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import losses, make_run, run_training, weights
from tests.support.steps import zero
from wands.config.options import ProfileOptions
from wands.run.sizes import step_flops
from wands.train import profiler
from wands.variants import TEXT_LEN

STEPS = ("train.max_steps=3", "train.bins_per_step=1", "data.prefetch=0")
WINDOW = "profile={start: 2, steps: 1}"
ALWAYS = {
    "attention",
    "projections",
    "ffn",
    "norm",
    "modulation",
    "copies",
    "optimizer",
    "data wait",
    "other",
}
Rows = dict[str, list[float]]


def profiled(
    model: Path, out: Path, overrides: tuple[str, ...], ds: dict[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[Rows], int]:
    """Train. Return the metrics, the rows of each table, and the number of wrapped methods that are left."""
    tables: list[Rows] = []
    wrapped: list[tuple[Any, str]] = []
    wrap = profiler._wrap
    table = profiler.format_scopes

    def watched_wrap(owner: Any, method: str, *more: Any) -> None:
        wrapped.append((owner, method))
        wrap(owner, method, *more)

    def watched_table(rows: Rows, *more: Any) -> str:
        tables.append(rows)
        assert not any(hasattr(vars(owner).get(method), "__wrapped__") for owner, method in wrapped)
        return table(rows, *more)

    profiler._wrap = watched_wrap
    profiler.format_scopes = watched_table
    return run_training(model, out, overrides, ds), tables, len(wrapped)


@pytest.mark.parametrize(
    ("grid", "stage", "more", "scopes"),
    [
        pytest.param(
            "ulysses", 3, "model.checkpointing=full", {"exchange", "ZeRO gather"}, marks=pytest.mark.slow
        ),
        pytest.param("ring", 2, "model.checkpointing=none", {"ring hop"}, marks=pytest.mark.slow),
        pytest.param("ulysses", 3, "model.checkpointing=selective", {"exchange"}, marks=pytest.mark.slow),
    ],
)
def test_a_profiled_run_is_the_run(
    tiny_pipeline: Path, tmp_path: Path, run_world, grid: str, stage: int, more: str, scopes: set[str]
):
    overrides = (*STEPS, f"parallel.{grid}_degree=2", more)
    plain = tmp_path / "plain"
    watched = tmp_path / "watched"
    rows, *_ = run_world(2, run_training, tiny_pipeline, plain, overrides, zero(stage))
    (found, tables, num_wrapped), (_, others, _) = run_world(
        2, profiled, tiny_pipeline, watched, (*overrides, WINDOW), zero(stage)
    )
    assert losses(found) == losses(rows)
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(watched)[name]), name
    assert num_wrapped > 10
    assert others == []  # of the ranks, only rank 0 is profiled
    assert scopes | ALWAYS <= tables[0].keys() <= scopes | ALWAYS | {"reduction", "ZeRO gather"}
    names = {path.name for path in (watched / "profile").iterdir()}
    assert names == {"rank0_step_000002.json.gz", "rank0_step_000002.txt"}
    trace = json.loads(gzip.decompress((watched / "profile" / "rank0_step_000002.json.gz").read_bytes()))
    named = {"ffn", "copies", "wands::ring_forward"} | scopes & {"ZeRO gather", "ring hop"}
    assert named <= {event.get("name") for event in trace["traceEvents"]}
    text = (watched / "profile" / "rank0_step_000002.txt").read_text()
    assert text.startswith("profile of rank 0, steps 2 to 2: ")
    assert text.splitlines()[-1].startswith("one step: ")
    # Two blocks run once in each micro step, and again in the backward pass under checkpointing.
    again = 1 if more.endswith("none") else 2
    micro_steps = tables[0]["copies"][0]
    assert tables[0]["ffn"][0] == 2 * micro_steps * again
    assert tables[0]["optimizer"][0] == tables[0]["data wait"][0] == 1


@pytest.mark.parametrize("chunks", [None, 1], ids=["whole", "chunks"])
def test_flops_of_a_step(chunks: int | None, tiny_pipeline: Path, tmp_path: Path, run_world):
    """Each pack is one clip with the longest text, so only named differences to the model FLOPs are left."""
    clips = f"data.mock={{num_samples: 4, shapes: [[2,8,8],[3,8,8]], text_lens: [{TEXT_LEN - 1}]}}"
    overrides = (
        clips,
        "packing.enabled=false",
        "packing.max_tokens=80",
        "model.checkpointing=none",
        "flow.cfg_dropout=0",
        *STEPS,
    )
    if chunks:
        overrides = (*overrides, "objective.name=teacher_forcing", f"objective.chunk_frames={chunks}")
    overrides = (*overrides, "profile={start: 2, steps: 1}", "attention.backend=reference")
    ((_, (rows,), _),) = run_world(1, profiled, tiny_pipeline, tmp_path / "run", overrides)
    run = make_run(tiny_pipeline, tmp_path / "other", overrides, world_size=1)
    shape = run.model.shape
    bins = run.schedule.sampler.step_plan(1).bins
    lens = [int(run.schedule.num_tokens[i]) for bin in bins for i in bin]
    clips = [i for bin in bins for i in bin]
    frames = [run.data.latent_shape(i)[0] for i in clips]
    if chunks:
        # frames of 16 tokens: all but the last twice; pairs of clean frames, then of noisy ones
        assert lens == [16 * (2 * num - 1) for num in frames]
        pairs = sum(16**2 * (num * (num - 1) // 2 + num * (num + 1) // 2) for num in frames)
    else:
        pairs = sum(n * n for n in lens)
    attention = shape.attention_flops_per_squared_token() * pairs
    counted = {name: row[3] for name, row in rows.items()}
    assert counted["attention"] == 3.5 * attention
    # A feed-forward: two matmuls, twice again for the gradients of its input and its weights.
    assert counted["ffn"] == 3 * sum(lens) * shape.num_layers * 4 * shape.dim * shape.ffn_dim
    # The scores of cross-attention, and the gradients of the inputs of the first layers, are not counted. The backward pass of
    # self-attention has five matmuls, and the model FLOPs four.
    cross = 3 * sum(lens) * shape.num_layers * 4 * shape.dim * TEXT_LEN
    patches = 2 * sum(lens) * shape.dim * shape.in_channels * math.prod(shape.patch_size)
    firsts = patches + len(lens) * 2 * shape.dim * (TEXT_LEN * shape.text_dim + shape.freq_dim)
    # A clean copy and each noisy chunk have a timestep. The model FLOPs count one for each clip.
    more_timesteps = sum(frames) if chunks else 0
    timesteps = (
        more_timesteps * 2 * (2 * shape.freq_dim * shape.dim + 3 * (shape.dim**2 + shape.dim * 6 * shape.dim))
    )
    expected = step_flops(run.model, run.schedule, bins) - cross - firsts + attention / 2 + timesteps
    assert sum(counted.values()) == expected
    assert expected == pytest.approx(step_flops(run.model, run.schedule, bins), rel=0.36)


@pytest.mark.slow
def test_the_command_ends_without_a_checkpoint(tiny_pipeline: Path, tmp_path: Path, run_world):
    given = (
        "train.max_steps=5",
        "profile.start=2",
        "profile.steps=2",
        "checkpoint.every=1",
        "profile.ranks=[1]",
    )
    overrides = ProfileOptions(overrides=given, out=tmp_path / "run").train_options().overrides
    (rows, tables, _), (_, others, _) = run_world(2, profiled, tiny_pipeline, tmp_path / "run", overrides)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (len(tables), len(others)) == (0, 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["event"] == "stop"
