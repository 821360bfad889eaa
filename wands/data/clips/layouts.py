"""Dataset layouts: ways to store clips and captions in files. Nothing is decoded here.

The function of a layout takes a `Source`. It returns an iterator of clip records and rejections, or None for another layout.
`load_source` uses the first result of `LAYOUTS` that is not None. `docs/extending.md` has the steps to add a layout.
"""

from __future__ import annotations

import os
from typing import Any

from wands.data.clips.file_kinds import CLIP_EXTENSIONS, explain_no_file
from wands.data.clips.listings import single_clip
from wands.data.clips.records import ClipRecord, Rejection, settle_keys
from wands.data.clips.source import Source
from wands.data.clips.trainer_configs import SECTION_LAYOUTS, trainer_config
from wands.errors import DataError, one_line

LAYOUTS = (single_clip, trainer_config, *SECTION_LAYOUTS)
"""Functions that read a source of clips, one for each known layout of files. `load_source` tries them in this order."""


def load_source(source: str, **options: Any) -> tuple[list[ClipRecord], list[Rejection]]:
    """List the usable clips of a source and the rejections, each sorted by key, with the same result in every run.

    `source` is a folder, tar archive, table, dataset configuration of another trainer, or name of a Hugging Face dataset, which
    is searched on the Hub only if it does not exist on disk. An image is a clip of one frame. Hidden files are ignored. `options`
    are attributes of `Source`.

    Raises:
        DataError: if the source does not exist, cannot be read, or contains no clip.
    """
    if not source.strip():
        raise DataError("SOURCE= is empty; pass a folder, a table, a tar archive or the name of a dataset")
    request = Source(source, **options)
    try:
        for layout in LAYOUTS:
            if (items := layout(request)) is not None:
                found = settle_keys(items)
                if any(found):
                    return found
                raise DataError(f"SOURCE={source} contains no clip; add clips with captions")
        path = request.path
    except (OSError, MemoryError) as error:  # such as a name of 5,000 characters, or a table of 1 TB
        reason = f"cannot be read ({one_line(error)}); correct the path or the file"
        raise DataError(f"SOURCE={source} {reason}") from None
    if path.is_dir() and any(path.rglob("*.tfrec*")):
        problem = "contains latents (.tfrec), not clips; import them with python -m data_tools.import_shards"
    elif path.is_dir():
        wanted = " ".join((*CLIP_EXTENSIONS, ".tar"))
        problem = f"contains no clip; wands looked for {wanted} at any depth. Pass a folder with such files"
    elif os.path.lexists(path):
        problem = explain_no_file(path)
    else:
        name = "name a Hugging Face dataset as owner/name"
        problem = f"does not exist (looked for {path}); correct the path, or {name}"
    raise DataError(f"SOURCE={source} {problem}")
