"""What a rank forwards is what was planned: mistakes on the way from the plan to the packed batch are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runs import make_job
from wands.data import collate
from wands.train import batches
from wands.train.batches import rank_shards
from wands.train.run import Job


@pytest.fixture
def job(tiny_pipeline: Path, tmp_path: Path) -> Job:
    return make_job(tiny_pipeline, tmp_path, ("train.bins_per_step=2",), world_size=2)


def shards_of(job: Job) -> list[batches.Shard]:
    plan = job.sampler.step_plan(0)
    return [shard for rank in (0, 1) for shard in rank_shards(job, plan, job.grid(rank))]


def test_the_ranks_forward_the_plan(job: Job):
    for step in range(3):
        plan = job.sampler.step_plan(step)
        forwarded = [
            tuple(job.data.keys.index(key.sample_id) for key in shard.keys)
            for rank in (0, 1)
            for shard in rank_shards(job, plan, job.grid(rank))
        ]
        assert sorted(forwarded) == sorted(plan.bins)


Patch = Callable[[pytest.MonkeyPatch, Job], None]


def lose_a_sample(patch: pytest.MonkeyPatch, job: Job) -> None:
    deal = batches.assign_bins
    patch.setattr(batches, "assign_bins", lambda *args: [[ranks[0][1:], *ranks[1:]] for ranks in deal(*args)])


def deal_a_bin_twice(patch: pytest.MonkeyPatch, job: Job) -> None:
    deal = batches.assign_bins
    patch.setattr(batches, "assign_bins", lambda *args: [[ranks[0], *ranks[:-1]] for ranks in deal(*args)])


def forget_visits(patch: pytest.MonkeyPatch, job: Job) -> None:
    """Two visits to one clip with the same noise."""
    job.data.keys[:] = ["mock-000000"] * len(job.data.keys)


def read_the_neighbour(patch: pytest.MonkeyPatch, job: Job) -> None:
    read = job.data.read
    patch.setattr(job.data, "read", lambda i, frames: read((i + 1) % 7, frames))


def read_another_length(patch: pytest.MonkeyPatch, job: Job) -> None:
    read = job.data.read

    def halved(i: int, frames: tuple[int, int] | None) -> collate.Sample:
        sample = read(i, frames)
        return replace(sample, latents=sample.latents[:, :, :2])

    patch.setattr(job.data, "read", halved)


def cumulate(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    right = collate._cu_seqlens
    return lambda patch, job: patch.setattr(collate, "_cu_seqlens", lambda lens: change(right(lens)))


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (lose_a_sample, "_check_step"),
        (deal_a_bin_twice, "_check_step"),
        (forget_visits, "_check_step"),
        (read_the_neighbour, "read_shard"),
        (read_another_length, "shard"),
        (cumulate(lambda ends: ends.flip(0)), "__post_init__"),  # not monotone
        (cumulate(lambda ends: ends + 1), "__post_init__"),  # does not begin at 0
        (cumulate(lambda ends: ends * 2), "__post_init__"),  # does not end at the token count
        (cumulate(lambda ends: ends.to(torch.int64)), "__post_init__"),
        (cumulate(lambda ends: torch.cat([ends, ends[-1:]])), "__post_init__"),  # an empty sample
    ],
)
def test_a_mistake_on_the_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch, job: Job, mistake: Patch, where: str
):
    shards_of(job)
    mistake(monkeypatch, job)
    with pytest.raises(AssertionError) as caught:
        shards_of(job)
    assert caught.traceback[-1].name == where
