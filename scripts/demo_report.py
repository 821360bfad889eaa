"""Helpers of demo.sh: clips, prompts, number of steps, progress bar, and the closing report."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from demo_lines import next_commands, print_evaluations, print_losses, print_places

if TYPE_CHECKING:
    from wands.data.cache.reader import LatentCache

DEFAULT_VARIANT = "wan2.1-t2v-1.3b"
# number of steps that overfit these few clips
STEPS = 500
FEW_CLIPS = 4
HEAVY_STEPS = 450  # two experts, which are both updated in every step, and the wider DiT of 48 channels
MOST_STEPS = 2.0  # factor of steps for more clips, so that the demo stays short
ENOUGH_PASSES = 400  # with fewer passes over the clips, samples show colors and layout, not details
SECONDS_PER_STEP = 0.31  # two busy CPU cores
OTHER_SECONDS = 130  # pipeline, cache, export, sampling
# Largest frame, by the VAE's stride: at most 48 or 40 tokens of a latent frame.
PIXELS = {8: 12288, 16: 40960}

STEP_LINE = re.compile(r"step +(\d+)/(\d+) +loss ([\d.]+)")

# Window of each clip in seconds: different lengths, one shot each, something moves.
WINDOWS = {
    "bikes": (
        4.45,
        5.35,
        "A cyclist in a helmet waits next to a van with a glowing lamp at a crossing in a city.",
    ),
    "bigbuckbunny": (
        2.0,
        3.40,
        "A big grey cartoon rabbit crawls out of its burrow under a grassy hill on a sunny morning.",
    ),
    "carphone_pristine": (
        0.0,
        1.60,
        "A man in a dark suit and red bow tie sits in a moving car and talks excitedly to the camera.",
    ),
    "cityCC0": (1.0, 2.15, "Glass office towers glow green and white at night against a dark blue sky."),
}
# Later windows of the same films, which are not trained: their loss shows that the model learns the four clips by heart.
HELD_OUT = {
    "bikes": (7.2, 8.1),
    "bigbuckbunny": (4.0, 5.2),
    "carphone_pristine": (2.4, 3.9),
    "cityCC0": (4.5, 5.6),
}


def write_clips(source: Path, out: Path, held_out: bool) -> None:
    """Copy the four films of the demo to a folder, and write metadata.csv with a caption and a time range for each film.

    Args:
        source: folder of the films.
        out: folder to write.
        held_out: True writes the time ranges in `HELD_OUT`, which the demo does not train on. False writes the time
            ranges in `WINDOWS`, which the demo trains on.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "metadata.csv").open("w", newline="", encoding="utf-8") as handle:
        rows = csv.writer(handle)
        rows.writerow(["file_name", "caption", "start", "end"])
        for stem, (start, end, caption) in WINDOWS.items():
            (path,) = source.glob(f"{stem}.*")
            shutil.copy(path, out / path.name)
            rows.writerow([path.name, caption, *(HELD_OUT[stem] if held_out else (start, end))])


def max_pixels(variant: str) -> int:
    """Return the largest area of a frame, in pixels, that the demo uses to train a model variant."""
    from wands.variants import VARIANTS

    return PIXELS[VARIANTS[variant].vae_stride[1]]


def pixel_size(cache: LatentCache, i: int) -> tuple[int, int, int]:
    """Return (frames, height, width) of the video from which sample `i` of the cache was encoded, in pixels."""
    _, frames, height, width = cache.index.latent_shapes[i].tolist()
    stride = cache.manifest["variant"]["vae_stride"]
    return stride[0] * (frames - 1) + 1, stride[1] * height, stride[2] * width


def frames_taken(conditions: Mapping[str, Any]) -> dict[str, int]:
    """Return which frames of a clip a model gets as conditioning frames.

    Args:
        conditions: conditions in the manifest of a cache, such as {"text": {}, "image": {"frames": "first"}}.

    Returns:
        A dictionary that maps a key of the prompt file to the index of a frame in the clip: {"image": 0}, {"last_image": -1},
        both entries, or no entry.
    """
    first = {"image": 0} if {"image", "first_frame"} & conditions.keys() else {}
    has_last = conditions.get("image", {}).get("frames") == "first and last"
    return first | ({"last_image": -1} if has_last else {})


