"""The latent cache: bits, order, damage, resume, fit, disk full, kill -9."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from data_tools.merge import merge
from tests.support.examples import examples
from tests.support.samples import narrow_text, sample_of, with_arrays
from wands import lock
from wands.data.cache import reader as cache_module
from wands.data.cache import shards
from wands.data.cache.reader import CacheIndex, CacheWriter, LatentCache
from wands.data.collate import Sample
from wands.errors import CacheError, DiskError, WandsError
from wands.variants import Variant

VARIANT = narrow_text("wan2.1-t2v-1.3b")
FINGERPRINT = {
    "vae": {"weights": "aa"},
    "text_encoder": {"weights": "bb"},
    "settings": {"fps": 16, "max_frames": 81},
}
FORK = multiprocessing.get_context("fork")
NULL = torch.full((1, 8), 0.5, dtype=torch.bfloat16)


def make_sample(number: int, text_len: int = 3) -> Sample:
    generator = torch.Generator().manual_seed(number)
    latents = torch.randn(16, 1 + number % 3, 4, 6, generator=generator).bfloat16()
    return sample_of(f"clip/{number:03d}", latents, torch.randn(text_len, 8, generator=generator).bfloat16())


def meta_of(sample: Sample, **changes: object) -> dict[str, object]:
    frames = 4 * (sample.latents.shape[1] - 1) + 1
    return {"num_frames": frames, "fps": 16.0, "content": "c0", "caption": f"of {sample.sample_id}"} | changes


def write(path: Path, samples: Iterable[Sample], commit: bool = True, **kwargs: int) -> Path:
    with CacheWriter(path, VARIANT, FINGERPRINT, **kwargs) as writer:
        for sample in samples:
            writer.add(sample.sample_id, sample.arrays, meta_of(sample))
        if commit:
            writer.commit(NULL)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.uint16).numpy().tobytes()


def assert_same(cache: LatentCache, samples: Iterable[Sample]) -> None:
    wanted = {sample.sample_id: sample for sample in samples}
    assert cache.index.keys == tuple(sorted(wanted))
    assert len(cache) > 0
    for i, key in enumerate(cache.index.keys):
        read = cache.read(i)
        assert read.sample_id == key
        assert read.latents.shape == wanted[key].latents.shape
        assert bits(read.latents) == bits(wanted[key].latents)
        assert bits(read.text_embeds) == bits(wanted[key].text_embeds)


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


# ---- some frames only


def big_sample() -> Sample:
    """81 frames at 480p, the size at which bytes are counted: HDF5 reads at least 64 KiB at a time."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(16, 21, 60, 104, generator=generator).bfloat16()
    return sample_of("big", latents, torch.randn(3, 8, generator=generator).bfloat16())


def bytes_read(cache: LatentCache, frames: tuple[int, int] | None) -> int:
    """What the kernel handed to this thread, from the disk or from its cache, during one read of sample 0."""

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


# ---- damage


@pytest.mark.parametrize("frames", [None, (0, 2), (0, 1), (0, 0)])
def test_a_shape_that_the_index_does_not_know_is_damage(
    tmp_path: Path, frames: tuple[int, int] | None
) -> None:
    folder = write(tmp_path / "c", [make_sample(2)])
    index = CacheIndex.from_file(folder / "index.npz")
    shapes = np.array([[16, 2, 4, 6]], dtype=index.latent_shapes.dtype)
    (folder / "index.npz").write_bytes(replace(index, latent_shapes=shapes).to_bytes())
    with pytest.raises(
        CacheError, match=r"has arrays latents \(16, 3, 4, 6\) .*, which differ from the index"
    ):
        LatentCache(folder).read(0, frames)


