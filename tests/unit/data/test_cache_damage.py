"""Damaged, foreign and swapped files of a cache: each is found and named."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.cache_samples import FINGERPRINT, NULL, VARIANT, bits, make_sample, meta_of, write
from wands.data.cache.reader import CacheIndex, CacheWriter, LatentCache
from wands.errors import CacheError

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
