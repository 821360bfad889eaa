"""Measure how fast samples are read from the latent cache, compared with plain files, safetensors files and WebDataset tars.

    python scripts/bench_cache.py              # 1 GiB of samples in each layout, two minutes, no GPU, no data

All layouts contain the same bf16 tensors: latents of 33 to 81 frames at 480p, text of 20 to 200 tokens. A round reads every
sample once in each layout. The order of the layouts changes from round to round, so that a slower disk affects all layouts. The
table shows the speed in MB/s (median of the rounds), and the speed divided by the speed of the layout `plain` (median, smallest
and largest ratio of a round). Layouts:

plain        one file per shard, one preadv per tensor into new memory, offsets known: the speed of the disk
wands        LatentCache.read
safetensors  one file per sample, safetensors.torch.load_file
tar scanned  WebDataset: a shard is a stream, so a random read also reads everything before the sample. For this reason, a
             round reads only six samples in random order
tar indexed  the same tars, read at the offsets that the script stored when it wrote the tars. WebDataset stores no offsets

`sequential` reads the samples in the order of writing, `random` in a random order. In a `warm` round, all files have been read
before. In a `cold` round, the files of a layout are removed from the page cache before the layout is read (POSIX_FADV_DONTNEED;
the host of a virtual machine may still cache them). In a `cold` round of `wands`, the cache is also opened again. The time to
open the cache is excluded. The first read of a shard then compares the shard with the index. The time of this comparison is
included.

A layout could use memory maps, and return a tensor before its bytes are read from the disk. The program therefore adds up one
number of each memory page of a tensor, so that the measured time includes the reading in every layout.

The first line shows an index of a million samples in shards of 512: the time to open the index (best of five), and the time to
compute the number of tokens of every sample.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from wands.data.cache.format import INDEX_NAME
from wands.data.cache.reader import CacheIndex, CacheWriter, LatentCache
from wands.data.cache.shards import shard_name
from wands.variants import VARIANTS

Pair = tuple[Tensor, Tensor]
PAGE = 4096
PER_SHARD = 64
SCANNED = 6
"""Number of random reads that are timed for tars without an index. It is small because each read scans a tar from its start."""


def make_samples(num_bytes: int, seed: int = 0) -> Iterator[Pair]:
    """Yield random samples until they have `num_bytes` bytes in total: latents bf16 [16, f, h, w], and
    text bf16 [L, 4096] for L text tokens.
    """
    draw = np.random.default_rng(seed)
    while num_bytes > 0:
        frames = int(draw.integers(9, 22))
        height, width = ((60, 104), (104, 60), (78, 80))[draw.integers(3)]
        shapes = (16, frames, height, width), (int(draw.integers(20, 201)), 4096)
        bits = [draw.integers(0, 1 << 16, shape, np.uint16) for shape in shapes]
        num_bytes -= sum(array.nbytes for array in bits)
        latents, text = (torch.from_numpy(array).view(torch.bfloat16) for array in bits)
        yield latents, text


class Plain:
    """Samples in plain binary files, which stay open and are read at known offsets. No layout can be read faster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: list[tuple[int, int, list[torch.Size]]] = []
        self.descriptors: list[int] = []

    def write(self, samples: Iterable[Pair]) -> None:
        file = None
        for i, pair in enumerate(samples):
            if i % PER_SHARD == 0:
                if file:
                    file.close()
                file = (self.folder / f"{i // PER_SHARD:05d}.bin").open("wb")
                self.descriptors.append(os.open(file.name, os.O_RDONLY))
            assert file
            self.places.append((i // PER_SHARD, file.tell(), [tensor.shape for tensor in pair]))
            for tensor in pair:
                file.write(tensor.view(torch.uint16).numpy().tobytes())
        assert file
        file.close()

    def __len__(self) -> int:
        return len(self.places)

    def read(self, i: int) -> Pair:
        shard, offset, shapes = self.places[i]
        tensors = []
        for shape in shapes:
            array = np.empty(shape, np.uint16)
            assert os.preadv(self.descriptors[shard], [array], offset) == array.nbytes
            offset += array.nbytes
            tensors.append(torch.from_numpy(array).view(torch.bfloat16))
        return tensors[0], tensors[1]

    def forget(self) -> None:
        """Forget everything that was stored about the files, before a round that reads with an empty page cache.

        In this class, there is nothing to forget. The subclass `Wands` opens its `LatentCache` again. The new `LatentCache`
        compares each shard with the index at the first read of the shard.
        """

    def sequential(self) -> Iterator[Pair]:
        return self.random(range(len(self)))

    def random(self, order: Sequence[int]) -> Iterator[Pair]:
        return map(self.read, order)


class Wands(Plain):
    """Samples in a latent cache of wands, read with the code that `wands train` uses."""

    def write(self, samples: Iterable[Pair]) -> None:
        with CacheWriter(self.folder, VARIANTS["wan2.1-t2v-1.3b"], {}, max_samples=PER_SHARD) as writer:
            for i, (latents, text) in enumerate(samples):
                meta = {
                    "num_frames": 4 * latents.shape[1] - 3,
                    "fps": 16.0,
                    "content": "",
                    "caption": "A clip.",
                }
                arrays = {"latents": latents, "text_embeds": text}
                writer.add(f"folder/clip {i:06d}", arrays, meta)
            writer.commit(torch.zeros(1, 4096, dtype=torch.bfloat16))
        self.cache = LatentCache(self.folder)

    def __len__(self) -> int:
        return len(self.cache)

    def forget(self) -> None:
        self.cache = LatentCache(self.folder)

    def read(self, i: int) -> Pair:
        sample = self.cache.read(i)
        return sample.latents, sample.text_embeds


class Safetensors(Plain):
    """Layout with one safetensors file per sample."""

    def write(self, samples: Iterable[Pair]) -> None:
        self.count = 0
        for i, (latents, text) in enumerate(samples):
            save_file({"latents": latents, "text_embeds": text}, self.folder / f"{i:06d}.safetensors")
            self.count += 1

    def __len__(self) -> int:
        return self.count

    def read(self, i: int) -> Pair:
        tensors = load_file(self.folder / f"{i:06d}.safetensors")
        return tensors["latents"], tensors["text_embeds"]


class TarScanned(Plain):
    """Samples in WebDataset tars. A random read also reads the whole tar before the sample."""

    def write(self, samples: Iterable[Pair]) -> None:
        self.members: list[tuple[int, int, int]] = []
        tar = None
        for i, (latents, text) in enumerate(samples):
            if i % PER_SHARD == 0:
                if tar:
                    tar.close()
                tar = tarfile.TarFile(self._path(i), "w")
            assert tar
            content = save({"latents": latents, "text_embeds": text})
            member = tarfile.TarInfo(f"{i:06d}.safetensors")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            self.members.append((i, tar.offset - -len(content) // 512 * -512, len(content)))
        assert tar
        tar.close()

    def __len__(self) -> int:
        return len(self.members)

    def sequential(self) -> Iterator[Pair]:
        for i in range(0, len(self), PER_SHARD):
            yield from self._stream(i)

    def read(self, i: int) -> Pair:
        stream = self._stream(i)
        for _ in range(i % PER_SHARD):
            next(stream)
        return next(stream)

    def _path(self, i: int) -> Path:
        return self.folder / f"{i // PER_SHARD:05d}.tar"

    def _stream(self, i: int) -> Iterator[Pair]:
        with tarfile.open(self._path(i), "r|") as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file
                tensors = load(file.read())
                yield tensors["latents"], tensors["text_embeds"]


class TarIndexed(TarScanned):
    """Samples in the tars of `TarScanned`, read at the offsets that `TarScanned.write` stored. WebDataset stores no offsets."""

    def share(self, other: TarScanned) -> None:
        self.members = other.members
        self.descriptors = [os.open(path, os.O_RDONLY) for path in sorted(self.folder.glob("*.tar"))]

    def read(self, i: int) -> Pair:
        _, offset, size = self.members[i]
        tensors = load(os.pread(self.descriptors[i // PER_SHARD], size, offset))
        return tensors["latents"], tensors["text_embeds"]


def open_large(root: Path, num_samples: int) -> tuple[int, float, float]:
    """Write a cache whose index has `num_samples` samples, and measure the time to open the cache.

    To save disk space, all shards are hard links to one small file, and the index repeats the entries of three samples.

    Returns:
        Number of shards, seconds to open the cache, and seconds to compute the number of tokens of every sample.
    """
    with CacheWriter(root, VARIANTS["wan2.1-t2v-1.3b"], {}) as writer:
        for i in range(3):
            meta = {"num_frames": 1, "fps": 16.0, "content": ""}
            arrays = {"latents": torch.zeros(16, 1 + i, 2, 2), "text_embeds": torch.zeros(1, 4096)}
            writer.add(str(i), {name: array.bfloat16() for name, array in arrays.items()}, meta)
        writer.commit(torch.zeros(1, 4096, dtype=torch.bfloat16))
    index = CacheIndex.from_file(root / INDEX_NAME)
    names = [shard_name(i) for i in range(-(-num_samples // 512))]
    for name in names[1:]:
        os.link(root / names[0], root / name)
    many: dict[str, Any] = {
        name: np.resize(value, (num_samples, *value.shape[1:]))
        for name, value in vars(index).items()
        if isinstance(value, np.ndarray) and len(value) == 3
    }
    many |= {
        "keys": tuple(f"folder {i // 10_000:03d}/clip {i:07d}" for i in range(num_samples)),
        "shards": (np.arange(num_samples) // 512).astype(np.int32),
        "shard_names": tuple(names),
        "shard_bytes": np.repeat(index.shard_bytes, len(names)),
        "shard_ids": index.shard_ids * len(names),
    }
    (root / INDEX_NAME).write_bytes(replace(index, **many).to_bytes())
    opened = []
    counted = []
    for _ in range(5):
        began = time.perf_counter()
        cache = LatentCache(root)
        opened.append(time.perf_counter() - began)
        assert len(cache.num_tokens((1, 2, 2))) == len(cache) == num_samples
        counted.append(time.perf_counter() - began - opened[-1])
    return len(names), min(opened), min(counted)


def empty_page_cache(folder: Path) -> None:
    """Remove the files in `folder` from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rate(samples: Iterator[Pair]) -> float:
    """Read all samples of an iterator, and return the speed in MB/s."""
    num_bytes = 0
    total = 0
    started = time.perf_counter()
    for pair in samples:
        for tensor in pair:
            total += int(tensor.view(torch.uint16).numpy().reshape(-1)[:: PAGE // 2].sum())
            num_bytes += tensor.nbytes
    assert total > 0
    return num_bytes / (time.perf_counter() - started) / 1e6


def main() -> None:
    """Measure opening a large index. Then write samples in each file layout, compare the layouts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of each layout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--index", type=int, default=1_000_000, help="samples of the large index")
    parser.add_argument("--dir", type=Path, help="folder for the files (default: a temporary folder)")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench_cache.", dir=options.dir))
    try:
        (root / "large").mkdir()
        shards, opened, counted = open_large(root / "large", options.index)
        print(
            f"index of {options.index:,} samples in {shards:,} shards: opened in {opened:.3f} s, their tokens in "
            f"{counted:.3f} s"
        )
        shutil.rmtree(root / "large")
        run(root, options.mib << 20, options.rounds)
    finally:
        shutil.rmtree(root)


def measure_rates(layouts: dict[str, Plain], rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Read all samples of each layout, in sequence and in random order, with a cold and with a warm page cache.

    Returns:
        Speeds in each round, by (layout, access, state of the page cache).
    """
    order = np.random.default_rng(1).permutation(len(layouts["plain"])).tolist()
    rates: dict[tuple[str, str, str], list[float]] = {}
    cases = itertools.product(("sequential", "random"), ("cold", "warm"), range(rounds))
    for access, state, number in cases:
        names = [*layouts][number % len(layouts) :] + [*layouts][: number % len(layouts)]
        for name, layout in ((name, layouts[name]) for name in names):
            if access == "sequential" and name == "tar indexed":
                continue
            if state == "cold":
                layout.forget()
                empty_page_cache(layout.folder)
            reads: Callable[[], Iterator[Pair]] = layout.sequential
            if access == "random":
                wanted_order = order[:SCANNED] if name == "tar scanned" else order
                reads = lambda layout=layout, o=wanted_order: layout.random(o)  # noqa: E731
            rates.setdefault((name, access, state), []).append(rate(reads()))
    return rates


def print_table(rates: dict[tuple[str, str, str], list[float]], names: list[str]) -> None:
    """Print a line for each layout."""
    for name in names:
        cells = []
        for access in ("sequential", "random"):
            for state in ("cold", "warm"):
                ours = rates.get((name, access, state))
                plain = rates["plain", access, state]
                if ours is None:
                    cells.append("-")
                    continue
                ratios = [a / b for a, b in zip(ours, plain, strict=True)]
                middle = statistics.median(ratios)
                low = min(ratios)
                high = max(ratios)
                cells.append(f"{statistics.median(ours):,.0f} {middle:.2f} ({low:.2f}-{high:.2f})")
        print(f"{name:14}" + "".join(f"{cell:>24}" for cell in cells))


def run(root: Path, num_bytes: int, rounds: int) -> None:
    """Write random samples in every layout to `root`, check that all layouts return equal samples, and print their speeds.

    Args:
        root: empty folder for the files.
        num_bytes: size of the samples in each layout.
        rounds: number of measurements of each layout.
    """
    layouts: dict[str, Plain] = {}
    for name, kind in (("plain", Plain), ("wands", Wands), ("safetensors", Safetensors), ("tar", TarScanned)):
        (root / name).mkdir()
        layouts[name] = kind(root / name)
        layouts[name].write(make_samples(num_bytes))
    indexed = TarIndexed(root / "tar")
    scanned = layouts.pop("tar")
    assert isinstance(scanned, TarScanned)
    indexed.share(scanned)
    layouts |= {"tar scanned": scanned, "tar indexed": indexed}
    count = len(layouts["plain"])
    for i, wanted in enumerate(layouts["plain"].sequential()):
        if i % 16 == 0:
            for name, layout in layouts.items():
                same = (
                    torch.equal(*(t.view(torch.int16) for t in two))
                    for two in zip(wanted, layout.read(i), strict=True)
                )
                assert all(same), (name, i)
    print(
        f"{count} samples, {num_bytes >> 20} MiB a layout, {rounds} rounds; MB/s, ratio to plain (spread)\n"
    )
    print(
        f"{'':14}"
        + "".join(f"{a + ', ' + p:>24}" for a in ("sequential", "random") for p in ("cold", "warm"))
    )
    print_table(measure_rates(layouts, rounds), list(layouts))


if __name__ == "__main__":
    main()
