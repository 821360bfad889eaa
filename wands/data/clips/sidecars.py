"""Folders and tar archives that contain clips and, next to each clip, a caption file. Unusable files are reported."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from tarfile import TarInfo
from typing import Any

from wands.data.clips.archives import MAX_CAPTION_BYTES, TAR_EXTENSIONS, TarReader, is_tar
from wands.data.clips.file_kinds import (
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    VIDEO_EXTENSIONS,
    decode_text,
    explain_error,
    explain_no_file,
)
from wands.data.clips.hf_dataset import clips_dir, saved_dataset
from wands.data.clips.records import (
    ClipRecord,
    Rejection,
    clip_key,
    clip_names,
    records_of_clip,
    reject,
    safe_name,
    spellings,
)
from wands.data.clips.source import Source
from wands.data.clips.tables import lower_names
from wands.errors import DataError, one_line

log = logging.getLogger(__name__)

_READ_EXTENSIONS = (*CLIP_EXTENSIONS, *TAR_EXTENSIONS)
CAPTIONS_OF_FOLDER = "captions.json"  # diffusion-pipe: captions of the clips in a folder
VIDEO_LINES = ("videos.txt", "video.txt")  # finetrainers
CAPTION_LINES = ("prompts.txt", "captions.txt", "prompt.txt", "caption.txt")
# fmt: off
_UNREAD_VIDEOS = (
    ".3g2", ".asf", ".divx", ".dv", ".f4v", ".h264", ".hevc", ".m1v", ".m2t", ".m2v",
    ".mpe", ".mpv", ".mxf", ".nut", ".ogm", ".qt", ".rm", ".rmvb", ".vob", ".y4m",
)
_UNREAD_IMAGES = (".apng", ".avif", ".heic", ".heif", ".jfif", ".jp2", ".jxl", ".tif", ".tiff")
# fmt: on
_UNREAD = dict.fromkeys(_UNREAD_VIDEOS, ".mp4") | dict.fromkeys(_UNREAD_IMAGES, ".png")
"""Format to convert to, for the extensions of videos and images that wands cannot read."""
MIN_FRAMES = 8
"""Smallest number of numbered images that are taken for the frames of a video."""
_FRAME = re.compile(r"(.*?)(\d{1,9})(\.\w+)", re.DOTALL)
# Names of text files in a folder of clips that are not captions.
_DOCUMENT = re.compile(
    r"(readme|licen[cs]e|copying|copyright|notice)([^a-z0-9].*)?|"
    r"terms|change(s|log)|credits?|authors?|attribution|citation|requirements|todo|notes?|info|about|log|config|"
    r"classes|tags|(file_?)?list|files|urls|links|sources?|metadata|train|test|val(id(ation)?)?",
    re.IGNORECASE | re.DOTALL,
)


def tar_archive(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Read a source that is one tar archive of clips. Return its clips, or None if the source is not a tar archive."""
    if source.path.is_file() and is_tar(source.path):
        return scan_tar(source.path, source.path.parent, source)
    return None


def folder_with_sidecars(source: Source) -> Iterator[ClipRecord | Rejection] | None:
    """Return the clips of a folder with tar archives, or with clips and a caption file next to each.

    None if it has neither, or if no clip has a caption and there are parquet or arrow files: then it is a Hugging Face dataset.
    """
    unreadable: list[Rejection] = []
    folders = dict(walk(source.path, unreadable, source.recursive)) if source.path.is_dir() else {}
    names = (name.lower() for files in folders.values() for name in files)
    if not any(name.endswith((*_READ_EXTENSIONS, *_UNREAD)) for name in names):
        return None
    items = [*_scan_folder(source, folders), *unreadable]
    has_captions = any(isinstance(item, ClipRecord) and item.caption for item in items)
    return iter(items) if has_captions or saved_dataset(source) is None else None


