"""Lines of the closing report of demo.sh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def print_losses(losses: Mapping[str, Sequence[float]]) -> bool:
    """Print how far each training loss has fallen.

    Args:
        losses: value of each loss in each step.

    Returns:
        True if each loss has fallen by more than 30 %.
    """
    fallen = True
    edge = max(len(next(iter(losses.values()))) // 10, 1)
    for name, values in losses.items():
        first = np.mean(values[:edge])
        last = np.mean(values[-edge:])
        what = "loss" if len(losses) == 1 else name.replace("noise expert", "noise")
        print(
            f"  {what:<13} {first:.4f} -> {last:.4f} (means of the first and last {edge} of {len(values)} steps)"
        )
        fallen = fallen and bool(last < 0.7 * first)
    return fallen


def print_evaluations(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the first and the last evaluation with a held-out loss, if there is one, and whether the model overfits."""
    evaluations = [row for row in rows if row["held_out"] is not None]
    if not evaluations:
        return
    first = evaluations[0]
    last = evaluations[-1]
    trained, other = (f"{first[side]:.3f} -> {last[side]:.3f}" for side in ("train", "held_out"))
    print(f"  evaluation    trained clips {trained}, other parts of the same films {other}")
    gap = last["held_out"] - last["train"]
    if gap > first["held_out"] - first["train"]:
        print(
            f"                overfit, as intended with so few clips: the gap between both losses has grown to {gap:.3f}"
        )


def print_places(out: Path, lora: bool) -> None:
    """Print where the results of the demo are."""
    for what, where in (
        ("page", "run/report.html"), ("contact sheet", "contact_sheet.png"), ("loss plot", "loss.png"),
        ("samples", "samples/*.mp4"), ("twice as long", "longer/*.mp4"),
        ("LoRA" if lora else "pipeline", "exported"),
        ("checkpoints", "run/checkpoints"), ("tensorboard", "run/tensorboard"), ("latent cache", "cache"), ("clips", "clips"),
    ):  # fmt: skip
        if list(out.glob(where)):
            print(f"  {what:<13} {out / where}")


def next_commands(
    out: Path, command: str, row: Mapping[str, Any], lora: bool, causal: bool = False
) -> list[list[str]]:
    """Return the arguments of commands that the user can run next: another sample, and a look at what a push would upload.

    Args:
        out: output folder of the demo.
        command: name or path of the program `wands`.
        row: a line of the prompt file of the demo, whose size and images the sample gets.
        lora: whether the demo exported a LoRA.
        causal: whether the model samples chunk by chunk.
    """
    exported = str(out / "exported")
    model = [str(out / "model"), "--lora", exported] if lora else [exported]
    flags = {"height": "--height", "width": "--width", "num_frames": "--frames"}
    shape = [text for name, flag in flags.items() for text in (flag, str(row[name]))]
    names = ("image", "last_image")
    images = [
        text
        for name in names
        if name in row
        for text in (f"--{name.replace('_', '-')}", str(out / row[name]))
    ]
    sample = [
        "--prompt",
        row["prompt"],
        *shape,
        *images,
        "--guidance",
        "1",
        "--out",
        str(out / "more_samples"),
    ]
    return [
        [command, "infer", *(["--causal"] if causal else []), "--model", *model, *sample],
        [command, "push", exported, "you/your-model", "--dry-run"],
    ]
