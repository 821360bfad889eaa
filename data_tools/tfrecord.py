"""Read TFRecord files and their tf.train.Example messages without TensorFlow.

A record is its length (8 bytes), a masked CRC-32C of the length, the data, and a masked CRC-32C of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache, reduce
from operator import xor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE, crc_update
from torch import Tensor

from wands.errors import DataError

_TABLE = np.array(CRC_TABLE, np.uint32)
"""CRC-32C table, [256]. Entry i is the value of a zero CRC register after a byte with the value i."""
_BLOCK = 4096
_DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16}
"""Torch dtypes of the supported numbers of the TensorFlow enum DataType."""


# ---- checksum


@cache
def _skip_tables() -> np.ndarray:
    """Return tables that advance a CRC-32C register over `_BLOCK` zero bytes, uint32 [4, 256].

    The new value is the XOR of entries [i, b], where b is byte i of the old value.
    """
    state = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    for _ in range(_BLOCK):
        state = _TABLE[state & 0xFF] ^ (state >> 8)
    return state


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum of some bytes.

    NumPy processes all blocks of 4096 bytes together, one byte of each at a time, and the checksums of the blocks are then
    combined. A plain loop over all bytes would need minutes for the 28 MB of one sample.
    """
    size = len(data) // _BLOCK * _BLOCK
    crc = 0xFFFFFFFF
    if size:
        columns = np.frombuffer(data, np.uint8, size).reshape(-1, _BLOCK).T.astype(np.uint32)
        blocks = np.zeros(columns.shape[1], np.uint32)
        for column in columns:
            blocks = _TABLE[(blocks ^ column) & 0xFF] ^ (blocks >> 8)
        tables = list(enumerate(_skip_tables().tolist()))
        for block in blocks.tolist():
            crc = reduce(xor, (table[crc >> 8 * byte & 0xFF] for byte, table in tables), block)
    return crc_update(crc ^ 0xFFFFFFFF, data[size:])


def masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C of `data`, as TFRecord files store it: the CRC is rotated, and a constant is added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


# ---- records


def read_tfrecords(path: Path) -> Iterator[bytes | DataError]:
    """Yield the data of each record of a file, or an error in place of a damaged record.

    A damaged or too large length ends the iteration, because the start of the next record is then unknown.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while head := file.read(12):
                length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, 0)
                if len(head) < 12 or masked_crc32c(head[:8]) != checksum:
                    yield DataError(
                        "length of the record is damaged, so the rest of the file cannot be read; replace the file"
                    )
                    return
                if length + 4 > size - file.tell():
                    yield DataError(f"file ends inside the record ({length:,} bytes); replace the file")
                    return
                data = file.read(length)
                (checksum,) = struct.unpack("<I", file.read(4))
                intact = masked_crc32c(data) == checksum
                yield data if intact else DataError("checksum of the record is wrong; replace the file")
    except OSError as error:
        raise DataError(
            f"the shard {path} of SHARDS cannot be read ({error.strerror}); check the path and the permissions of the file"
        ) from None


# ---- messages


def _message_fields(data: bytes) -> list[tuple[int, Any]]:
    """Return (number, int or bytes) of each field of a protobuf message. Raise DataError if the data is none."""
    try:
        # To a message without fields, every field is unknown.
        return [(field.field_number, field.data) for field in UnknownFieldSet(Empty.FromString(data))]
    except DecodeError:
        raise DataError(
            "a record of the TFRecord shard is not valid protobuf; copy the shard again, or set SHARDS to shards of MaxDiffusion"
        ) from None


def _last(data: bytes, number: int) -> bytes | None:
    """Return the last value of the length-delimited field `number` of a protobuf message, or None if it is missing."""
    values = [value for found, value in _message_fields(data) if found == number and isinstance(value, bytes)]
    return values[-1] if values else None


def parse_example(data: bytes) -> dict[str, bytes]:
    """Return the first value of each bytes feature of a serialized tf.train.Example. Features with numbers are left out.

    Raises:
        DataError: if the data is not a tf.train.Example.
    """
    features: dict[str, bytes] = {}
    try:
        for number, entry in _message_fields(_last(data, 1) or b""):  # Example.features.feature, a map
            if number != 1 or not isinstance(entry, bytes):
                continue
            name = _last(entry, 1)
            feature = _last(entry, 2)
            listed = _last(feature, 1) if feature else None  # Feature.bytes_list
            value = next((v for n, v in _message_fields(listed) if n == 1), None) if listed else None
            if name is not None and isinstance(value, bytes):
                features[name.decode()] = value
    except ValueError as error:
        raise DataError(
            f"the record is not a tf.train.Example ({error}); copy the shard again, or set SHARDS to shards of MaxDiffusion"
        ) from None
    return features


def parse_tensor(data: bytes) -> Tensor:
    """Return the tensor of `tf.io.serialize_tensor` in its stored dtype.

    Raises:
        DataError: if the data is no such tensor, or its dtype is not in `_DTYPES`, or its size does not fit its shape.
    """
    try:
        proto = TensorProto.FromString(data)
    except DecodeError as error:
        raise DataError(
            f"an array of the record is not a serialized tensor ({error}); copy the shard again, or set SHARDS to "
            "shards that MaxDiffusion wrote"
        ) from None
    kind = proto.dtype
    shape = [size.size for size in proto.tensor_shape.dim]
    content = proto.tensor_content
    if kind not in _DTYPES:
        raise DataError(
            f"an array of the record has TensorFlow's type {kind}, not a float; set SHARDS to shards that MaxDiffusion wrote"
        )
    wanted = int(np.prod(shape, dtype=object)) * _DTYPES[kind].itemsize
    if wanted != len(content) or not content or min(shape, default=0) < 0:
        raise DataError(
            f"an array of the record has the shape {shape}, which does not fit its {len(content):,} bytes; copy the shard again"
        )
    return torch.frombuffer(bytearray(content), dtype=_DTYPES[kind]).reshape(shape)
