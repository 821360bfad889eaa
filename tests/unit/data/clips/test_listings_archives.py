"""Tar archives of clips: members, captions, damage, a full disk."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.listing_folders import load, mp4, tar, write
from wands.data.clips.archives import TarReader
from wands.data.clips.layouts import load_source
from wands.data.clips.records import Rejection
from wands.errors import CacheError, DataError

__all__ = ["mp4"]  # fixtures


def shard_members(mp4: list[bytes]) -> list[tuple[str, bytes]]:
    return [
        ("000000.mp4", mp4[0]),
        ("000000.txt", b"A cat."),
        ("000001.mp4", mp4[1]),
        ("000001.json", json.dumps({"caption": ["A dog.", "A brown dog."], "fps": 8}).encode()),
        ("000002.mp4", mp4[2]),
        ("000003.txt", b"no clip"),
        ("__key__/000004.mp4", mp4[3]),
        ("__key__/000004.json", b'{"caption": "deep", "start": 0, "end": 0.5}'),
        ("__key__/000004.depth.mp4", mp4[0]),
        ("__key__/000004.jpg", b"a thumbnail"),
    ]


def no_clip_again(copy: Callable[..., None]) -> Callable[..., None]:
    def checked(reader: TarReader, member: tarfile.TarInfo, target: Any) -> None:
        assert not member.name.endswith(".mp4")
        copy(reader, member, target)

    return checked


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz"])
def test_webdataset_tars(
    tmp_path: Path, mp4: list[bytes], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WebDataset: shard-000000.tar, a sample is all members with one key; each sample in one shard."""
    mode = "w" if ending == ".tar" else "w:gz"
    source = tmp_path / "shards"
    tar(source / f"shard-000000{ending}", shard_members(mp4), mode)
    tar(source / f"shard-000001{ending}", [("000000.mp4", mp4[3]), ("000000.txt", b"Last.")], mode)
    cache = tmp_path / "cache"
    rows, rejected = load(source, cache_dir=cache)
    assert {key: caption for key, (_, caption) in rows.items()} == {
        "shard-000000/000000": "A cat.",
        "shard-000000/000001": "A dog.",
        "shard-000000/000001~" + next(k for k in rows if "~" in k).split("~")[1]: "A brown dog.",
        "shard-000000/__key__/000004@0.000-0.500": "deep",
        "shard-000001/000000": "Last.",
    }
    others = {f"shard-000000{ending}:__key__/000004.{other}" for other in ("depth.mp4", "jpg")}
    assert set(rejected) == {"shard-000000/000002", "shard-000000/000003"} | others
    assert all("__key__/000004.mp4 belongs to the same sample" in rejected[other] for other in others)
    assert "missing caption" in rejected["shard-000000/000002"]
    assert (
        "sample in the archive has no clip (its files have the extensions txt)"
        in rejected["shard-000000/000003"]
    )
    by_key = {row.key: row.path for row in load_source(str(source), cache_dir=cache)[0]}
    assert by_key["shard-000000/000000"].read_bytes() == mp4[0]
    assert by_key["shard-000000/000001"].read_bytes() == mp4[1]
    assert {path.parent for path in by_key.values()} == {cache}
    assert len(list(cache.iterdir())) == 4  # what has no caption is not written
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    with monkeypatch.context() as patch:  # a later run reads no clip again
        patch.setattr(TarReader, "_copy", no_clip_again(TarReader._copy))
        assert {row.key: row.path for row in load_source(str(source), cache_dir=cache)[0]} == by_key
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written
    single = load_source(str(source / f"shard-000001{ending}"), cache_dir=cache)[0]
    assert [row.key for row in single] == ["shard-000001/000000"]


def test_diffusion_pipe_tar_with_captions_json(tmp_path: Path, mp4: list[bytes]) -> None:
    folder = tmp_path / "set"
    tar(folder / "part.tar", [("a 1.0.mp4", mp4[0]), ("b.mp4", mp4[1])])
    write(folder / "captions.json", {"a 1.0.mp4": ["one", "two"], "c.mp4": ["gone"]})
    rows, rejected = load(folder, cache_dir=tmp_path / "cache")
    assert sorted(caption for _, caption in rows.values()) == ["one", "two"]
    assert set(rejected) == {"part/b", "captions.json:c.mp4"}


