"""Train one recipe with linear layers in bf16 and in fp8, and compare curves, held-out losses and gradients.

    python scripts/compare_precision.py tiny --set model.path=M --set data.cache=C --set eval.cache=H \\
        --set train.max_steps=500 --deepspeed ds_configs/cpu.json --out runs/precision

The recipe needs held-out clips: `eval.cache` or `data.holdout`. --fp8 names other settings of the second run, for example
--fp8 lora.quantize=fp8 for a LoRA.

The script prints three results and plots the losses in precision.png:
- losses: mean training loss over each tenth of the run
- held-out loss: of both runs after the last step, and the mean difference of the clips with its 95 % confidence interval
- gradients: cosine between the gradients of one bin, both at the weights that the bf16 run has learned; the mean and the
  worst of each kind of layer

The exit code is 1 if the interval of the held-out loss lies wholly above 0: fp8 is then clearly worse.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from loss_compare import run, series_of
from torch import Tensor

from wands.commands.plots import save_loss_plot
from wands.config.deepspeed import load_ds_config
from wands.config.recipe_loading import load_recipe
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ProcessGroups
from wands.engine.engine import attention_backend, build_model
from wands.files import read_rows
from wands.train.evaluation import paired_change
from wands.train.evaluation_plan import HELD_OUT, PLAN_FILE, EvaluationPlan
from wands.train.prepare import prepare_run

NAMES = ("bf16", "fp8")


def compare_held_out(folders: Sequence[Path]) -> tuple[list[float], dict[str, Any] | None]:
    """Return (held-out loss of each run after its last step, change of the clips from bf16 to fp8 with its interval)."""
    plan = EvaluationPlan.model_validate_json((folders[0] / PLAN_FILE).read_bytes())
    last = [read_rows(folder / "evaluations.jsonl")[-1] for folder in folders]
    change = paired_change(plan, HELD_OUT, last[1]["losses"], last[0]["losses"])
    return [row[HELD_OUT] for row in last], change


def learned_weights(recipe: str, settings: Sequence[str], folder: Path) -> str:
    """Export what a run has learned, and return the recipe setting that starts another run from it."""
    exported = folder.parent / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "wands", "export", str(folder), "--out", str(exported)], check=True)
    key = "lora.init_from" if load_recipe(recipe, settings).lora else "model.path"
    return f"{key}={exported}"


def gradients_of(recipe: str, settings: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradient of each trained parameter in the first micro step of a run, without an update."""
    prepared = prepare_run(load_recipe(recipe, settings), load_ds_config(None), world_size=1)
    rank, _, device = init_process_group()
    groups = ProcessGroups.build(prepared.grid(rank), device)
    model = build_model(
        prepared.recipe,
        prepared.ds_config,
        prepared.model.experts[0],
        groups=groups,
        device=device,
        backend=attention_backend(prepared.recipe, prepared.model.shape.head_dim, device),
    ).to(device)
    [batches] = prepared.reader(groups.dims).micro_batches(prepared.schedule.sampler.step_plan(0))
    with torch.autocast(device.type, torch.bfloat16):
        loss, _ = prepared.objective.loss(model, *batches[0])
    loss.backward()
    return {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}


def cosines(bf16: dict[str, Tensor], fp8: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the cosine of the two gradients of each matrix, grouped by layer name without the number of the block."""
    found = defaultdict(list)
    for name, gradient in bf16.items():
        if gradient.dim() < 2 or not gradient.any():
            continue
        kind = ".".join(part for part in name.removesuffix(".weight").split(".") if not part.isdigit())
        cosine = torch.cosine_similarity(gradient.double().flatten(), fp8[name].double().flatten(), dim=0)
        found[kind].append(float(cosine))
    return dict(found)


def main() -> int:
    """Train both runs, print the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="recipe file or name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="both", help="setting of both runs"
    )
    parser.add_argument(
        "--fp8",
        action="append",
        metavar="KEY=VALUE",
        help="settings of the second run; default: precision.linears=fp8",
    )
    parser.add_argument("--procs", type=int, default=1, help="processes of each run")
    parser.add_argument("--deepspeed", type=Path, help="DeepSpeed JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.both.append("precision.compute=bf16")
    changes = args.fp8 or ["precision.linears=fp8"]

    folders = [run("bf16", args, []), run("fp8", args, changes)]
    series = [series_of(folder) for folder in folders]
    tenth = max(len(series[0]) // 10, 1)
    print(f"{'steps':>13}  {'bf16':>8}  {'fp8':>8}  difference")
    for start in range(1, len(series[0]) + 1, tenth):
        steps = [step for step in range(start, start + tenth) if step in series[0]]
        means = [fmean(one[step] for step in steps) for one in series]
        print(
            f"{steps[0]:>6}-{steps[-1]:<6}  {means[0]:>8.4f}  {means[1]:>8.4f}  {means[1] / means[0] - 1:+.2%}"
        )
    save_loss_plot(
        args.out / "precision.png",
        {name: (list(one), list(one.values())) for name, one in zip(NAMES, series, strict=True)},
    )

    held_out, change = compare_held_out(folders)
    print(f"held-out loss: bf16 {held_out[0]:.5f}, fp8 {held_out[1]:.5f}", end="")
    is_worse = False
    if change and change["low"] is not None:
        print(f", change {change['mean']:+.5f} ({change['low']:+.5f} to {change['high']:+.5f})", end="")
        is_worse = change["low"] > 0
    print()

    learned = learned_weights(args.recipe, args.both, folders[0])
    shared = [*args.both, learned, f"output_dir={args.out / 'gradients'}"]
    gradients = [gradients_of(args.recipe, [*shared, *more]) for more in ([], changes)]
    print("gradients of one bin, cosine between bf16 and fp8: mean, worst")
    found = cosines(*gradients)
    for kind, values in sorted(found.items(), key=lambda item: min(item[1])):
        print(f"  {kind:<40} {fmean(values):.5f}  {min(values):.5f}")
    (args.out / "precision.json").write_text(
        json.dumps({"held_out": held_out, "change": change, "cosines": found}, indent=2)
    )
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
