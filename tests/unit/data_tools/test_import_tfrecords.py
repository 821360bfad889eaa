"""Import of TFRecords: records, checksums, damage."""

from __future__ import annotations

import json
import struct
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

from data_tools.import_shards import import_shards
from data_tools.tfrecord import crc32c, masked_crc32c, parse_example, parse_tensor, read_tfrecords
from tests.support.shard_samples import latents, model, raw
from wands.data.cache.reader import LatentCache
from wands.errors import DataError

__all__ = ["model"]  # fixtures


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
