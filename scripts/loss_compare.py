"""Train one recipe with two groups of settings, and compare the losses step by step, to check that they are equal.

    python scripts/loss_compare.py tiny --both model.path=M --both data.cache=C --both train.max_steps=20 \\
        --a packing.enabled=true --b packing.enabled=false --procs 2 --deepspeed ds_configs/zero3.json --out compare

--both adds a recipe setting to both runs, --a only to the first run, and --b only to the second run.

The script prints the two losses of each step. It also prints the largest relative difference between the losses of a step, and
between the losses of a clip. It plots the losses in compare.png. The exit code is 1 if a difference is above --tolerance.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path


def run(name: str, args: argparse.Namespace, settings: list[str]) -> Path:
    """Run one training with torchrun and the recipe settings `settings`. Return the run folder `name` inside --out."""
    folder = args.out / name
    shutil.rmtree(folder, ignore_errors=True)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(args.procs),
        "--master-port",
        str(port),
    ]
    command = [sys.executable, *launcher, "-m", "wands", "train", args.recipe]
    if args.deepspeed:
        command += ["--deepspeed", str(args.deepspeed)]
    for setting in (*args.both, *settings, "train.log_samples=true", f"output_dir={folder}"):
        command += ["--set", setting]
    log = args.out / f"{name}.log"
    with log.open("w") as handle:
        done = subprocess.run(command, stdout=handle, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"run {name} failed, see {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    return folder


def series_of(folder: Path) -> dict[int, float]:
    """Return a dictionary that maps each step of a run to the loss of the step.

    Args:
        folder: the run folder, with metrics.jsonl.
    """
    return {row["step"]: row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").open())}


def samples_of(folder: Path) -> dict[tuple[int, str, int], float]:
    """Return the loss of each clip in each step of a run. The keys are (step, clip, repeat_index).

    repeat_index is 0, 1, ... for the uses of the clip in an epoch.
    """
    rows = (json.loads(line) for path in sorted(folder.glob("samples-rank*.jsonl")) for line in path.open())
    return {(row["step"], row["sample_id"], row["repeat_index"]): row["loss"] for row in rows}


def largest(a: dict, b: dict) -> float:
    """Return the largest relative difference of the values of two dictionaries; infinity if the keys differ or there are none."""
    if a.keys() != b.keys() or not a:
        return float("inf")
    return max(abs(a[key] - b[key]) / max(abs(a[key]), 1e-12) for key in a)


def main() -> int:
    """Train with the settings --a and with the settings --b, and compare the losses. Return the exit code.

    The exit code is 1 if a relative difference is above --tolerance.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="recipe file or name")
    parser.add_argument(
        "--both", action="append", default=[], metavar="KEY=VALUE", help="setting of both runs"
    )
    parser.add_argument(
        "--a", action="append", default=[], metavar="KEY=VALUE", help="setting of the first run"
    )
    parser.add_argument(
        "--b", action="append", default=[], metavar="KEY=VALUE", help="setting of the second run"
    )
    parser.add_argument("--procs", type=int, default=1, help="processes of each run")
    parser.add_argument("--deepspeed", type=Path, help="DeepSpeed JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/loss_compare"))
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest relative difference that is accepted"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folders = [run("a", args, args.a), run("b", args, args.b)]
    a, b = (series_of(folder) for folder in folders)
    names = (" ".join(args.a) or "a", " ".join(args.b) or "b")
    print(f"{'step':>6}  {names[0][:24]:>24}  {names[1][:24]:>24}  {'relative':>10}")
    for step in sorted(a.keys() | b.keys()):
        x = a.get(step, float("nan"))
        y = b.get(step, float("nan"))
        print(f"{step:>6}  {x:>24.9f}  {y:>24.9f}  {abs(x - y) / max(abs(x), 1e-12):>10.2e}")
    from wands.commands.plots import save_loss_plot

    save_loss_plot(
        args.out / "compare.png",
        {name: (list(s), list(s.values())) for name, s in zip(names, (a, b), strict=True)},
    )
    by_step = largest(a, b)
    by_clip = largest(*(samples_of(folder) for folder in folders))
    print(
        f"largest relative difference: {by_step:.2e} by step, {by_clip:.2e} by clip; plot {args.out / 'compare.png'}"
    )
    return 0 if max(by_step, by_clip) <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