def test_archives_never_write_outside_the_target(tmp_path: Path, mp4: list[bytes]) -> None:
    source = tmp_path / "a/b/source"
    cache = tmp_path / "a/b/cache"
    path = source / "evil.tar"
    source.mkdir(parents=True)
    secret = write(tmp_path / "secret.mp4", "secret")
    names = ["../../up.mp4", f"{tmp_path}/absolute.mp4", "x/../../y.mp4"]
    with tarfile.open(path, "w") as archive:
        for name in [*names, "good.mp4", "good.txt", "good.mp4"]:
            info = tarfile.TarInfo(name)
            data = b"caption" if name.endswith("txt") else mp4[0]
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for kind, name in [(tarfile.SYMTYPE, "link.mp4"), (tarfile.LNKTYPE, "hard.mp4")]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = str(secret)
            archive.addfile(info)
        for kind, name in [(tarfile.CHRTYPE, "device.mp4"), (tarfile.FIFOTYPE, "pipe.mp4")]:
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    before = {p for p in tmp_path.rglob("*")}
    rows, rejections = load_source(str(source), cache_dir=cache)
    assert [row.key for row in rows] == ["evil/good"]
    written = {p for p in tmp_path.rglob("*")} - before
    assert {p.parent for p in written if p.is_file()} == {cache}
    assert not (tmp_path / "absolute.mp4").exists()
    reasons = {rejection.key: rejection.reason for rejection in rejections}
    for name in names:
        assert "leads out of the archive" in reasons[f"evil.tar:{name}"]
    for name in ("link.mp4", "hard.mp4"):
        assert f"a link (to {secret})" in reasons[f"evil.tar:{name}"]
    for name in ("device.mp4", "pipe.mp4"):
        assert "not a regular file" in reasons[f"evil.tar:{name}"]
    assert "same name" in reasons["evil.tar:good.mp4"]
    assert len(reasons) == 8


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "No space left.*HF_DATASETS_CACHE"),
        (errno.EFBIG, "File too large.*raise the limit .*ulimit -f"),
    ],
)
def test_a_full_disk_ends_the_scan(
    tmp_path: Path, mp4: list[bytes], monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    path = tar(tmp_path / "a.tar", shard_members(mp4))

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TarReader, "_copy", full)
    with TarReader(path) as reader:
        members = next(iter(reader.samples.values()))
        video = members["mp4"]
        with pytest.raises(CacheError, match=rf"cannot store 000000\.mp4 .*{fix}"):
            reader.unpack(video, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def cuts(data: bytes) -> list[int]:
    """Positions of a cut: inside the last member, at its header, inside its header, before the end mark."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        last = archive.getmembers()[-1]
    end = last.offset_data + (last.size + 511) // 512 * 512
    return [last.offset_data + 1, last.offset, last.offset + 100, end]


def test_damaged_archives_say_so(tmp_path: Path, mp4: list[bytes]) -> None:
    members = [("a.mp4", mp4[0]), ("a.txt", b"A cat."), ("b.txt", b"A dog."), ("b.mp4", mp4[1])]
    data = tar(tmp_path / "whole.tar", members).read_bytes()
    assert load_source(str(tmp_path / "whole.tar"), cache_dir=tmp_path / "cache")[1] == []
    for number, cut in enumerate(cuts(data)):
        path = tmp_path / f"cut{number}.tar"
        path.write_bytes(data[:cut])
        rows, rejected = load(path, cache_dir=tmp_path / "cache")
        assert f"cut{number}/a" in rows
        assert "damaged or cut off" in rejected[f"cut{number}.tar"], (number, rejected)
        assert (f"cut{number}/b" in rows) == (cut == cuts(data)[-1])
    for name, content, reason in [
        ("empty.tar", b"", "empty.tar is empty (0 bytes); copy or download the file again"),
        ("text.tar", b"text" * 999, "text.tar is a text file, despite its name"),
        ("bytes.tar", bytes(range(256)) * 9, "cannot be read as a tar archive (no tar header); copy or pack"),
        (
            "z.tar.gz",
            b"\x1f\x8b" + data[:999],
            "cannot be read as a tar archive (no tar header)",
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        rows, rejections = load_source(str(tmp_path / name), cache_dir=tmp_path / "cache")
        assert rows == []
        assert [rejection.key for rejection in rejections] == [name]
        assert reason in rejections[0].reason


def test_random_damage_to_an_archive_never_crashes(tmp_path: Path, mp4: list[bytes]) -> None:
    data = bytearray(tar(tmp_path / "whole.tar", shard_members(mp4)).read_bytes())
    rng = np.random.default_rng(0)
    path = tmp_path / "hurt.tar"
    for _ in range(150):
        hurt = data.copy()
        start = int(rng.integers(len(hurt) // 512)) * 512  # most damage to headers, where the structure is
        for _ in range(int(rng.integers(1, 20))):
            hurt[start + int(rng.integers(512))] = int(rng.integers(256))
        path.write_bytes(hurt)
        rows, rejections = load_source(str(path), cache_dir=tmp_path / "cache")
        assert len(rows) + len(rejections) > 0
        assert all(isinstance(rejection, Rejection) and rejection.reason for rejection in rejections)


def test_encoded_shards_point_to_their_importer(tmp_path: Path) -> None:
    members = [("000000.pth", b"x"), ("000000.pickle", b"x"), ("000000.json", b"{}")]
    tar(tmp_path / "energon/shard-000000.tar", members)
    rows, rejections = load_source(str(tmp_path / "energon"))
    assert rows == []
    assert "data_tools.import_shards" in rejections[0].reason
    (tmp_path / "tfrec").mkdir()
    (tmp_path / "tfrec/file_00-10.tfrec").touch()
    with pytest.raises(DataError, match=r"data_tools\.import_shards"):
        load_source(str(tmp_path / "tfrec"))
