"""What lies in the folder where the workers of a `wands preprocess` meet, `.work` of the cache.

    run.json                       model, settings
    captions.jsonl  clips.jsonl    the pieces of work, one on each line
    captions.claims clips.claims   which of them are taken and done
    clips.marks                    which clips were in hand when a process ended
    text-0.journal samples-0.journal rejects-0.jsonl worker-0.json     what worker 0 has made

A piece is marked as done once its result is in such a file: a process that is killed loses what it had in hand, no more.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

WORK_NAME = ".work"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNTOUCHED, BEGUN, IN_ENCODER = 0, 1, 2
"""Marks of a clip; IN_ENCODER only of one that had been in hand before when a process ended."""


@dataclass(frozen=True)
class Row:
    """A row of the source: one of the captions of a clip.

    Attributes:
        key: of its sample; `wands.data.clips.clip` says which suffixes a window or a further size adds.
        caption: cleaned.
        content: digest of all that the sample is made from.
        present: suffixes of its samples that are in the cache.
    """

    key: str
    caption: str
    content: str
    present: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clip:
    """A piece of work: a range of a file with every row that wants it, so that it is decoded and encoded once.

    Attributes:
        path: the file.
        start: seconds, None for the beginning.
        end: seconds, None for the end.
        video: digest of what its latents are made from.
        rows: those that lack a sample.
        latents: (shard, row of the shard, suffix) of latents that the cache has with another caption or name,
            and that a row lacks.
        decode: there is more than these.
    """

    path: str
    start: float | None
    end: float | None
    video: str
    rows: tuple[Row, ...]
    latents: tuple[tuple[str, int, str], ...] = ()
    decode: bool = True

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Clip:
        """Inverse of `to_json`."""
        rows = tuple(Row(**row | {"present": tuple(row["present"])}) for row in value["rows"])
        latents = tuple((shard, place, suffix) for shard, place, suffix in value["latents"])
        return cls(**value | {"rows": rows, "latents": latents})

    def lacks(self, suffix: str) -> list[Row]:
        """The rows that have no sample with this suffix."""
        return [row for row in self.rows if suffix not in row.present]


@dataclass(frozen=True)
class Run:
    """What the workers of a run are told, `run.json`.

    Attributes:
        token: of the run; nothing is done for one that is over.
        model: diffusers pipeline folder or Hub id.
        clip: fields of the `ClipSpec`.
        more_pixels: further bounds of a frame's area, each a further sample of every clip.
        text_dtype: of UMT5.
        vae_dtype: of the VAE.
        vae_tiling: whether frames are encoded in tiles.
        digest: of the cache's fingerprint.
        max_samples: of a shard.
        needs_vae: whether any clip is to be decoded.
        conditions: of the variant.
    """

    token: str
    model: str
    clip: dict[str, Any]
    more_pixels: tuple[int, ...] = ()
    text_dtype: Literal["bf16", "fp32"] = "bf16"
    vae_dtype: Literal["bf16", "fp32"] = "fp32"
    vae_tiling: bool = False
    digest: str = ""
    max_samples: int = 512
    needs_vae: bool = True
    conditions: tuple[str, ...] = ("text",)

    def write(self, work: Path) -> None:
        """Write the file; OSError as the system raises it."""
        (work / "run.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, work: Path) -> Run:
        """Read the file."""
        value = json.loads((work / "run.json").read_text())
        lists = {name: tuple(value[name]) for name in ("more_pixels", "conditions")}
        return cls(**value | lists)


@dataclass
class WorkerStats:
    """What a worker tells of itself at its end.

    Attributes:
        num_windows: encoded by it.
        waited: seconds that its encoder stood still for a clip to be decoded.
        worked: seconds that it encoded and stored.
        error: the mistake that ended it early.
    """

    num_windows: int = 0
    waited: float = 0.0
    worked: float = 0.0
    error: str | None = None

    def write(self, work: Path, slot: int) -> None:
        """Leave it for the leader."""
        (work / f"worker-{slot}.json").write_text(json.dumps(asdict(self)))


class Lines:
    """The JSON values of a file, one on each line, read when asked for. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Find the lines."""
        self._file, self._mutex = path.open("rb"), threading.Lock()
        self._offsets = array("q", [0])
        for line in self._file:
            self._offsets.append(self._offsets[-1] + len(line))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Any:
        with self._mutex:
            self._file.seek(self._offsets[number])
            return json.loads(self._file.readline())


class Marks:
    """A byte for each clip, which stays when the process that wrote it ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Open the file; the process keeps it open."""
        self._file = path.open("r+b", buffering=0)

    @staticmethod
    def create(path: Path, marks: bytes) -> None:
        """Make the file anew."""
        path.write_bytes(marks)

    def __getitem__(self, number: int) -> int:
        return (os.pread(self._file.fileno(), 1, number) or bytes(1))[0]

    def __setitem__(self, number: int, mark: int) -> None:
        os.pwrite(self._file.fileno(), bytes([mark]), number)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
