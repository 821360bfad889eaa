"""Stage `step` of gpu_stages.py: training steps through `wands tools profile`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_record import Results, Rows
from gpu_blocks import overrides_of
from gpu_sizes import STEP_PACKS, STEP_RUNS, VARIANT_NAMES

from wands.planning.hardware import MACHINES, Machine, with_measurements

SPEEDS = "speeds.json"
"""File of the part `calibrate` in the folder of the results."""
NUM_LOSSES = 20


def run_wands(arguments: Sequence[str]) -> None:
    """Run a command of wands in a new process, so that its peak memory does not include the memory of this script.

    The output of the command is printed.

    Raises:
        RuntimeError: if the command fails.
    """
    done = subprocess.run([sys.executable, "-m", "wands", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    print(done.stdout, flush=True)


def find_machine(device: str, speeds: Path) -> Machine:
    """Return the machine of this GPU, with the speeds in a file of `calibrate` if there is one; on a CPU, an H200."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    machine = next((m for key, m in MACHINES.items() if key.split("-")[0].upper() in name), MACHINES["h200"])
    return with_measurements(machine, speeds) if name and speeds.is_file() else machine


def step(
    args: argparse.Namespace,
    shapes: Sequence[Sequence[int]],
    results: Results,
    variant: str = VARIANT_NAMES[0],
    settings: Sequence[str] = (),
) -> Rows:
    """Train six steps with `wands tools profile`, and return a row of the table.

    The row contains measurements of steps 3 and 4, such as time and peak memory. It also contains the predicted time and the
    predicted peak memory. The profiler records only step 5. If the profiler fails, the error is printed and the stage fails,
    but the measurements are kept.
    """
    from wands.planning.memory import estimate_memory
    from wands.planning.step_time import predict
    from wands.train.prepare import load_run

    device = args.device
    layers = 2 if device == "cpu" else None
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *overrides_of(device, variant, shapes, Path(folder), layers),
            *(*settings, *args.overrides, "profile.start=5", "profile.steps=1"),
        ]
        world: dict[str, Any] = {"world_size": 1, "device_type": device, "encoders": lambda path: {}}
        run = load_run(None, None, overrides, ignore_output_dir=True, **world)
        out = Path(folder) / "profile"
        options = [part for text in overrides for part in ("--set", text)]
        try:
            run_wands(["tools", "profile", "--out", str(out), *options])
        except RuntimeError as error:
            if not (out / "metrics.jsonl").is_file():
                raise
            results.failed = True
            print(error, flush=True)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        scopes = "\n".join(path.read_text() for path in sorted(out.glob("profile/*.txt")))
    print(scopes, flush=True)
    rows = [json.loads(line) for line in lines][2:4]  # step 1 compiles, step 5 is profiled
    workload = run.workload(device)
    machine = find_machine(device, args.out / SPEEDS)
    lens = [int(length) for length in run.schedule.num_tokens]
    seconds = statistics.median(row["seconds"] for row in rows)
    estimated = estimate_memory(workload).peak
    peak = rows[-1]["device_peak"]
    return [
        {
            "s": seconds,
            "predicted s": predict(workload, machine, lens).seconds,
            "predicted from": machine.source,
            "TFLOP/s": statistics.median(row["tflops"] for row in rows),
            "MFU": rows[-1]["mfu"],
            "data wait s": statistics.median(row["data_wait"] for row in rows),
            "peak GiB": peak and peak / 2**30,
            "estimated GiB": estimated / 2**30,
            "peak / estimate": peak and peak / estimated,
            "profile": "written" if scopes else "failed",
        }
    ]


def calibrate(args: argparse.Namespace) -> Rows:
    """Measure the speeds from which the other parts predict times, and return them as rows."""
    file = args.out / SPEEDS
    run_wands(["tools", "calibrate", "--out", str(file)])
    speeds = json.loads(file.read_text())
    kernels = speeds.pop("attention_flops")
    rows: Rows = [{"speed": name, "value": value} for name, value in speeds.items()]
    for name, (forward, backward) in kernels.items():
        rows += [
            {"speed": f"{name} forward", "value": forward},
            {"speed": f"{name} backward", "value": backward},
        ]
    return rows


def fp8_losses(args: argparse.Namespace) -> Rows:
    """Train 1.3B on the same clips in bf16 and in fp8, and return the losses of each step."""
    device = args.device
    _, shapes = list(STEP_PACKS[device].items())[min(1, len(STEP_PACKS[device]) - 1)]
    losses: dict[str, list[float]] = {}
    for linears in ("bf16", "fp8"):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [
                *overrides_of(device, VARIANT_NAMES[0], shapes, Path(folder), 2 if device == "cpu" else None),
                *(f"precision={{compute: bf16, linears: {linears}}}", f"train.max_steps={NUM_LOSSES}"),
                *("train.log_every=1", "optim.lr=1e-4", *args.overrides),
            ]
            run_wands(["train", *(part for text in overrides for part in ("--set", text))])
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        losses[linears] = [json.loads(line)["loss"] for line in lines]
    steps = zip(losses["bf16"], losses["fp8"], strict=True)
    return [
        {"step": number, "bf16": bf16, "fp8": fp8, "fp8 / bf16": fp8 / bf16}
        for number, (bf16, fp8) in enumerate(steps, start=1)
    ]


def step_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `step`: calibrate, measure training steps of each run in `STEP_RUNS`, and compare losses."""
    results.run("calibrate", lambda: calibrate(args))
    for label, (variant, settings) in STEP_RUNS.items():
        for name, shapes in STEP_PACKS[args.device].items():
            results.run(
                f"{label}, {name}",
                lambda shapes=shapes, variant=variant, settings=settings: step(
                    args, shapes, results, variant, settings
                ),
            )
    results.run(f"{NUM_LOSSES} losses in bf16 and fp8", lambda: fp8_losses(args))