def test_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    samples = [make_sample(number) for number in range(3)]
    folder = write(tmp_path / "c", samples)
    shard = folder / "shard-00000.h5"
    with h5py.File(shard, "r") as file:
        offset = file["samples/000001/latents"].id.get_offset()
    content = bytearray(shard.read_bytes())
    content[offset + 10] ^= 4
    shard.write_bytes(content)
    assert bits(LatentCache(folder).read(1).latents) != bits(samples[1].latents)  # silent without verify
    cache = LatentCache(folder, verify=True)
    cache.read(0)
    with pytest.raises(CacheError, match=r"clip/001 in shard-00000\.h5 has a wrong checksum"):
        cache.read(1)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "shard-00001.h5").unlink(), r"shard-00001\.h5 is missing"),
        (lambda c: _truncate(c / "shard-00000.h5"), r"shard-00000\.h5 has \d+ bytes, but the index says \d+"),
        (lambda c: (c / "index.npz").unlink(), r"is unfinished \(no index\.npz\)"),
        (lambda c: _truncate(c / "index.npz"), r"damaged index\.npz"),
        (lambda c: (c / "index.npz").write_bytes(b""), r"damaged index\.npz"),
        (lambda c: (c / "manifest.json").unlink(), r"is not a latent cache"),
        (lambda c: (c / "manifest.json").write_text("{"), r"manifest\.json cannot be read"),
        (lambda c: (c / "manifest.json").write_text("[1]"), r"manifest\.json must contain a JSON object"),
    ],
)
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, damage: object, message: str) -> None:
    folder = write(tmp_path / "c", map(make_sample, range(3)), max_samples=2)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(CacheError, match=message) as caught:
        LatentCache(folder)
    assert "\n" not in str(caught.value)


def test_other_schema_version_says_both(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", [make_sample(0)])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 7}))
    with pytest.raises(CacheError, match=r"schema_version=7, but this version of wands reads 1"):
        LatentCache(folder)


@pytest.mark.parametrize("path", ["missing", "file"])
def test_not_a_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="is not a folder"):
        LatentCache(tmp_path / path)


def test_swapped_shards_are_noticed(tmp_path: Path) -> None:
    """Same size, same fingerprint, other samples: neither stat nor shapes tell them apart."""
    folder = write(tmp_path / "c", [make_sample(0), make_sample(3)], max_samples=1)
    first = folder / "shard-00000.h5"
    second = folder / "shard-00001.h5"
    a = first.read_bytes()
    b = second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    second.write_bytes(a)
    with pytest.raises(
        CacheError,
        match=r"clip/000 in shard-00000\.h5 is not at its position in the index, because sample clip/003 is there",
    ):
        LatentCache(folder).read(0)


def test_metadata_of_another_sample_is_noticed(tmp_path: Path) -> None:
    """A wrong row in the index, after the first read has compared the shard with it."""
    cache = LatentCache(write(tmp_path / "c", [make_sample(0), make_sample(3)]))
    cache.read(0)
    cache.index.rows[:] = cache.index.rows[::-1].copy()
    with pytest.raises(
        CacheError,
        match=r"clip/003 in .* is not at its position in the index, because sample clip/000 is there",
    ):
        cache.meta(1)