def _scan_folder(source: Source, folders: dict[Path, list[str]]) -> Iterator[ClipRecord | Rejection]:
    """Yield records and rejections for the clips of folders (with their file names) and of the archives in them."""
    folder = source.path
    for root, files in folders.items():
        stems: dict[str, list[str]] = {}
        for file in files:
            stems.setdefault(PurePosixPath(file).stem, []).append(file)
        yield from _reject_unread(root, stems, source)
        for archive in filter(is_tar, map(root.joinpath, files)):
            yield from scan_tar(archive, folder, source)
        frames = numbered_frames(files)
        if frames and not any(_sidecar_of(stems[Path(file).stem], source.sidecars) for file in frames):
            video = next((name for name in folders.get(root.parent, []) if _is_video_of(name, root)), None)
            if video or source.needs_caption:
                yield _reject_frames(root, frames, folder, video)
                files = sorted({*files} - {*frames})
            else:
                message = "%s: %d numbered images look like the frames of a video, but each counts as a clip"
                log.warning(message, root, len(frames))
        for file in clip_names(files, kinds=source.files):
            path = root / file
            name = path.relative_to(folder).as_posix()
            siblings = stems[path.stem]
            try:
                if not path.is_file():
                    raise DataError(f"video={path} {explain_no_file(path)}")
                if clip := _clip_of_poster(file, siblings, source.sidecars):
                    raise DataError(
                        f"image {file} may be a preview of the video {clip} of the same name, so the image is not used; "
                        "rename the image if it is a separate clip"
                    )
                sidecar = _sidecar_of(siblings, source.sidecars)
                sidecar = sidecar or _sidecar_of(stems.get(file, []), source.sidecars)  # a.mp4.txt
                if sidecar:
                    captions, row = _parse_captions(sidecar, _read_small(path.with_name(sidecar)), source)
                else:
                    wanted = " or ".join(path.stem + extension for extension in source.sidecars[:2])
                    hint = "pass the path of a table with the captions as SOURCE"
                    captions = source.check_captions(None, f"{wanted} next to the clip, {hint}")
                    row = {}
                yield from records_of_clip(name, path, captions, sidecar or name, row, kinds=source.files)
            except DataError as error:
                yield reject(clip_key(name), path, error)


def numbered_frames(files: list[str]) -> list[str]:
    """Return the images of a folder that look like the frames of a video: at least `MIN_FRAMES`, numbered without a gap."""
    series: dict[tuple[str, str], dict[int, str]] = {}
    for file in files:
        name = _FRAME.fullmatch(file)
        if name and file.lower().endswith(IMAGE_EXTENSIONS):
            series.setdefault((name[1], name[3]), {})[int(name[2])] = file
    longest = max(series.values(), key=len, default={})
    is_video = len(longest) >= MIN_FRAMES and max(longest) - min(longest) + 1 == len(longest)
    return [longest[number] for number in sorted(longest)] if is_video else []


def _is_video_of(file: str, frames_dir: Path) -> bool:
    return PurePosixPath(file).stem == frames_dir.name and file.lower().endswith(VIDEO_EXTENSIONS)


def _reject_frames(root: Path, frames: list[str], folder: Path, video: str | None) -> Rejection:
    """Reject the frames in `root`. `video` is the name of the video that was made of them, if there is one."""
    if video:
        reason = f"{len(frames):,} images look like the frames of {video}, which is used; move the folder elsewhere"
        return reject(safe_name(root.relative_to(folder).as_posix()), root, reason)
    first_name = _FRAME.fullmatch(frames[0])
    assert first_name is not None
    prefix, first, extension = first_name.groups()
    is_padded = all(len(file) == len(frames[0]) for file in frames)
    pattern = f"{prefix}%0{len(first)}d{extension}" if is_padded else f"{prefix}%d{extension}"
    name = root.relative_to(folder).as_posix() if root != folder else root.name
    command = f"ffmpeg -framerate FPS -start_number {int(first)} -i {name}/{pattern} {name}.mp4"
    reason = (
        f"{len(frames):,} numbered images without captions look like the frames of a video; make a video ({command}), and write "
        f"its caption in {name}.txt"
    )
    return reject(safe_name(name), root, reason)