def write_prompts(cache_dir: Path, out: Path) -> None:
    """Write the prompt file `out`: one line for each sample of the cache, with its caption as the prompt.

    A line also contains the size, the number of frames and a seed. For image-to-video models, the function writes the
    conditioning frames as PNG files to the folder `pictures` next to `out`, and the line contains their paths.
    """
    from PIL import Image

    from wands.data.cache.reader import LatentCache

    cache = LatentCache(cache_dir)
    taken = frames_taken(cache.manifest["conditions"])
    with out.open("w", encoding="utf-8") as handle:
        for i in range(len(cache)):
            frames, height, width = pixel_size(cache, i)
            row = {"prompt": cache.meta(i)["caption"], "height": height, "width": width, "num_frames": frames}
            for name, number in taken.items():
                row[name] = f"pictures/{i:03d}-{name}.png"
                (out.parent / "pictures").mkdir(exist_ok=True)
                Image.fromarray(source_frames(cache, i)[number]).save(out.parent / row[name])
            handle.write(json.dumps({**row, "seed": i}) + "\n")


def double_frames(prompts: Path, out: Path) -> None:
    """Write a copy of a prompt file whose videos have twice as many latent frames, less the first one."""
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    with out.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps({**row, "num_frames": 2 * row["num_frames"] - 1}) + "\n")


def choose_steps(cache_dir: Path, wanted: int | None, heavy: bool = False) -> tuple[int, str]:
    """Return the number of training steps for a cache, and a sentence with the reason.

    Up to four clips are trained for `STEPS` (500) steps. More clips are trained for more steps, but at most for 2 x `STEPS`.

    Args:
        cache_dir: output of `wands preprocess`.
        wanted: number of steps that the user has set; None computes a number from the number of clips.
        heavy: whether a step takes about twice the time of a step of wan2.1-t2v-1.3b. `HEAVY_STEPS` (450) then
            replaces `STEPS`.

    Raises:
        WandsError: if there is no cache, or it has fewer than two samples.
    """
    from wands.errors import DataError

    passes_per_step, num_clips = _plan(cache_dir)
    if num_clips < 2:
        raise DataError(
            f"--clips: the demo trains on two processes and needs at least two usable clips, not {num_clips}; add clips."
        )
    usual = HEAVY_STEPS if heavy else STEPS
    factor = 1.0 if num_clips <= FEW_CLIPS else min(1 / passes_per_step, MOST_STEPS)
    steps = wanted if wanted is not None else round(factor * usual)
    minutes = (steps * SECONDS_PER_STEP * (2 if heavy else 1) + OTHER_SECONDS) / 60
    passes = round(steps * passes_per_step)
    return (
        steps,
        f"{steps} steps, {passes} passes over {num_clips} clips; about {minutes:.0f} minutes to the end",
    )


def _plan(cache_dir: Path) -> tuple[float, int]:
    """Return (fraction of an epoch that one training step covers, number of samples in the cache)."""
    from wands.config.recipe_loading import load_recipe
    from wands.data.cache.reader import LatentCache
    from wands.data.packing import plan_epoch

    cache = LatentCache(cache_dir)
    recipe = load_recipe("tiny", [])
    if len(cache) < 2:
        return 1.0, len(cache)
    plan = plan_epoch(
        cache.num_tokens((1, 2, 2)),
        max_tokens=recipe.packing.max_tokens,
        bins_per_step=recipe.train.bins_per_step,
        seed=0,
        epoch=0,
        cost=(1.0, 0.0),
    )
    return 1 / plan.num_steps, len(cache)


