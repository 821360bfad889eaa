"""A cache whose files have the right form and wrong types, sizes or structures: one sentence, and no memory for mere claims."""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from data_tools.verify import verify_cache
from tests.support.odd_values import ODD, odd_copies, outcome, to_text
from tests.support.samples import narrow_text, sample_of
from wands.commands.verify import verify
from wands.config.options import VerifyOptions
from wands.data.cache.index_file import COLUMNS
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, WandsError

VARIANT = narrow_text("wan2.1-t2v-1.3b")
DEFAULT = ("keys", "latent_shapes", "fps", "null_text")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "cache"
    with CacheWriter(path, VARIANT, {"settings": {"fps": 16}}) as writer:
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            latents = torch.randn(16, 1 + number, 4, 6, generator=generator).bfloat16()
            sample = sample_of(f"clip/{number}", latents, torch.randn(3, 8, generator=generator).bfloat16())
            meta = {"num_frames": 1 + 4 * number, "fps": 16.0, "content": "c", "caption": "a"}
            writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(torch.zeros(1, 8).bfloat16())
    return path


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def read_all(path: Path) -> None:
    """Read all that training and a report read."""
    cache = LatentCache(path, verify=True)
    cache.check_fits(VARIANT, {})
    for i in range(len(cache)):
        cache.read(i)
        cache.meta(i)
    assert np.isfinite(cache.index.fps).all()
    assert (cache.index.num_frames > 0).all()


def verdicts(path: Path) -> list[str]:
    found = [outcome(lambda: read_all(path)), outcome(lambda: verify(VerifyOptions(path=path)))]
    return [*found, outcome(lambda: [str(problem) for problem in verify_cache(path).problems])]


# ---- manifest.json


def test_any_value_in_any_field_of_the_manifest_is_at_most_one_sentence(cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    for name, damaged in odd_copies(manifest, share=0.03):
        (cache / "manifest.json").write_text(to_text(damaged))
        try:
            verdicts(cache)
        except Exception as error:
            raise AssertionError(name) from error


# ---- index.npz


def write_index(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path / "index.npz", allow_pickle=False, **arrays)  # type: ignore[arg-type]


def index_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path / "index.npz") as npz:
        return {name: npz[name] for name in npz}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in COLUMNS]
)
def test_an_array_of_another_type_shape_or_value_is_at_most_one_sentence(cache: Path, name: str) -> None:
    arrays = index_of(cache)
    array = arrays[name]
    odd: list[np.ndarray] = [
        *(array.astype(dtype) for dtype in (np.float64, np.int8, np.uint64, "S3", np.complex64, bool)),
        *(array[:0], array[:1], array[None], array.reshape(-1), np.array(3), np.concatenate([array, array])),
        *(np.full_like(array, value) for value in (0, 1, 255)),
        np.full_like(array, np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.nan),
        np.full_like(array, np.iinfo(array.dtype).min if array.dtype.kind in "iu" else -np.inf),
        np.frombuffer(b"../../etc/passwd", np.uint8),
    ]
    for changed in odd:
        write_index(cache, arrays | {name: changed})
        verdicts(cache)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fps", np.nan, "frame rate is not a positive number"),
        ("fps", 0, "frame rate is not a positive number"),
        ("num_frames", 0, "no frames"),
        ("latent_shapes", 10**6, "larger than their shard"),
        ("shards", 7, "not listed"),
        ("rows", -1, "negative"),
    ],
)
def test_verify_refuses_what_training_would_compute_with(
    cache: Path, name: str, value: float, words: str
) -> None:
    arrays = index_of(cache)
    write_index(cache, arrays | {name: np.full_like(arrays[name], value)})
    assert all(words in verdict for verdict in verdicts(cache)[:2])
    assert any(words in str(problem) for problem in verify_cache(cache).problems)


def test_an_index_that_names_a_file_outside_the_cache_is_refused(cache: Path) -> None:
    name = np.frombuffer(b"../../other.h5", np.uint8)
    write_index(cache, index_of(cache) | {"shard_names": name})
    assert all("name is not that of a shard" in verdict for verdict in verdicts(cache)[:2])


def test_a_compressed_index_is_refused_before_it_fills_the_memory(cache: Path) -> None:
    arrays = index_of(cache)
    huge = {"null_text": np.zeros((1, 200_000_000), np.uint16)}
    np.savez_compressed(cache / "index.npz", allow_pickle=False, **(arrays | huge))  # type: ignore[arg-type]
    assert (cache / "index.npz").stat().st_size < 10**6
    del huge
    tracemalloc.start()
    try:
        assert all("compressed" in verdict for verdict in verdicts(cache)[:2])
        assert tracemalloc.get_traced_memory()[1] < 50e6  # bytes, of 400 MB
    finally:
        tracemalloc.stop()