def walk(folder: Path, unreadable: list[Rejection], recursive: bool) -> Iterator[tuple[Path, list[str]]]:
    """Yield (folder, sorted names of its files) for `folder` and, if `recursive`, each folder below it.

    Names that begin with a dot are skipped. Links are followed, but no folder is visited twice. A folder that cannot be read
    becomes a rejection in `unreadable`.
    """
    seen: set[tuple[int, int]] = set()
    errors: list[OSError] = []
    num_hidden = 0
    for root, folders, files in os.walk(folder, followlinks=True, onerror=errors.append):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        yield Path(root), sorted(name for name in files if not name.startswith("."))
        num_hidden += sum(name.startswith(".") and name.lower().endswith(_READ_EXTENSIONS) for name in files)
    for error in errors:
        problem = f"folder cannot be read ({error.strerror}); fix the permissions of the folder"
        unreadable.append(reject(os.path.relpath(error.filename, folder), error.filename, problem))
    if num_hidden:
        what = (
            "clip or archive whose name begins" if num_hidden == 1 else "clips or archives whose names begin"
        )
        log.warning("%s: skipped %d %s with a dot", folder, num_hidden, what)


def _clip_of_poster(file: str, siblings: list[str], extensions: tuple[str, ...]) -> str | None:
    """Return the name of the video among `siblings` that an image probably previews, or None.

    A video with an upper-case extension, such as CLIP.MP4, counts only with an upper-case caption file, such as CLIP.TXT.
    """
    if not file.lower().endswith(IMAGE_EXTENSIONS):
        return None
    caption = _sidecar_of(siblings, extensions)
    # A camera writes CLIP.MP4, CLIP.JPG and CLIP.TXT, all in upper case.
    spell = str.lower if caption and not PurePosixPath(caption).suffix.islower() else str
    return next((name for name in siblings if spell(name).endswith(VIDEO_EXTENSIONS)), None)


def _sidecar_of(siblings: list[str], extensions: tuple[str, ...]) -> str | None:
    """Return the caption file in `siblings`, or None. Extensions are in order of preference; lower case comes first."""
    exact = {PurePosixPath(name).suffix: name for name in reversed(siblings)}
    folded = {ending.lower(): name for ending, name in exact.items()}
    found = (names[ending] for names in (exact, folded) for ending in extensions if ending in names)
    return next(found, None)


def _reject_unread(root: Path, stems: dict[str, list[str]], source: Source) -> Iterator[Rejection]:
    """Yield a rejection for each file that seems to be an unreadable clip, and for each caption file without a clip.

    Texts that are probably no captions are ignored: README.txt, LICENSE.txt, and texts of a folder without caption files.
    """
    clips = {stem for stem, files in stems.items() if clip_names(files, kinds=source.files)}
    has_sidecars = any(_sidecar_of(stems[stem], source.sidecars) for stem in clips)
    for stem, files in stems.items():
        sidecar = None if stem in clips else _sidecar_of(files, source.sidecars)
        captioned = sidecar is not None and _may_be_caption(root / sidecar, source)
        kinds = {file: PurePosixPath(file).suffix.lower() for file in files if not is_tar(root / file)}
        known = (*CLIP_EXTENSIONS, *source.sidecars)
        unread = {
            file: kind for file, kind in kinds.items() if kind in _UNREAD or (captioned and kind not in known)
        }
        for file, kind in unread.items():
            name = (root / file).relative_to(source.path).as_posix()
            what = f"{kind} files are not read" if kind else "a file without an extension is not read"
            caption = f"; {sidecar} is its caption" if captioned else ""
            key = safe_name(name) if stem in clips else clip_key(name)
            wanted = _UNREAD.get(kind, ".mp4 or .png")
            yield reject(key, root / file, f"{what}, so convert the file to {wanted}{caption}")
        if captioned and sidecar and has_sidecars and not unread and not _belongs_to_another(stem, clips):
            name = (root / sidecar).relative_to(source.path).as_posix()
            reason = (
                f"no clip of the same name is next to the caption; add {stem}.mp4, or remove the caption file"
            )
            twins = (root / (stem + extension) for extension in CLIP_EXTENSIONS)
            if folder_twin := next(filter(Path.is_dir, twins), None):
                reason = f"{folder_twin.name} {explain_no_file(folder_twin)}"
            yield reject(safe_name(name), root / sidecar, reason)


