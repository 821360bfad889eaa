"""data_tools.verify: a flipped bit is found, or nothing that anybody reads has changed by it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from data_tools.verify import main, verify_cache
from tests.support.samples import narrow_text, sample_of
from wands.data.cache.format import read_manifest
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.collate import Sample

VARIANT = narrow_text("wan2.1-t2v-1.3b")
FINGERPRINT = {"vae": {"weights_sha256": "aa"}, "settings": {"fps": 16, "max_frames": 81}}
NULL = torch.full((1, 8), 0.5, dtype=torch.bfloat16)


def make_sample(number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    latents = torch.randn(16, 1 + number % 3, 4, 6, generator=generator).bfloat16()
    return sample_of(f"clip/{number:03d}", latents, torch.randn(3, 8, generator=generator).bfloat16())


def write_cache(
    path: Path, numbers: Iterable[int], max_samples: int = 12, **fingerprint: Any
) -> dict[str, Sample]:
    samples = [make_sample(number) for number in numbers]
    with CacheWriter(path, VARIANT, FINGERPRINT | fingerprint, max_samples=max_samples) as writer:
        for sample in samples:
            frames = 4 * (sample.latents.shape[1] - 1) + 1
            meta = {
                "num_frames": frames,
                "fps": 16.0,
                "content": "c",
                "caption": f"Of {sample.sample_id}, ünï.",
            }
            writer.add(sample.sample_id, sample.arrays, meta)
        writer.commit(NULL)
    return {sample.sample_id: sample for sample in samples}


def contents(path: Path) -> dict[str, Any]:
    """Everything that a reader can get from a cache, except in which shard and row it lies."""
    cache = LatentCache(path)

    def digest(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), hashlib.sha256(tensor.view(torch.uint16).numpy().tobytes()).hexdigest()

    samples = {}
    for i, key in enumerate(cache.keys):
        sample = cache.read(i)
        numbers = [getattr(cache.index, name)[i].tolist() for name in ("num_frames", "fps", "crc32")]
        samples[key] = (digest(sample.latents), digest(sample.text_embeds), numbers, cache.meta(i))
    return {"samples": samples, "manifest": read_manifest(path), "null": digest(cache.null_text_embeds)}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, one with so many samples that HDF5 keeps their names in a tree, one with few."""
    path = tmp_path_factory.mktemp("sound") / "cache"
    write_cache(path, range(17))
    assert sorted(file.name for file in path.iterdir()) == [
        "index.npz",
        "manifest.json",
        "shard-00000.h5",
        "shard-00001.h5",
    ]
    return path


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def test_a_sound_cache(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify_cache(sound)
    stored = LatentCache(sound)
    size = sum(2 * (int(shape.prod()) + 3 * 8) for shape in stored.index.latent_shapes)
    assert (report.problems, report.num_samples, report.num_bytes) == ([], 17, size)
    assert main([str(sound)]) == 0
    assert f"17 samples, {size:,} bytes of latents and text read, 0 problem(s)" in capsys.readouterr().out


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_random_flips_are_found_or_change_nothing_that_is_read(cache: Path, count: int) -> None:
    """Harmless means: every array of the index, every sample's bits and meta, the manifest are as before."""
    before = contents(cache)
    draw = np.random.default_rng(4)
    files = sorted(cache.iterdir())
    found = {file.name: 0 for file in files}
    harmless = dict(found)
    for number in range(count):
        file = files[number % len(files)]
        used = len(file.read_bytes().rstrip(b"\0"))  # the writer claims more of the disk than it needs
        bit = int(draw.integers(8 * used))
        flip(file, bit)
        if verify_cache(cache, workers=1).problems:
            found[file.name] += 1
        else:
            assert contents(cache) == before, f"{file.name}: bit {bit} changes what is read and is not found"
            harmless[file.name] += 1
        flip(file, bit)
    assert contents(cache) == before
    assert min(found.values()) > count // 20, (found, harmless)


def places(shard: Path) -> dict[str, int]:
    """Byte offsets of each kind of place in a shard."""
    content = shard.read_bytes()
    with h5py.File(shard) as file:
        group = file["samples/000002"]
        places = {name: group[name].id.get_offset() + 5 for name in ("latents", "text_embeds")}
        key = group.attrs["key"]
    caption = content.index(b"Of clip/002")
    last = content.index(key)
    return places | {
        "superblock": 12,
        "caption": caption,
        "key": last + 2,
        "object header": content.index(b"OHDR") + 6,
        "tree": content.index(b"BTLF") + 9,
        "names": content.index(b"FHDB") + 30,
    }


@pytest.mark.parametrize(
    ("place", "names_sample"),
    [
        ("latents", True),
        ("text_embeds", True),
        ("caption", True),
        ("key", True),
        ("superblock", False),
        ("object header", False),
        ("tree", False),
        ("names", False),
    ],
)
@pytest.mark.parametrize("bit", [0, 6])
def test_each_kind_of_place_in_a_shard(
    cache: Path, place: str, names_sample: bool, bit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = cache / "shard-00000.h5"
    flip(shard, 8 * places(shard)[place] + bit)
    assert main([str(cache)]) == 1
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert lines
    assert all("shard-00000.h5" in line for line in lines)
    assert all(
        "delete shard-00000.h5 and run the same `wands preprocess` command again" in line
        or "rebuilds the index" in line
        for line in lines
    )
    if names_sample:
        assert [line.partition(":")[0] for line in lines] == ["shard-00000.h5 (clip/002)"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(7, marks=pytest.mark.slow), 61])
def test_the_manifest_is_guarded_whole(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every 7th bit (in the default tier, every 61st) is found, or the JSON says the same."""
    cache = tmp_path / "cache"
    write_cache(cache, range(2))
    path = cache / "manifest.json"
    content = path.read_bytes()
    before = json.loads(content)
    found = 0
    bits = range(0, 8 * len(content), every)
    for bit in bits:
        flip(path, bit)
        problems = verify_cache(cache, workers=1).problems
        if problems:
            assert {problem.place for problem in problems} == {"manifest.json"}
            found += 1
        else:
            assert read_manifest(cache) == before
        path.write_bytes(content)
    assert found > len(bits) * 7 / 16  # that is, more than half as many as there are bytes, at every 7th bit
    manifest = json.loads(content)
    manifest["variant"]["text_dim"] += 1
    path.write_text(json.dumps(manifest))
    assert main([str(cache)]) == 1
    assert "manifest.json: the file was changed (wrong digest); restore the file" in capsys.readouterr().out


def test_an_index_that_disagrees_with_the_shards_names_the_sample(cache: Path) -> None:
    with np.load(cache / "index.npz") as npz:
        arrays = dict(npz)
    for name in ("crc32", "free_lens", "latent_shapes", "num_frames", "fps", "rows"):
        changed = arrays | {name: arrays[name].copy()}
        changed[name][3] += 1
        np.savez(cache / "index.npz", **changed)
        problems = verify_cache(cache).problems
        assert problems, name
        assert any("clip/003" in problem.place for problem in problems), name
        assert all("rebuilds the index" in problem.fix for problem in problems), name


def test_missing_files_and_a_shard_of_another_cache(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cache(tmp_path / "other", [40], vae={"weights_sha256": "bb"})
    shutil.copy(tmp_path / "other" / "shard-00000.h5", cache / "shard-00001.h5")
    problems = verify_cache(cache).problems
    assert any("which differs from manifest.json" in problem.what for problem in problems)
    assert any("bytes, but the index says" in problem.what for problem in problems)
    (cache / "shard-00001.h5").unlink()
    [problem] = verify_cache(cache).problems
    assert problem.place == "shard-00001.h5"
    assert "5 samples" in problem.what
    (cache / "index.npz").unlink()
    [problem] = verify_cache(cache).problems
    assert (problem.place, problem.what) == ("index.npz", "the file is missing, so the cache is unfinished")
    os.remove(cache / "manifest.json")
    assert {problem.place for problem in verify_cache(cache).problems} == {"index.npz", "manifest.json"}
    assert main([str(tmp_path)]) == 2
    assert "is not a latent cache" in capsys.readouterr().err