def test_shard_of_another_cache_is_refused(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours", [make_sample(0)])
    with CacheWriter(tmp_path / "theirs", VARIANT, FINGERPRINT | {"vae": {"weights": "cc"}}) as writer:
        sample = make_sample(0)
        writer.add(sample.sample_id, sample.arrays, meta_of(sample))
        writer.commit(NULL)
    (ours / "shard-00000.h5").write_bytes((tmp_path / "theirs" / "shard-00000.h5").read_bytes())
    with pytest.raises(CacheError, match="made with other encoders or settings"):
        LatentCache(ours).read(0)
    with pytest.raises(CacheError, match=r"damaged shard-00000\.h5 .*made with other encoders or settings"):
        write(ours, [make_sample(1)])


def test_a_pickle_in_the_index_is_never_loaded(tmp_path: Path) -> None:
    """Trap: caches that unpickle. An object array in index.npz must be refused, not executed."""
    folder = write(tmp_path / "c", [make_sample(0)])

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    with np.load(folder / "index.npz") as npz:
        arrays = dict(npz)
    np.savez(folder / "index.npz", **(arrays | {"null_text": np.array([Bomb()], dtype=object)}))
    with pytest.raises(CacheError, match="damaged"):
        LatentCache(folder)
    assert not (tmp_path / "exploded").exists()
    with np.load(folder / "index.npz", allow_pickle=True) as npz:  # the bug: what a careless reader would do
        npz["null_text"]
    assert (tmp_path / "exploded").exists()


def test_index_arrays_must_agree(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", map(make_sample, range(2)))
    index = CacheIndex.from_file(folder / "index.npz")
    (folder / "index.npz").write_bytes(replace(index, crc32=index.crc32[:1]).to_bytes())
    with pytest.raises(CacheError, match="different lengths"):
        LatentCache(folder)


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


# ---- fit


OTHER_CHANNELS = replace(
    VARIANT,
    name="wan2.2-ti2v-5b",
    dit=replace(VARIANT.dit, in_channels=48, out_channels=48),
    vae_stride=(4, 16, 16),
)


@pytest.mark.parametrize(
    ("variant", "fingerprint", "message"),
    [
        (
            OTHER_CHANNELS,
            {},
            r"wan2\.1-t2v-1\.3b \(vae_stride=\[4, 8, 8\], latent_channels=16\) but the model is "
            r"wan2\.2-ti2v-5b \(vae_stride=\[4, 16, 16\], latent_channels=48\)",
        ),
        (replace(VARIANT, dit=replace(VARIANT.dit, text_dim=64)), {}, r"text_dim=8.*text_dim=64"),
        (
            replace(VARIANT, conditions=("text", "image")),
            {},
            r"conditions=\[text, mask\].*conditions=\[text, image \(frames=first\), mask\]",
        ),
        (VARIANT, {"vae": {"weights": "zz"}}, r"with vae\.weights=aa but the model, .*, has vae\.weights=zz"),
        (
            VARIANT,
            {"vae": {"weights": "aa"}, "tokenizer": {"vocab": "t"}},
            r"tokenizer=None.*tokenizer=\{'vocab': 't'\}",
        ),
    ],
)
def test_cache_of_another_model_says_both(
    tmp_path: Path, variant: Variant, fingerprint: dict[str, object], message: str
) -> None:
    cache = LatentCache(write(tmp_path / "c", [make_sample(0)]))
    with pytest.raises(CacheError, match=message):
        cache.check_fits(variant, fingerprint)


def test_sizes_of_one_family_share_a_cache(tmp_path: Path) -> None:
    cache = LatentCache(write(tmp_path / "c", [make_sample(0)]))
    cache.check_fits(narrow_text("wan2.1-t2v-14b"), {"vae": {"weights": "aa"}})
    cache.check_fits(VARIANT, {})


# ---- writing


@pytest.mark.parametrize(
    ("fingerprint", "message"),
    [
        (FINGERPRINT | {"vae": {"weights": "zz"}}, r"begun with vae\.weights=aa but this run has zz"),
        (
            FINGERPRINT | {"settings": {"fps": 24, "max_frames": 81}},
            r"begun with settings\.fps=16 but this run has 24",
        ),
    ],
)
def test_other_settings_never_mix_and_never_delete(
    tmp_path: Path, fingerprint: dict[str, object], message: str
) -> None:
    samples = [make_sample(0)]
    folder = write(tmp_path / "c", samples)
    with pytest.raises(CacheError, match=message):
        CacheWriter(folder, VARIANT, fingerprint)
    assert_same(LatentCache(folder, verify=True), samples)


def test_other_variant_is_refused_for_writing(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", [make_sample(0)])
    with pytest.raises(CacheError, match=r"variant\.latent_channels=16 but this run has 48"):
        CacheWriter(folder, OTHER_CHANNELS, FINGERPRINT)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "holiday.mp4").write_text("x")
    with pytest.raises(
        CacheError,
        match=r"cache=.* contains other files, but no cache; choose an empty or new folder as --out",
    ):
        CacheWriter(tmp_path, VARIANT, FINGERPRINT)
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.mp4"]


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("x")
    with pytest.raises(WandsError, match=r"cache=.*c: lock file .* cannot be created \(Not a directory\)"):
        CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT):
        with pytest.raises(WandsError, match=r"cache=.*c is being written by another process \(host"):
            CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT)
    CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT).__exit__(None, None, None)


def test_only_bf16_is_stored(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        with pytest.raises(AssertionError, match="bf16"):
            writer.add(
                "a", {"latents": torch.zeros(16, 1, 2, 2), "text_embeds": torch.zeros(1, 8).bfloat16()}, {}
            )


def test_ctrl_c_keeps_finished_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt falls between a sample's two datasets: what came before it stays, the half one goes."""
    samples = [make_sample(number) for number in range(3)]
    create = h5py.Group.create_dataset

    def interrupted(group: h5py.Group, name: str, **kwargs: object) -> h5py.Dataset:
        if group.name.endswith("000002") and name == "text_embeds":
            raise KeyboardInterrupt
        return create(group, name, **kwargs)

    monkeypatch.setattr(h5py.Group, "create_dataset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "c", samples)
    monkeypatch.setattr(h5py.Group, "create_dataset", create)
    with pytest.raises(CacheError, match="unfinished"):
        LatentCache(tmp_path / "c")
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        assert writer.entries.keys() == {"clip/000", "clip/001"}
    write(tmp_path / "c", samples[2:])
    assert_same(LatentCache(tmp_path / "c", verify=True), samples)


PREAMBLE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r})\n"
    + textwrap.dedent("""
    import resource
    from pathlib import Path
    from tests.unit.data.test_cache import *
    folder = Path(sys.argv[1])
""")
)


