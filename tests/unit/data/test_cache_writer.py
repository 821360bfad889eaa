"""Writing of a cache: settings that never mix, full disks, kills."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import h5py
import pytest
import torch

from tests.support.cache_samples import FINGERPRINT, NULL, VARIANT, assert_same, make_sample, meta_of, write
from tests.support.samples import narrow_text
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, DiskError, WandsError
from wands.variants import Variant

FORK = multiprocessing.get_context("fork")


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
    from dataclasses import replace
    from pathlib import Path

    import torch

    from tests.support.cache_samples import make_sample, write
    from tests.support.samples import sample_of
    from wands.errors import DiskError

    folder = Path(sys.argv[1])
""")
)


def run_script(body: str, *args: object) -> subprocess.CompletedProcess[str]:
    code = PREAMBLE + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
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