def _may_be_caption(file: Path, source: Source) -> bool:
    """Return whether a text or JSON file that belongs to no clip looks like a caption, not like a document or other data."""
    if _DOCUMENT.fullmatch(file.stem) or file.name.lower() in (*VIDEO_LINES, *CAPTION_LINES):
        return False
    kind = file.suffix.lower()
    try:
        is_json = kind not in (".txt", ".caption", ".jsonl")
        return kind in (".txt", ".caption") or (
            is_json and any(_parse_captions(file.name, _read_small(file), source)[0])
        )
    except DataError:
        return False


def _belongs_to_another(stem: str, clips: set[str]) -> bool:
    """Return whether a text file such as a.tags.txt or a.mp4.txt belongs to a clip (a.mp4) without being its caption."""
    parts = stem.split(".")
    return any(".".join(parts[:end]) in clips for end in range(1, len(parts)))


def _read_small(path: Path) -> bytes:
    """Return the bytes of a caption file of at most `MAX_CAPTION_BYTES`, so that a huge file cannot fill the memory."""
    if not path.is_file():  # a pipe or a terminal would block forever
        raise DataError(f"{path.name} {explain_no_file(path)}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); replace this caption file") from error
    if len(data) > MAX_CAPTION_BYTES:
        raise DataError(
            f"{path.name} has more than {MAX_CAPTION_BYTES:,} bytes, too many for captions of one clip; write a shorter caption"
        )
    return data


def _parse_captions(name: str, data: bytes, source: Source) -> tuple[list[str], dict[str, Any]]:
    """Return the captions of one clip's caption file (of a .jsonl file, its first line), and the JSON object or {}."""
    row: dict[str, Any] = {}
    try:
        value: Any = decode_text(data, name)
        kind = PurePosixPath(name).suffix.lower()
        if kind in (".json", ".jsonl"):
            value = json.loads(value.strip().split("\n")[0] if kind == ".jsonl" else value)
            if not isinstance(value, dict):
                found = type(value).__name__
                raise DataError(
                    f"{name} contains a {found}, not a JSON object; write an object with the key {source.caption_names[0]}"
                )
            row = lower_names(value)
            value = source.pick_caption(row)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise DataError(f"the caption file cannot be read ({name}): {explain_error(error)}") from error
    return source.check_captions(value, name), row


def name_in_captions(name: str, captions: Container[str], present: Container[str]) -> str | None:
    """Return the name of a clip as captions.json writes it, or None if the clip is not in it.

    With accents, this may be the other spelling (composed or decomposed), unless the folder has a file of that spelling, to which
    the captions then belong.
    """
    if name in captions:
        return name
    return next((other for other in spellings(name) if other in captions and other not in present), None)


