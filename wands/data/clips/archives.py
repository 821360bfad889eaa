"""Read the clips of tar archives (WebDataset, diffusion-pipe), and store them in files with safe names.

Members with the same folder and the same file name up to the first dot form one sample. Links, devices and names that lead out of
the archive are refused: attackers have used them to overwrite files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from wands.data.clips.file_kinds import explain_content
from wands.data.clips.records import store_clip
from wands.errors import DataError, one_line
from wands.texts import printable

TAR_EXTENSIONS = (".tar", ".tar.gz", ".tgz")
MAX_CAPTION_BYTES = 1 << 20
"""Largest size in bytes of a file with the captions of one clip."""
MAX_LATENT_BYTES = 1 << 30
"""Largest size in bytes of an archive member with the latents of one sample."""

MAX_GROWTH = 100
"""Largest ratio of members to archive in bytes. Compressed zeros and sparse files can exceed it, and fill the disk."""


def is_tar(path: Path) -> bool:
    """Return whether a file name has the extension of a tar archive."""
    return path.name.lower().endswith(TAR_EXTENSIONS)


class _Header(tarfile.TarInfo):
    """Header of a member. An extended header above `MAX_CAPTION_BYTES` bytes fails, because it could fill the memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.size > MAX_CAPTION_BYTES and header.type in b"LKxgX":
            raise tarfile.ReadError(f"a header has {header.size:,} bytes (limit {MAX_CAPTION_BYTES:,})")
        return header


class TarReader:
    """Context manager for an open tar archive.

    Attributes:
        samples: members by sample (path up to the first dot of the file name) and by the rest of the name in lower case ("mp4",
            "txt", "seg.json").
        rejections: (name, reason) of each unusable member, with the name "" for the archive itself.
    """

    def __init__(self, path: Path) -> None:
        """Open an archive and list its members. DataError if it is not a tar archive or cannot be read."""
        self._path = path.absolute()
        try:
            self._tar = tarfile.open(path, "r:*", tarinfo=_Header)  # noqa: SIM115 - closed by __exit__
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            reason = explain_content(path)
            if not reason:  # the text of a ReadError lists the failures of all compression methods
                problem = "no tar header" if isinstance(error, tarfile.ReadError) else one_line(error)
                reason = f"cannot be read as a tar archive ({problem}); copy or pack the archive again"
            raise DataError(f"{path.name} {reason}") from None
        self.rejections: list[tuple[str, str]] = []
        self.samples = self._list()

    def __enter__(self) -> TarReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def read(self, member: tarfile.TarInfo, max_bytes: int = MAX_CAPTION_BYTES) -> bytes:
        """Return the bytes of a regular file. DataError if it has more than `max_bytes` or the archive ends inside it."""
        if member.size > max_bytes:
            raise DataError(f"{member.name} has {member.size:,} bytes, max {max_bytes:,}; remove this member")
        buffer = io.BytesIO()
        self._copy(member, buffer)
        return buffer.getvalue()

    def unpack(self, member: tarfile.TarInfo, folder: Path) -> Path:
        """Copy a regular file to `folder`, and return the new path. An existing copy is kept.

        Its name is a hash of the archive's path, size and modification time, and of the member's position.

        Raises:
            DataError: if the archive ends inside the member.
            CacheError: if the disk is full or not writable.
        """
        status = self._path.stat()
        place = (str(self._path), status.st_size, status.st_mtime_ns, member.offset_data, member.size)
        digest = hashlib.sha256(repr(place).encode("utf-8", "surrogateescape")).hexdigest()
        path = folder.absolute() / f"{digest}{PurePosixPath(member.name).suffix.lower()}"
        store_clip(path, member.size, partial(self._copy, member), f"{member.name} of {self._path}")
        return path

    def _copy(self, member: tarfile.TarInfo, target: IO[bytes]) -> None:
        try:
            source = self._tar.extractfile(member)
            assert source is not None, member.name
            shutil.copyfileobj(source, target, 1 << 20)
        except (EOFError, tarfile.TarError, ValueError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{member.name} cannot be read from {self._path.name} ({one_line(error)}); replace the archive"
            ) from None

    def _list(self) -> dict[str, dict[str, tarfile.TarInfo]]:
        samples: dict[str, dict[str, tarfile.TarInfo]] = {}
        space = MAX_GROWTH * self._path.stat().st_size
        for member in self._members():
            space -= member.size
            if space < 0:
                reason = f"archive unpacks to more than {MAX_GROWTH} times its size, so this and all later files are not read"
                fix = "pack the archive without compression and sparse files"
                self.rejections.append((member.name, f"{reason}; {fix}"))
                break
            name = PurePosixPath(member.name.removeprefix("./"))
            if member.isdir() or any(part.startswith(".") and part != ".." for part in name.parts):
                continue  # hidden files are skipped, as in folders
            if problem := _problem(member):
                self.rejections.append((member.name, problem))
                continue
            stem, _, extension = name.name.partition(".")
            members = samples.setdefault(str(name.with_name(stem)), {})
            if members.setdefault(extension.lower(), member) is not member:
                reason = "another file in the archive has the same name, and the first file is used; remove one of the two"
                self.rejections.append((str(name), reason))
        return samples

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Yield members up to the end mark. If it is missing or the archive is damaged, append the reason to `rejections`.

        `tarfile` alone would treat damage between two members as the end of the archive.
        """
        try:
            while (member := self._tar.next()) is not None:
                yield member
            stream = self._tar.fileobj
            assert stream is not None
            stream.seek(self._tar.offset)
            if stream.read(512) != bytes(512):
                raise EOFError(f"the end mark of a tar archive is missing at byte {self._tar.offset:,}")
        except (OSError, EOFError, tarfile.TarError, ValueError, zlib.error) as error:
            problem = f"archive is damaged or cut off ({one_line(error)})"
            self.rejections.append(("", f"{problem}, and all later files are lost; replace the archive"))


def _problem(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link (to {member.linkname}) in an archive is not followed; store the linked file itself"
    if not member.isreg():
        return "archive member is not a regular file; remove it from the archive"
    if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        return "name of the member leads out of the archive; use a relative name without .."
    if member.name != printable(member.name):
        return "name of the member is not valid UTF-8 or contains control characters; rename the file in the archive"
    return ""
