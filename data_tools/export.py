"""Export a latent cache for other programs: `python -m data_tools.export CACHE OUT --format safetensors|webdataset`.

OUT contains export.manifest, null_text.safetensors (embedding of the empty caption), and a safetensors file for each sample, with
key, caption and other metadata in its header. With webdataset, the files are in tars of about 1 GiB, each with the caption as
.txt and the metadata as .json. `data_tools.import_cache` converts an export to an identical cache.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

from safetensors.torch import save

from data_tools.program import program
from wands.config.base import ARGUMENT, Options
from wands.data.cache.format import disk_error
from wands.data.cache.reader import LatentCache
from wands.errors import ConfigError
from wands.files import publish
from wands.lock import WriterLock
from wands.preprocess.progress import progress
from wands.texts import plural

EXPORT_NAME = "export.manifest"
"""JSON file with the manifest of the cache. Not `.json`, because `datasets.load_dataset` reads every `.json` as rows of data."""
NULL_NAME = "null_text.safetensors"
EXPORT_FORMAT = "wands export"
FORMATS = ("safetensors", "webdataset")
NAME_LENGTH = 150
"""Largest length of a file name without extension, in characters. File systems and tars allow 255 bytes for the whole name."""


def export_cache(path: str | Path, out: str | Path, format: str, max_bytes: int = 1 << 30) -> int:
    """Write every sample of a cache to the new folder `out`, verify their checksums, and return their number.

    A temporary folder is renamed at the end; the next run removes that of a killed run. A tar that has reached `max_bytes` gets
    no further sample, so it can exceed the limit by one sample.

    Raises:
        CacheError: if the cache is damaged or the disk is full.
        ConfigError: if `out` exists.
    """
    assert format in FORMATS, format
    cache = LatentCache(path, verify=True)
    out = Path(out).absolute()
    with WriterLock(out.with_name(f".{out.name}.lock"), f"OUT={out}") as lock:
        if out.exists():
            raise ConfigError(f"OUT={out} exists; pass a new folder.")
        _write(cache, out, format, max_bytes, lock)
    return len(cache)


def _write(cache: LatentCache, out: Path, format: str, max_bytes: int, lock: WriterLock) -> None:
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        manifest = {
            "format": EXPORT_FORMAT,
            "layout": format,
            "num_samples": len(cache),
            "cache": cache.manifest,
        }
        (temporary / EXPORT_NAME).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        (temporary / NULL_NAME).write_bytes(save({"text_embeds": cache.null_text_embeds.contiguous()}))
        with progress("samples", len(cache)) as advance, closing(_Tars(temporary, max_bytes)) as tars:
            for i in range(len(cache)):
                name = file_name(i, cache.keys[i])
                meta = cache.meta(i)
                content = _to_bytes(cache, i)
                if format == "webdataset":
                    metadata = {"key": cache.keys[i], "crc32": f"{cache.index.crc32[i]:08x}", **meta}
                    tars.add(name, content, str(meta.get("caption") or ""), json.dumps(metadata))
                else:
                    (temporary / f"{name}.safetensors").write_bytes(content)
                advance()
        os.sync()
        lock.check()
        publish(temporary, out)
    except OSError as error:
        lock.check()
        shutil.rmtree(temporary, ignore_errors=True)
        raise disk_error(out, cache.num_bytes, error) from None


def file_name(i: int, key: str) -> str:
    """Return the name without extension of sample `i`: `i` and the percent-encoded key, cut to `NAME_LENGTH` characters.

    It contains no dot, because WebDataset treats the text after the first dot as the extension.
    """
    readable = quote(key.encode("utf-8", "surrogateescape"), safe="").replace(".", "%2E")
    return f"{i:08d}-{readable}"[:NAME_LENGTH]


def _to_bytes(cache: LatentCache, i: int) -> bytes:
    sample = cache.read(i)
    header = {
        "key": json.dumps(sample.sample_id),
        "meta": json.dumps(cache.meta(i)),
        "crc32": f"{cache.index.crc32[i]:08x}",
    }
    return save({name: array.contiguous() for name, array in sample.arrays.items()}, header)


class _Tars:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._tar: tarfile.TarFile | None = None
        self._count = 0

    def add(self, name: str, content: bytes, caption: str, metadata: str) -> None:
        if self._tar is None or self._tar.offset >= self._max_bytes:
            self.close()
            path = self._folder / f"shard-{self._count:05d}.tar"
            self._tar = tarfile.TarFile(path, "w", format=tarfile.PAX_FORMAT)
            self._count += 1
        parts = {"safetensors": content, "txt": caption.encode("utf-8", "replace"), "json": metadata.encode()}
        for extension, part in parts.items():
            member = tarfile.TarInfo(f"{name}.{extension}")
            member.size = len(part)
            self._tar.addfile(member, io.BytesIO(part))

    def close(self) -> None:
        if self._tar:
            self._tar.close()


class ExportArguments(Options):
    """Export a latent cache for other programs.

    Examples:
        python -m data_tools.export cache exported --format webdataset
    """

    cache: Annotated[Path, ARGUMENT]
    """Cache folder that `wands preprocess` wrote."""
    out: Annotated[Path, ARGUMENT]
    """New folder for the export."""
    format: Literal["safetensors", "webdataset"]
    """File format: safetensors writes one file per sample, and webdataset writes tars with many samples."""


def _run(options: ExportArguments) -> int:
    count = export_cache(options.cache, options.out, options.format)
    print(f"{options.out}: {plural(count, 'sample')}")
    return 0


main = program(ExportArguments, _run)

if __name__ == "__main__":
    sys.exit(main())