def scan_tar(
    archive: Path,
    folder: Path,
    source: Source,
    captions: dict[str, Any] | None = None,
    used: set[str] | None = None,
) -> Iterator[ClipRecord | Rejection]:
    """Yield a record for each caption of each usable sample in a tar archive, and a rejection for each other sample.

    A sample is the members with the same name apart from the extension. `folder` contains the archive, and names are relative to
    it. `captions`, from a captions.json next to the archive, replace captions in the archive; the names that were found are added
    to `used`, so that the caller can report the others.
    """
    place = archive.relative_to(folder).as_posix()
    base = next(place[: -len(end)] for end in TAR_EXTENSIONS if place.lower().endswith(end))
    try:
        with TarReader(archive) as reader:
            for sample, members in reader.samples.items():
                key = f"{base}/{sample}"
                try:
                    yield from _records_of_sample(
                        reader,
                        sample,
                        members,
                        key=key,
                        place=place,
                        source=source,
                        captions=captions,
                        used=used,
                    )
                except DataError as error:
                    yield reject(safe_name(key), place, error)
            for member, reason in reader.rejections:
                yield reject(f"{place}:{member}".rstrip(":"), place, reason)
    except DataError as error:
        yield reject(place, archive, error)


def _records_of_sample(
    reader: TarReader,
    sample: str,
    members: dict[str, TarInfo],
    *,
    key: str,
    place: str,
    source: Source,
    captions: dict[str, Any] | None,
    used: set[str] | None,
) -> Iterator[ClipRecord | Rejection]:
    files = {
        kind.column: [members.pop(end[1:]) for end in kind.endings if end[1:] in members]
        for kind in source.files
    }
    (extension, video), *others = _clips_of_sample(members)
    for _, other in others:
        reason = (
            f"{video.name} belongs to the same sample and is used instead; rename this file in the archive"
        )
        yield reject(f"{place}:{other.name}", place, reason)
    written = video.name.removeprefix("./")
    row: dict[str, Any] = {}
    listed = name_in_captions(written, captions or {}, ())
    if captions and used is not None and listed is not None:
        used.add(listed)
        texts = source.check_captions(captions[listed], CAPTIONS_OF_FOLDER)
    else:
        texts, row = _captions_of_sample(reader, sample, extension, source)
    path = reader.unpack(video, clips_dir(source))
    # Files of an archive are in the archive: a path in the .json file could lead to any file.
    unpacked = {
        column: next((reader.unpack(member, path.parent) for member in members_of), None)
        for column, members_of in files.items()
    }
    yield from records_of_clip(
        f"{key}.{extension}", path, texts, f"{place}:{written}", row | unpacked, kinds=source.files
    )


def _clips_of_sample(members: dict[str, TarInfo]) -> list[tuple[str, TarInfo]]:
    """Return (extension, member) of each video, then of each image, in a sample. DataError if there is none."""
    shortest_first = sorted(members.items(), key=lambda item: (len(item[0]), item[0]))
    clips = [
        (extension, member)
        for known in (VIDEO_EXTENSIONS, IMAGE_EXTENSIONS)
        for extension, member in shortest_first
        if f".{extension}".endswith(known)
    ]
    if clips:
        return clips
    names = ", ".join(sorted(members))
    if "pth" in members:
        raise DataError("sample has latents (.pth); import them with python -m data_tools.import_shards")
    raise DataError(
        f"sample in the archive has no clip (its files have the extensions {names}); add a clip, or remove the sample"
    )


def _captions_of_sample(
    reader: TarReader, sample: str, clip: str, source: Source
) -> tuple[list[str], dict[str, Any]]:
    """Return the captions from the .txt, .caption or .json member of a sample, and the JSON object or {}.

    Without a caption, the result is [""] if the source needs none, else DataError.
    """
    members = reader.samples[sample]
    inner = clip.rpartition(".")[0]  # WebDataset reads "1.0.mp4" as key 1 and extension 0.mp4
    for ending in ("txt", "caption", "json"):
        for extension in (f"{inner}.{ending}".strip("."), ending):
            if member := members.get(extension):
                return _parse_captions(f"{sample}.{extension}", reader.read(member), source)
    return source.check_captions(None, "a .txt or .json file with the name of the clip in the archive"), {}
