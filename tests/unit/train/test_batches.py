"""A rank forwards the batches that were planned: mistakes on the way from the plan to the packed batch are noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runs import make_run
from wands.data import collate
from wands.data.collate import RankSlice
from wands.flow.noise import NoisyBatch, add_noise
from wands.objectives.flow_matching import FlowMatching
from wands.plugin import Plugin
from wands.train import batches
from wands.train.prepared_run import PreparedRun
from wands.variants import Expert


@pytest.fixture
def run(tiny_pipeline: Path, tmp_path: Path) -> PreparedRun:
    return make_run(tiny_pipeline, tmp_path, ("train.bins_per_step=2",), world_size=2)


def shards_of(run: PreparedRun, step: int = 0) -> list[RankSlice]:
    plan = run.schedule.sampler.step_plan(step)
    return [shard for rank in (0, 1) for shard in run.reader(run.grid(rank)).rank_slices(plan)]


def test_the_ranks_forward_the_plan(run: PreparedRun):
    for step in range(3):
        plan = run.schedule.sampler.step_plan(step)
        forwarded = [
            tuple(run.data.keys.index(key.sample_id) for key in shard.keys) for shard in shards_of(run, step)
        ]
        assert sorted(forwarded) == sorted(plan.bins)


Patch = Callable[[pytest.MonkeyPatch, PreparedRun], None]


def lose_a_sample(patch: pytest.MonkeyPatch, run: PreparedRun) -> None:
    deal = batches.assign_bins
    patch.setattr(batches, "assign_bins", lambda *args: [[ranks[0][1:], *ranks[1:]] for ranks in deal(*args)])


def deal_a_bin_twice(patch: pytest.MonkeyPatch, run: PreparedRun) -> None:
    deal = batches.assign_bins
    patch.setattr(batches, "assign_bins", lambda *args: [[ranks[0], *ranks[:-1]] for ranks in deal(*args)])


def forget_visits(patch: pytest.MonkeyPatch, run: PreparedRun) -> None:
    """Two visits to one clip with the same noise."""
    run.data.keys[:] = ["mock-000000"] * len(run.data.keys)


def read_the_neighbor(patch: pytest.MonkeyPatch, run: PreparedRun) -> None:
    read = run.data.read
    patch.setattr(run.data, "read", lambda i, frames: read((i + 1) % 7, frames))


def read_another_length(patch: pytest.MonkeyPatch, run: PreparedRun) -> None:
    read = run.data.read

    def halved(i: int, frames: tuple[int, int] | None) -> collate.Sample:
        sample = read(i, frames)
        return replace(sample, arrays={**sample.arrays, "latents": sample.latents[:, :, :2]})

    patch.setattr(run.data, "read", halved)


def cumulate(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    right = collate._cu_seqlens
    return lambda patch, run: patch.setattr(collate, "_cu_seqlens", lambda lens: change(right(lens)))


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (lose_a_sample, "_check_step"),
        (deal_a_bin_twice, "_check_step"),
        (forget_visits, "_check_step"),
        (read_the_neighbor, "read_rows_of_bin"),
        (read_another_length, "rank_slice"),
        (cumulate(lambda ends: ends.flip(0)), "__post_init__"),  # not monotone
        (cumulate(lambda ends: ends + 1), "__post_init__"),  # does not begin at 0
        (cumulate(lambda ends: ends * 2), "__post_init__"),  # does not end at the token count
        (cumulate(lambda ends: ends.to(torch.int64)), "__post_init__"),
        (cumulate(lambda ends: torch.cat([ends, ends[-1:]])), "__post_init__"),  # an empty sample
    ],
)
def test_a_mistake_on_the_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch, run: PreparedRun, mistake: Patch, where: str
):
    shards_of(run)
    mistake(monkeypatch, run)
    with pytest.raises(AssertionError) as caught:
        shards_of(run)
    assert caught.traceback[-1].name == where


class ThreadsOfNoise(FlowMatching):
    """The default objective, which records the threads that draw its noise."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def prepare(self, part: RankSlice, expert: Expert) -> NoisyBatch:
        self.threads.add(threading.current_thread().name)
        return super().prepare(part, expert)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_noise_is_drawn_and_pinned_ahead(
    prefetch: int, monkeypatch: pytest.MonkeyPatch, tiny_pipeline: Path, tmp_path: Path
):
    objective = ThreadsOfNoise()
    run = make_run(
        tiny_pipeline,
        tmp_path,
        ("train.bins_per_step=2",),
        world_size=1,
        plugin=Plugin(objective=objective),
    )
    pinned = set[int]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.add(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    reader = run.reader(run.grid(0))
    steps = reader.prefetched(1, prefetch, pins=True)
    plan, [found] = next(steps)
    steps.close()
    assert objective.threads == {"wands-prefetch_0" if prefetch else "MainThread"}
    flow = run.recipe.flow
    for (part, noisy), clean in zip(found, reader.rank_slices(plan), strict=True):
        assert len(part.tokens) == 0
        wanted = add_noise(clean.tokens, clean.layout, clean.keys, flow, run.recipe.train.seed)
        for name in ("tokens", "target", "sigmas", "timesteps"):
            assert torch.equal(getattr(noisy, name), getattr(wanted, name))
            assert id(getattr(noisy, name)) in pinned
        assert {id(part.text_embeds), id(part.weights), id(part.meta.positions)} <= pinned