def show_progress(log: Path, description: str) -> int:
    """Copy the output of a training run from stdin to a log file, and draw a progress bar from the lines with the loss.

    Errors of wands are printed. If stderr is not a terminal, the function prints a line after each 10 % of the steps.

    Returns:
        Exit code of this script: always 0, even if the training run failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    tenth = 0
    with log.open("a") as file, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        for line in sys.stdin:
            file.write(line)
            file.flush()
            if match := STEP_LINE.match(line):
                step = int(match[1])
                total = int(match[2])
                loss = match[3]
                bar.update(
                    task, completed=step, total=total, description=f"{description}, loss {float(loss):.3f}"
                )
                if not console.is_terminal and step * 10 // total > tenth:
                    tenth = step * 10 // total
                    print(f"{description}: step {step} of {total}, loss {float(loss):.3f}", flush=True)
            elif line.startswith(("wands:", "wands [")):
                print(line, end="", file=sys.stderr)
    return 0


def choose_processes() -> int:
    """Return the number of training processes: 2, or 1 on a machine with one GPU, because each process needs a GPU."""
    from wands.distributed.bootstrap import accelerator_type

    return min(2, torch.cuda.device_count()) if accelerator_type() == "cuda" else 2


def made(latents: torch.Tensor, taken: Mapping[str, int]) -> torch.Tensor:
    """Return the latent frames that the model makes, without the conditioning frames. If no frame remains, return all frames.

    Args:
        latents: latents of a video [C, f, h, w].
        taken: result of `frames_taken`. If it contains "image", the first latent frame is left out. If it contains
            "last_image", the last latent frame is left out.
    """
    first = int("image" in taken)
    last = latents.shape[1] - ("last_image" in taken)
    return latents[:, first:last] if first < last else latents


def judge(table: np.ndarray, captions: Sequence[str]) -> tuple[np.ndarray, str]:
    """Check whether each sample is closest to the clip with its caption.

    Args:
        table: float [N, N], correlation of each sample (row) with each clip (column).
        captions: caption of each clip. A sample may be closest to any clip with its caption.

    Returns:
        bool [N], True for each sample that is closest to a clip with its caption, and a sentence with the result. A sample
        is False if one of its correlations is not finite.
    """
    own = np.array([[mine == other for other in captions] for mine in captions])
    right = np.isfinite(table).all(axis=1) & own[np.arange(len(captions)), table.argmax(axis=1)]
    if own.all() and len(captions) > 1:
        what = "all clips have the same caption, so the samples cannot be assigned to clips"
        return right, what if right.all() else f"{int((~right).sum())} samples are not finite"
    shared = int((own.sum(axis=1) > 1).sum())
    target = "a clip with the same caption" if shared else "its own clip"
    verdict = f"each sample is closest to {target}"
    if not right.all():
        verdict = f"{int((~right).sum())} samples are closer to another clip"
    return right, verdict + (
        f" ({shared} clips share a caption and cannot be distinguished)" if shared else ""
    )


def loss_columns(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return a dictionary that maps the name of each loss, such as "training loss", to a list with its value in each step.

    A model with two experts has a loss for each expert.
    """
    columns = {"high": "loss_high", "low": "loss_low"}
    found = {f"{name}-noise expert": key for name, key in columns.items() if key in metrics[0]}
    return {name: [row[key] for row in metrics] for name, key in (found or {"training loss": "loss"}).items()}


