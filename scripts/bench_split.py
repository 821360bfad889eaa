"""Measure how fast `wands split` finds the shots of a video in one process.

python scripts/bench_split.py FILM

FILM is a video file. The script decodes the film without splitting it, and then splits it. For both, the script prints the time
and the speed in seconds of film per second. The last line is the time of the split divided by the time of the decoding.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from data_tools.footage.shots import find_parts
from wands.data.clips.records import ClipRecord
from wands.data.clips.video_file import open_video


def main(film: Path) -> None:
    seconds = {"decoding": 0.0, "split": 0.0}
    for _ in range(2):  # the first round also fills the disk cache
        started = time.perf_counter()
        with open_video(film) as reader:
            for frame in reader.frames(0):
                length = frame.end
        seconds["decoding"] = time.perf_counter() - started
        started = time.perf_counter()
        for _part in find_parts(ClipRecord("", film, "")):
            pass
        seconds["split"] = time.perf_counter() - started
    for name, value in seconds.items():
        print(f"{name}: {value:.2f} s, {length / value:.1f} s of film per second")
    print(f"ratio split / decoding: {seconds['split'] / seconds['decoding']:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