def test_an_index_that_claims_petabytes_is_refused(cache: Path) -> None:
    arrays = index_of(cache)
    with zipfile.ZipFile(cache / "index.npz", "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            content = buffer.getvalue()
            if name == "null_text":
                claim = b"'shape': (1099511627776, 1024), }"
                at = content.index(b"'shape'")
                content = (content[:at] + claim).ljust(127) + b"\n" + content[128:]
            archive.writestr(f"{name}.npy", content)
    assert all("claims the shape" in verdict for verdict in verdicts(cache)[:2])


# ---- shards


@contextmanager
def changed_shard(cache: Path) -> Iterator[h5py.File]:
    """The shard, open to be changed. Its size in the index follows."""
    shard = cache / "shard-00000.h5"
    with h5py.File(shard, "r+") as file:
        yield file
    write_index(cache, index_of(cache) | {"shard_bytes": np.array([shard.stat().st_size], np.int64)})


def external_link(file: h5py.File, path: Path) -> None:
    shutil.copy(path, path.with_name("other.bin"))
    del file["samples/000001"]
    file["samples/000001"] = h5py.ExternalLink("other.bin", "samples/000001")


def link_to_a_pipe(file: h5py.File, path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    del file["samples"]
    file["samples"] = h5py.ExternalLink("pipe", "samples")


def soft_loop(file: h5py.File, path: Path) -> None:
    del file["samples/000001"]
    file["samples/000001"] = h5py.SoftLink("/samples/000001")


def hard_loop(file: h5py.File, path: Path) -> None:
    del file["samples/000001"]
    file["samples/000001"] = file["samples"]


def external_storage(file: h5py.File, path: Path) -> None:
    latents = file["samples/000001/latents"]
    content = latents[()]
    path.with_name("raw.bin").write_bytes(content.tobytes())
    del file["samples/000001/latents"]
    external = [("raw.bin", 0, h5py.h5f.UNLIMITED)]
    file["samples/000001"].create_dataset("latents", content.shape, content.dtype, external=external)


def compression_bomb(file: h5py.File, path: Path) -> None:
    shape = (16, 2000, 4, 6)
    del file["samples/000001/latents"]
    file["samples/000001"].create_dataset(
        "latents", shape, np.uint16, compression="gzip", data=np.zeros(shape)
    )


def same_content_in_chunks(file: h5py.File, path: Path) -> None:
    content = file["samples/000001/latents"][()]
    del file["samples/000001/latents"]
    file["samples/000001"].create_dataset("latents", data=content, chunks=True, compression="gzip")


def a_group_as_array(file: h5py.File, path: Path) -> None:
    del file["samples/000001/text_embeds"]
    file["samples/000001"].create_group("text_embeds")


STRUCTURES = (
    *(external_link, link_to_a_pipe, soft_loop, hard_loop),
    *(external_storage, compression_bomb, same_content_in_chunks, a_group_as_array),
)


@pytest.mark.parametrize("change", STRUCTURES, ids=lambda change: change.__name__)
def test_a_structure_that_wands_never_writes_is_never_intact(
    cache: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[h5py.File, Path], None]
) -> None:
    with changed_shard(cache) as file:
        change(file, cache / "shard-00000.h5")
    monkeypatch.chdir(cache)
    with pytest.raises(CacheError, match="damaged"):
        read_all(cache)
    with pytest.raises(WandsError, match="damaged"):
        verify(VerifyOptions(path=cache))
    assert verify_cache(cache).problems


@pytest.mark.parametrize(
    "name",
    [
        "meta",
        "key",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("crc32", "signature", "mask_sums")),
    ],
)
def test_any_attribute_of_a_sample_is_at_most_one_sentence(cache: Path, name: str) -> None:
    with h5py.File(cache / "shard-00000.h5") as file:
        stored = file["samples/000001"].attrs[name]
    texts = (
        [to_text(damaged) for _, damaged in odd_copies(json.loads(stored), share=0.05)]
        if isinstance(stored, str)
        else []
    )
    plain = [value for value in ODD if isinstance(value, bool | int | float) and abs(value) < 2**63]
    for odd in (*texts, *plain, [1, 2, 3], h5py.Empty("f8"), b"\xff"):
        with changed_shard(cache) as file:
            file["samples/000001"].attrs[name] = odd
        verdicts(cache)
        outcome(lambda: LatentCache(cache).meta(1).get("fps"))


@pytest.mark.parametrize(
    ("name", "value"), [("fps", float("nan")), ("num_frames", 0), ("fps", True), ("fps", "16")]
)
def test_verify_reads_the_facts_of_a_shard(cache: Path, name: str, value: object) -> None:
    with changed_shard(cache) as file:
        attributes = file["samples/000001"].attrs
        attributes["meta"] = json.dumps({**json.loads(attributes["meta"]), name: value})
    with pytest.raises(WandsError, match=f"damaged .*{name}"):
        verify(VerifyOptions(path=cache))
