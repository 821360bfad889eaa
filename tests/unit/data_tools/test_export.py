"""data_tools.export and import_cache: there and back bit by bit; nothing unsafe is opened."""

from __future__ import annotations

import errno
import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from data_tools import export as export_module
from data_tools import import_cache as import_module
from data_tools.export import export_cache, file_name
from data_tools.import_cache import import_cache
from data_tools.verify import verify_cache
from tests.unit.data_tools.test_verify import (
    FINGERPRINT,
    NULL,
    VARIANT,
    contents,
    flip,
    make_sample,
    write_cache,
)
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.encoders.text import TextEncoder
from wands.errors import ConfigError, DataError, DiskError

KEYS = ["a", "clip/b.mp4", "../up", "ünï 视频", "x" * 300, "no\udcff text", "tab\tand\nline"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys as no file may be called, every bit pattern of bf16, a caption of several lines, empty text."""
    path = tmp_path_factory.mktemp("cache") / "cache"
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(16, 16, 16, 16)
    with CacheWriter(path, VARIANT, FINGERPRINT) as writer:
        for number, key in enumerate(KEYS):
            sample = make_sample(number)
            latents = every if number == 0 else sample.latents
            text = sample.text_embeds[: 0 if number == 1 else 3]
            meta = {
                "num_frames": 4 * latents.shape[1] - 3,
                "fps": 16.0,
                "content": f"c{number}",
                "caption": f"Ünï\n{key}",
            }
            writer.add(key, {"latents": latents, "text_embeds": text}, meta)
        writer.commit(NULL)
    return path


@pytest.fixture
def exported(cache: Path, tmp_path: Path) -> Path:
    export_cache(cache, tmp_path / "export", "webdataset")
    return tmp_path / "export"


@pytest.mark.parametrize("layout", export_module.FORMATS)
def test_there_and_back(cache: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "export"
    back = tmp_path / "back"
    assert export_module.main([str(cache), str(out), "--format", layout]) == 0
    assert import_module.main([str(out), str(back)]) == 0
    assert capsys.readouterr().out == f"{out}: 7 samples\n{back}: 7 samples\n"
    assert contents(back) == contents(cache)
    assert verify_cache(back).problems == []
    assert import_cache(out, back) == 7  # again: nothing to do
    assert contents(back) == contents(cache)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "export"]


def test_what_others_find_in_an_export(cache: Path, tmp_path: Path) -> None:
    export_cache(cache, tmp_path / "files", "safetensors")
    stored = LatentCache(cache)
    path = tmp_path / "files" / f"{file_name(0, stored.keys[0])}.safetensors"
    assert path.name == "00000000-%2E%2E%2Fup.safetensors"
    tensors = load_file(path)
    assert sorted(tensors) == ["latents", "text_embeds"]
    assert torch.equal(tensors["latents"].view(torch.int16), stored.read(0).latents.view(torch.int16))
    assert len(list((tmp_path / "files").iterdir())) == 7 + 2
    export_cache(cache, tmp_path / "tars", "webdataset", max_bytes=40_000)
    tars = sorted((tmp_path / "tars").glob("*.tar"))
    assert [path.name for path in tars] == [f"shard-{i:05d}.tar" for i in range(len(tars))]
    assert len(tars) > 1
    names = [name for path in tars for name in tarfile.TarFile(path).getnames()]
    assert len(names) == 21
    assert all(name.count(".") == 1 and "/" not in name and len(name) < 200 for name in names)
    with tarfile.open(tars[0]) as tar:
        assert tar.extractfile("00000000-%2E%2E%2Fup.txt").read().decode() == "Ünï\n../up"  # type: ignore[union-attr]
        known = json.loads(tar.extractfile("00000000-%2E%2E%2Fup.json").read())  # type: ignore[union-attr]
    assert known["key"] == "../up"
    assert known["num_frames"] == stored.index.num_frames[0]
    assert int(known["crc32"], 16) == stored.index.crc32[0]


def test_datasets_finds_only_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets reads every file with the extension of a table as rows of data."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    write_cache(tmp_path / "cache", [1, 2, 3])
    export_cache(tmp_path / "cache", tmp_path / "export", "webdataset")
    rows = datasets.load_dataset(str(tmp_path / "export"), split="train", cache_dir=str(tmp_path / "rows"))
    assert len(rows) == 3
    assert set(rows.column_names) >= {"safetensors", "txt", "json"}


def test_an_export_appears_whole_or_not_at_all(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "export"
    calls = []

    def fail(*_: Any) -> bytes:
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return b"x"

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_to_bytes", fail)
        with pytest.raises(KeyboardInterrupt):
            export_cache(cache, out, "safetensors")
    assert not out.exists()
    export_cache(cache, out, "safetensors")  # what the first has left is gone
    assert len(list(out.iterdir())) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]
    with pytest.raises(ConfigError, match="exists; pass a new folder"):
        export_cache(cache, out, "webdataset")


def add_member(path: Path, name: str, content: bytes = b"evil", **changes: Any) -> None:
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo(name)
        for field, value in changes.items():
            setattr(member, field, value)
        member.size = len(content) if member.isreg() else 0
        tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("../evil.safetensors", {}, "name of the member leads out of the archive"),
        ("/tmp/wands-evil.safetensors", {}, "name of the member leads out of the archive"),
        ("a/../../evil.txt", {}, "name of the member leads out of the archive"),
        ("evil.safetensors", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a link"),
        ("evil.safetensors", {"type": tarfile.LNKTYPE, "linkname": "../x"}, "a link"),
        ("evil.safetensors", {"type": tarfile.CHRTYPE}, "not a regular file"),
        ("evil.pth", {}, "is a pickle"),
        ("evil.latents.pickle", {}, "is a pickle"),
        ("evil.txt", {}, "has no .safetensors"),
        ("evil.safetensors", {}, "is damaged"),
    ],
)
def test_unsafe_members_are_refused_and_nothing_is_written_outside(
    exported: Path, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    add_member(next(exported.glob("*.tar")), name, **changes)
    before = {path for path in tmp_path.rglob("*") if "back" not in path.parts}
    with pytest.raises(DataError, match=message):
        import_cache(exported, tmp_path / "back")
    assert {path for path in tmp_path.rglob("*") if "back" not in path.relative_to(tmp_path).parts} == before
    assert not (tmp_path / "back" / "index.npz").exists()
    assert not Path("/tmp/wands-evil.safetensors").exists()
    assert all(
        path.name == "manifest.json" or path.suffix == ".h5" for path in (tmp_path / "back").rglob("*")
    )


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_no_pickle_is_ever_opened(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diffsynth").mkdir()
    torch.save(Bomb(), tmp_path / "diffsynth" / "0.pth")
    assert import_module.main(["diffsynth", "back"]) == 2
    assert "contains pickles such as 0.pth" in capsys.readouterr().err
    export_cache(cache, tmp_path / "export", "safetensors")
    (tmp_path / "export" / "x.pth").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=r"x\.pth is a pickle"):
        import_cache(tmp_path / "export", tmp_path / "back")
    (tmp_path / "export" / "x.pth").rename(tmp_path / "export" / "99999999-x.safetensors")
    with pytest.raises(DataError, match=r"99999999-x\.safetensors is damaged"):
        import_cache(tmp_path / "export", tmp_path / "back")
    assert not (tmp_path / "exploded").exists()


def test_damage_and_loss_are_found(cache: Path, tmp_path: Path) -> None:
    export_cache(cache, tmp_path / "export", "safetensors")
    path = sorted((tmp_path / "export").glob("0*"))[3]
    flip(path, 8 * (path.stat().st_size - 3))
    with pytest.raises(DataError, match=rf"{path.name[:9]}.* is damaged \(the checksum of the tensors is"):
        import_cache(tmp_path / "export", tmp_path / "back")
    path.unlink()
    with pytest.raises(DataError, match="has 6 of 7 samples; restore"):
        import_cache(tmp_path / "export", tmp_path / "back")
    assert not (tmp_path / "back" / "index.npz").exists()
    (tmp_path / "export" / "null_text.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"export\.manifest or null_text\.safetensors in SOURCE"):
        import_cache(tmp_path / "export", tmp_path / "back")
    (tmp_path / "export" / "export.manifest").unlink()
    with pytest.raises(DataError, match=r"neither export\.manifest nor \*_wan\.safetensors"):
        import_cache(tmp_path / "export", tmp_path / "back")


def test_a_torn_tar_is_named(exported: Path, tmp_path: Path) -> None:
    path = next(exported.glob("*.tar"))
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match=r"shard-00000\.tar"):
        import_cache(exported, tmp_path / "back")
    path.write_bytes(b"no tar")
    with pytest.raises(DataError, match=r"shard-00000\.tar is a text file"):
        import_cache(exported, tmp_path / "back")


# ---- musubi-tuner: file and tensor names as its wan_cache_latents.py and wan_cache_text_encoder_outputs.py write them


def musubi(folder: Path, **changes: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    folder.mkdir()
    wanted = {}
    generator = torch.Generator().manual_seed(0)
    for base, window, size, frames, dtype in (
        ("bikes", "_00000-009", (96, 64), 3, torch.bfloat16),
        ("bikes", "_00016-005", (96, 64), 2, torch.bfloat16),
        ("a_b_01", "", (64, 96), 1, torch.float32),
    ):
        latents = torch.randn(16, frames, size[1] // 8, size[0] // 8, generator=generator).to(dtype)
        text = torch.randn(7, 32, generator=generator).to(dtype)
        named = "bfloat16" if dtype == torch.bfloat16 else "float32"
        place = "x".join(map(str, latents.shape[1:]))
        stem = f"{base}{window}_{size[0]:04d}x{size[1]:04d}"
        tensors = {f"latents_{place}_{named}": latents, f"latents_image_{place}_{named}": latents + 1}
        header = {"architecture": "wan", "width": "640", "height": "272", "format_version": "1.0.1"}
        save_file(tensors | changes.get("tensors", {}), folder / f"{stem}_wan.safetensors", header)
        header = {"architecture": "wan", "caption1": f"Of {base}.", "format_version": "1.0.1"}
        if not (folder / f"{base}_wan_te.safetensors").exists():
            save_file({f"varlen_t5_{named}": text}, folder / f"{base}_wan_te.safetensors", header)
            texts = text
        wanted[stem] = (latents.bfloat16(), texts.bfloat16())
    return wanted


def test_a_musubi_cache(tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = musubi(tmp_path / "musubi")
    command = [str(tmp_path / "musubi"), str(tmp_path / "cache")]
    assert import_module.main(command) == 2
    assert "--model is needed" in capsys.readouterr().err
    assert import_module.main([*command, "--model", str(tiny_pipeline)]) == 0
    cache = LatentCache(tmp_path / "cache", verify=True)
    assert cache.keys == sorted(wanted)
    for i, key in enumerate(cache.keys):
        sample = cache.read(i)
        assert torch.equal(sample.latents, wanted[key][0])
        assert torch.equal(sample.text_embeds, wanted[key][1])
    meta = cache.meta(cache.find("bikes_00016-005_0096x0064"))
    assert (meta["caption"], meta["source"], meta["start_seconds"]) == ("Of bikes.", "bikes", 1.0)
    assert cache.index.num_frames.tolist() == [1, 9, 5]
    assert set(cache.index.fps.tolist()) == {16.0}
    assert torch.equal(cache.null_text_embeds, TextEncoder.load(tiny_pipeline).encode("").bfloat16())
    assert cache.fingerprint["settings"]["imported"] == "musubi-tuner"
    assert verify_cache(tmp_path / "cache").problems == []


def test_a_musubi_cache_of_another_model_or_kind_is_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    musubi(tmp_path / "indexed", tensors={"f_indices_int32": torch.tensor([0, 1])})
    with pytest.raises(DataError, match="f_indices"):
        import_cache(tmp_path / "indexed", tmp_path / "cache", str(tiny_pipeline))
    musubi(tmp_path / "musubi")
    text = tmp_path / "musubi" / "bikes_wan_te.safetensors"
    shutil.copy(text, tmp_path / "kept")
    text.write_bytes(save({"varlen_t5_bfloat16": torch.zeros(4, 33, dtype=torch.bfloat16)}))
    with pytest.raises(DataError, match=r"text embedding of shape \(4, 33\) is not \[1 to 512, 32\]"):
        import_cache(tmp_path / "musubi", tmp_path / "cache", str(tiny_pipeline))
    text.unlink()
    with pytest.raises(DataError, match=r"bikes_wan_te\.safetensors cannot be read \(No such file"):
        import_cache(tmp_path / "musubi", tmp_path / "cache", str(tiny_pipeline))
    shutil.copy(tmp_path / "kept", text)
    path = next((tmp_path / "musubi").glob("a_b*_wan.safetensors"))
    save_file({"latents_1x3x4_bfloat16": torch.randn(16, 1, 3, 4).bfloat16()}, path)
    with pytest.raises(DataError, match="multiples of patch_size"):
        import_cache(tmp_path / "musubi", tmp_path / "cache", str(tiny_pipeline))
    assert not (tmp_path / "cache" / "index.npz").exists()
    write_cache(tmp_path / "c", [1])
    export_cache(tmp_path / "c", tmp_path / "e", "safetensors")
    with pytest.raises(ConfigError, match="is not needed"):
        import_cache(tmp_path / "e", tmp_path / "back", str(tiny_pipeline))


def test_a_full_disk_leaves_no_open_tar(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars: list[tarfile.TarFile] = []

    def full(self: tarfile.TarFile, *_: object) -> None:
        tars.append(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(DiskError, match="No space left"):
        export_cache(cache, tmp_path / "out", "webdataset")
    assert [tar.closed and tar.fileobj.closed for tar in tars] == [True]
    assert list(tmp_path.glob("*out*")) == []
