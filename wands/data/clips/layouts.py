"""Folders of clips as other trainers lay them out: captions beside the clips, tables, line-aligned text, archives."""

import json
import os
import re
import unicodedata
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from wands.data.clips.archive import TAR_EXTENSIONS, TarReader, TarSample
from wands.data.clips.hf_dataset import clips_dir
from wands.data.clips.manifest import (
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    Scan,
    check_captions,
    check_file,
    clip_key,
    locate,
    read_range,
    safe_name,
)
from wands.data.clips.table import Columns, NumberedRow, read_pairs, read_table
from wands.errors import DataError

_TABLES = (
    "metadata.csv",
    "metadata.jsonl",
    "metadata.json",
    "meta.json",  # NVIDIA DFM
    "videos2caption.json",  # FastVideo
    "json_of_internal_datasets.json",  # VideoX-Fun
)
# diffusion-pipe: the folder is the data set, this file has its captions.
_CAPTIONS_OF_FOLDER = "captions.json"
_MERGE = "merge.txt"  # FastVideo
_VIDEO_LINES = ("videos.txt", "video.txt")  # finetrainers
_CAPTION_LINES = ("prompts.txt", "captions.txt", "prompt.txt", "caption.txt")
_TOLD_SINGLY = 10  # so many clips that a listing leaves out are told of one by one whatever it names
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
# Where tools keep the clips of a table whose paths do not name that folder: FastVideo, DiffSynth.
_CLIP_FOLDERS = ("videos", "train")


def find_listing(folder: Path, source: str, split: str) -> Path | None:
    """The file that lists a folder's clips, if there is one: in the folder, else in that of the split.

    Raises:
        DataError: there are several.
    """
    names = (*_TABLES, _CAPTIONS_OF_FOLDER, _MERGE)
    for place in (folder, folder / split):
        found = [place / name for name in names if (place / name).is_file()]
        if any((place / name).is_file() for name in _CAPTION_LINES):
            found += [place / name for name in _VIDEO_LINES if (place / name).is_file()]
        found = [file for file in found if not _is_sidecar(file)]
        if place / _MERGE in found:  # it names the others
            found = [place / _MERGE]
        if len(found) > 1:
            raise DataError(
                f"source={source} holds {' and '.join(file.name for file in found)}; name the one that counts"
            )
        if found:
            return found[0]
    return None


def _is_sidecar(file: Path) -> bool:
    """Whether a clip of the same stem lies beside it: video.txt is then the caption of video.mp4."""
    return any(file.with_suffix(extension).exists() for extension in CLIP_EXTENSIONS)


def scan_listing(
    listing: Path, columns: Columns, cache_dir: Path | None, scan: Scan, *, whole_folder: bool
) -> None:
    """Read a file that lists clips; which kind it is, its name says.

    Args:
        listing: the file.
        columns: of a table.
        cache_dir: where clips of archives are written.
        scan: to add to.
        whole_folder: the source is the folder of the file, so clips there that it does not list are told of.
    """
    if listing.name == _CAPTIONS_OF_FOLDER and _scan_captioned_folder(listing, columns, cache_dir, scan):
        return
    named = _Named()
    if listing.name == _MERGE:
        _scan_merged(listing, columns, scan, named)
    elif listing.name in _VIDEO_LINES:
        captions = [listing.with_name(name) for name in _CAPTION_LINES]
        present = [file for file in captions if file.is_file()]
        if len(present) != 1:
            raise DataError(
                f"source={listing.parent} holds {len(present)} files of captions for {listing.name}; keep one "
                f"of {', '.join(_CAPTION_LINES)}"
            )
        rows = read_pairs(listing, present[0])
        _scan_rows(listing, rows, Columns(columns.source), listing.parent, scan, named)
    else:
        _scan_rows(listing, read_table(listing), columns, listing.parent, scan, named)
    if whole_folder:
        _reject_unlisted(listing, named, scan)


@dataclass
class _Named:
    """What the rows of a listing name: clips that were found, and what stands in other columns, an input image."""

    clips: set[Path] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def add_others(self, row: dict[str, Any], video: object, folders: tuple[Path, ...]) -> None:
        for value in row.values():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, str) and item != video and item.lower().endswith(CLIP_EXTENSIONS):
                    self.others |= {_composed(os.path.normpath(folder / item)) for folder in folders}


def _composed(path: str | Path) -> str:
    return unicodedata.normalize("NFC", str(path))


def _reject_unlisted(listing: Path, named: _Named, scan: Scan) -> None:
    """Tell of the clips below a listing that it does not name; of images only if it names any.

    A folder of many clips of which it names less than half is told of as a whole: the listing is then a selection.
    """
    folder = listing.parent
    images = any(path.name.lower().endswith(IMAGE_EXTENSIONS) for path in named.clips)
    wanted = CLIP_EXTENSIONS if images else VIDEO_EXTENSIONS
    known = named.others | {_composed(path) for path in named.clips}
    nodes: set[tuple[int, int]] | None = None  # for links, and systems for which A.MP4 is a.mp4
    keys = {clip_key(entry.name) for entry in scan.entries}
    table = f"the tables of {listing.name}" if listing.name == _MERGE else listing.name
    for root, files in _walk(folder, scan):
        clips = [root / file for file in files if file.lower().endswith(wanted)]
        left = [path for path in clips if _composed(path) not in known]
        if left:
            if nodes is None:
                nodes = {node for node in map(_node, named.clips) if node}
            left = [path for path in left if _node(path) not in nodes]
        if len(left) <= max(_TOLD_SINGLY, len(clips) - len(left)):
            for path in left:
                name = path.relative_to(folder).as_posix()
                key = safe_name(name) if clip_key(name) in keys else clip_key(name)
                reason = (
                    f"no readable row in {table} names it; write one with its caption, or move it elsewhere"
                )
                scan.reject(key, path, reason)
        else:
            reason = (
                f"no readable row in {table} names {len(left):,} clips of this folder ({left[0].name}, "
                f"{left[1].name} ...); write rows with their captions, or move them elsewhere"
            )
            below = f":{root.relative_to(folder).as_posix()}" if root != folder else ""
            scan.reject(f"{listing.name}{below}", root, reason)


