"""The latent cache: bits, order, damage, resume, fit, disk full, kill -9."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from data_tools.merge import merge
from tests.support.cache_samples import (
    FINGERPRINT,
    NULL,
    VARIANT,
    assert_same,
    bits,
    make_sample,
    meta_of,
    write,
)
from tests.support.examples import examples
from tests.support.samples import sample_of
from wands import lock
from wands.data.cache import reader as cache_module
from wands.data.cache import shards
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, WandsError


def test_a_cache_that_another_process_has_taken_over_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.05)
    taken = r"c was taken over by another process \(host b, pid 7, since today\)"
    writer = CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT)
    writer.add("a", make_sample(0).arrays, meta_of(make_sample(0)))
    writer.finish_shard()
    writer.add("b", make_sample(1).arrays, meta_of(make_sample(1)))
    temporary = writer._temporary
    (tmp_path / "c" / lock.LOCK_NAME).write_text('{"owner": "host b, pid 7, since today"}')
    os.replace(temporary, tmp_path / "own")  # the other process has begun a shard with the same number
    temporary.write_text("of the other")
    for end in (lambda: writer.commit(NULL), writer.__exit__):
        with pytest.raises(WandsError, match=taken):
            end()
    assert temporary.read_text() == "of the other"
    assert [path.name for path in (tmp_path / "c").glob("*.h5")] == ["shard-00000.h5"]
    assert not (tmp_path / "c" / "index.npz").exists()


def test_every_bf16_bit_pattern_survives(tmp_path: Path) -> None:
    every = (
        torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    )  # nan payloads, -0, subnormals
    sample = sample_of("all", every.view(16, 16, 16, 16), every[:80].view(10, 8))
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        writer.add("all", sample.arrays, meta_of(sample, num_frames=61))
        writer.commit(NULL)
    cache = LatentCache(tmp_path / "c", verify=True)
    assert_same(cache, [sample])
    assert bits(cache.null_text_embeds) == bits(NULL)


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(7)),
    cuts=st.lists(st.integers(1, 6), max_size=3),
    max_samples=st.integers(1, 4),
)
def test_order_and_interruptions_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], cuts: list[int], max_samples: int
) -> None:
    """Any order of writing, in any number of sittings: the cache reads the same."""
    samples = [make_sample(number) for number in range(7)]
    folder = tmp_path_factory.mktemp("c")
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), 7], strict=True):
        write(folder, [samples[i] for i in order[first:last]], commit=last == 7, max_samples=max_samples)
    cache = LatentCache(folder, verify=True)
    assert_same(cache, samples)
    shapes = np.array([s.latents.shape for s in samples])
    assert (cache.index.latent_shapes == shapes).all()
    assert cache.num_tokens((1, 2, 2)).tolist() == (shapes[:, 1] * 2 * 3).tolist()
    assert not list(folder.glob(".*"))


def test_shards_stay_within_their_size(tmp_path: Path) -> None:
    samples = [make_sample(3 * number) for number in range(10)]  # 16*1*4*6*2 + 3*8*2 = 816 bytes each
    cache = LatentCache(write(tmp_path / "c", samples, max_bytes=2000))
    assert np.bincount(cache.index.shards).tolist() == [3, 3, 3, 1]
    assert cache.index.shard_names[1] == "shard-00001.h5"
    assert_same(cache, samples)


def test_index_needs_no_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "c", map(make_sample, range(3)))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(h5py, "File", refuse)
    cache = LatentCache(tmp_path / "c")
    assert cache.index.text_lens.tolist() == [3, 3, 3]
    assert cache.index.num_frames.tolist() == [1, 5, 9]
    assert cache.index.fps.tolist() == [16, 16, 16]
    assert cache.null_text_embeds.shape == (1, 8)
    with pytest.raises(AssertionError, match="a shard was opened"):
        cache.read(0)


def test_shards_are_readable_by_hdf5_1_10_and_contiguous(tmp_path: Path) -> None:
    write(tmp_path / "c", [make_sample(0)])
    with h5py.File(tmp_path / "c" / "shard-00000.h5", "r") as file:
        assert file.libver[1] in ("v110", "v200", "latest")
        assert (tmp_path / "c" / "shard-00000.h5").read_bytes()[8] <= 3  # superblock: 3 is HDF5 1.10
        latents = file["samples/000000/latents"]
        assert latents.dtype == np.uint16
        assert latents.chunks is None
        assert latents.compression is None


@pytest.mark.parametrize(
    "key", ["plain", "a/b/../c", "日本/ü", "x" * 3000, "s\udcff", "new\nline", "", 'quote"']
)
def test_any_key_works(tmp_path: Path, key: str) -> None:
    sample = replace(make_sample(1), sample_id=key)
    cache = LatentCache(write(tmp_path / "c", [sample, make_sample(2)]))
    assert cache.read(cache.find(key)).sample_id == key
    assert cache.meta(cache.find(key))["caption"] == f"of {key}"


def test_long_captions_and_metadata_come_back(tmp_path: Path) -> None:
    sample = make_sample(1)
    meta = meta_of(sample, caption="ü\0 " * 50_000, source="a\udcff.mp4", window=[0.5, 1.25])
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(NULL)
    assert LatentCache(tmp_path / "c").meta(0) == meta


def test_same_key_again_replaces_and_content_tells(tmp_path: Path) -> None:
    old = make_sample(1)
    new = make_sample(4)
    new = replace(new, sample_id=old.sample_id)
    write(tmp_path / "c", [old, make_sample(2)])
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        assert writer.has(old.sample_id, "c0")
        assert not writer.has(old.sample_id, "c1")
        assert not writer.has("clip/777", "c0")
        writer.add(new.sample_id, new.arrays, meta_of(new, content="c1"))
        writer.commit(NULL)
    assert_same(LatentCache(tmp_path / "c"), [new, make_sample(2)])
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        assert writer.has(old.sample_id, "c1")


# ---- files, processes, threads


def _sum_in_child(cache: LatentCache, queue: multiprocessing.Queue) -> None:
    queue.put([float(cache.read(i).latents.float().sum()) for i in range(len(cache))])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_cache_crosses_processes(tmp_path: Path, method: str) -> None:
    samples = [make_sample(number) for number in range(4)]
    cache = LatentCache(write(tmp_path / "c", samples, max_samples=2), verify=True)
    cache.read(0)  # HDF5 has been in use when the child is forked
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(cache, queue))
    child.start()
    sums = queue.get(timeout=60)
    child.join(30)
    assert sums == [float(s.latents.float().sum()) for s in samples]
    assert_same(cache, samples)


def test_a_cache_that_was_read_is_pickled(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(3)]
    cache = LatentCache(write(tmp_path / "c", samples))
    cache.read(1)
    assert_same(pickle.loads(pickle.dumps(cache)), samples)


def test_a_shard_is_compared_again_only_when_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (make_sample(3 * number) for number in range(3))
    cache = LatentCache(write(tmp_path / "c", [first, second, third]))
    other = write(tmp_path / "d", [first, third, second])
    opened: list[Path] = []

    def open_shard(path: Path, fingerprint: str) -> h5py.File:
        opened.append(path)
        return shards.open_shard(path, fingerprint)

    monkeypatch.setattr(cache_module, "open_shard", open_shard)
    for _ in range(3):
        assert_same(cache, [first, second, third])
    assert_same(pickle.loads(pickle.dumps(cache)), [first, second, third])
    assert len(opened) == 1
    os.replace(other / "shard-00000.h5", cache.path / "shard-00000.h5")  # the same size, keys and shapes
    with pytest.raises(CacheError, match="is in a shard that was replaced after the index was written"):
        cache.read(0)
    with pytest.raises(CacheError, match="because sample clip/006 is there"):
        cache.meta(1)


def test_threads_read_together(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(6)]
    cache = LatentCache(write(tmp_path / "c", samples, max_samples=1), verify=True)
    wrong: list[object] = []

    def read_all(order: list[int]) -> None:
        try:
            wrong.extend(i for i in order * 20 if bits(cache.read(i).latents) != bits(samples[i].latents))
        except CacheError as error:
            wrong.append(error)

    threads = [threading.Thread(target=read_all, args=(o,)) for o in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- licences


def test_licences_are_in_the_index_and_in_the_shards(tmp_path: Path) -> None:
    licenses = {
        "clip/000": "MIT",
        "clip/001": "",
        "clip/002": None,
        "clip/003": "CC-BY-4.0",
        "clip/004": "MIT",
    }
    wanted = ["MIT", "", "", "CC-BY-4.0", "MIT"]
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT, max_samples=2) as writer:
        for number in (4, 2, 0, 1, 3):
            sample = make_sample(number)
            meta = meta_of(sample, license=licenses[sample.sample_id])
            writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(NULL)
    cache = LatentCache(tmp_path / "c")
    assert cache.licenses.tolist() == wanted
    assert [cache.meta(i)["license"] or "" for i in range(5)] == wanted
    merge(tmp_path / "merged", [tmp_path / "c", write(tmp_path / "d", [make_sample(5)])])
    assert LatentCache(tmp_path / "merged").licenses.tolist() == [*wanted, ""]
    (tmp_path / "c" / "index.npz").unlink()
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:  # a run that continues reads the shards
        writer.commit(NULL)
    assert LatentCache(tmp_path / "c").licenses.tolist() == wanted


def test_index_holds_the_keys_asked_for(tmp_path: Path) -> None:
    """The rest stays in its shard: it can come back without being encoded."""
    samples = [make_sample(number) for number in range(4)]
    folder = write(tmp_path / "c", samples, max_samples=2)
    with CacheWriter(folder, VARIANT, FINGERPRINT) as writer:
        writer.commit(NULL, {"clip/000", "clip/003"})
    assert_same(LatentCache(folder), [samples[0], samples[3]])
    write(folder, [])
    assert_same(LatentCache(folder), samples)


def test_the_same_samples_in_another_order_are_another_shard(tmp_path: Path) -> None:
    """Written anew after a shard was lost, and killed before the index: same size, same keys, same shapes."""
    first, second, third = (make_sample(3 * number) for number in range(3))
    folder = write(tmp_path / "c", [first, second, third])
    other = write(tmp_path / "d", [first, third, second])
    shard = "shard-00000.h5"
    (folder / shard).write_bytes((other / shard).read_bytes())
    with pytest.raises(CacheError, match="is in a shard that was replaced after the index was written"):
        LatentCache(folder).read(0)  # which itself lies where the index says


def test_no_shard_stays_open(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(8)]
    cache = LatentCache(write(tmp_path / "c", samples, max_samples=2))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert_same(cache, samples)
        assert len(os.listdir("/proc/self/fd")) == before