def report(out: Path, seconds: int, lora: bool, command: str, causal: bool = False) -> bool:
    """Print the final report of the demo, and write a contact sheet and a loss plot.

    Args:
        out: folder with all results of the demo.
        seconds: duration of the demo.
        lora: whether the demo trained and exported a LoRA.
        command: name or path of the program `wands`, for the commands to run next.
        causal: whether the model samples chunk by chunk.

    Returns:
        True if the demo has succeeded. Each generated sample must be most similar to a clip with its caption, and each training
        loss must have fallen by more than 30 %.
    """
    from safetensors.torch import load_file

    from wands.commands.plots import save_loss_plot
    from wands.commands.score import correlation
    from wands.data.cache.reader import LatentCache
    from wands.files import read_rows
    from wands.run.append_log import marked_steps
    from wands.sampling.contact_sheet import SheetRow, save_contact_sheet

    cache = LatentCache(out / "cache")
    samples = [json.loads(line) for line in (out / "samples" / "samples.jsonl").read_text().splitlines()]
    clips = [cache.read(i).latents.float() for i in range(len(cache))]
    latents = [load_file(out / "samples" / sample["latents"])["latents"].float() for sample in samples]
    taken = frames_taken(cache.manifest["conditions"])
    clips, latents = ([made(video, taken) for video in videos] for videos in (clips, latents))
    table = np.array([[correlation(mine, clip) for clip in clips] for mine in latents])

    metrics = read_rows(out / "run" / "metrics.jsonl")
    passes = round(len(metrics) * _plan(out / "cache")[0])
    short = f"{passes} passes over the clips: expect colors and layout, not details. "
    note = short if passes < ENOUGH_PASSES else ""
    rows = []
    for i, sample in enumerate(samples):
        left = source_frames(cache, i)
        right = video_frames(out / "samples" / sample["file"])
        rows.append(
            SheetRow(f"{note if i == 0 else ''}{cache.index.keys[i]}: {sample['prompt']}", [left, right])
        )
    save_contact_sheet(out / "contact_sheet.png", rows)
    steps = [int(row["step"]) for row in metrics]
    losses = loss_columns(metrics)
    series = {name: (steps, values) for name, values in losses.items()}
    save_loss_plot(out / "loss.png", series, marks=marked_steps(out / "run", steps[-1]))

    names = [key[:14] for key in cache.index.keys]
    without = ", without the frames that were given" if taken else ""
    print(f"\nlatent correlation of each sample (row) with each clip (column), {len(names)} clips{without}")
    print(" " * 16 + "".join(f"{name:>16}" for name in names))
    for name, row in zip(names, table, strict=True):
        print(f"{name:<16}" + "".join(f"{value:>16.3f}" for value in row))
    nearest, verdict = judge(table, [cache.meta(i)["caption"] for i in range(len(cache))])
    print(f"\nwands demo: {verdict}")
    if note:
        print(f"  {'training':<13} {note}DEMO_STEPS=N trains longer.")
    fallen = print_losses(losses)
    if not fallen:
        print("                the loss must fall by at least 30 %: train longer with DEMO_STEPS=N")
    print_evaluations(read_rows(out / "run" / "evaluations.jsonl"))
    print(f"  time          {seconds // 60} min {seconds % 60} s, package set-up aside")
    print_places(out, lora)
    row = json.loads((out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    for arguments in next_commands(out, command, row, lora, causal):
        print(f"  {'next':<13} {shlex.join(arguments)}")
    return bool(nearest.all()) and fallen


def source_frames(cache: LatentCache, i: int) -> np.ndarray:
    """Return the pixels from which sample i was encoded, uint8 [F, H, W, 3]."""
    from wands.data.clips.clip import ClipSpec
    from wands.data.clips.video import decode_clip

    meta = cache.meta(i)
    (frames, height, width) = pixel_size(cache, i)
    spec = ClipSpec(fps=meta["fps"], height=height, width=width, center_crop=True, max_frames=frames)
    return next(iter(decode_clip(Path(meta["source"]), spec, start=meta["start_seconds"]))).frames


def video_frames(path: Path) -> np.ndarray:
    """Return all frames of an mp4, uint8 [F, H, W, 3]."""
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def main() -> int:
    """Run the helper that the command line names, and return the exit code."""
    # As in the `wands` command: diffusers imports bitsandbytes if it is installed, which warns of a kernel that nothing uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    clips = actions.add_parser("clips", help="the demo's clips with captions")
    clips.add_argument("source", type=Path)
    clips.add_argument("out", type=Path)
    clips.add_argument("--held-out", action="store_true")
    prompts = actions.add_parser("prompts", help="a prompt file from a cache")
    prompts.add_argument("cache", type=Path)
    prompts.add_argument("out", type=Path)
    longer = actions.add_parser("longer", help="a prompt file for videos twice as long")
    longer.add_argument("prompts", type=Path)
    longer.add_argument("out", type=Path)
    steps = actions.add_parser("steps", help="number of training steps; only the number goes to stdout")
    steps.add_argument("cache", type=Path)
    steps.add_argument("wanted", type=int, nargs="?")
    steps.add_argument("--variant", default=DEFAULT_VARIANT)
    actions.add_parser("processes", help="number of training processes")
    bar = actions.add_parser("progress", help="progress bar of a training whose output is on stdin")
    bar.add_argument("log", type=Path)
    bar.add_argument("description")
    pixels = actions.add_parser("pixels", help="largest area of a frame")
    pixels.add_argument("variant")
    closing = actions.add_parser("report", help="the closing block")
    closing.add_argument("out", type=Path)
    closing.add_argument("--seconds", type=int, required=True)
    closing.add_argument("--lora", action="store_true")
    closing.add_argument("--causal", action="store_true")
    closing.add_argument("--wands", default="wands")
    args = parser.parse_args()
    if args.action == "clips":
        write_clips(args.source, args.out, args.held_out)
    elif args.action == "prompts":
        write_prompts(args.cache, args.out)
    elif args.action == "longer":
        double_frames(args.prompts, args.out)
    elif args.action == "pixels":
        print(max_pixels(args.variant))
    elif args.action == "progress":
        return show_progress(args.log, args.description)
    elif args.action == "processes":
        print(choose_processes())
    elif args.action == "steps":
        from wands.errors import WandsError
        from wands.variants import VARIANTS

        row = VARIANTS[args.variant]
        heavy = len(row.experts) > 1 or row.dit.out_channels == 48
        try:
            number, why = choose_steps(args.cache, args.wanted, heavy)
        except WandsError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
        print(f"training: {why}", file=sys.stderr)
        print(number)
    else:
        return 0 if report(args.out, args.seconds, args.lora, args.wands, args.causal) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
