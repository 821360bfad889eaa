"""A range of frames of a sample is read alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import h5py
import pytest
import torch

from tests.support.cache_samples import bits, make_sample, write
from tests.support.samples import sample_of, with_arrays
from wands.data.cache.reader import LatentCache
from wands.data.collate import Sample
from wands.errors import CacheError

# ---- some frames only


def big_sample() -> Sample:
    """81 frames at 480p, the size at which bytes are counted: HDF5 reads at least 64 KiB at a time."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(16, 21, 60, 104, generator=generator).bfloat16()
    return sample_of("big", latents, torch.randn(3, 8, generator=generator).bfloat16())


def bytes_read(cache: LatentCache, frames: tuple[int, int] | None) -> int:
    """Bytes that the kernel gave this thread, from the disk or from its cache, during one read of sample 0."""

    def count() -> int:
        return int(Path("/proc/thread-self/io").read_text().split()[1])  # rchar

    cache.read(0, (0, 0))  # open the shard
    before = count()
    idle = count()
    cache.read(0, frames)
    return count() - idle - (idle - before)


@pytest.mark.parametrize("verify", [False, True])
def test_every_range_of_frames_is_the_whole_read_there_and_zero_elsewhere(
    tmp_path: Path, verify: bool
) -> None:
    samples = [
        with_arrays(make_sample(n), latents=torch.randn(16, frames, 4, 6).bfloat16())
        for n, frames in enumerate((1, 2, 5))
    ]
    cache = LatentCache(write(tmp_path / "c", samples), verify=verify)
    for i, sample in enumerate(samples):
        num_frames = cache.latent_shape(i)[0]
        assert cache.latent_shape(i) == tuple(sample.latents.shape[1:])
        for first in range(num_frames + 1):
            for end in range(first, num_frames + 1):
                wanted = torch.zeros_like(sample.latents)
                wanted[:, first:end] = sample.latents[:, first:end]
                part = cache.read(i, (first, end))
                assert part.sample_id == sample.sample_id
                assert bits(part.latents) == bits(wanted)
                assert bits(part.text_embeds) == bits(sample.text_embeds)


def test_the_other_frames_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_large_buffer(path: Path, mode: str = "r", buffering: int = -1, **others: Any) -> IO[Any]:
        return opened(path, mode, 1 << 22 if buffering < 0 else buffering, **others)

    opened = Path.open
    monkeypatch.setattr(Path, "open", with_large_buffer)  # the default on some network file systems
    sample = big_sample()
    whole = sample.latents.nbytes
    folder = write(tmp_path / "c", [sample])
    cache = LatentCache(folder)
    assert whole <= bytes_read(cache, None) < 1.1 * whole
    assert whole <= bytes_read(cache, (0, 21)) < 1.1 * whole
    assert 6 / 21 * whole <= bytes_read(cache, (5, 11)) < whole / 3
    assert bytes_read(cache, (0, 0)) < whole / 50
    assert bytes_read(LatentCache(folder, verify=True), (5, 11)) >= whole  # the checksum is one of the whole


def test_a_checksum_sees_the_frames_that_were_not_asked_for(tmp_path: Path) -> None:
    sample = replace(make_sample(2), sample_id="a")  # 3 frames
    folder = write(tmp_path / "c", [sample])
    shard = folder / "shard-00000.h5"
    with h5py.File(shard, "r") as file:
        offset = file["samples/000000/latents"].id.get_offset()
    content = bytearray(shard.read_bytes())
    content[offset] ^= 4  # in frame 0
    shard.write_bytes(content)
    assert bits(LatentCache(folder).read(0, (1, 3)).latents[:, 1:]) == bits(sample.latents[:, 1:])
    with pytest.raises(CacheError, match="wrong checksum"):
        LatentCache(folder, verify=True).read(0, (1, 3))


def test_threads_read_different_frames_together(tmp_path: Path) -> None:
    samples = [make_sample(3 * number + 2) for number in range(3)]  # 3 frames each
    cache = LatentCache(write(tmp_path / "c", samples, max_samples=1))
    wrong: list[object] = []

    def read_all(first: int, end: int) -> None:
        try:
            for i in [0, 1, 2] * 20:
                found = cache.read(i, (first, end)).latents[:, first:end]
                if bits(found) != bits(samples[i].latents[:, first:end]):
                    wrong.append(i)
        except CacheError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read_all, args=frames) for frames in ((0, 1), (1, 2), (1, 3), (0, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("frames", [(-1, 1), (0, 4), (2, 1)])
def test_frames_outside_the_sample_are_a_programmer_mistake(tmp_path: Path, frames: tuple[int, int]) -> None:
    cache = LatentCache(write(tmp_path / "c", [make_sample(2)]))
    with pytest.raises(AssertionError):
        cache.read(0, frames)
