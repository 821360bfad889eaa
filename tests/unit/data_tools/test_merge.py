"""data_tools.merge and split: bit by bit, nothing mixed, and kill -9 leaves no trace."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data_tools import merge as merge_module
from data_tools import split as split_module
from data_tools.merge import main as merge_main
from data_tools.merge import merge
from data_tools.split import name_hash, split_cache
from data_tools.verify import verify_cache
from tests.unit.data_tools.test_verify import VARIANT, contents, flip, write_cache
from wands.data.cache.format import cache_contract, contract_of, read_manifest
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, ConfigError
from wands.texts import safe_lines

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    for name, numbers in (("a", range(0, 9)), ("b", range(9, 30)), ("c", (30, 31))):
        write_cache(folder / name, numbers, max_samples=5)
    return [folder / name for name in "abc"]


def test_merged_equals_all_samples_written_at_once(parts: list[Path], tmp_path: Path) -> None:
    merged = merge(tmp_path / "out", parts)
    assert (merged.num_samples, merged.num_copied, merged.duplicates) == (32, 32, [])
    write_cache(tmp_path / "wanted", range(32))
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    assert verify_cache(tmp_path / "out").problems == []
    again = merge(tmp_path / "out", parts)
    assert (again.num_samples, again.num_copied) == (32, 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_rejected_clips_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = {"a": ["one", "two"], "b": [], "c": ["two", "three"]}
    for number, (name, lines) in enumerate(lists.items()):
        write_cache(tmp_path / name, [number])
        (tmp_path / name / "rejects.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert merge_module.main([*(str(tmp_path / name) for name in lists), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "rejects.jsonl").read_text() == "one\ntwo\nthree\n"
    assert f"3 rejected clips are listed in {tmp_path / 'out' / 'rejects.jsonl'}" in capsys.readouterr().out


def test_a_manifest_gives_the_variant_of_another_cache(tmp_path: Path) -> None:
    contract = cache_contract(VARIANT)
    contract["variant"] |= {"name": "mine", "text_dim": 77, "vae_stride": [4, 16, 16]}
    with CacheWriter(tmp_path / "c", contract, {}):
        pass
    assert contract_of(read_manifest(tmp_path / "c")) == contract


def test_duplicates_are_told_and_kept_once(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cache(tmp_path / "d", [3, 4, 50])
    assert merge_module.main([str(parts[0]), str(tmp_path / "d"), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "10 samples, 10 of them copied now" in text
    assert (
        "2 samples are in several caches with equal content and are stored once: clip/003, clip/004" in text
    )
    write_cache(tmp_path / "wanted", [*range(9), 50])
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_one_key_with_different_samples_is_refused(parts: list[Path], tmp_path: Path) -> None:
    other = LatentCache(parts[1])
    with CacheWriter(tmp_path / "d", VARIANT, other.fingerprint) as writer:
        sample = other.read(0)
        writer.add("clip/003", sample.arrays, other.meta(0))
        writer.commit(other.null_text_embeds)
    with pytest.raises(
        ConfigError, match=r"1 key\(s\) have different samples in two caches: clip/003 \(in .*a and .*d\)"
    ):
        merge(tmp_path / "out", [parts[0], tmp_path / "d"])
    assert not (tmp_path / "out").exists()


def test_another_fingerprint_variant_or_null_text_is_refused(parts: list[Path], tmp_path: Path) -> None:
    write_cache(tmp_path / "d", [60], vae={"weights_sha256": "bb"})
    with pytest.raises(
        CacheError, match=r"d has vae\.weights_sha256=bb, but .*a has vae\.weights_sha256=aa; only caches of"
    ):
        merge(tmp_path / "out", [parts[0], tmp_path / "d"])
    like = LatentCache(parts[0])
    narrow = contract_of(like.manifest)
    narrow["variant"] = narrow["variant"] | {"text_dim": 5}
    with CacheWriter(tmp_path / "e", narrow, like.fingerprint) as writer:
        writer.commit(like.null_text_embeds)
    with pytest.raises(CacheError, match=r"e has variant\.text_dim=5, but .*a has variant\.text_dim=8"):
        merge(tmp_path / "out", [parts[0], tmp_path / "e"])
    with CacheWriter(tmp_path / "f", VARIANT, like.fingerprint) as writer:
        writer.commit(like.null_text_embeds + 1)
    with pytest.raises(CacheError, match="have different embeddings of the empty caption"):
        merge(tmp_path / "out", [parts[0], tmp_path / "f"])
    assert not (tmp_path / "out").exists()


def test_what_is_in_out_is_never_lost(parts: list[Path], tmp_path: Path) -> None:
    merge(tmp_path / "out", parts[:2])
    before = contents(tmp_path / "out")
    with pytest.raises(
        ConfigError,
        match=r"finished cache, and 21 of its samples \(first: clip/009\) are not among the samples to copy",
    ):
        merge(tmp_path / "out", [parts[0], parts[2]])
    with pytest.raises(ConfigError, match="is one of the caches to merge"):
        merge(tmp_path / "out", [tmp_path / "out", parts[2]])
    assert contents(tmp_path / "out") == before
    assert merge(tmp_path / "out", parts).num_copied == 2  # a third cache joins


def test_a_damaged_sample_is_named_and_not_copied(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(parts[0], tmp_path / "a"))
    bits = LatentCache(damaged).read(2).latents.view(-1)[:8].view(torch.uint8).numpy().tobytes()
    flip(damaged / "shard-00000.h5", 8 * (damaged / "shard-00000.h5").read_bytes().index(bits))
    assert merge_module.main([str(damaged), str(parts[2]), "--out", str(tmp_path / "out")]) == 2
    assert "sample clip/002 in shard-00000.h5 has a wrong checksum" in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.npz").exists()
    assert merge(tmp_path / "out", [parts[0], parts[2]]).num_copied == 9  # two were whole


@pytest.mark.kill
def test_killed_at_any_moment_the_next_run_goes_on(tmp_path: Path) -> None:
    """Ten kill -9 at random moments, more until one comes late enough; a run that finishes before its kill starts anew."""
    write_cache(tmp_path / "a", range(300), max_samples=150)
    write_cache(tmp_path / "b", range(300, 650), max_samples=150)
    paths = [tmp_path / "a", tmp_path / "b"]
    out = tmp_path / "out"
    started = time.monotonic()
    whole = FORK.Process(target=merge, args=(tmp_path / "wanted", paths))
    whole.start()  # a copy of this process, like those that are killed: copying takes time, too
    whole.join()
    usual = time.monotonic() - started
    wanted = contents(tmp_path / "wanted")
    draw = np.random.default_rng(0)
    kills = 0
    resumed = 0
    while kills < 10 or (not resumed and kills < 60):
        process = FORK.Process(target=merge, args=(out, paths))
        process.start()
        process.join(
            draw.uniform(0, usual * (1 + kills / 20))
        )  # later and later, because the machine may be busier now
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0 or (out / "index.npz").exists():
            assert contents(out) == wanted
            shutil.rmtree(out)
        elif list(out.glob("shard-*.h5")):
            with pytest.raises(CacheError, match="unfinished"):
                LatentCache(out)
            resumed += 1
    merge(out, paths)
    assert contents(out) == wanted
    assert verify_cache(out).problems == []
    assert not list(out.glob(".*"))
    assert resumed > 0


def test_split_by_fraction_is_stable_and_whole(parts: list[Path], tmp_path: Path) -> None:
    a, b = split_cache(parts[1], tmp_path / "a", tmp_path / "b", fraction=0.4)
    assert a + b == 21
    ours, theirs, all_of_it = (contents(p)["samples"] for p in (tmp_path / "a", tmp_path / "b", parts[1]))
    assert ours | theirs == all_of_it
    assert not ours.keys() & theirs.keys()
    assert set(ours) == {key for key in all_of_it if name_hash(key) < 0.4}
    assert LatentCache(tmp_path / "a").manifest == LatentCache(parts[1]).manifest
    merge(tmp_path / "grown", parts)
    split_cache(tmp_path / "grown", tmp_path / "a2", tmp_path / "b2", fraction=0.4)
    assert ours.items() <= contents(tmp_path / "a2")["samples"].items()
    merge(tmp_path / "again", [tmp_path / "a", tmp_path / "b"])
    assert contents(tmp_path / "again") == contents(parts[1])


def test_a_clip_is_not_split(tmp_path: Path) -> None:
    """Its windows, sizes and further captions would be trained on and held out."""
    clips = [f"clip {i}" for i in range(12)]
    ends = ("", "#0001", "@1.000-2.000", "@1.000-2.000#0003", "~0123abcd")
    write_cache(tmp_path / "one", [0])
    one = LatentCache(tmp_path / "one")
    sample = one.read(0)
    meta = one.meta(0)
    with CacheWriter(tmp_path / "cache", VARIANT, one.fingerprint) as writer:
        for clip in clips:
            for end in ends:
                writer.add(clip + end, sample.arrays, meta)
        writer.commit(one.null_text_embeds)
    a, b = split_cache(tmp_path / "cache", tmp_path / "a", tmp_path / "b", fraction=0.5)
    sides = [set(LatentCache(tmp_path / side).keys) for side in ("a", "b")]
    assert (a + b, min(a, b) > 0) == (60, True)
    for clip in clips:
        assert {clip + end for end in ends} <= sides[name_hash(clip) >= 0.5]


def test_the_hash_is_one_for_all_time_and_even() -> None:
    assert name_hash("clip/000") == (0x276BCB87FF07658B >> 11) / 2**53  # printf clip/000 | b2sum -l 64
    values = np.array([name_hash(f"clip {i}") for i in range(4000)])
    assert abs((values < 0.1).mean() - 0.1) < 0.02
    assert 0 <= values.min() < values.max() < 1
    name_hash("name \udcff of no encoding")


def test_split_by_keys_file(parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("clip/010\r\n\nclip/020\n")
    command = [str(parts[1]), str(tmp_path / "a"), str(tmp_path / "b"), "--keys-file", str(tmp_path / "keys")]
    assert split_module.main(command) == 0
    assert LatentCache(tmp_path / "a").keys == ["clip/010", "clip/020"]
    assert len(LatentCache(tmp_path / "b")) == 19
    both = [*command, "--fraction", "0.5"]
    for wrong, message in ((command[:3], "are both missing"), (both, "cannot be combined")):
        assert split_module.main(wrong) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "keys").write_text("clip/010\nclip/999")
    assert split_module.main(command) == 2
    problem = f"1 of the 2 keys in --keys-file are not in CACHE={parts[1]}, such as clip/999;"
    assert safe_lines(problem) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fraction", "message"), [(0.0, "between 0 and 1"), (1.5, "between"), (0.99, "21 and 0 samples")]
)
def test_a_split_with_an_empty_side_is_refused(
    parts: list[Path], tmp_path: Path, fraction: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split_cache(parts[1], tmp_path / "a", tmp_path / "b", fraction=fraction)
    assert not list(tmp_path.iterdir())


def test_the_output_is_an_option(parts: list[Path], tmp_path: Path) -> None:
    assert merge_main([*map(str, parts), "--out", str(tmp_path / "new")]) == 0
    assert len(LatentCache(tmp_path / "new").keys) > len(LatentCache(parts[0]).keys)
    assert merge_main([*map(str, parts)]) == 2