def _node(path: Path) -> tuple[int, int] | None:
    """What tells a file from others whatever its name; None for a broken link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _scan_rows(
    table: Path, rows: list[NumberedRow], columns: Columns, folder: Path, scan: Scan, named: _Named
) -> None:
    """Add the clips that a table's rows name; their paths count from ``folder``."""
    if not rows:
        raise DataError(f"source={table} lists no clip; add rows with a video and a caption")
    readable = [row for _, row in rows if isinstance(row, dict)]
    if readable:
        columns.check({name for row in readable for name in row})
    folders = (folder, *(folder / name for name in _CLIP_FOLDERS))
    for number, row in rows:
        where = f"{table.name}:{number}"
        if isinstance(row, str):
            scan.reject(where, table, row)
            continue
        video, caption = columns.pick(row)
        named.add_others(row, video, folders)
        try:
            if not isinstance(video, str) or not video.strip():
                raise DataError("no video in this row; write its path")
            name, path = locate(video.strip(), folders)
            named.clips.add(path)
            scan.add(where, name, path, check_captions(caption, where), read_range(row, path))
        except DataError as error:
            scan.reject(where, video or table, str(error))


def _scan_merged(listing: Path, columns: Columns, scan: Scan, named: _Named) -> None:
    """FastVideo's merge.txt: each line a folder of clips and, after a comma, the table of its captions."""
    try:
        lines = listing.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"source={listing} cannot be read ({error}); save it as UTF-8 text") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 2 or not all(parts):
            scan.reject(
                f"{listing.name}:{number}",
                listing,
                "unreadable line; write a folder, a comma and its table on it",
            )
            continue
        # FastVideo counts them from where it is started; a data set that was moved as a whole, from the list.
        folder, table = (
            next(
                (path for path in (Path(part).absolute(), listing.parent / part) if path.exists()), Path(part)
            )
            for part in parts
        )
        if not table.is_file():
            reason = f"no such table (looked for {parts[1]}); correct the path"
            scan.reject(f"{listing.name}:{number}", parts[1], reason)
            continue
        _scan_rows(table, read_table(table), columns, folder, scan, named)


def _scan_captioned_folder(listing: Path, columns: Columns, cache_dir: Path | None, scan: Scan) -> bool:
    """diffusion-pipe: captions.json has the captions of the files beside it, and of members of archives.

    Returns:
        False if it is a table of another form.
    """
    rows = read_table(listing)
    if not rows or any(isinstance(row, str) or set(row) != {"file_name", "caption"} for _, row in rows):
        return False
    captions = {str(row["file_name"]): row["caption"] for _, row in rows if isinstance(row, dict)}
    if len(captions) < len(rows):  # a list that names a clip twice: the last must not silently win
        return False
    folder, missing = listing.parent, set(captions)
    paths = sorted(folder.iterdir())
    present = {path.name for path in paths}
    for path in paths:
        name = path.name
        if name.startswith("."):
            continue
        if name.lower().endswith(TAR_EXTENSIONS):
            missing -= scan_tar(path, folder, columns, captions, cache_dir, scan)
        elif name.lower().endswith(CLIP_EXTENSIONS):
            written = _as_written(name, captions, present)
            missing.discard(written or name)
            try:
                check_file(name, path)
                if written is None:
                    raise DataError(f"no entry in {listing.name}; add one with its captions")
                scan.add(clip_key(name), written, path, check_captions(captions[written], listing.name))
            except DataError as error:
                scan.reject(clip_key(name), path, str(error))
    for name in sorted(missing):
        try:  # other tools' captions.json may name clips in sub-folders
            found, path = locate(name, (folder,))
            scan.add(clip_key(found), found, path, check_captions(captions[name], listing.name))
        except DataError as error:
            scan.reject(f"{listing.name}:{name}", name, str(error))
    return True


def _as_written(name: str, captions: Container[str], present: Container[str]) -> str | None:
    """How captions.json writes a name; see `locate`. What other names are ``present`` are no writing of this one."""
    others = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    if name in captions:
        return name
    return next((other for other in others if other in captions and other not in present), None)


def scan_folder(folder: Path, columns: Columns, cache_dir: Path | None, scan: Scan) -> int:
    """Add the clips of a folder with the captions beside them, and those of archives in it.

    Returns:
        The number of clips and archives, usable or not.
    """
    found = 0
    for root, files in _walk(folder, scan):
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


def _walk(folder: Path, scan: Scan) -> Iterator[tuple[Path, list[str]]]:
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
    if _DOCUMENT.fullmatch(file.stem) or file.name.lower() in (*_VIDEO_LINES, *_CAPTION_LINES):
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
                    listed = _as_written(written, captions, ())
                    if listed is not None:
                        met.add(listed)
                        texts = check_captions(captions[listed], _CAPTIONS_OF_FOLDER)
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
