"""Index of a latent cache: facts about all samples, so that planning need not open the shards."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wands.data.cache.shards import IndexEntry, damage_named, read_shard_id

TEXTS = ("keys", "shard_names", "shard_ids", "license_names")


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """Facts about all samples of a cache, as arrays. Item i of each array of length N belongs to `keys[i]`.

    Attributes:
        keys: sample ids, sorted.
        shard_names: file names of the shards.
        shard_bytes: int64 [shards], sizes of the shards in bytes.
        shard_ids: digests of the shards' contents.
        shards: int32 [N], position in `shard_names` of the shard that contains the sample.
        rows: int32 [N], number of the sample inside its shard.
        latent_shapes: int32 [N, 4], latent (channels, frames, rows, columns).
        text_lens: int32 [N], number of text tokens without padding.
        crc32: uint32 [N], checksum of all arrays of the sample.
        num_frames: int32 [N], number of pixel frames.
        fps: float32 [N], frames per second after resampling.
        offsets: int64 [N, arrays of a sample], position in bytes in the shard at which each array starts.
            With this position, reading does not need HDF5. If any sample has a mask, there is a column for the mask, with 0
            for samples without a mask.
        null_text: uint16 [text tokens, width of the text encoder], bf16 bits of the embedding of "".
        signatures: uint64 [N, 2], bits by which nearly equal videos are found (`wands.data.holdout.signature`). Zeros for
            samples that an earlier version of wands wrote.
        license_names: licences of the clips, each once.
        licenses: int32 [N], position in `license_names` of the licence of the sample; -1 if the source states no licence.
        mask_sums: float64 [N, 2], two sums of token weights for each sample with a mask. The first sum is over all tokens, and
            the second sum is over the tokens of the first latent frame. Zeros for a sample without a mask. The file
            contains this array only if a sample has a mask.
    """

    keys: tuple[str, ...]
    shard_names: tuple[str, ...]
    shard_bytes: np.ndarray
    shards: np.ndarray
    rows: np.ndarray
    latent_shapes: np.ndarray
    text_lens: np.ndarray
    crc32: np.ndarray
    num_frames: np.ndarray
    fps: np.ndarray
    null_text: np.ndarray
    offsets: np.ndarray
    shard_ids: tuple[str, ...]
    signatures: np.ndarray
    license_names: tuple[str, ...]
    licenses: np.ndarray
    mask_sums: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def build(cls, path: Path, entries: Sequence[IndexEntry], null_text: np.ndarray) -> CacheIndex:
        """Build the index of finished shards. The index is sorted by key.

        Args:
            path: cache folder that contains the shards.
            entries: entry of each sample, with its shape, checksum and other facts.
            null_text: uint16 [text tokens, width of the text encoder], bf16 bits of the embedding of "".
        """
        entries = sorted(entries, key=lambda entry: entry.key)
        names = tuple(sorted({entry.shard for entry in entries}))
        number = {name: i for i, name in enumerate(names)}
        width = max((len(entry.offsets) for entry in entries), default=2)
        offsets = [(*entry.offsets, 0)[:width] for entry in entries]
        licenses = {name: i for i, name in enumerate(sorted({entry.license for entry in entries} - {""}))}
        return cls(
            keys=tuple(entry.key for entry in entries),
            shard_names=names,
            shard_bytes=np.array([(path / name).stat().st_size for name in names], np.int64),
            shards=np.array([number[entry.shard] for entry in entries], np.int32),
            rows=np.array([entry.row for entry in entries], np.int32),
            latent_shapes=np.array([entry.latent_shape for entry in entries], np.int32).reshape(-1, 4),
            text_lens=np.array([entry.text_len for entry in entries], np.int32),
            crc32=np.array([entry.crc32 for entry in entries], np.uint32),
            num_frames=np.array([entry.num_frames for entry in entries], np.int32),
            fps=np.array([entry.fps for entry in entries], np.float32),
            null_text=null_text,
            offsets=np.array(offsets, np.int64).reshape(-1, width),
            shard_ids=tuple(read_shard_id(path / name) for name in names),
            signatures=np.array([entry.signature for entry in entries], np.uint64).reshape(-1, 2),
            license_names=tuple(licenses),
            licenses=np.array([licenses.get(entry.license, -1) for entry in entries], np.int32),
            mask_sums=np.array([entry.mask_sums for entry in entries], np.float64).reshape(-1, 2),
        )

    def to_bytes(self) -> bytes:
        """Return the content of `index.npz`. Strings are stored as NUL-separated UTF-8, so that reading does not need
        pickle.
        """
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        if not self.mask_sums.any():
            del arrays["mask_sums"]
        buffer = io.BytesIO()
        arrays |= {name: _join(getattr(self, name)) for name in TEXTS}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> CacheIndex:
        """Read `index.npz`.

        Raises:
            CacheError: if the file is damaged or an array is missing.
        """
        fix = "run the same wands preprocess command again, which rebuilds the index from the shards."
        with damage_named(path, fix), np.load(path, allow_pickle=False) as npz:
            zeros = np.zeros((len(npz["crc32"]), 2), np.uint64)
            # Earlier versions of wands wrote no signatures and no licences. Not all caches have masks.
            arrays = {"signatures": zeros, "mask_sums": zeros.astype(np.float64), **npz}
            arrays = {"licenses": np.full(len(zeros), -1), "license_names": _join(()), **arrays}
            arrays = {name: arrays[name] for name in cls.__dataclass_fields__}
            index = cls(**{**arrays, **{name: _split(arrays[name]) for name in TEXTS}})
            of_samples = arrays.keys() - {*TEXTS, "shard_bytes", "null_text"}
            wrong = [name for name in of_samples if len(arrays[name]) != len(index)]
            if wrong or not len(index.shard_bytes) == len(index.shard_names) == len(index.shard_ids):
                raise ValueError("the cache's index is damaged: its arrays have different lengths")
        return index


def _join(texts: Sequence[str]) -> np.ndarray:
    assert not any("\0" in text for text in texts), "a key cannot contain NUL"
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: np.ndarray) -> tuple[str, ...]:
    text = array.tobytes().decode("utf-8", "surrogateescape")
    return tuple(text.split("\0")) if text else ()
