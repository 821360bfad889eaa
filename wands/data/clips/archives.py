"""Tar archives of clips (WebDataset, diffusion-pipe) read in place: nothing is ever unpacked by a member's name.

A sample is all members of one folder that share their name up to the first dot. Links, devices and names that
lead out of the archive are refused: they are of no use in a data set, and elsewhere they have overwritten files.
"""

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from wands.errors import CacheError, DataError

TAR_EXTENSIONS = (".tar", ".tar.gz", ".tgz")


@dataclass
class TarSample:
    """Members that belong together.

    Attributes:
        key: their common name: folder and file name up to the first dot.
        members: by what follows that dot, in lower case ("mp4", "txt", "seg.json").
    """

    key: str
    members: dict[str, tarfile.TarInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A member, or the archive (empty name), that cannot be used, and why."""

    name: str
    reason: str


class TarReader:
    """An open archive: its samples, and the bytes of their members. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open and list an archive.

        Raises:
            DataError: it is no tar archive or cannot be read at all.
        """
        self._path = path.absolute()
        try:
            self._tar = tarfile.open(path, "r:*")  # noqa: SIM115 - closed by __exit__
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise DataError(f"is no tar archive that can be read ({_brief(error)}); replace it") from None
        self.refusals: list[Refusal] = []
        self.samples: list[TarSample] = []
        self._list()

    def __enter__(self) -> "TarReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def read(self, member: tarfile.TarInfo) -> bytes:
        """The bytes of a regular member.

        Raises:
            DataError: the archive ends inside it.
        """
        buffer = io.BytesIO()
        self._copy(member, buffer)
        return buffer.getvalue()

    def unpack(self, member: tarfile.TarInfo, folder: Path) -> Path:
        """Copy a regular member to a file that is named by its place, unless it is there already.

        By place, not by content: a later run does not read the archives again to find out what it has.

        Returns:
            The file, in ``folder`` itself.

        Raises:
            DataError: the archive ends inside it.
            CacheError: the disk is full or refuses.
        """
        status = self._path.stat()
        place = (str(self._path), status.st_size, status.st_mtime_ns, member.offset_data, member.size)
        digest = hashlib.sha256(repr(place).encode("utf-8", "surrogateescape")).hexdigest()
        path = folder.absolute() / f"{digest}{PurePosixPath(member.name).suffix.lower()}"
        if path.is_file() and path.stat().st_size == member.size:
            return path
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                self._copy(member, file)
            os.replace(partial, path)
        except OSError as error:
            raise CacheError(
                f"{folder} cannot take {member.name} of {self._path} ({error.strerror or error}: {member.size:,} bytes); "
                "free some space, or name another disk with HF_DATASETS_CACHE"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
        return path

    def _copy(self, member: tarfile.TarInfo, target: IO[bytes]) -> None:
        size = 0
        try:
            source = self._tar.extractfile(member)
            assert source is not None, member.name
            while block := source.read(1 << 20):
                size += len(block)
                target.write(block)
        except (EOFError, tarfile.TarError, ValueError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"cannot be read from its archive ({_brief(error)}); replace the archive"
            ) from None
        if size != member.size:
            raise DataError(f"is cut off in its archive ({size:,} of {member.size:,} bytes); replace it")

    def _list(self) -> None:
        samples: dict[str, TarSample] = {}
        for member in self._members():
            name = member.name.removeprefix("./")
            parts = PurePosixPath(name).parts
            if member.isdir() or any(part.startswith(".") and part != ".." for part in parts):
                continue  # hidden, as in folders
            if problem := _problem(member):
                self.refusals.append(Refusal(member.name, problem))
                continue
            stem, _, extension = PurePosixPath(name).name.partition(".")
            key = str(PurePosixPath(name).with_name(stem))
            sample = samples.setdefault(key, TarSample(key))
            if extension.lower() in sample.members:
                self.refusals.append(
                    Refusal(name, "another member has the same name; the first counts, remove one")
                )
            else:
                sample.members[extension.lower()] = member
        self.samples = list(samples.values())

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Members up to the end mark; `tarfile` itself takes damage between two members for the end."""
        try:
            while (member := self._tar.next()) is not None:
                yield member
            stream = self._tar.fileobj
            assert stream is not None
            stream.seek(self._tar.offset)
            whole = stream.read(512) == bytes(512)
            problem = "" if whole else f"no end mark at byte {self._tar.offset:,}"
        except (OSError, EOFError, tarfile.TarError, ValueError, zlib.error) as error:
            problem = _brief(error)
        if problem:
            self.refusals.append(
                Refusal("", f"archive is damaged or cut off ({problem}); what follows is lost, replace it")
            )


def _problem(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link (to {member.linkname}) in an archive is not followed; store the file itself"
    if not member.isreg():
        return "no regular file; remove it from the archive"
    if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        return "its name leads out of the archive; store it under a relative name without .."
    if member.name != member.name.encode("utf-8", "replace").decode("utf-8"):
        return "member name is not valid UTF-8; rename it"
    return ""


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
