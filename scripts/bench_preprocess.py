"""Measure the speed of `wands preprocess` with different numbers of processes and different batch sizes of the VAE.

    python scripts/bench_preprocess.py CLIPS                      # the clips of the demo, minutes on 2 cores
    python scripts/bench_preprocess.py CLIPS --workers 1 --vae-batch 1 8 --max-pixels 6144 --max-frames 17 --copies 8
    python scripts/bench_preprocess.py CLIPS --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --workers 1 2 4 8 --device cuda

CLIPS is a folder of clips, with or without captions. A setting is a pair: a number of processes (--workers) and a batch size of
the VAE (--vae-batch). The script measures all pairs of the given numbers. Every run encodes --copies copies of each clip into an
empty cache. At the end of a run, some processes wait for the last clip. With more copies, this wait is a smaller part of the run.
The settings alternate, so that a busy machine slows down all settings. The table shows the median over --rounds. The CPU cores
are divided among the processes: with 8 cores and 2 processes, each process has 4 threads.

Without --model, the tiny pipeline of `make_tiny_pipeline.py` encodes the clips. The tiny VAE is much faster than Wan's VAE, so
the processes spend more of their time on waiting for decoded frames.

Columns:

seconds    time of the whole command: start of the processes, loading, scan, text, clips and index
encoding   time that the slowest process needs to load the models and to encode its clips, including the wait for decoded frames
clips/s    clips divided by `seconds`, and clips divided by `encoding`
speed-up   `encoding` of the first setting / `encoding` of this setting
waited     fraction of the encoding time in which the processes waited for decoded frames
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_tiny_pipeline import build_tiny_pipeline

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import json, sys
from wands.preprocess.preprocess import preprocess
from wands.config.options import PreprocessOptions
if __name__ == "__main__":
    report = preprocess(PreprocessOptions(**json.loads(sys.argv[1])))
    print(json.dumps([report.num_accepted, len(report.rejected), report.waited, report.seconds_encoding]))
"""


def fill(folder: Path, clips: Path, copies: int) -> int:
    """Copy each clip of `clips` several times into `folder`, write a caption for each copy, and return the number of copies."""
    names = sorted(path for path in clips.rglob("*") if path.suffix in (".mp4", ".mpg", ".mkv", ".webm"))
    if not names:
        sys.exit(f"CLIPS={clips} contains no .mp4, .mpg, .mkv or .webm file. Pass a folder of clips.")
    for copy in range(copies):
        for path in names:
            target = folder / f"{path.stem}-{copy}{path.suffix}"
            shutil.copy(path, target)  # equal files: in an empty cache none has latents for another
            target.with_suffix(".txt").write_text(f"The clip called {path.stem}.")
    return copies * len(names)


def run_once(options: dict[str, object], cores: int) -> tuple[float, float, float]:
    """Run `wands preprocess` in a new process.

    Args:
        options: options of the command.
        cores: number of CPU cores, which the worker processes share.

    Returns:
        Seconds of the whole command, seconds of the encoding, and fraction of the encoding time that was spent on waiting
        for decoded frames.
    """
    workers = int(str(options["workers"]))
    threads = str(max(1, cores // workers))
    began = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(options)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": threads},
    )
    seconds = time.perf_counter() - began
    if result.returncode:
        sys.exit(result.stderr)
    accepted, rejected, waited, encoding = json.loads(result.stdout.splitlines()[-1])
    if rejected or not accepted:
        sys.exit(f"{accepted} samples, {rejected} rejected: a benchmark wants clips that can be used")
    return seconds, encoding, waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--model", help="pipeline folder or Hub id [default: a tiny pipeline]")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vae-batch", type=int, nargs="+", default=[1])
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-pixels", type=int, default=480 * 832)
    parser.add_argument("--max-frames", type=int, default=81)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = args.model
        if model is None:
            model = str(work / "tiny")
            build_tiny_pipeline(Path(model), size="demo")
        (work / "clips").mkdir()
        num_clips = fill(work / "clips", args.clips, args.copies)
        settings = list(itertools.product(args.workers, args.vae_batch))
        results: dict[tuple[int, int], list[tuple[float, float, float]]] = {pair: [] for pair in settings}
        for turn in range(args.rounds):
            for workers, vae_batch in settings:
                out = work / f"cache-{turn}-{workers}-{vae_batch}"
                options = {
                    "source": str(work / "clips"),
                    "out": str(out),
                    "model": model,
                    "max_pixels": args.max_pixels,
                    "max_frames": args.max_frames,
                    "device": args.device,
                    "workers": workers,
                    "vae_batch": vae_batch,
                }
                results[workers, vae_batch].append(run_once(options, cores))
                shutil.rmtree(out)
    print(f"{num_clips} clips, up to {args.max_pixels:,} pixels and {args.max_frames} frames, {cores} cores")
    print("processes  batch  seconds  clips/s   encoding  clips/s  speed-up   waited")
    base = None
    for (workers, vae_batch), runs in results.items():
        seconds, encoding, waited = (statistics.median(column) for column in zip(*runs, strict=True))
        base = base or encoding
        print(
            f"{workers:9d} {vae_batch:6d} {seconds:8.1f} {num_clips / seconds:8.2f} {encoding:10.1f} {num_clips / encoding:8.2f}"
            f" {base / encoding:8.2f}x {waited:8.1%}"
        )


if __name__ == "__main__":
    main()
