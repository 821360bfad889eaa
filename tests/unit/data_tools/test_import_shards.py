"""data_tools.import_shards on shards written as DFM and MaxDiffusion write them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.compat.proto import tensor_pb2, types_pb2
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor

from data_tools.import_shards import check_imported_latents, import_shards, main
from data_tools.tfrecord import crc32c, masked_crc32c, parse_example, parse_tensor, read_tfrecords
from wands.data.cache.reader import LatentCache
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import TextEncoder
from wands.errors import CacheError, DataError
from wands.variants import variant_of

# diffusers' defaults for the VAE of Wan 2.1
WAN_STD = [
    2.8184,
    1.4541,
    2.3275,
    2.6558,
    1.2196,
    1.7708,
    2.6052,
    2.0743,
    3.2687,
    2.1526,
    2.8652,
    1.5579,
    1.6382,
    1.1253,
    2.8251,
    1.916,
]


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline with the statistics of Wan's own VAE."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_pipeline, folder)
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latents_std": WAN_STD}))
    return folder


def latents(
    seed: int, shape: tuple[int, ...] = (16, 3, 4, 6), contrast: float = 1.0, jitter: float = 0.2
) -> Tensor:
    """Normalized latents of a clip of some contrast."""
    generator = torch.Generator().manual_seed(seed)
    spread = contrast * (jitter * torch.randn(shape[0], 1, 1, 1, generator=generator)).exp()
    shift = 0.3 * torch.randn(shape[0], 1, 1, 1, generator=generator)
    return torch.randn(*shape, generator=generator) * spread + shift


def raw(tensor: Tensor) -> Tensor:
    return tensor * torch.tensor(WAN_STD).view(-1, 1, 1, 1)


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


# ---------------------------------------------------------------- TFRecord


def example_class() -> Any:
    """tf.train.Example, declared as TensorFlow's example.proto and feature.proto do."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> Any:
        made = file.message_type.add(name=name)
        for field_name, number, kind, type_name, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            named = {"type_name": type_name} if type_name else {}
            made.field.add(name=field_name, number=number, type=kind, label=label, **named)
        return made

    message("BytesList", ("value", 1, kinds.TYPE_BYTES, "", True))
    message("FloatList", ("value", 1, kinds.TYPE_FLOAT, "", True))
    message("Int64List", ("value", 1, kinds.TYPE_INT64, "", True))
    lists = [("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List")]
    message("Feature", *[(n, i, kinds.TYPE_MESSAGE, f".t.{t}", False) for n, i, t in lists])
    features = message("Features", ("feature", 1, kinds.TYPE_MESSAGE, ".t.Features.FeatureEntry", True))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=kinds.TYPE_MESSAGE, type_name=".t.Feature", label=kinds.LABEL_OPTIONAL
    )
    message("Example", ("features", 1, kinds.TYPE_MESSAGE, ".t.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


EXAMPLE = example_class()


def serialized(tensor: Tensor) -> bytes:
    """As tf.io.serialize_tensor writes it."""
    kinds = {
        torch.float32: types_pb2.DT_FLOAT,
        torch.float16: types_pb2.DT_HALF,
        torch.bfloat16: types_pb2.DT_BFLOAT16,
    }
    proto = tensor_pb2.TensorProto(dtype=kinds[tensor.dtype])
    for size in tensor.shape:
        proto.tensor_shape.dim.add(size=size)
    proto.tensor_content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return proto.SerializeToString()


def record(tensor: Tensor, text: Tensor, timestep: int | None = None) -> bytes:
    example = EXAMPLE()
    example.features.feature["latents"].bytes_list.value.append(serialized(tensor))
    example.features.feature["encoder_hidden_states"].bytes_list.value.append(serialized(text))
    if timestep is not None:
        example.features.feature["timesteps"].int64_list.value.append(timestep)
    return example.SerializeToString()


def tfrecord(path: Path, records: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)  # TensorBoard's own
        for data in records:
            writer.write(data)
        writer.flush()
    return path


def padded(length: int, width: int, seed: int = 0) -> Tensor:
    text = torch.zeros(512, width)
    text[:length] = torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
    return text


def test_checksum_equals_tensorboards_byte_by_byte() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    rng = np.random.default_rng(0)
    for size in [0, 1, 7, 4095, 4096, 4097, 3 * 4096 + 5]:
        data = rng.bytes(size)
        assert crc32c(data) == pywrap_tensorflow.crc32c(data)
        assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)


def test_maxdiffusion_tfrecords(model: Path, tmp_path: Path) -> None:
    width = json.loads((model / "transformer" / "config.json").read_text())["text_dim"]
    tensors = [latents(i) for i in range(4)]
    texts = [padded(5 + i, width, i) for i in range(4)]
    full = torch.randn(512, width, generator=torch.Generator().manual_seed(7))
    source = tmp_path / "tfrecords"
    tfrecord(
        source / "file_00-2.tfrec", [record(tensors[0], texts[0]), record(tensors[1][None], texts[1][None])]
    )
    tfrecord(
        source / "file_01-4.tfrec",
        [record(tensors[2], texts[2], timestep=125), record(tensors[3].to(torch.bfloat16), full.half())],
    )
    tfrecord(source / "file_02-6.tfrec", [])
    report = import_shards(source, tmp_path / "cache", model)
    assert (report.num_samples, report.rejected) == (4, ())
    cache = LatentCache(tmp_path / "cache", verify=True)
    assert cache.keys == [f"file_00-2/00000{i}" for i in (0, 1)] + [f"file_01-4/00000{i}" for i in (0, 1)]
    assert cache.index.text_lens.tolist() == [5, 6, 7, 512]
    for index, (tensor, text) in enumerate(zip(tensors, [*texts[:3], full.half()], strict=True)):
        sample = cache.read(index)
        assert torch.equal(sample.latents, tensor.to(torch.bfloat16))
        assert torch.equal(sample.text_embeds, text[: len(sample.text_embeds)].to(torch.bfloat16))
        assert not text[len(sample.text_embeds) :].any()
        assert cache.meta(index)["fps"] == 16
    assert cache.fingerprint["settings"]["imported"]["from"] == "maxdiffusion"


def test_unusable_records_say_why(model: Path, tmp_path: Path) -> None:
    width = json.loads((model / "transformer" / "config.json").read_text())["text_dim"]
    tensor = latents(0)
    text = padded(5, width)
    lacking = EXAMPLE()
    integer = EXAMPLE()
    lacking.features.feature["latents"].bytes_list.value.append(serialized(tensor))
    proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_INT32)
    for name in ("latents", "encoder_hidden_states"):
        integer.features.feature[name].bytes_list.value.append(proto.SerializeToString())
    short = EXAMPLE.FromString(record(tensor, text))
    short.features.feature["latents"].bytes_list.value[0] = serialized(tensor)[:-40]
    cases = {
        "": record(tensor, text),
        "no encoder_hidden_states": lacking.SerializeToString(),
        "TensorFlow's type 3": integer.SerializeToString(),
        "text embedding of shape (5, 7)": record(tensor, padded(5, 7)),
        "not finite": record(tensor, text / 0),
        "not valid protobuf": b"\xff" * 50,
        "not normalized": record(raw(tensor), text),
        "not a serialized tensor": short.SerializeToString(),
    }
    path = tfrecord(tmp_path / "file_00-9.tfrec", list(cases.values()))
    report = import_shards(path, tmp_path / "cache", model)
    assert report.num_samples == 1
    reasons = {item.key: item.reason for item in report.rejected}
    assert len(reasons) == len(cases) - 1
    for index, part in enumerate(cases):
        assert part in reasons.get(f"file_00-9/{index:06}", "")


