"""Run one stage of the GPU measurements of scripts/gpu.sh.

    python scripts/gpu_stages.py attention --device cuda --out gpu_out
    python scripts/gpu_stages.py block --device cpu --out /tmp/out --set model.checkpointing=full    # a test run in seconds

A stage has several parts. After each part, the script writes all results of the stage to STAGE.json and STAGE.txt in the folder
--out. --set changes a key of the recipe. 1.3B and 14B are the text-to-video models of Wan 2.1. Stages:

attention   copy and matmul speed, attention kernels forward and backward, cross-attention backward, copies to the device
block       one transformer block of 1.3B and of 14B: time, operators, bytes and kernels, for one clip and for many clips
step        calibration; a training step of 1.3B and of a LoRA of 14B through `wands tools profile`, also in fp8 and with swapped
            blocks: time, MFU, and the peak of memory next to the estimate; 20 losses in bf16 and in fp8
tests       the tests marked gpu
memory      bench_memory.py at the widths of 1.3B and 14B
infer       time of each part of `wands infer` with random weights of 1.3B and of its VAE
encode      the VAE of Wan 2.1 and UMT5-XXL with random weights: clips and captions per second
compare     bench_peers.py: wands, and diffusers + accelerate + DeepSpeed, also with torch.compile
causal      bench_causal.py: steps with teacher forcing, and a rollout

No stage needs model files or a network. Only `tests` uses clips. A part that fails is recorded with its error, and the next part
starts. On a CPU, all sizes are tiny: the numbers show only that every part runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_causal
import bench_memory
import bench_peers
import bench_step
from bench_record import Results, Rows
from gpu_blocks import block_stage
from gpu_kernels import attention_stage
from gpu_samples import encode_stage, infer_stage
from gpu_sizes import MEMORY
from gpu_steps import step_stage

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("unit/attention", "unit/model", "distributed", "gpu", "launch")


def run_tests(args: argparse.Namespace) -> Rows:
    """Run the GPU tests, several at a time, and return a row with the numbers of all, skipped and failed tests.

    When a test finishes, its name and result are written to tests.log. If the run is ended early, these results are kept.

    Raises:
        RuntimeError: if pytest cannot run, or if tests fail. The message contains the names of the failed tests.
    """
    report = args.out / "pytest.xml"
    log = args.out / "tests.log"
    workers = str(min(14, os.cpu_count() or 1))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", "-n", workers, "-vv"]
    with open(log, "w") as output:
        code = subprocess.run(
            [*command, *(f"tests/{folder}" for folder in TESTS)], cwd=ROOT, stdout=output, stderr=output
        ).returncode
    if code not in (0, 1) or not report.is_file():
        raise RuntimeError(log.read_text()[-2000:])
    suite = ET.parse(report).getroot()[0]
    report.unlink()
    failed = [
        case.get("name")
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    row = {
        "tests": int(suite.get("tests", 0)),
        "skipped": int(suite.get("skipped", 0)),
        "failed": len(failed),
    }
    if failed:
        raise RuntimeError(f"{row}: {', '.join(map(str, failed))}; see {log}")
    return [row]


def tests_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the tests marked `gpu` (stage `tests`)."""
    results.run(", ".join(TESTS), lambda: run_tests(args))


def memory(args: argparse.Namespace, size: dict[str, Any]) -> Rows:
    """Measure all modes of activation checkpointing with bench_memory.py at one model size. Return a row for each mode."""
    options = argparse.Namespace(device=args.device, rounds=2, clock="wall", **size)
    found = bench_memory.measure(options)
    none = found["none"]
    rows = [
        {
            "mode": name,
            "device MiB": one.device / 2**20,
            "device of none": one.device / none.device,
            "host MiB": one.host / 2**20,
            "s": statistics.median(one.seconds),
            "time of none": bench_memory.slower(none, one),
        }
        for name, one in found.items()
    ]
    bench_memory.report(found)
    return rows


def memory_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `memory`: measure activation checkpointing at each model size in `MEMORY`."""
    for name, size in MEMORY[args.device].items():
        results.run(name, lambda s=size: memory(args, s))


def compare_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `compare`: compare the training speed of wands with diffusers + accelerate + DeepSpeed."""
    rounds = 5
    if args.device == "cpu":
        rounds = 1
        bench_step.GRIDS["cpu"] = [(1, 4, 4), (2, 4, 4), (1, 2, 4)]
        bench_step.WIDTHS["cpu"] |= {"num_layers": 1, "ffn_dim": 96, "text_dim": 32}
    for name in bench_peers.KINDS:
        for is_compiled in (False, True):
            part = f"{name}, compiled peer" if is_compiled else name
            options = args.device, name, args.overrides, rounds, is_compiled
            results.run(part, partial(bench_peers.measure, *options))


def causal_stage(args: argparse.Namespace, results: Results) -> None:
    """Run the stage `causal`: compare teacher forcing with bidirectional steps, and measure a rollout."""
    rounds = 5
    if args.device == "cpu":
        rounds = 1
        bench_causal.SIZES["cpu"] = [(6, 2, 2)]
        bench_causal.MIX["cpu"] = [(6, 2, 2), (3, 2, 3)]
        bench_causal.NUM_FRAMES = 21
        bench_causal.WIDTHS["cpu"] |= {"num_layers": 1, "ffn_dim": 96, "text_dim": 32}
    bench = bench_causal.Bench(args.device)
    for grid in bench_causal.SIZES[args.device]:
        tokens = grid[0] * grid[1] * grid[2]
        results.run(f"{tokens:,} tokens", partial(bench_causal.measure_steps, bench, grid, rounds))
    results.run("packing", lambda: bench_causal.measure_packing(bench, rounds))
    results.run("rollout", lambda: bench_causal.measure_rollout(bench))


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "attention": attention_stage,
    "block": block_stage,
    "step": step_stage,
    "tests": tests_stage,
    "memory": memory_stage,
    "infer": infer_stage,
    "encode": encode_stage,
    "compare": compare_stage,
    "causal": causal_stage,
}


def main() -> int:
    """Run the stage that the command line names.

    Return the exit code: 1 if a measurement or test of the stage failed, 2 if --part names no part.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_out"), help="folder of the results")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="recipe override for block, step and compare, such as attention.backend=torch",
    )
    parser.add_argument(
        "--part",
        default="",
        metavar="TEXT",
        help="run only the parts whose names contain TEXT, such as '8 clips'",
    )
    args = parser.parse_args()
    results = Results(args.out, args.stage, args.device, args.overrides, args.part)
    STAGES[args.stage](args, results)
    if not results.ran:
        names = "; ".join(results.skipped)
        print(f"--part {args.part}: no part of {args.stage} has this text in its name; use one of: {names}")
        return 2
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
