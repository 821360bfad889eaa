"""Clips in folders and tars, each with its caption in a file beside it; what lies there and is neither is told of."""

import json
import os
import re
import unicodedata
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.clips.archives import TAR_EXTENSIONS, TarReader, TarSample
from wands.data.clips.hf_dataset import clips_dir
from wands.data.clips.records import (
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    Scan,
    check_captions,
    check_file,
    clip_key,
    read_range,
    safe_name,
)
from wands.data.clips.tables import Columns
from wands.errors import DataError

# diffusion-pipe: the folder is the data set, this file has its captions.
CAPTIONS_OF_FOLDER = "captions.json"
VIDEO_LINES = ("videos.txt", "video.txt")  # finetrainers
CAPTION_LINES = ("prompts.txt", "captions.txt", "prompt.txt", "caption.txt")
# Beside a clip; the first that is there counts.
_SIDECARS = (".txt", ".json", ".jsonl")
# What people have among their clips, too, and would miss without a word.
# fmt: off
_UNREAD_VIDEOS = (
    ".3g2", ".asf", ".divx", ".dv", ".f4v", ".h264", ".hevc", ".m1v", ".m2t", ".m2v",
    ".mpe", ".mpv", ".mxf", ".nut", ".ogm", ".qt", ".rm", ".rmvb", ".vob", ".y4m",
)
_UNREAD_IMAGES = (".apng", ".avif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".tif", ".tiff")
# fmt: on
# Texts that lie among clips and are no captions.
_DOCUMENT = re.compile(
    r"(readme|licen[cs]e|copying|copyright|notice)([^a-z0-9].*)?|"
    r"terms|change(s|log)|credits?|authors?|attribution|citation|requirements|todo|notes?|info|about|log|config|"
    r"classes|tags|(file_?)?list|files|urls|links|sources?|metadata|train|test|val(id(ation)?)?",
    re.IGNORECASE | re.DOTALL,
)
_MOST_BYTES_OF_CAPTION = 1 << 20


def scan_folder(folder: Path, columns: Columns, cache_dir: Path | None, scan: Scan) -> int:
    """Add the clips of a folder with the captions beside them, and those of archives in it.

    Returns:
        The number of clips and archives, usable or not.
    """
    found = 0
    for root, files in walk(folder, scan):
        stems: dict[str, list[str]] = {}
        for file in files:
            stems.setdefault(PurePosixPath(file).stem, []).append(file)
        found += _reject_unread(root, folder, stems, columns, scan)
        for file in files:
            path = root / file
            if file.lower().endswith(TAR_EXTENSIONS):
                found += 1
                scan_tar(path, folder, columns, {}, cache_dir, scan)
            if not file.lower().endswith(CLIP_EXTENSIONS):
                continue
            found += 1
            name = path.relative_to(folder).as_posix()
            beside = stems[path.stem]
            try:
                check_file(name, path)
                if clip := _clip_of_poster(file, beside):
                    raise DataError(f"taken for the poster of {clip}; rename it if it is a clip of its own")
                written, captions, row = _read_sidecar(path, beside, columns)
                scan.add(written, name, path, captions, read_range(row, path))
            except DataError as error:
                scan.reject(clip_key(name), path, str(error))
    return found


def walk(folder: Path, scan: Scan) -> Iterator[tuple[Path, list[str]]]:
    """Folders in sorted order with their visible files; each real folder once, so that links cannot loop."""
    seen: set[tuple[int, int]] = set()

    def unreadable(error: OSError) -> None:
        name = os.path.relpath(error.filename, folder)
        scan.reject(name, error.filename, f"folder cannot be read ({error.strerror}); mend its permissions")

    for root, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(root), sorted(name for name in files if not name.startswith("."))


def _clip_of_poster(file: str, beside: list[str]) -> str | None:
    """The video among the files of an image's stem: a caption there is the video's."""
    if not file.lower().endswith(IMAGE_EXTENSIONS):
        return None
    stem, caption = PurePosixPath(file).stem, _sidecar_of(beside)
    if caption and not PurePosixPath(caption).suffix.islower():  # a camera's: CLIP.MP4 CLIP.JPG CLIP.TXT
        return next((name for name in beside if name.lower().endswith(VIDEO_EXTENSIONS)), None)
    return next((stem + extension for extension in VIDEO_EXTENSIONS if stem + extension in beside), None)


def _sidecar_of(beside: list[str]) -> str | None:
    """Which of the files of one stem has its captions: the first of _SIDECARS, then in capital letters too."""
    endings = [PurePosixPath(name).suffix for name in beside]
    for written in (endings, [ending.lower() for ending in endings]):
        for ending in _SIDECARS:
            if ending in written:
                return beside[written.index(ending)]
    return None


def _reject_unread(
    root: Path, folder: Path, stems: dict[str, list[str]], columns: Columns, scan: Scan
) -> int:
    """Tell of clips of kinds that are not read, and of captions whose clip is missing.

    A text alone is not told of where no clip has its caption beside it, nor one that is named like a document.

    Returns:
        The number of files of kinds that are known not to be read.
    """
    clips = {
        stem for stem, files in stems.items() if any(file.lower().endswith(CLIP_EXTENSIONS) for file in files)
    }
    paired = any(_sidecar_of(stems[stem]) for stem in clips)
    count = 0
    for stem, files in stems.items():
        sidecar = None if stem in clips else _sidecar_of(files)
        captioned = sidecar is not None and _may_be_caption(root / sidecar, columns)
        told = False
        for file in files:
            kind = PurePosixPath(file).suffix.lower()
            if kind in (*CLIP_EXTENSIONS, *_SIDECARS) or file.lower().endswith(TAR_EXTENSIONS):
                continue
            name = (root / file).relative_to(folder).as_posix()
            known = kind in _UNREAD_VIDEOS or kind in _UNREAD_IMAGES
            if known or captioned:
                wanted = ".png" if kind in _UNREAD_IMAGES else ".mp4" if known else ".mp4 or .png"
                what = f"{kind} files are not read" if kind else "a file without an extension is not read"
                of_caption = f", though {sidecar} has a caption" if captioned else ""
                key = safe_name(name) if stem in clips else clip_key(name)
                scan.reject(key, root / file, f"{what}{of_caption}; convert it to {wanted}")
                count, told = count + known, True
        if captioned and sidecar and paired and not told and not _belongs_to_another(stem, clips):
            name = (root / sidecar).relative_to(folder).as_posix()
            reason = f"no clip of its name lies beside it; add {stem}.mp4, or remove the text"
            scan.reject(safe_name(name), root / sidecar, reason)
    return count


def _may_be_caption(file: Path, columns: Columns) -> bool:
    """Whether a text without a clip looks like the caption of one: no document, and no JSON of another kind."""
    if _DOCUMENT.fullmatch(file.stem) or file.name.lower() in (*VIDEO_LINES, *CAPTION_LINES):
        return False
    if file.suffix.lower() == ".txt":
        return True
    try:
        if file.suffix.lower() == ".jsonl" or not file.is_file():
            return False
        if file.stat().st_size > _MOST_BYTES_OF_CAPTION:
            return False
        return bool(_caption_in_file(file.name, file.read_bytes(), columns)[0])
    except (OSError, DataError):
        return False


def _belongs_to_another(stem: str, clips: set[str]) -> bool:
    """Whether a text is one more of some clip: clip.tags.txt of clip.mp4, clip.mp4.txt of clip.mp4."""
    parts = stem.split(".")
    return any(".".join(parts[:end]) in clips for end in range(1, len(parts)))


def _read_sidecar(clip: Path, beside: list[str], columns: Columns) -> tuple[str, list[str], dict[str, Any]]:
    """Read the captions in a file ``beside`` a clip, of the same stem; see `_sidecar_of`. Of a .jsonl the first line.

    Returns:
        The file's name, the captions in it, and the JSON object they stand in.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    name = _sidecar_of(beside)
    if name is None:
        raise DataError(f"missing caption; write one in {clip.stem}.txt or {clip.stem}.json beside it")
    file = clip.with_name(name)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file.name} cannot be read ({error}); save it as UTF-8 text") from error
    return file.name, *_caption_in_file(file.name, data, columns)


def _caption_in_file(name: str, data: bytes, columns: Columns) -> tuple[list[str], dict[str, Any]]:
    """The captions in a file of one clip, and the JSON object they stand in.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    row: dict[str, Any] = {}
    try:
        value: Any = data.decode("utf-8-sig")
        kind = PurePosixPath(name).suffix.lower()
        if kind in (".json", ".jsonl"):
            value = json.loads(value.strip().split("\n")[0] if kind == ".jsonl" else value)
            if not isinstance(value, dict):
                raise DataError(f"{name} holds a {type(value).__name__}; write an object with a caption")
            row = {str(key).lower(): item for key, item in value.items()}
            value = columns.pick_caption(row)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise DataError(f"{name} cannot be read ({error}); save it as UTF-8 text") from error
    return check_captions(value, name), row


def as_written(name: str, captions: Container[str], present: Container[str]) -> str | None:
    """How captions.json writes a name; see `locate`. What other names are ``present`` are no writing of this one."""
    others = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    if name in captions:
        return name
    return next((other for other in others if other in captions and other not in present), None)


def scan_tar(
    archive: Path,
    folder: Path,
    columns: Columns,
    captions: dict[str, Any],
    cache_dir: Path | None,
    scan: Scan,
) -> set[str]:
    """Add the clips of an archive that lies in ``folder``.

    Args:
        archive: the tar.
        folder: of the source.
        columns: of the .json of a sample.
        captions: by member name; they count before those in the archive.
        cache_dir: where clips are written.
        scan: to add to.

    Returns:
        The names in ``captions`` that were met.
    """
    place = archive.relative_to(folder).as_posix()
    base = next(place[: -len(end)] for end in TAR_EXTENSIONS if place.lower().endswith(end))
    met: set[str] = set()
    try:
        with TarReader(archive) as reader:
            for sample in reader.samples:
                key = f"{base}/{sample.key}"
                try:
                    (extension, video), *others = _clips_of_sample(sample)
                    for _, other in others:
                        reason = f"beside {video.name} of the same key, which counts; give it another name"
                        scan.reject(f"{place}:{other.name}", place, reason)
                    written = video.name.removeprefix("./")
                    where = f"{place}:{written}"
                    row: dict[str, Any] = {}
                    listed = as_written(written, captions, ())
                    if listed is not None:
                        met.add(listed)
                        texts = check_captions(captions[listed], CAPTIONS_OF_FOLDER)
                    else:
                        texts, row = _caption_of_sample(reader, sample, extension, columns)
                    path = reader.unpack(video, clips_dir(cache_dir))
                    scan.add(where, f"{key}.{extension}", path, texts, read_range(row, path))
                except DataError as error:
                    scan.reject(safe_name(key), place, str(error))
            for refusal in reader.refusals:
                scan.reject(f"{place}:{refusal.name}".rstrip(":"), place, refusal.reason)
    except DataError as error:
        scan.reject(place, archive, str(error))
    return met


def _clips_of_sample(sample: TarSample) -> list[tuple[str, Any]]:
    """Extension and member of a sample's videos, then its images; the first is the clip.

    Raises:
        DataError: it has none.
    """
    members = sorted(sample.members.items(), key=lambda item: (len(item[0]), item[0]))
    clips = [
        (extension, member)
        for known in (VIDEO_EXTENSIONS, IMAGE_EXTENSIONS)
        for extension, member in members
        if f".{extension}".endswith(known)
    ]
    if clips:
        return clips
    found = ", ".join(sorted(sample.members))
    if "pth" in sample.members:
        raise DataError(f"holds latents ({found}), no clip; python -m data_tools.import_shards reads them")
    raise DataError(f"no clip among its members ({found}); add one, or remove the sample")


def _caption_of_sample(
    reader: TarReader, sample: TarSample, clip: str, columns: Columns
) -> tuple[list[str], dict[str, Any]]:
    """Captions beside the member with extension ``clip``: .txt, .caption, .json; and the object of a .json.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    inner = clip.rpartition(".")[0]  # wds takes "1.0.mp4" for key 1 and extension 0.mp4
    for ending in ("txt", "caption", "json"):
        for extension in (f"{inner}.{ending}".strip("."), ending):
            if extension in sample.members:
                name = f"{sample.key}.{extension}"
                return _caption_in_file(name, reader.read(sample.members[extension]), columns)
    raise DataError("missing caption; put a .txt or .json of the same name beside it in the archive")
