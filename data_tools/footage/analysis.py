"""Analyze clips in subprocesses. Each result is stored immediately, so that an interrupted command can continue later."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wands.data.clips.isolated import Crash, map_isolated
from wands.data.clips.records import ClipRecord
from wands.files import read_rows, write_text
from wands.preprocess.clip_rules import LIMIT_SECONDS, crash_reason
from wands.preprocess.progress import progress

Result = dict[str, Any]


def identify(path: Path, *values: object) -> str:
    """Return a text that changes if the path, size or modification time of a file, or one of the JSON values, changes."""
    status = path.stat()
    return json.dumps([str(path), status.st_size, status.st_mtime_ns, *values])


def analyse_clips(
    function: Callable[[ClipRecord], Any],
    clips: Mapping[str, ClipRecord],
    store: Path,
    num_workers: int | None,
) -> tuple[dict[str, Result], int]:
    """Call a function on each clip without a stored result. Return all results in the order of `clips`, and the number of calls.

    `function` runs in a subprocess, and returns JSON values; a `reason` means that the clip cannot be used, and is not stored.
    `clips` maps the result of `identify` to the clip. From `store`, a .jsonl file, results of other clips are removed.
    """
    results = {row["clip"]: row for row in read_rows(store) if row.get("clip") in clips}
    todo = [name for name in clips if name not in results]
    # Without a line that an interrupted call left incomplete.
    write_text(store, "".join(json.dumps(row) + "\n" for row in results.values()))
    tasks = [clips[name] for name in todo]
    preload = [function.__module__]
    found = map_isolated(
        function, tasks, num_workers=num_workers, limit_seconds=LIMIT_SECONDS, preload=preload
    )
    with store.open("a", buffering=1, encoding="utf-8") as file, progress("videos", len(todo)) as advance:
        for index, result in found:
            if isinstance(result, Crash):
                result = {"reason": crash_reason(tasks[index].path, result)}
            results[todo[index]] = {"clip": todo[index], **result}
            if "reason" not in result:
                file.write(json.dumps(results[todo[index]]) + "\n")
            advance()
    return {name: results[name] for name in clips}, len(todo)