def run_script(body: str, *args: object) -> subprocess.CompletedProcess[str]:
    code = PREAMBLE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )


def test_full_disk_is_one_sentence_and_leaves_no_litter(tmp_path: Path) -> None:
    result = run_script(
        """
        latents, text = torch.zeros(16, 8, 60, 60).bfloat16(), torch.zeros(3, 8).bfloat16()
        big = [sample_of(f"clip/{n}", latents + n, text) for n in range(4)]
        write(folder, big[:2], commit=False, max_samples=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, 2_500_000))
        try:
            write(folder, big[2:] + [replace(big[0], sample_id="late")], max_samples=3)
        except DiskError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 2_500_000))
        try:
            write(folder, [make_sample(0)], max_samples=3)
        except DiskError as error:
            print(error)
        """,
        tmp_path / "c",
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    big, small = result.stdout.strip().split("\n")
    assert big.startswith(f"cache={tmp_path / 'c'} cannot store shard-00002.h5 (File too large: ")
    assert "bytes needed" in big
    assert "cannot store" in small
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == ["manifest.json", "shard-00000.h5", "shard-00001.h5"]
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        assert writer.entries.keys() == {"clip/0", "clip/1", "clip/2", "clip/3"}  # all that fitted
        writer.commit(NULL)
    assert len(LatentCache(tmp_path / "c", verify=True)) == 4


def _commit_with_little_disk(folder: Path, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    with CacheWriter(folder, VARIANT, FINGERPRINT) as writer:
        try:
            writer.commit(NULL)
        except DiskError as error:
            pipe.send(str(error))


def test_space_is_reserved_on_file_systems_that_cannot_reserve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There glibc writes to every block instead, but not if the file is open for appending."""
    flags: list[int] = []
    monkeypatch.setattr(
        os, "posix_fallocate", lambda file, *_: flags.append(fcntl.fcntl(file, fcntl.F_GETFL))
    )
    write(tmp_path / "c", [make_sample(1)])
    assert flags
    assert not any(flag & os.O_APPEND for flag in flags)


def test_full_disk_at_the_index(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", map(make_sample, range(3)), max_samples=1)
    before = (folder / "index.npz").read_bytes()
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=_commit_with_little_disk, args=(folder, theirs))
    child.start()
    child.join(60)
    assert ours.poll(), "no DiskError"
    assert "cannot store index.npz (File too large" in ours.recv()
    assert (folder / "index.npz").read_bytes() == before
    assert not list(folder.glob(".*"))


def _write_and_die(folder: Path, survivors: int) -> None:
    with CacheWriter(folder, VARIANT, FINGERPRINT, max_samples=3) as writer:
        for sample in map(make_sample, range(survivors)):
            writer.add(sample.sample_id, sample.arrays, meta_of(sample))
        if writer._file is not None:
            writer._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("survivors", [0, 3, 5])
def test_kill_9_never_leaves_a_cache_that_reads_wrongly(tmp_path: Path, survivors: int) -> None:
    samples = [make_sample(number) for number in range(7)]
    child = FORK.Process(target=_write_and_die, args=(tmp_path / "c", survivors))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(CacheError, match="unfinished"):
        LatentCache(tmp_path / "c")
    with CacheWriter(tmp_path / "c", VARIANT, FINGERPRINT) as writer:
        kept = set(writer.entries)
        assert len(kept) == survivors // 3 * 3
        for sample in samples:
            if sample.sample_id not in kept:
                writer.add(sample.sample_id, sample.arrays, meta_of(sample))
        writer.commit(NULL)
    assert_same(LatentCache(tmp_path / "c", verify=True), samples)
    assert not list((tmp_path / "c").glob(".*"))


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
