"""File extensions of clips, and reasons why a path such as a.mp4 is not a clip: a folder, a named pipe, a Git LFS pointer."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
from contextlib import suppress
from pathlib import Path

from wands.errors import DataError, one_line

# fmt: off
VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)
# fmt: on
IMAGE_EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
CLIP_EXTENSIONS = (*VIDEO_EXTENSIONS, *IMAGE_EXTENSIONS)

_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_REASON = "is a Git LFS pointer, not the file itself; run git lfs pull in its folder"


def explain_no_file(path: Path) -> str:
    """Return why a path is not a regular file, with the fix."""
    if not os.path.exists(path):
        problem = "is a link to itself or to a missing file" if path.is_symlink() else "does not exist"
        return f"{problem}; restore the file, or remove the link or row that names it"
    kind = "a folder" if path.is_dir() else "a named pipe" if path.is_fifo() else "a device or a socket"
    return f"is {kind}, not a file; put the file itself in its place"


def explain_content(path: Path) -> str:
    """Return why a file is neither a video nor an image nor an archive, with the fix; "" if it may be, by its first bytes."""
    start = b"\0"
    with suppress(OSError), path.open("rb") as file:
        start = file.read(1024)
    if not start:
        return "is empty (0 bytes); copy or download the file again"
    if start.startswith(_LFS):
        return _LFS_REASON
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)
    except UnicodeDecodeError:
        return ""
    if re.match(r"\s*<(!doctype\s+html|html)", text, re.IGNORECASE):
        return "is an HTML page, such as the error page of a download; download the file again"
    has_controls = re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]", text)
    return "" if has_controls else "is a text file, despite its name; replace or remove the file"


def decode_text(data: bytes, name: str) -> str:
    r"""Decode UTF-8, UTF-16 or UTF-32, with or without a byte order mark. Line ends become "\n".

    Raises:
        DataError: if the file is a Git LFS pointer, which would otherwise become a caption.
        UnicodeDecodeError: if the file has another encoding.
    """
    if data.startswith(_LFS):
        raise DataError(f"{name} {_LFS_REASON}")
    return io.StringIO(data.decode(json.detect_encoding(data)), newline=None).read()


def explain_error(error: Exception) -> str:
    """Return the reason why a text file cannot be read, decoded or parsed, followed by the fix."""
    if isinstance(error, RecursionError):
        return "brackets are nested too deeply; remove the nested values"
    if isinstance(error, UnicodeError):
        return f"{error}; save the file as UTF-8 text"
    if isinstance(error, OSError):
        return f"{one_line(error)}; check the path"
    fix = "correct the JSON" if isinstance(error, json.JSONDecodeError) else "correct the file"
    return f"{error}; {fix}"