def test_damage_to_a_file_costs_what_it_hits(tmp_path: Path) -> None:
    records = [bytes([i]) * (100 + i) for i in range(4)]
    data = bytearray(tfrecord(tmp_path / "a.tfrec", records).read_bytes())
    second = 16 + 100
    path = tmp_path / "b.tfrec"

    def read(content: bytes) -> list[Any]:
        path.write_bytes(content)
        return [str(r) if isinstance(r, DataError) else r for r in read_tfrecords(path)]

    assert read(bytes(data)) == records
    flipped = data.copy()
    flipped[second + 12 + 5] ^= 1
    assert read(flipped) == [records[0], "checksum of the record is wrong; replace the file", *records[2:]]
    flipped = data.copy()
    flipped[second + 3] ^= 1
    assert read(flipped) == [
        records[0],
        "length of the record is damaged, so the rest of the file cannot be read; replace the file",
    ]
    for cut in (second + 5, second + 12, second + 60):
        found = read(bytes(data[:cut]))
        assert found[0] == records[0]
        assert len(found) == 2
        assert "; " in found[1]
    huge = struct.pack("<Q", 1 << 60)
    assert "ends inside" in read(huge + struct.pack("<I", masked_crc32c(huge)) + b"x")[0]
    assert zlib.crc32(b"123456789") != crc32c(b"123456789")  # another polynomial than zlib's


def test_a_tensor_with_negative_sizes_is_refused() -> None:
    proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=bytes(4))
    for size in (-1, -1):
        proto.tensor_shape.dim.add(size=size)
    with pytest.raises(DataError, match=r"has the shape \[-1, -1\]"):
        parse_tensor(proto.SerializeToString())


def test_damaged_messages_never_crash() -> None:
    whole = record(latents(0, (16, 1, 2, 2)), padded(3, 4)[:3])
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(2000):
        data = bytearray(whole)
        for place in rng.integers(min(len(data), 200), size=int(rng.integers(1, 4))):
            data[place] = rng.integers(256)
        try:
            features = parse_example(bytes(data[: int(rng.integers(1, len(data) + 1))]))
            for value in features.values():
                assert parse_tensor(value).is_floating_point()
            outcomes.add("read")
        except DataError as error:
            outcomes.add("refused" if "; " in str(error) else str(error))
    assert outcomes == {"read", "refused"}
