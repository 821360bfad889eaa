"""data_tools.import_shards on shards written as DFM and MaxDiffusion write them."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from data_tools.import_shards import check_imported_latents, import_shards, main
from tests.support.shard_samples import WAN_STD, latents, model, raw
from wands.data.cache.reader import LatentCache
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import TextEncoder
from wands.errors import CacheError, DataError
from wands.variants import variant_of

__all__ = ["model"]  # fixtures


def side_info(caption: str, **changes: Any) -> dict[str, Any]:
    """The .json of DFM's prepare_dataset_wan.py."""
    return {
        "video_path": "/data/clips/a.mp4",
        "processed_frames": 9,
        "processed_height": 32,
        "processed_width": 48,
        "caption": caption,
        "deterministic_latents": True,
        "memory_optimization": True,
        "model_version": "wan2.1",
        "resize_settings": {"target_size": None, "resize_mode": "bilinear"},
    } | changes


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def energon(path: Path, samples: list[dict[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for index, sample in enumerate(samples):
            for extension, data in sample.items():
                info = tarfile.TarInfo(f"{index:06}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def energon_sample(tensor: Any, caption: str = "A cat.", **changes: Any) -> dict[str, bytes]:
    text = torch.zeros(226, 32, dtype=torch.float16)
    return {
        "json": json.dumps(side_info(caption, **changes)).encode(),
        "pickle": pickle.dumps(text),
        "pth": saved(tensor),
    }


def test_energon_shards(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "shards"
    (source / ".nv-meta").mkdir(parents=True)
    tensors = [latents(seed).half() for seed in range(4)]
    captions = ["A cat.", "A dog &amp; a man.", "A cat.", "Rain."]
    made = [energon_sample(t, c) for t, c in zip(tensors, captions, strict=True)]
    energon(source / "shard-rank00-000000.tar", made[:3])
    energon(source / "shard-rank01-000000.tar", made[3:])
    out = tmp_path / "cache"
    arguments = [str(source), "--model", str(model), "--out", str(out), "--fps", "24"]
    assert main(arguments) == 0
    assert "4 samples\n0 rejected" in capsys.readouterr().out

    cache = LatentCache(out, verify=True)
    encoder = TextEncoder.load(model)
    assert cache.keys == [f"shard-rank00-000000/00000{i}" for i in range(3)] + ["shard-rank01-000000/000000"]
    for index in range(4):
        sample = cache.read(index)
        meta = cache.meta(index)
        assert torch.equal(sample.latents, tensors[index].to(torch.bfloat16))
        assert torch.equal(sample.text_embeds, encoder.encode(captions[index]))
        assert (meta["num_frames"], meta["height"], meta["width"], meta["fps"]) == (9, 32, 48, 24)
    assert cache.meta(1)["caption"] == "A dog & a man."
    assert torch.equal(cache.null_text_embeds, encoder.encode(""))
    variant = variant_of(json.loads((model / "transformer" / "config.json").read_text()))
    cache.check_fits(variant, fingerprint_pipeline(model))
    assert cache.fingerprint["settings"]["imported"] == {
        "from": "energon",
        "posterior": "mean",
        "vae_tiling": True,
    }

    energon(source / "shard-rank01-000000.tar", [*made[3:], energon_sample(latents(9), "New.")])
    assert main(arguments) == 0
    assert "5 samples, 4 of them from an earlier run" in capsys.readouterr().out
    assert len(LatentCache(out, verify=True)) == 5


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_run(model: Path, tmp_path: Path) -> None:
    traps = [tmp_path / f"trap{i}" for i in range(4)]
    good = energon_sample(latents(0))
    energon(
        tmp_path / "shards/a.tar",
        [
            good | {"pickle": pickle.dumps(Evil(traps[0]))},
            good | {"pth": pickle.dumps(Evil(traps[1]))},
            good | {"pth": saved(Evil(traps[2]))},
            good | {"pth": saved({"latents": Evil(traps[3])})},
        ],
    )
    report = import_shards(tmp_path / "shards", tmp_path / "cache", model)
    assert report.num_samples == 1  # the first: its pickle is not looked at
    assert [item.key for item in report.rejected] == [f"a/00000{i}" for i in (1, 2, 3)]
    assert all("not a plain tensor" in item.reason for item in report.rejected)
    assert not any(trap.exists() for trap in traps)
    torch.load(io.BytesIO(saved(Evil(traps[2]))), weights_only=False)
    assert traps[2].exists()  # the traps do spring when loaded the common way


def test_unusable_samples_say_why(model: Path, tmp_path: Path) -> None:
    good = latents(0)
    nan = good.clone()
    nan[0, 0, 0, 0] = float("nan")
    flat = good.clone()
    flat[3] = 1
    samples = {
        "": energon_sample(good),
        "not [16, frames": energon_sample(latents(1, (48, 3, 4, 6))),
        "not multiples of patch_size": energon_sample(latents(1, (16, 3, 5, 6))),
        "not finite": energon_sample(nan),
        "constant in a channel": energon_sample(flat),
        "not normalized": energon_sample(raw(good)),
        "missing caption": energon_sample(good, " "),
        "the caption in the sample's .json file must be text": energon_sample(good, caption=3),  # type: ignore[arg-type]
        "model_version=wan2.2": energon_sample(good, model_version="wan2.2"),
        "'posterior': 'sample'": energon_sample(good, deterministic_latents=False),
        "'vae_tiling': False": energon_sample(good, memory_optimization=False),
        "no .pth": {k: v for k, v in energon_sample(good).items() if k != "pth"},
        "no .json": {k: v for k, v in energon_sample(good).items() if k != "json"},
        ".json file cannot be read": energon_sample(good) | {"json": b"{"},
        "does not contain a JSON object": energon_sample(good) | {"json": b"[]"},
        "contains a list": energon_sample([good]),
    }
    path = energon(tmp_path / "shards/a.tar", list(samples.values()))
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    path.write_bytes(path.read_bytes()[: last.offset_data + (last.size + 511) // 512 * 512])  # no end mark
    report = import_shards(tmp_path / "shards", tmp_path / "cache", model)
    assert report.num_samples == 1
    reasons = {item.key: item.reason for item in report.rejected}
    for index, part in enumerate(samples):
        if part:
            assert part in reasons.pop(f"a/{index:06}"), part
    assert list(reasons) == ["a.tar"]
    assert "damaged or cut off" in reasons["a.tar"]
    lines = (tmp_path / "cache/rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == [item.reason for item in report.rejected]


@pytest.mark.parametrize("name", ["empty", "gone", "both", "hopeless"])
def test_sources_without_a_sample(
    model: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    energon(tmp_path / "both/a.tar", [energon_sample(latents(0))])
    (tmp_path / "both/a.tfrec").touch()
    energon(tmp_path / "hopeless/a.tar", [energon_sample(raw(latents(0)))])
    assert main([str(tmp_path / name), "--model", str(model), "--out", str(tmp_path / "cache")]) == 2
    part = {"empty": "looked for .tar", "gone": "no such folder", "both": "both tars and TFRecords"}
    assert (
        part.get(name, "no usable sample: 1 rejected (first: latents are not normalized: the channels")
        in capsys.readouterr().err
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("options", [["--device", "nonsense"], ["--model", "gone"]])
def test_options_that_cannot_be(
    model: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    energon(tmp_path / "a.tar", [energon_sample(latents(0))])
    arguments = [str(tmp_path / "a.tar"), "--model", str(model), "--out", str(tmp_path / "cache")]
    assert main([*arguments, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {' '.join(options)} " if "--device" in options else "error: model=")
    assert error.count("\n") == 1
    assert main([*arguments, "--fps", "0"]) == 2
    assert "Invalid value for '--fps'" in capsys.readouterr().err


def test_another_encoding_is_another_cache(model: Path, tmp_path: Path) -> None:
    for name, tiling in (("a", True), ("b", False)):
        energon(tmp_path / f"{name}.tar", [energon_sample(latents(0), memory_optimization=tiling)])
    import_shards(tmp_path / "a.tar", tmp_path / "cache", model)
    with pytest.raises(CacheError, match="vae_tiling"):
        import_shards(tmp_path / "b.tar", tmp_path / "cache", model)


@pytest.mark.parametrize("contrast", [0.4, 0.6, 1.0, 1.4])
def test_normalization_is_told_from_the_profile(model: Path, contrast: float) -> None:
    """Also where DFM's own rule (no normalization if 0.5 < std < 2) leaves latents as they are."""
    variant = variant_of(json.loads((model / "transformer" / "config.json").read_text()))
    std = torch.tensor(WAN_STD)
    refused = 0
    for seed in range(100):
        tensor = latents(seed, (16, 3, 8, 8), contrast)
        check_imported_latents(tensor, variant, std)
        try:
            check_imported_latents(raw(tensor), variant, std)
        except DataError:
            refused += 1
    assert refused >= 97
